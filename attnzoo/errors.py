"""The one exception that means: the user can put this right, and the message says how."""


class UserError(Exception):
    """Wrong input (a file, an option, a machine without a GPU). Its message is one line: what, why, and a way out."""

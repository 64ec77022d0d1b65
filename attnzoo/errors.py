"""Exceptions that mean something: UserError, that the user can put this right, and the message says how."""


class UserError(Exception):
    """Wrong input (a file, an option, a machine without a GPU). Its message is one line: what, why, and a way out."""


class NoRoom(ValueError):
    """A sequence is too short for what has to stand in it, the answer included."""

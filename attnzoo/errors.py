"""Exceptions that mean something: UserError, that the user can put this right, and the message says how."""

from collections.abc import Sequence


class UserError(Exception):
    """Wrong input (a file, an option, a machine without a GPU). Its message is one line: what, why, and a way out."""


class NoRoom(ValueError):
    """A sequence is too short for what has to stand in it, the answer included."""


def like_it(near: Sequence[str]) -> str:
    """A part of a message: the names that are near to a wrong one. It is empty where there are none."""
    return f"like it: {', '.join(near)}; " if near else ""

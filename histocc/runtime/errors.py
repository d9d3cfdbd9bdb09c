"""The two ways in which a run ends with a message instead of a traceback."""

from __future__ import annotations  # the launchers read this in older Pythons, too


class UserError(Exception):
    """A mistake that the user can fix: ends every rank with exit code 2 and one message, from rank 0."""

    heard_from_main = False


class TrainingError(Exception):
    """A run that cannot continue: ends every rank with exit code 1 and one message, from rank 0."""


def said_by_all(error: UserError | TrainingError) -> UserError | TrainingError:
    """The same error as one that ends the process it happened to with its message, whichever rank that is."""
    error.said_by_all = True
    return error

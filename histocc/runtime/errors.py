"""The two ways in which a run ends with a message instead of a traceback."""


class RunError(Exception):
    """Ends every rank with one message, from rank 0.

    said_by_all: it is of one process alone, which says it itself, whichever rank that is; heard_from_main:
    all ranks know of it at the same time, so that they do not wait for rank 0 to find it, too.
    """

    def __init__(self, message: str = "", *, said_by_all: bool = False, heard_from_main: bool = False):
        super().__init__(message)
        self.said_by_all, self.heard_from_main = said_by_all, heard_from_main


class UserError(RunError):
    """A mistake that the user can fix: exit code 2."""


class TrainingError(RunError):
    """A run that cannot continue: exit code 1."""


def raise_if_any(problems: list[str], of: str = "", most: int | None = None) -> None:
    """Raises one UserError that lists `problems`, below how many they are; a single one of nothing stands
    alone.

    of: what they are problems of; most: how many are listed.
    """
    if not problems:
        return
    if len(problems) == 1 and not of:
        raise UserError(problems[0])
    count = f"{len(problems):,} problem{'s' * (len(problems) > 1)}:"
    lines = [problem.replace("\n", "\n  ") for problem in problems[:most]]
    left = len(problems) - len(lines)
    more = [f"… and {left:,} more"] * (left > 0)
    raise UserError("\n  ".join([f"{of}: {count}" if of else count, *lines, *more]))

"""A checkpoint of any run: what it must hold for its run to be resumed from it, beside the weights: state of
the optimizer and of the schedule, random state, and position in the data. Each entry by itself, and how they
agree with each other; and which checkpoint of a folder is the newest that does.
"""

from collections.abc import Callable
from typing import Any

from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.schema import (
    described,
    kind,
    listing,
    mapping,
    maybe,
    plain,
    real,
    require,
    text,
    whole,
)

MOST_GROUPS = 1024  # of parameters
COUNT = whole(0, 2**62)
RNG = mapping({"seed": whole(-(2**63), 2**63), "threads": whole(1, 1024), "processes": whole(1, 1 << 20)})
ANY_FLOAT = real()  # of a log, where a loss may be infinite
POSITION = mapping(
    {
        "epoch": COUNT,
        "batch": COUNT,
        "total_batch": whole(1, 2**62),
        "steps_per_epoch": whole(1, 2**62),
        "fingerprint": text(100),
        "samples": COUNT,
        "sums": listing(mapping({}, rest=ANY_FLOAT), 1, 1 << 20),
        "grad_norm": maybe(ANY_FLOAT),
        "launchers": listing(text(1000, empty=True)),
        "run": text(100),
        "best_val_loss": maybe(ANY_FLOAT),
        "bad_steps": COUNT,
        "bad_validations": COUNT,
        "finite_step": maybe(COUNT),
        "files": mapping({}, rest=COUNT),
        "unfinished": kind("true or false", lambda value: isinstance(value, bool)),
    },
    rest=plain,
)
SCHEDULER = mapping(
    {"base_lrs": listing(real(0, above=True), 1, MOST_GROUPS), "last_epoch": COUNT}, rest=plain
)
GROUP = mapping(
    {
        "params": listing(COUNT, 1),
        "lr": real(0),
        "betas": listing(real(0, 1), 2, 2),
        "eps": real(0),
        "weight_decay": real(0),
    },
    {"initial_lr": real(0)},
    rest=plain,
)
SCALER = mapping(
    {},
    {
        "scale": real(0, above=True),
        "growth_factor": real(1, above=True),
        "backoff_factor": real(0, 1, above=True),
        "growth_interval": whole(1, 2**62),
        "_growth_tracker": COUNT,
    },
    rest=plain,
)
OPTIMIZER = mapping(
    {
        "state": kind("numbers and states", lambda value: isinstance(value, dict)),
        "param_groups": listing(GROUP, 1, MOST_GROUPS),
    }
)
RESUMABLE = mapping(
    {
        "step": COUNT,
        "rng": RNG,
        "position": POSITION,
        "scheduler": SCHEDULER,
        "args": mapping({"num_epochs": whole(1)}),
        "optimizer": OPTIMIZER,
        "scaler": maybe(SCALER),
    }
)


class ForeignCheckpoint(UserError):
    """Weights that another program has written."""


class NewerFormat(UserError):
    """A file that a newer version of this program has written."""


def check_format(file: str, found: Any) -> None:
    """Raises UserError where a file of histocc is of another format than this version reads."""
    if type(found) is int and found > checkpoint.FORMAT:
        raise NewerFormat(
            f"{file}: written by a newer histocc: format {found}; this version reads {checkpoint.FORMAT}. It"
            " stays as it is: install a newer histocc, or choose another folder"
        )
    if type(found) is not int or found != checkpoint.FORMAT:
        raise UserError(f"{file}: format: found {described(found)}, expected {checkpoint.FORMAT}")


def check_ours(file: str, state: dict[str, Any]) -> None:
    """Raises UserError where another program, or another version, has written the checkpoint."""
    if "format" not in state:
        raise ForeignCheckpoint(
            f"{file}: holds weights but not the settings of their model, as another program writes them. It"
            f" is not of a run of histocc and stays as it is: start from it with --initial-checkpoint {file}"
            " and another --save-path"
        )
    check_format(file, state["format"])


def check_resumable(file: str, state: dict[str, Any]) -> None:
    """Raises UserError unless a checkpoint has all that a run needs to be resumed from it, and its entries
    agree.
    """
    require(file, RESUMABLE, state)
    step, position, groups = state["step"], state["position"], state["optimizer"]["param_groups"]
    check_agreement(
        file,
        {
            "position: epoch": (position["epoch"], step // position["steps_per_epoch"]),
            "position: batch": (position["batch"], step % position["steps_per_epoch"]),
            "scheduler: last_epoch": (state["scheduler"]["last_epoch"], step),
            "scheduler: base_lrs": (len(state["scheduler"]["base_lrs"]), len(groups)),
            "rng: seed": (state["rng"]["seed"], state["args"].get("seed", state["rng"]["seed"])),
        },
    )


def check_agreement(file: str, expected: dict[str, tuple[Any, Any]]) -> None:
    """Raises UserError where two entries say different things. expected: entry → what it says, and what the
    others make of it.
    """
    for entry, (found, wanted) in expected.items():
        if found != wanted:
            raise UserError(
                f"{file}: {entry}: found {found}, expected {wanted}, as the other entries have it"
            )


class Newest:
    """The newest good checkpoint of a folder.

    read: the checkpoint in a file, checked; raises UserError.
    """

    def __init__(self, read: Callable[[str], dict[str, Any]]):
        self.read = read
        self._kept: tuple[tuple[int, ...], dict[str, Any]] | None = None

    def __call__(self, folder: str, keep: bool = False) -> tuple[str, dict[str, Any], list[str]]:
        """(file, checkpoint, what is wrong with the files that should have been it) of the run in `folder`.

        keep: the caller only looks at it, and the next call will be for the same: that one gets it from
        memory, unless the file was replaced.

        Raises UserError where no checkpoint can be read, and for one that another program or a newer version
        has written.
        """
        wrong: list[str] = []
        for path in checkpoint.newest_first(folder):
            try:
                return path, self._read(path, keep), wrong
            except (ForeignCheckpoint, NewerFormat):
                raise
            except UserError as error:
                wrong.append(str(error))
        raise UserError(
            "\n  ".join([f"{folder}: no checkpoint of the run can be read; --overwrite starts over", *wrong])
        )

    def _read(self, path: str, keep: bool) -> dict[str, Any]:
        kept, self._kept = self._kept, None
        try:
            found = checkpoint.identity(path)
        except OSError:  # the reader says it
            return self.read(path)
        state = kept[1] if kept and kept[0] == found else self.read(path)
        if keep:
            self._kept = found, state
        return state

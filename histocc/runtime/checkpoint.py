"""Checkpoints: written whole or not at all, read as data and never as code.

A checkpoint is one `torch.save` dict of tensors and plain Python types. `model`, `optimizer`, `scheduler`,
`step` and `key` are as in the published files; `format`, `config`, `formatter`, `system`, `languages`,
`args`, `rng` and `position` make it enough to predict with, and to continue from, without any other file.
`checksums` are those of all other
entries: what was changed after the file was written is noticed when it is read.
"""

import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator
from typing import Any

import torch

from histocc.runtime.checksums import SUMS, sums_of, with_sums, without_sums
from histocc.runtime.errors import UserError, as_user_error
from histocc.runtime.files import OwnFiles, atomic_copy, atomic_write, kind_of

FORMAT = 1
LAST, BEST = "last.bin", "best.bin"
SECOND_NAME = "model_state_dict"
# names of the checkpoint of an epoch, 1-based: of a run on occupations, and of one on anything else
EPOCH, EPOCH_OF_ANY = "epoch_{}.bin", "checkpoint_epoch_{}.pt"
_STEP_FILE = re.compile(r"(\d+)\.bin")
CHECKPOINT = re.compile(r"(last|best|\d+|epoch_\d+)\.bin|checkpoint_epoch_\d+\.pt")


def name_of_step(step: int) -> str:
    return f"{step}.bin"


def to_cpu(value: Any) -> Any:
    """Nested dicts, lists and tuples with every tensor on the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if isinstance(value, dict):
        return type(value)((name, to_cpu(part)) for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(map(to_cpu, value))
    return value


def _written(state: dict[str, Any]) -> dict[str, Any]:
    """What a file of `state` holds: tensors on the CPU, checksums, and the weights by their second name."""
    state = with_sums(to_cpu({name: value for name, value in state.items() if name != SECOND_NAME}))
    state[SECOND_NAME] = state["model"]
    return state


def save(own: OwnFiles, names: list[str], state: dict[str, Any]) -> None:
    """Writes `state` once and gives it every name of `names` in the folder of `own`, last.bin first. Rank 0
    only. Raises OSError.

    The weights are there by a second name as well, which takes no room: the one that other trainers' scripts
    read.
    """
    state, names = _written(state), sorted(names, key=lambda name: name != LAST)
    first, *others = own.claim(*names)
    with atomic_write(first) as file:
        torch.save(state, file)
    for path in others:
        atomic_copy(first, path)


def replace(path: str, state: dict[str, Any]) -> None:
    """Writes a changed checkpoint in the place of the one that it was. Raises OSError."""
    with atomic_write(os.path.realpath(path)) as file:
        torch.save(_written(state), file)


def prune(own: OwnFiles, keep: int) -> None:
    """Removes all but the newest `keep` of the run's files `{step}.bin`; other checkpoints are never touched.
    Rank 0 only.
    """
    steps = sorted(int(match[1]) for match in map(_STEP_FILE.fullmatch, own.names) if match)
    own.remove([name_of_step(step) for step in steps[: max(0, len(steps) - keep)]])


def load(path: str, sums: bool = False) -> dict[str, Any]:
    """The checkpoint in `path`, as `load_plain` gives it. Raises UserError where it is none, too."""
    state = load_plain(path, sums)
    if "model" not in state:
        raise UserError(f"{path}: is not a checkpoint of histocc: it has no entry 'model'")
    return state


def load_same(path: str, sums: dict[str, Any]) -> dict[str, Any] | None:
    """The entries with these checksums of a checkpoint that another process has read and checked, from its
    file; None where this process does not find the same there.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        found = {name: state[name] for name in sums}
        return found if sums_of(found) == sums else None
    except Exception:  # not there, not the same, or no memory for it: who knows it can still send it
        return None


def load_plain(path: str, sums: bool = False) -> dict[str, Any]:
    """The dict in `path`, tensors on the CPU. Tensors and plain types only: nothing in it is executed. sums:
    with the entry of its checksums, where it has them.

    Raises UserError, naming the objects found, where it holds anything else or is damaged.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise UserError(
            f"{path}: found a {'folder' if os.path.isdir(path) else 'pipe or device'}, expected a file"
        )
    try:
        if zipfile.is_zipfile(path):  # torch does not compare the checksums
            with zipfile.ZipFile(path) as archive:
                if sum(part.file_size for part in archive.infolist()) > os.path.getsize(path):
                    raise UserError(
                        f"{path}: found compressed parts, expected a file as torch.save writes it"
                    )
                damaged = archive.testzip()
            if damaged:
                raise UserError(
                    f"{path}: damaged: its part {damaged} has another checksum than when it was written"
                )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about formats that are refused below in any case
            state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except pickle.UnpicklingError as error:
        raise UserError(_refusal(path, error)) from None
    except UserError:
        raise
    except Exception as error:  # a damaged or foreign file makes the reader fail in any way
        if found := as_user_error(error):  # no memory, too many open files: the file may be good
            raise found from None
        raise UserError(
            f"{path}: cannot be read as a checkpoint, it may be damaged ({type(error).__name__})"
        ) from None
    if not isinstance(state, dict):
        raise UserError(f"{path}: is not a checkpoint of histocc: it holds no dict with an entry 'model'")
    if "model" in state:
        state.pop(SECOND_NAME, None)
    newer = type(state.get("format")) is int and state["format"] > FORMAT  # the reader of checkpoints says so
    if SUMS not in state or newer:
        return state
    return without_sums(path, state) | ({SUMS: state[SUMS]} if sums else {})


def _refusal(path: str, error: Exception) -> str:
    try:
        found = ", ".join(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except Exception:  # not even the list can be read: a damaged or foreign file
        found = ""
    found = found or ", ".join(re.findall(r"GLOBAL (\S+)", str(error)))
    if not found:  # torch's own message would advise to switch the check off
        return (
            f"{path}: cannot be read as a checkpoint; it is something else, or damaged. Give a .bin file of a"
            " run, or the run's folder"
        )
    return (
        f"{path}: refused, since it holds objects that could run code when loaded: {found}.\n  A checkpoint"
        " may hold tensors and plain Python values only. If you trust its source, open it there and save its"
        " state dict alone: torch.save({'model': model.state_dict(), 'key': key}, 'clean.bin')"
    )


def find(path: str, names: tuple[str, ...] = (LAST, BEST)) -> str | None:
    """`path` itself where it is a file, or the first of `names` in the folder `path`; None where there is
    none.
    """
    if os.path.isfile(path):
        return path
    return next(
        (os.path.join(path, name) for name in names if os.path.isfile(os.path.join(path, name))), None
    )


def exists_in(folder: str) -> bool:
    """Whether `folder` holds a checkpoint of a run."""
    return os.path.isdir(folder) and any(map(CHECKPOINT.fullmatch, os.listdir(folder)))


def identity(path: str) -> tuple[int, ...]:
    """What differs once a file is replaced or written to. Raises OSError."""
    found = os.stat(path)
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def step_of(path: str) -> int | None:
    """The step of a checkpoint, without reading its tensors; None where it cannot be read."""
    if kind_of(path) != "a file":
        return None
    try:
        step = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["step"]
    except Exception:
        return None
    return step if type(step) is int else None


def newest_first(folder: str) -> Iterator[str]:
    """The checkpoints in `folder` from which a run could continue: last.bin, then the others, the highest
    step first. These are looked into only when they are asked for.
    """
    yield os.path.join(folder, LAST)
    names = (
        [name for name in os.listdir(folder) if CHECKPOINT.fullmatch(name) and name != LAST]
        if os.path.isdir(folder)
        else []
    )
    paths = [os.path.join(folder, name) for name in names]
    steps = {path: -1 if (step := step_of(path)) is None else step for path in paths}
    yield from sorted(paths, key=lambda path: steps[path], reverse=True)


def differing_args(saved: dict[str, Any], now: dict[str, Any], may_differ: set[str]) -> list[str]:
    """Arguments that a resumed run may not change but did, a line each."""
    return [
        f"--{name.replace('_', '-')} was {saved[name]!r}, now it is {now[name]!r}"
        for name in sorted(saved.keys() & now.keys() - may_differ)
        if saved[name] != now[name]
    ]


def load_matching(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> list[list[str]]:
    """Copies the weights whose name and shape fit. Returns [new, unused]: those in the model alone or of
    another shape, and those in `weights` alone or of another shape, each as «name [shape]»."""
    own = model.state_dict()
    fitting = {
        name: tensor for name, tensor in weights.items() if name in own and own[name].shape == tensor.shape
    }
    model.load_state_dict(fitting, strict=False)
    return [
        [f"{name} {list(part[name].shape)}" for name in sorted(part.keys() - fitting.keys())]
        for part in (own, weights)
    ]

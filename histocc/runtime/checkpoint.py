"""Checkpoints: written whole or not at all, read as data and never as code, and checked once.

A checkpoint is one `torch.save` dict of tensors and plain Python types. `model`, `optimizer`, `scheduler`,
`step` and `key` are as in the published files. `format`, `config`, `formatter`, `system`, `languages`,
`args`, `rng` and `position` are what predicting and resuming need, without any other file, with `scaler`
after fp16 and the entries CODING of `published/models.py`. `made_by` says which versions wrote it, and when.
`checksum` covers all other entries, so that damage and edits are noticed. Without one a file is unchecked.
"""

import contextlib
import errno
import os
import pickle
import platform
import re
import time
import warnings
import zlib
from collections.abc import Callable, Generator, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.serialization import config as torch_config

from histocc import __version__
from histocc.runtime.errors import MACHINE, Unreadable, UserError, as_user_error, in_words
from histocc.runtime.files import OwnFiles, atomic_copy, atomic_write, is_same, kind_of, opened
from histocc.runtime.world import World

FORMAT = 1
LAST, BEST = "last.bin", "best.bin"
SECOND_NAME = "model_state_dict"
CHECKSUM = "checksum"
NAMES_ENTRY = "names"  # the entry with all names of the file, written or planned
# names of an epoch's checkpoint (1-based): in a run on occupations, and in a run on anything else
EPOCH, EPOCH_OF_ANY = "epoch_{}.bin", "checkpoint_epoch_{}.pt"
CHECKPOINT = re.compile(r"(last|best|\d+|epoch_\d+)\.bin|checkpoint_epoch_\d+\.pt")
OF_BYTES = None, errno.EINVAL, errno.ENOENT, errno.ENOTDIR  # error numbers of a damaged or missing file
FULL = MACHINE[errno.ENOSPC], MACHINE[errno.EDQUOT]  # ends of messages
SPACE_SECONDS = 5.0  # pause between two tries to save on a full disk
READ_SECONDS = 5.0  # how long reading is retried when the system does not hand a file over
_FOR_RESUMING = ("model", "step", "position", "scheduler", "rng", "optimizer", "args")
Content = Callable[[int, dict[str, Any]], dict[str, Any]]  # (step, position) → what to save


class ForeignCheckpoint(UserError):
    """The error for a file written by another program or by another version of this one."""


# ---- the content of a file


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers are finite, without allocating a second tensor of that size."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(map(torch.isfinite, torch.aminmax(tensor)))


def checksum_of(value: Any, before: int = 0) -> int:
    """Return the CRC-32 of nested dicts, lists, tensors and plain values, appended to `before`.

    It ignores the order of a dict's entries and the difference between list and tuple. CRC-32 finds damage
    but is not a signature: data that are never executed do not need one.
    """
    if isinstance(value, Tensor):
        before = zlib.crc32(f"{value.dtype} {list(value.shape)}".encode(), before)
        flat = value.detach().cpu().contiguous().reshape(-1)
        return zlib.crc32(flat.view(torch.uint8).numpy().data, before) if flat.numel() else before
    if isinstance(value, dict):
        before = zlib.crc32(f"dict {len(value)}".encode(), before)
        for name in sorted(value, key=repr):
            before = checksum_of(value[name], checksum_of(repr(name), before))
        return before
    if isinstance(value, (list, tuple)):
        before = zlib.crc32(f"list {len(value)}".encode(), before)
        for part in value:
            before = checksum_of(part, before)
        return before
    return zlib.crc32(repr(value).encode("utf-8", "surrogatepass"), before)


def with_checksum(entries: dict[str, Any]) -> dict[str, Any]:
    """Return `entries` with their checksum as one more entry."""
    entries = {name: value for name, value in entries.items() if name != CHECKSUM}
    return {**entries, CHECKSUM: checksum_of(entries)}


def check_checksum(file: str, entries: dict[str, Any]) -> None:
    """Raise UserError if `entries` hold a checksum that does not match them."""
    if CHECKSUM in entries and entries[CHECKSUM] != with_checksum(entries)[CHECKSUM]:
        raise UserError(
            f"{file}: its content is not what its checksum says: it was damaged, or changed after it was"
            f" written. Take an earlier checkpoint; if the change was meant, remove the entry {CHECKSUM!r}"
        )


# ---- writing


def made_by() -> dict[str, str]:
    """Return the entry `made_by` of a file: the versions that write it, and the date."""
    versions = {"histocc": __version__, "torch": str(torch.__version__), "python": platform.python_version()}
    return {**versions, "date": datetime.now(UTC).isoformat(timespec="seconds")}


def _write(path: str, state: dict[str, Any]) -> None:
    """Write `state` with its checksum. Raises OSError."""
    entries = {name: value for name, value in state.items() if name != SECOND_NAME}
    state = with_checksum(tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), entries))
    state[SECOND_NAME] = state["model"]  # for other trainers' scripts, at no cost in space
    # torch takes four to six seconds per GB for the CRC-32 of the archive's parts, which nobody compares
    without_crc32 = torch_config.patch({"save.compute_crc32": False})  # pyright: ignore
    with atomic_write(path) as file, without_crc32:
        torch.save(state, file)


def save(files: OwnFiles, names: list[str], state: dict[str, Any]) -> None:
    """Write `state` once and give the file all `names`, last.bin first. Rank 0 only. Raises OSError."""
    first, *others = files.claim(*sorted(names, key=lambda name: name != LAST))
    _write(first, state)
    for path in others:
        atomic_copy(first, path)


def complete(files: OwnFiles, state: dict[str, Any], keep: int) -> None:
    """Give last.bin (content: `state`) the names that a killed save missed. Rank 0 only. Raises OSError."""
    for name in filter(CHECKPOINT.fullmatch, state.get(NAMES_ENTRY, ())):
        if name != LAST and step_of(files.path(name)) != state["step"]:
            atomic_copy(files.path(LAST), *files.claim(name))
    prune(files, keep)


def rewrite(path: str, state: dict[str, Any]) -> None:
    """Replace a checkpoint with a changed one, and also its hard links in the run's folder, such as best.bin
    of the same step. Rank 0 only. Raises OSError, UserError.
    """
    path = os.path.realpath(path)
    files = OwnFiles(os.path.dirname(path))
    own = [files.path(name) for name in filter(CHECKPOINT.fullmatch, files.names)]
    same = [other for other in own if other != path and not os.path.islink(other) and is_same(other, path)]
    _write(path, state)
    for other in same:
        atomic_copy(path, other)


def prune(files: OwnFiles, keep: int) -> None:
    """Remove all but the newest `keep` of the run's own files `{step}.bin`. Rank 0 only."""
    names = {name for name in files.names if re.fullmatch(r"\d+\.bin", name)}
    written = sorted(names & set(os.listdir(files.folder)), key=lambda name: int(name[:-4]))
    files.remove(names.difference(written[max(0, len(written) - keep) :]))  # and names of saves that failed


class Saver:
    """The engine's `save(step, names, position)`: rank 0 writes a checkpoint from which one can predict and
    resume, while the others wait. All ranks.

    A failed save prints a warning and does not end the run: the next one may succeed. If the weights or the
    optimizer are not finite, the save fails in the same way and the earlier files stay.

    Args:
        files: the files of the run, whose folder gets the checkpoints.
        keep: number of {step}.bin files to keep.
        state: makes the content on rank 0, a nested dict with tensors. It is called on all ranks.
        say: prints a line on rank 0.
    """

    def __init__(self, files: OwnFiles, keep: int, world: World, state: Content, say: Callable[[str], None]):
        self.files, self.keep, self.world, self.state, self.say = files, keep, world, state, say
        # the last save's arguments, its error (the same on all ranks) and its duration
        self.given: tuple[int, list[str], dict[str, Any]] = 0, [], {}
        self.failed, self.seconds = "", 0.0

    def __call__(self, step: int, names: list[str], position: dict[str, Any]) -> str:
        """Save, and return the error, or ""."""
        started = time.monotonic()
        state = self.state(step, position)
        write = partial(self._write, step, names, state, started)
        self.failed = self.world.run_on_main(write, limited=True)
        self.given, self.seconds = (step, names, position), time.monotonic() - started
        return self.failed

    def wait_for_space(self) -> None:
        """Repeat the last save of the run while the disk is full, until the time limit or a signal."""
        limit, waited = self.world.time_limit, 0.0
        while self.failed.endswith(FULL) and waited < limit and not self.world.stop_agreed():
            if not waited:
                how_long = f"for up to {limit / 60:g} minutes (--timeout-minutes), or until a signal"
                self.say(f"Note: the run waits {how_long}, for space to save its last checkpoint")
            time.sleep(pause := min(SPACE_SECONDS, limit / 10))
            waited += pause
            self(*self.given)

    def _write(self, step: int, names: list[str], state: dict[str, Any], started: float) -> str:
        failed, size = "", 0
        trained = tree_leaves([state[name] for name in ("model", "optimizer") if name in state])
        if not all(is_finite(value) for value in trained if isinstance(value, Tensor)):
            failed = "its weights are no longer finite; lower --learning-rate, or raise --warmup-pct"
        else:
            try:
                os.makedirs(self.files.folder, exist_ok=True)
                save(self.files, names, {**state, NAMES_ENTRY: names})
                size = os.path.getsize(self.files.path(names[-1]))
                prune(self.files, self.keep)
            except Exception as error:  # OSError, and torch's writer turns a full disk into a RuntimeError
                failed = in_words(error, self.files.path(LAST if LAST in names else names[0]))
        if not failed or (step, failed) != (self.given[0], self.failed):  # otherwise it was reported already
            self.say(
                f"WARNING: the checkpoint of step {step:,} could not be saved: {failed}. Training continues,"
                " and the next save is tried all the same."
                if failed
                else f"Saved {', '.join(names)}{f' of step {step:,}' if step else ''}: {size / 1e6:,.0f} MB"
                f" in {time.monotonic() - started:.2f} s"
            )
        return failed


# ---- reading


@contextlib.contextmanager
def reading(file: str) -> Generator[None]:
    """Turn any failure to read `file` or to use its content into one UserError that names the file, or into
    Unreadable if the bytes are not the cause. Run no collective inside: its failure would look like damage.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in OF_BYTES:
            raise Unreadable(f"{file}: cannot be read: {error.strerror}") from None
        if known := as_user_error(error):  # the message is enough, or the machine failed
            raise known from None
        if "PytorchStreamReader" in str(error):
            size = f"{os.path.getsize(file):,} bytes"
            raise UserError(f"{file}: is damaged or incomplete ({size}): copy it again") from None
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise UserError(
            f"{file}: cannot be read as a checkpoint ({what[:300]}). It may be damaged, or edited: take"
            " an earlier one, or write it again"
        ) from None


def load(path: str) -> dict[str, Any]:
    """Return the dict in `path`, tensors on the CPU, and compare its checksum if it has one. Nothing in it is
    executed. Raises UserError, which names any objects other than tensors and plain types, and Unreadable if
    the system cannot hand it over within READ_SECONDS.
    """
    until = time.monotonic() + READ_SECONDS
    while True:
        try:
            return _load(path)
        except Unreadable:
            if time.monotonic() > until:
                raise
        time.sleep(0.5)


def _load(path: str) -> dict[str, Any]:
    with reading(path), opened(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of formats that are refused anyway
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):
                raise UserError(_refusal(path, error)) from None
            raise
        if not isinstance(state, dict):
            raise UserError(f"{path}: is not a checkpoint: it holds no dict with an entry 'model'")
        if "model" in state:
            state.pop(SECOND_NAME, None)
        if type(state.get("format")) is int:
            check_format(path, state["format"])  # another version may compute another checksum
        check_checksum(path, state)
    return state


def _refusal(path: str, error: Exception) -> str:
    """Return the message for a refused file, since torch's own advises the user to switch the check off."""
    names = re.findall(r"GLOBAL (\S+)", str(error))
    with contextlib.suppress(Exception):  # not even the list can be read: a damaged or foreign file
        names = torch.serialization.get_unsafe_globals_in_checkpoint(path) or names
    if not names:
        return (
            f"{path}: cannot be read as a checkpoint; it is something else, or damaged. Give a .bin file of a"
            " run, or the run's folder"
        )
    return (
        f"{path}: refused, since it holds objects that could run code when loaded: {', '.join(names)}.\n  A"
        " checkpoint may hold tensors and plain Python values only. If you trust its source, open it there"
        " and save only its state dict: torch.save({'model': model.state_dict(), 'key': key}, 'clean.bin')"
    )


def check_format(file: str, number: Any) -> None:
    """Raise ForeignCheckpoint if a file of histocc has a format that this version does not read."""
    if type(number) is not int or number != FORMAT:
        raise ForeignCheckpoint(
            f"{file}: written by another version of histocc: format {number!r:.60}; this version reads"
            f" {FORMAT}. It stays as it is: install that version, or choose another folder"
        )


def load_resumable(path: str) -> dict[str, Any]:
    """Load a checkpoint as `load` does, and check that a run can resume from it. Raises UserError."""
    state = load(path)
    if "format" not in state:
        raise ForeignCheckpoint(
            f"{path}: holds weights but not the settings of their model, so histocc did not write it. It"
            f" stays as it is: start from it with --initial-checkpoint {path} and another folder"
        )
    check_format(path, state["format"])
    if missing := [name for name in _FOR_RESUMING if name not in state]:
        raise UserError(f"{path}: cannot be resumed from: it lacks {', '.join(missing)}")
    return state


# ---- the files of a folder


def find(path: str, names: tuple[str, ...] = (LAST, BEST)) -> str | None:
    """Return `path` itself if it is a file, the first of `names` in the folder `path`, or None."""
    paths = [path, *(os.path.join(path, name) for name in names)]
    return next(filter(os.path.isfile, paths), None)


def exists_in(folder: str) -> bool:
    """Return whether `folder` holds a checkpoint of a run."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a bad name
        return any(map(CHECKPOINT.fullmatch, os.listdir(folder)))
    return False


def step_of(path: str) -> int | None:
    """Return the step of a checkpoint without reading its tensors, or None if it cannot be read."""
    if kind_of(path) != "a file":
        return None
    try:
        step = torch.load(path, map_location="cpu", mmap=True, weights_only=True)["step"]
    except Exception:
        return None
    return step if type(step) is int else None


def newest_first(folder: str) -> Iterator[str]:
    """Yield the paths of a folder's checkpoints: last.bin, then the others, newest first."""
    yield os.path.join(folder, LAST)
    names = os.listdir(folder) if os.path.isdir(folder) else []
    paths = [os.path.join(folder, name) for name in names if CHECKPOINT.fullmatch(name) and name != LAST]
    yield from sorted(paths, key=lambda path: step_of(path) or -1, reverse=True)


def newest_good(folder: str, read: Callable[[str], dict[str, Any]]) -> tuple[str, dict[str, Any], list[str]]:
    """Return the newest readable checkpoint of the run in `folder`: (file, checkpoint, problems of the files
    tried before it). Raises UserError if none can be read, ForeignCheckpoint if another program or version
    wrote one, Unreadable if the system cannot hand one over, which may be whole.
    """
    wrong: list[str] = []
    for path in newest_first(folder):
        try:
            return path, read(path), wrong
        except (ForeignCheckpoint, Unreadable):
            raise
        except UserError as error:
            wrong.append(str(error))
    raise UserError(
        "\n  ".join([f"{folder}: no checkpoint of the run can be read; --overwrite starts over", *wrong])
    )

"""Checksums (CRC-32) of files and of what a checkpoint holds: they tell a file that was damaged or edited
from one as it was written.

They are no signature: who edits a file on purpose can write its checksum, too. CRC-32 runs at several GB/s,
above the speed of disks.
"""

import zlib
from typing import Any

import torch

from histocc.runtime.errors import UserError
from histocc.runtime.schema import content, either, mapping, require, whole

SUMS = "checksums"
# What may be taken out of a checkpoint that codes and is not resumed.
_FOR_RESUMING = frozenset({"optimizer", "scheduler", "rng", "position"})
_SUM = whole(0, 2**32 - 1)
_TABLE = mapping({}, rest=either(_SUM, mapping({}, rest=_SUM)))
_BLOCK = 1 << 24  # bytes


def of_file(path: str) -> int:
    """The checksum of a file's content. Raises OSError."""
    found = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found


def of_tensor(tensor: torch.Tensor, before: int = 0) -> int:
    """The checksum of a tensor's dtype, shape and bytes, appended to `before`."""
    found = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode(), before)
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data, found) if flat.numel() else found


def of_value(value: Any, before: int = 0) -> int:
    """The checksum of nested dicts, lists, tensors and plain Python values, appended to `before`. The order
    of a dict's entries does not count, nor does list or tuple.
    """
    if isinstance(value, torch.Tensor):
        return of_tensor(value, before)
    if isinstance(value, dict):
        found = zlib.crc32(f"dict {len(value)}".encode(), before)
        for name in sorted(value, key=repr):
            found = of_value(value[name], zlib.crc32(repr(name).encode(), found))
        return found
    if isinstance(value, (list, tuple)):
        found = zlib.crc32(f"list {len(value)}".encode(), before)
        for part in value:
            found = of_value(part, found)
        return found
    return zlib.crc32(repr(value).encode("utf-8", "surrogatepass"), before)


# ---- those of the entries of a file of a model, in the file itself


def sums_of(entries: dict[str, Any]) -> dict[str, Any]:
    """Checksum of each entry; of `model` those of its tensors, so that the one that was changed can be
    named."""
    return {
        name: (
            {part: of_value(tensor) for part, tensor in value.items()}
            if name == "model" and isinstance(value, dict)
            else of_value(value)
        )
        for name, value in entries.items()
    }


def with_sums(entries: dict[str, Any]) -> dict[str, Any]:
    """`entries` and, as one more, their checksums. Any earlier ones are left out."""
    entries = {name: value for name, value in entries.items() if name != SUMS}
    return {**entries, SUMS: sums_of(entries)}


def without_sums(file: str, entries: dict[str, Any], where: str = "") -> dict[str, Any]:
    """`entries` without their checksums, which were compared. where: the entry of the file that holds them,
    for messages.

    Raises UserError for an entry that was changed, added or removed after they were written; what only
    resuming needs may be removed.
    """
    expected: Any = entries.get(SUMS)
    entries = {name: value for name, value in entries.items() if name != SUMS}
    require(file, _TABLE, expected, where + SUMS)
    require(file, content(tensors=True), entries)
    found = sums_of(entries)
    changed = [
        name
        for name in {**expected, **found}
        if expected.get(name) != found.get(name) and not (name in _FOR_RESUMING and name not in found)
    ]
    if not changed:
        return entries
    entry = changed[0]
    before, now = expected.get(entry), found.get(entry)
    what = (
        "nothing"
        if entry not in found
        else "an entry that was added"
        if entry not in expected
        else "another content"
    )
    if isinstance(before, dict) and isinstance(now, dict):
        entry += ": " + str(next(name for name in {**before, **now} if before.get(name) != now.get(name)))
    raise UserError(
        f"{file}: {entry}: found {what}, expected what the checksums of the file say: it was "
        "damaged, or changed after it was "
        f"written. Who changed it on purpose removes the entry {where}{SUMS} as well"
    )

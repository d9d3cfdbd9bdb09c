"""Checksums (CRC-32) of files and of what a checkpoint holds: they tell a file that was damaged or edited
from one as it was written.

They are no signature: who edits a file on purpose can write its checksum, too. CRC-32 runs at several GB/s,
above the speed of disks.
"""

import zlib
from typing import Any

import torch

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

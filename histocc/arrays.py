"""A prepared folder: the arrays that every process of a run maps into memory.

For each of `train` and `val` it holds flat arrays:

    {part}.chars     uint32 [N]           code points of all descriptions, one after the other
    {part}.offsets   int64  [rows + 1]    where each description starts in chars
    {part}.language  uint8  [rows]        index into meta["languages"]
    {part}.codes     int32  [rows, K]     indices into meta["codes"], −1 where a row has fewer than K codes
    {part}.text_hash uint64 [rows]        equal for descriptions that differ only in case and blanks

and `meta.json`, written last.
"""

import json
import os
from dataclasses import dataclass

import numpy as np

from histocc.text_rules import AS_IS

PREPARED_FORMAT = 3
ARRAYS = {"chars": np.dtype("<u4"), "offsets": np.dtype("<i8"), "language": np.dtype("u1"), "codes": np.dtype("<i4"),
          "text_hash": np.dtype("<u8")}


def map_array(path: str, dtype: np.dtype) -> np.ndarray:
    """The array in `path`, mapped read-only; an empty file is an empty array."""
    return np.memmap(path, dtype=dtype, mode="r") if os.path.getsize(path) else np.zeros(0, dtype=dtype)


class RowSet:
    """The rows of one part (`train` or `val`) of a prepared folder. Cheap to send to a worker: it maps files."""

    def __init__(self, folder: str, part: str, max_codes: int):
        self.folder, self.part, self.max_codes = folder, part, max_codes
        self._map()

    def _map(self) -> None:
        arrays = {name: map_array(os.path.join(self.folder, f"{self.part}.{name}"), dtype)
                  for name, dtype in ARRAYS.items()}
        self.chars, self.offsets, self.language = arrays["chars"], arrays["offsets"], arrays["language"]
        self.codes, self.text_hash = arrays["codes"].reshape(-1, self.max_codes), arrays["text_hash"]

    def __getstate__(self) -> dict:
        return {"folder": self.folder, "part": self.part, "max_codes": self.max_codes}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._map()

    def __len__(self) -> int:
        return len(self.language)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Characters of the descriptions of `rows` (int64 [B]); int64 [B]."""
        return self.offsets[rows + 1] - self.offsets[rows]

    def texts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Descriptions of `rows` (int64 [B]): (code points uint32 [N], offsets int64 [B + 1])."""
        start = self.offsets[rows]
        lengths = self.lengths(rows)
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(lengths, out=offsets[1:])
        index = np.arange(offsets[-1]) + np.repeat(start - offsets[:-1], lengths)
        return self.chars[index], offsets


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder: its rows, its codes in the order of the linear outputs, its languages, all characters of its descriptions
    (sorted code points), by which rule texts were cleaned, how many of the codes come from the initial weights of the run,
    whether the columns of codes held numbers of the HISCO key, and what was found."""

    folder: str
    train: RowSet
    val: RowSet
    codes: list[str]
    languages: list[str]
    alphabet: list[int]
    max_codes: int
    fingerprint: str
    report: dict
    clean_text: str = AS_IS
    kept_codes: int = 0
    hisco_numbers: bool = False

    @classmethod
    def open(cls, folder: str) -> "PreparedData":
        with open(os.path.join(folder, "meta.json"), encoding="utf-8") as file:
            meta = json.load(file)
        parts = {part: RowSet(folder, part, meta["max_codes"]) for part in ("train", "val")}
        return cls(folder, parts["train"], parts["val"], meta["codes"], meta["languages"], meta["alphabet"],
                   meta["max_codes"], meta["fingerprint"], meta["report"], meta.get("clean_text", AS_IS), meta.get("kept_codes", 0),
                   meta.get("hisco_numbers", False))

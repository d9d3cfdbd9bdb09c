"""A prepared folder: the arrays that every process of a run maps into memory.

For each of `train` and `val` it holds flat arrays:

    {part}.chars     uint32 [N]           code points of all descriptions, one after the other
    {part}.offsets   int64  [rows + 1]    where each description starts in chars
    {part}.language  uint8  [rows]        index into meta["languages"]
    {part}.codes     int32  [rows, K]     indices into meta["codes"], −1 where a row has fewer than K codes
    {part}.text_hash uint64 [rows]        equal for descriptions that differ only in case and blanks

beside lists for people, and `meta.json`, written last: what the arrays mean, and the size and checksum of
every other file and of its own content.
"""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from histocc.runtime.errors import UserError
from histocc.runtime.files import checksum, opened
from histocc.runtime.rng import mix
from histocc.text import texts_of_pieces

PREPARED_FORMAT = 4
ARRAYS = {
    "chars": np.dtype("<u4"),
    "offsets": np.dtype("<i8"),
    "language": np.dtype("u1"),
    "codes": np.dtype("<i4"),
    "text_hash": np.dtype("<u8"),
}
TEACHER = "teacher"  # the file of a teacher's answers to the training rows, where there are some
TEACHER_OUTPUTS = 16  # of its linear decoder that are kept for a text, the most probable ones
META = "meta.json"
# All files that this program writes into a prepared folder; `lines` are gone before it is whole.
FILES = (
    *(f"{part}.{name}" for part in ("train", "val") for name in (*ARRAYS, "lines")),
    f"train.{TEACHER}",
    "key.csv",
    "words.csv",
    "rejected_rows.csv",
    "conflicts.csv",
    "data_report.json",
    META,
)


def teacher_record(room: int) -> np.dtype:
    """What a teacher answers to a text, in numbers of the student's codes, −1 for none: its most probable
    linear outputs and their logits; the codes that it writes, `room` at most, and the probability of that;
    and whether the row that has the answer has true codes, too.
    """
    codes, logits = ("codes", "<i4", (TEACHER_OUTPUTS,)), ("logits", "<f2", (TEACHER_OUTPUTS,))
    return np.dtype([codes, logits, ("written", "<i4", (room,)), ("prob", "<f4"), ("labelled", "?")])


def content_checksum(meta: dict) -> int:
    """The checksum of all entries of meta.json but that of its own, whatever their order."""
    content = {name: value for name, value in meta.items() if name != "checksum"}
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def write_last(folder: str, content: dict) -> None:
    """Writes the file that makes a folder complete: `content`, and the sizes and checksums of all other
    files.
    """
    paths = {name: os.path.join(folder, name) for name in sorted(os.listdir(folder))}
    sizes = {name: os.path.getsize(path) for name, path in paths.items()}
    sums = {name: checksum(path) for name, path in paths.items()}
    meta = json.loads(json.dumps({**content, "sizes": sizes, "checksums": sums}))
    with open(os.path.join(folder, META), "w", encoding="utf-8") as file:
        json.dump({**meta, "checksum": content_checksum(meta)}, file)


def read_meta(folder: str) -> dict:
    """The content of a prepared folder's meta.json. Raises UserError if it is not as it was written."""
    path = os.path.join(folder, META)
    try:
        with opened(path) as file:
            meta = json.load(file)
        if meta["format"] == PREPARED_FORMAT and meta["checksum"] == content_checksum(meta):
            return meta
        what = "was changed after it was written, or by another version"
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        what = f"cannot be read as it was written ({error})"
    raise UserError(f"{path}: {what}; move {folder} away and the data are prepared again")


def fault(folder: str, contents: bool = True, check: Callable[[], None] = lambda: None) -> str | None:
    """Why a folder is not as it was written, by the checksums of its files or, without `contents`, their
    sizes; None if it is. `check` is called between files.
    """
    name = META
    try:
        if not os.path.exists(os.path.join(folder, META)):
            return f"{META} is missing"
        meta = read_meta(folder)
        if meta["fingerprint"] != os.path.basename(os.path.abspath(folder)):
            return f"{META} is that of other data"
        for name, size in meta["sizes"].items():
            path = os.path.join(folder, name)
            check()
            if not os.path.lexists(path):
                return f"{name} is missing"
            same = os.path.isfile(path) and os.path.getsize(path) == size
            if not same or contents and checksum(path) != meta["checksums"][name]:
                return f"{name} is not as it was written"
    except UserError:
        return f"{META} is not as it was written"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None


def map_array(path: str, dtype: np.dtype, mode: Literal["r", "r+"] = "r") -> np.ndarray:
    """The array in `path`, mapped, read-only unless `mode` is "r+"; an empty file is an empty array."""
    return np.memmap(path, dtype=dtype, mode=mode) if os.path.getsize(path) else np.zeros(0, dtype=dtype)


def text_keys(text_hash: np.ndarray, language: np.ndarray) -> np.ndarray:
    """uint64 [N], the same for two rows if their texts (but for case and blanks) and languages are. language:
    numbers of the languages.
    """
    return mix(np.asarray(text_hash) ^ mix(np.asarray(language).astype(np.uint64)))


class RowSet:
    """The rows of one part (`train` or `val`) of a prepared folder. Cheap to send to a worker: it maps
    files.
    """

    def __init__(self, folder: str, part: str, max_codes: int):
        self.folder, self.part, self.max_codes = folder, part, max_codes
        self._map()

    def _map(self) -> None:
        arrays = {
            name: map_array(os.path.join(self.folder, f"{self.part}.{name}"), dtype)
            for name, dtype in ARRAYS.items()
        }
        self.chars, self.offsets, self.language = arrays["chars"], arrays["offsets"], arrays["language"]
        self.codes, self.text_hash = arrays["codes"].reshape(-1, self.max_codes), arrays["text_hash"]
        taught = os.path.join(self.folder, f"{self.part}.{TEACHER}")
        self.teacher = map_array(taught, teacher_record(self.max_codes)) if os.path.exists(taught) else None

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

    def teacher_of(self, rows: np.ndarray) -> np.ndarray | None:
        """What the teacher answers to `rows` (int64 [B]): `teacher_record`s [B]; None where there is none."""
        return None if self.teacher is None else np.asarray(self.teacher[rows])

    def texts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Descriptions of `rows` (int64 [B]): (code points uint32 [N], offsets int64 [B + 1])."""
        return texts_of_pieces(self.chars, self.offsets[rows][:, None], self.lengths(rows)[:, None])

    def strings(self, rows: np.ndarray) -> list[str]:
        """Descriptions of `rows` (int64 [B])."""
        chars, offsets = self.texts(rows)
        joined, ends = chars.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass"), offsets.tolist()
        return [joined[start:end] for start, end in zip(ends, ends[1:])]


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder."""

    folder: str
    train: RowSet
    val: RowSet
    codes: list[str]  # in the order of the linear outputs
    languages: list[str]
    alphabet: list[int]  # all characters of the descriptions, sorted code points
    max_codes: int
    fingerprint: str
    report: dict  # what `report_lines` shows
    clean_text: str  # the rule by which texts were cleaned
    kept_codes: int  # how many of the codes come from the initial weights of the run
    hisco_numbers: bool  # whether the columns of codes held numbers of the HISCO key

    @classmethod
    def open(cls, folder: str) -> "PreparedData":
        """Maps the arrays of a folder whose checksums have been looked at, by whoever prepared it. Raises
        UserError if meta.json or the size of a file is not as it was written.
        """
        meta = read_meta(folder)
        if problem := fault(folder, contents=False):
            raise UserError(f"{folder}: {problem}; move the folder away and the data are prepared again")
        parts = {part: RowSet(folder, part, meta["max_codes"]) for part in ("train", "val")}
        names = cls.__annotations__.keys() - {"folder", *parts}
        return cls(folder, **parts, **{name: meta[name] for name in names})

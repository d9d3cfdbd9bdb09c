"""A prepared folder: the arrays that every process of a run maps into memory.

For each of `train` and `val` it holds flat arrays:

    {part}.chars     uint32 [N]           code points of all descriptions, one after the other
    {part}.offsets   int64  [rows + 1]    where each description starts in chars
    {part}.language  uint8  [rows]        index into meta["languages"]
    {part}.codes     int32  [rows, K]     indices into meta["codes"], −1 where a row has fewer than K codes
    {part}.text_hash uint64 [rows]        equal for descriptions that differ only in case and blanks
    {part}.times     float64 [rows]       how often each row counts (empty if each counts once)

A row that counts three times is three rows of a `RowSet`. The folder also holds lists for people and
`meta.txt`, which is written last. It describes the arrays and holds checksums of all files.
"""

import functools
import json
import os
from dataclasses import dataclass

import numpy as np

from histocc.runtime.errors import UserError
from histocc.runtime.files import checksum, hash_of_sources, kind_of, read_sealed, write_sealed
from histocc.runtime.rng import mix
from histocc.text import texts_of_pieces

# data prepared by other versions of these files are prepared again. A run on them cannot be resumed
PREPARED_FORMAT = hash_of_sources("data/*.py", "formatter.py", "text.py", "*.csv", "runtime/rng.py")
ARRAYS = {
    "chars": np.dtype("<u4"),
    "offsets": np.dtype("<i8"),
    "language": np.dtype("u1"),
    "codes": np.dtype("<i4"),
    "text_hash": np.dtype("<u8"),
    "times": np.dtype("<f8"),
}
WRITTEN = {**ARRAYS, "lines": np.dtype("<i8")}  # during preparation: number of the file × 2**40 + line
META = "meta.txt"
# All files that this program writes into a prepared folder. `lines` is removed before it is complete. Without
# the first file the folder counts as missing.
HELD = (
    META,
    *(f"{part}.{name}" for part in ("train", "val") for name in WRITTEN),
    *("key.csv", "words.csv", "rejected_rows.csv", "conflicts.csv", "data_report.json"),
)


def write_last(folder: str, content: dict) -> None:
    """Write the file that makes a folder complete: `content`, and the checksums of all other files."""
    there = set(os.listdir(folder))
    sums = {name: checksum(os.path.join(folder, name)) for name in HELD if name in there}
    text = json.dumps({**content, "checksums": sums})
    write_sealed(os.path.join(folder, META), text.encode(), of=content["fingerprint"])


def read_meta(folder: str) -> dict:
    """Return what `write_last` wrote. Raises UserError if the file is damaged."""
    path = os.path.join(folder, META)
    content = read_sealed(path, of=os.path.basename(os.path.abspath(folder)))
    if content is None:
        raise UserError(f"{path}: is not as it was written; move {folder} away to prepare it again")
    return json.loads(content)


def fault(folder: str) -> str | None:
    """Return the name of a missing file or of one with a wrong checksum, or None if all are intact."""
    name = META
    try:
        for name, expected in read_meta(folder)["checksums"].items():
            path = os.path.join(folder, name)
            if kind_of(path) != "a file" or checksum(path) != expected:
                return name
    except (OSError, UserError):
        return name
    return None


def map_array(path: str, dtype: np.dtype) -> np.ndarray:
    """Map the array in `path` read-only. An empty file gives an empty array."""
    return np.memmap(path, dtype=dtype, mode="r") if os.path.getsize(path) else np.zeros(0, dtype=dtype)


def text_keys(text_hash: np.ndarray, language: np.ndarray) -> np.ndarray:
    """Return uint64 [N], equal for rows of one language (number) and text, ignoring case and blanks."""
    return mix(np.asarray(text_hash) ^ mix(np.asarray(language).astype(np.uint64)))


class RowSet:
    """The rows of one part (`train` or `val`) of a prepared folder."""

    def __init__(self, folder: str, part: str, max_codes: int):
        self.folder, self.part, self.max_codes = folder, part, max_codes
        paths = {name: os.path.join(folder, f"{part}.{name}") for name in ARRAYS}
        if not os.path.exists(paths["times"]):  # data of an earlier version
            del paths["times"]
        arrays = {name: map_array(path, ARRAYS[name]) for name, path in paths.items()}
        self.chars, offsets = arrays["chars"], arrays["offsets"]
        self.times = arrays.get("times", np.zeros(0)).astype(np.int64)
        self.starts, self.ends = self.each(offsets[:-1]), self.each(offsets[1:])
        self.language, self.text_hash = self.each(arrays["language"]), self.each(arrays["text_hash"])
        self.codes = self.each(arrays["codes"].reshape(-1, max_codes))

    def __reduce__(self) -> tuple:
        return RowSet, (self.folder, self.part, self.max_codes)  # a worker maps the files itself

    def __len__(self) -> int:
        return len(self.language)

    def each(self, values: np.ndarray) -> np.ndarray:
        """Return the value of each row, given the values in the arrays."""
        return values.repeat(self.times, axis=0) if len(self.times) else values

    def lines(self) -> np.ndarray:
        """Return the file and line of each row (see WRITTEN), int64, if they are kept."""
        return self.each(map_array(os.path.join(self.folder, f"{self.part}.lines"), WRITTEN["lines"]))

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers of characters, int64 [B], of the descriptions of `rows` (int64 [B])."""
        return self.ends[rows] - self.starts[rows]

    def texts(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the descriptions of `rows` (int64 [B]): (code points uint32 [N], offsets int64 [B + 1])."""
        return texts_of_pieces(self.chars, self.starts[rows][:, None], self.lengths(rows)[:, None])

    def strings(self, rows: np.ndarray) -> list[str]:
        """Return the descriptions of `rows` (int64 [B])."""
        chars, offsets = self.texts(rows)
        joined, ends = chars.astype("<u4").tobytes().decode("utf-32-le", "surrogatepass"), offsets.tolist()
        return [joined[start:end] for start, end in zip(ends, ends[1:])]


def code_counts(rows: RowSet, codes: int) -> np.ndarray:
    """Return the number of rows with each code, int64 [codes], reading blocks of rows."""
    counts = np.zeros(codes, dtype=np.int64)
    for start in range(0, len(rows), 1 << 18):
        block = rows.codes[start : start + (1 << 18)]
        counts += np.bincount(block[block >= 0], minlength=codes)
    return counts


def thinned(rows: np.ndarray, most: int) -> np.ndarray:
    """Return at most `most` of the rows, evenly spread."""
    return rows if len(rows) <= most else rows[np.arange(most) * len(rows) // most]


class SomeRows(RowSet):
    """Some rows of another set. index: their numbers there, int64 [N]."""

    def __init__(self, rows: RowSet, index: np.ndarray):
        self.rows, self.index, self.chars = rows, index, rows.chars
        for name in ("starts", "ends", "language", "codes", "text_hash"):
            setattr(self, name, getattr(rows, name)[index])


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
    report: dict  # for `report_lines`
    clean_text: str  # the rule that cleaned the texts
    kept_codes: int  # number of codes from the run's initial weights
    hisco_numbers: bool  # whether the code columns held numbers of the HISCO key

    @functools.cached_property
    def texts(self) -> int:
        """The number of distinct texts to learn from."""
        return len(np.unique(text_keys(self.train.text_hash, self.train.language)))

    @classmethod
    def open(cls, folder: str) -> "PreparedData":
        """Map a folder whose checksums have been compared. Raises UserError if `meta.txt` is damaged."""
        meta = read_meta(folder)
        parts = {part: RowSet(folder, part, meta["max_codes"]) for part in ("train", "val")}
        names = cls.__annotations__.keys() - {"folder", *parts}
        return cls(folder, **parts, **{name: meta[name] for name in names})

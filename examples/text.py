"""Text as bytes or tokens, in windows: rows for masked diffusion and for an autoregressive model."""

import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from examples.transformer import BYTES
from histocc.runtime.errors import UserError
from histocc.runtime.rng import below, chance, draw, streams
from histocc.trainer.batches import Rows

LEAST_MASKED = 1e-3  # least share of a window that is masked, in training
DRAWS = 32  # draws of a window, in validation
CONTROL = re.compile(rb"[\0-\x08\x0e-\x19\x1c-\x1f]")  # bytes that no text has, in any encoding


class Data(NamedTuple):
    """The ids for training and validation, integers [N], the number of different ones, and the files."""

    train: np.ndarray
    val: np.ndarray
    vocabulary: int
    files: str

    @property
    def unit(self) -> str:
        return "byte" if self.vocabulary == BYTES else "token"


def read_data(paths: list[str]) -> Data:
    """Read a folder of tokens, or files and folders of text. Raises UserError."""
    folders = [path for path in paths if _holds_tokens(Path(path))]
    if folders and len(paths) > 1:
        raise UserError(f"{folders[0]}: holds arrays of tokens; give only this folder")
    return read_tokens(Path(paths[0])) if folders else read_text(paths)


def read_text(paths: list[str]) -> Data:
    """Read bytes uint8 of files and of folders of text; the last tenth of each file is for validation. Binary
    files in a folder are skipped. Raises UserError if a binary file is named, or if there is no text.
    """
    texts, binary = [], []
    for path in map(Path, paths):
        for file in _files_in(path) if path.is_dir() else [path]:
            content = _read(file)
            if not CONTROL.search(content):
                texts.append(np.frombuffer(content, dtype=np.uint8))
            elif file == path:
                raise UserError(
                    f"{file}: is a binary file, not text; arrays of tokens are read from their folder"
                )
            else:
                binary.append(file.name)
    texts = [text for text in texts if len(text)]
    left_out = f"; binary, left out: {_list(binary)}" if binary else ""
    if not texts:
        raise UserError(f"{', '.join(paths)}: no text there{left_out}")
    return _split(texts, [], BYTES, f"{', '.join(paths)} ({len(texts):,} files of text{left_out})")


def read_tokens(folder: Path) -> Data:
    """Read ids of tokens from arrays (.npy) of a folder, whose metadata.json has their vocab_size: train*.npy
    and val*.npy, or arrays whose names differ only in digits, with the last tenth of each for validation.
    Rows of a matrix follow one another. Raises UserError.
    """
    metadata = folder / "metadata.json"
    try:
        vocabulary = int(json.loads(metadata.read_bytes())["vocab_size"])
    except (OSError, ValueError, LookupError, TypeError):
        raise UserError(f'{metadata}: arrays of tokens need this file, with {{"vocab_size": …}}') from None
    names = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.npy"))
    val = [name for name in names if name.startswith("val")]
    train = [name for name in names if name.startswith("train")] or sorted({*names} - {*val})
    for some in (train, val):
        if len({re.sub("[0-9]+", "", name) for name in some}) > 1 or not train:
            raise UserError(
                f"{folder}: which arrays hold tokens? Expected train*.npy and val*.npy, or arrays whose names"
                f" differ only in digits, found {_list(names) or 'no .npy'}"
            )
    arrays, held_out = ([_array(folder / name, vocabulary) for name in some] for some in (train, val))
    return _split(arrays, held_out, vocabulary, f"{folder} (tokens in {_list([*train, *val])})")


def _list(names: list[str]) -> str:
    return ", ".join(names[:5]) + " …" * (len(names) > 5)


def _holds_tokens(path: Path) -> bool:
    metadata = path / "metadata.json"
    return any(path.glob("*.npy")) or metadata.is_file() and b'"vocab_size"' in metadata.read_bytes()


def _array(file: Path, vocabulary: int) -> np.ndarray:
    try:
        array = np.load(file, mmap_mode="r").reshape(-1)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{file}: cannot be read as an array: {error}") from None
    if array.dtype.kind not in "iu":
        raise UserError(f"{file}: holds {array.dtype}, not ids of tokens, which are integers")
    if len(array) and not 0 <= array.min() <= array.max() < vocabulary:
        raise UserError(
            f"{file}: holds ids from {array.min()} to {array.max()}, outside a vocabulary of {vocabulary:,}"
            " (vocab_size in metadata.json)"
        )
    return array


def _split(arrays: list[np.ndarray], held_out: list[np.ndarray], vocabulary: int, files: str) -> Data:
    """Hold out the last tenth of each array for validation, unless there are separate arrays for it."""
    if not held_out:
        cuts = [len(array) * 9 // 10 for array in arrays]
        held_out = [array[cut:] for array, cut in zip(arrays, cuts)]
        arrays = [array[:cut] for array, cut in zip(arrays, cuts)]
    # a single array stays in its file
    train, val = (some[0] if len(some) == 1 else np.concatenate(some) for some in (arrays, held_out))
    return Data(train, val, vocabulary, files)


def _files_in(folder: Path) -> list[Path]:
    """Return regular files below, in order, except hidden ones and Python's cache."""
    inside = (path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file())
    return [
        folder.joinpath(*parts)
        for parts in sorted(inside)
        if not any(part.startswith((".", "__pycache__")) for part in parts)
    ]


def _read(file: Path) -> bytes:
    if not file.is_file():
        raise UserError(f"{file}: no such file or folder")
    return file.read_bytes()


class Windows(Rows):
    """Windows of `length` ids, one after the other: tokens int64 [B, L]. seed: of the epochs' shifts of each
    window by less than its length; None: no shifts. Raises UserError if the text is shorter than a window.
    """

    def __init__(self, text: np.ndarray, length: int, seed: int | None = None, most: int | None = None):
        if len(text) < length:
            raise UserError(
                f"the text, or what is held out for validation, has {len(text):,} bytes or tokens, fewer than"
                f" a window of {length}: give more text, or a smaller --window"
            )
        self.text, self.length, self.seed = text, length, seed
        self.windows = min(len(text) // length, most or len(text))
        self.fingerprint = hashlib.sha256(np.ascontiguousarray(text).data).hexdigest()

    def __len__(self) -> int:
        return self.windows

    def windows_of(self, numbers: np.ndarray, epoch: int) -> torch.Tensor:
        """Return tokens int64 [B, L] of windows `numbers` in an epoch."""
        start = numbers * self.length
        if self.seed is not None:
            shift = below(draw(streams(self.seed, epoch, numbers), 0), self.length)
            start = np.minimum(start + shift, len(self.text) - self.length)
        return torch.from_numpy(self.text[start[:, None] + np.arange(self.length)].astype(np.int64))

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.windows_of(numbers, epoch)}


class MaskedWindows(Windows):
    """Windows with masked tokens, bool [B, L], and the weight of a masked token, float64 [B]: each token is
    masked with probability p = (1 − ε) t + ε, t ~ U(0, 1), and weighs 1 / (p L) (LLaDA, arXiv 2502.09992).
    Level and mask are a function of (seed, epoch, row). The seed is required.
    """

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        found = streams(self.seed or 0, epoch, numbers)
        level = (draw(found, 1) >> np.uint64(11)) * 2.0**-53
        share = (1 - LEAST_MASKED) * level + LEAST_MASKED
        masked = chance(draw(found[:, None], np.arange(2, 2 + self.length)), share[:, None])
        return {
            "tokens": self.windows_of(numbers, epoch),
            "masked": torch.from_numpy(masked),
            "weight": torch.from_numpy(1 / (share * self.length)),
        }


class MaskedDraws(Windows):
    """Masked windows for validation, with less variance: each window DRAWS times, with exactly l of its L
    tokens masked, l spread evenly over 1 … L, and weight 1 / l. The mean over these rows estimates the bound.
    """

    def __len__(self) -> int:
        return self.windows * DRAWS

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        found = streams(0, 0, numbers)
        within = (draw(found, 0) >> np.uint64(11)) * 2.0**-53
        count = 1 + ((numbers % DRAWS + within) / DRAWS * self.length).astype(np.int64)  # [B]
        order = draw(found[:, None], np.arange(1, 1 + self.length)).argsort(axis=1).argsort(axis=1)
        return {
            "tokens": self.windows_of(numbers // DRAWS, 0),
            "masked": torch.from_numpy(order < count[:, None]),
            "weight": torch.from_numpy(1 / count),
        }

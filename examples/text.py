"""Text as bytes, in windows: rows for masked diffusion and for an autoregressive model."""

import hashlib
from pathlib import Path

import numpy as np
import torch

from histocc.runtime.errors import UserError
from histocc.runtime.rng import below, chance, draw, streams
from histocc.trainer.batches import Rows

LEAST_MASKED = 1e-3  # share of a window, in training
DRAWS = 32  # of a window, in validation


def read_text(paths: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """(training, validation) bytes uint8 of files and of folders of text: the last tenth of each file is for
    validation. Raises UserError where there is no text.
    """
    files = [file for path in map(Path, paths) for file in (_files_in(path) if path.is_dir() else [path])]
    texts = [np.frombuffer(_read(file), dtype=np.uint8) for file in files]
    texts = [text for text in texts if len(text) and not (text == 0).any()]  # files of another kind hold NULs
    if not texts:
        raise UserError(f"{', '.join(map(str, paths))}: no text there")
    cuts = [len(text) * 9 // 10 for text in texts]
    return (
        np.concatenate([text[:cut] for text, cut in zip(texts, cuts)]),
        np.concatenate([text[cut:] for text, cut in zip(texts, cuts)]),
    )


def _files_in(folder: Path) -> list[Path]:
    """Regular files below, in order, but for hidden ones and those of Python's cache."""
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
    """Windows of `length` bytes, one behind the other: tokens int64 [B, L]. seed: each epoch shifts each
    window by less than its length; None leaves them. Raises UserError where the text is shorter than one.
    """

    def __init__(self, text: np.ndarray, length: int, seed: int | None = None, most: int | None = None):
        if len(text) < length:
            raise UserError(
                f"the text, or its last tenth for validation, has {len(text):,} bytes, fewer than a window"
                f" of {length}: give more text, or a smaller --window"
            )
        self.text, self.length, self.seed = text, length, seed
        self.windows = min(len(text) // length, most or len(text))
        self.fingerprint = hashlib.sha256(text.tobytes()).hexdigest()

    def __len__(self) -> int:
        return self.windows

    def windows_of(self, numbers: np.ndarray, epoch: int) -> torch.Tensor:
        """Tokens int64 [B, L] of windows `numbers` in an epoch."""
        start = numbers * self.length
        if self.seed is not None:
            shift = below(draw(streams(self.seed, epoch, numbers), 0), self.length)
            start = np.minimum(start + shift, len(self.text) - self.length)
        return torch.from_numpy(self.text[start[:, None] + np.arange(self.length)].astype(np.int64))

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        return {"tokens": self.windows_of(numbers, epoch)}


class MaskedWindows(Windows):
    """And which tokens are masked, bool [B, L], and the weight of each of them, float64 [B]: each token with
    probability p = (1 − ε) t + ε, t ~ U(0, 1), weight 1 / (p L) (LLaDA, arXiv 2502.09992). Level and mask
    are a function of (seed, epoch, row). seed: given.
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
    """The same for validation, with less variance: each window DRAWS times, with exactly l of its L tokens
    masked, l even over 1 … L, and weight 1 / l. The mean over these rows estimates the upper bound.
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

"""Drawn images with a question about a place in them.

A batch, as in `examples.images`, has image float32 [B, 3, H, W] (0 … 1), question int64 [B, Q] (bytes, 0
after the end), mask float32 [B, H, W] (1 for the pixels of the answer, else 0), answer int64 [B] and modality
int64 [B] (indices), and modality_weight float32 [B], the weight of the modality's loss in this epoch.
"""

import numpy as np
import torch

from histocc.runtime.rng import below, draw, streams
from histocc.trainer.batches import Rows

LONGEST = 48  # bytes of a question
MODALITY_EPOCHS, MODALITY_WEIGHT = 5, 0.5  # the first epochs, which also learn the kind of image
SIZE = 64  # pixels of a side of a drawn scene
SHAPES = ["circle", "square", "triangle"]
STYLES = ["plain", "grainy", "striped"]
HEIGHTS, SIDES = (("upper", "top"), ("lower", "bottom")), ("left", "right")
ASKED = ("what lies in the {} {}?", "the shape at the {} {}", "{} {}: what is it?")


class Questions(Rows):
    """The common part of drawn and real images. shuffled: each image gets the question of another row."""

    answers: list[str]
    modalities: list[str]
    shuffled = False

    def asked(self, number: int) -> str:
        """Return the question of a row."""
        raise NotImplementedError

    def texts(self, numbers: np.ndarray) -> torch.Tensor:
        """Return questions as int64 [B, LONGEST]."""
        found = np.zeros((len(numbers), LONGEST), dtype=np.int64)
        for i, number in enumerate(numbers.tolist()):
            other = (number * 7919 + 1) % len(self) if self.shuffled else number
            text = self.asked(other).lower().encode()[:LONGEST]
            found[i, : len(text)] = np.frombuffer(text, dtype=np.uint8)
        return torch.from_numpy(found)

    def weights(self, numbers: np.ndarray, epoch: int) -> torch.Tensor:
        return torch.full((len(numbers),), MODALITY_WEIGHT if epoch < MODALITY_EPOCHS else 0.0)


class Scenes(Questions):
    """`number` scenes of four shapes, one in each quarter, with a question about one of them: a function of
    (seed, row).
    """

    answers, modalities = SHAPES, STYLES

    def __init__(self, number: int, seed: int, shuffled: bool = False):
        self.number, self.seed, self.shuffled = number, seed, shuffled
        self.fingerprint = f"scenes {number} {seed}"

    def __len__(self) -> int:
        return self.number

    def drawn(self, numbers: np.ndarray, which: int | np.ndarray, most: int) -> np.ndarray:
        """Draw even whole numbers below `most`: number `which` of each row, [B] or [B, len(which)]."""
        found = streams(self.seed, 0, numbers)
        return below(draw(found[:, None] if np.ndim(which) else found, which), most)

    def asked(self, number: int) -> str:
        quarter, height, asked = (
            int(self.drawn(np.array([number]), i, n)[0]) for i, n in ((0, 4), (1, 2), (2, 3))
        )
        return ASKED[asked].format(HEIGHTS[quarter // 2][height], SIDES[quarter % 2])

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        rows, four = np.arange(len(numbers)), np.arange(4)
        quarter, style = self.drawn(numbers, 0, 4), self.drawn(numbers, 3, len(STYLES))
        kind = self.drawn(numbers, 10 + four, len(SHAPES))  # [B, 4], as all below
        x = 32 * (four % 2) + 12 + self.drawn(numbers, 20 + four, 9)
        y = 32 * (four // 2) + 12 + self.drawn(numbers, 30 + four, 9)
        radius = 6 + self.drawn(numbers, 40 + four, 6)
        colour = (self.drawn(numbers, np.arange(50, 62), 156) + 100).reshape(-1, 4, 3) / 255
        inside = self.inside(kind, x, y, radius)  # [B, 4, H, W]
        image = self.background(numbers, style)
        for i in range(4):
            image = np.where(inside[:, i, None], colour[:, i, :, None, None], image)
        return {
            "image": torch.from_numpy(image.astype(np.float32)),
            "question": self.texts(numbers),
            "mask": torch.from_numpy(inside[rows, quarter].astype(np.float32)),
            "answer": torch.from_numpy(kind[rows, quarter]),
            "modality": torch.from_numpy(style),
            "modality_weight": self.weights(numbers, epoch),
        }

    def inside(self, kind: np.ndarray, x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
        """Return the pixels that each shape covers, bool [B, 4, H, W]."""
        places = np.arange(SIZE)
        dx = places[None, None, None, :] - x[..., None, None]
        dy = places[None, None, :, None] - y[..., None, None]
        r, kind = radius[..., None, None], kind[..., None, None]
        circle, square = dx**2 + dy**2 <= r**2, np.maximum(abs(dx), abs(dy)) <= 0.8 * r
        triangle = (dy <= 0.7 * r) & (1.7 * abs(dx) <= dy + r)
        return np.where(kind == 0, circle, np.where(kind == 1, square, triangle))

    def background(self, numbers: np.ndarray, style: np.ndarray) -> np.ndarray:
        """Return the images without shapes, [B, 3, H, W]."""
        grain = self.drawn(numbers, np.arange(100, 100 + SIZE**2), 60).reshape(-1, 1, SIZE, SIZE) / 255
        stripes = (np.arange(SIZE) // 4 % 2 * 50 / 255)[None, None, None, :]
        found = np.where(style[:, None, None, None] == 1, grain, 25 / 255)
        return np.where(style[:, None, None, None] == 2, stripes, found) * np.ones((1, 3, 1, 1))

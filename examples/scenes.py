"""Images with a question about a place in them: drawn scenes, or PNG files with masks and questions.

A batch of either holds image float32 [B, 3, H, W] (0 … 1), question int64 [B, Q] (bytes, 0 behind the end),
mask float32 [B, H, W] (0 or 1: the pixels of what is asked for), answer int64 [B] and modality int64 [B]
(indices), and modality_weight float32 [B]: of its loss in this epoch.
"""

import csv
from pathlib import Path

import numpy as np
import torch

from histocc.runtime.checksums import of_file
from histocc.runtime.errors import UserError
from histocc.runtime.rng import below, draw, streams
from histocc.trainer.batches import Rows

LONGEST = 48  # bytes of a question
MODALITY_EPOCHS, MODALITY_WEIGHT = 5, 0.5  # the first epochs, in which the kind of image is learned, too
SIZE = 64  # of a drawn scene
SHAPES = ["circle", "square", "triangle"]
STYLES = ["plain", "grainy", "striped"]
HEIGHTS, SIDES = (("upper", "top"), ("lower", "bottom")), ("left", "right")
ASKED = ("what lies in the {} {}?", "the shape at the {} {}", "{} {}: what is it?")


class Questions(Rows):
    """What both kinds have in common. shuffled: each image gets the question of another row."""

    answers: list[str]
    modalities: list[str]
    shuffled = False

    def asked(self, number: int) -> str:
        """The question of a row."""
        raise NotImplementedError

    def texts(self, numbers: np.ndarray) -> torch.Tensor:
        """Questions as int64 [B, LONGEST]."""
        found = np.zeros((len(numbers), LONGEST), dtype=np.int64)
        for i, number in enumerate(numbers.tolist()):
            other = (number * 7919 + 1) % len(self) if self.shuffled else number
            text = self.asked(other).lower().encode()[:LONGEST]
            found[i, : len(text)] = np.frombuffer(text, dtype=np.uint8)
        return torch.from_numpy(found)

    def weights(self, numbers: np.ndarray, epoch: int) -> torch.Tensor:
        return torch.full((len(numbers),), MODALITY_WEIGHT if epoch < MODALITY_EPOCHS else 0.0)


class Scenes(Questions):
    """`number` scenes of four shapes, one in each quarter, and a question about one of them: a function of
    (seed, row).
    """

    answers, modalities = SHAPES, STYLES

    def __init__(self, number: int, seed: int, shuffled: bool = False):
        self.number, self.seed, self.shuffled = number, seed, shuffled
        self.fingerprint = f"scenes {number} {seed}"

    def __len__(self) -> int:
        return self.number

    def drawn(self, numbers: np.ndarray, which: int | np.ndarray, most: int) -> np.ndarray:
        """Even whole numbers below `most`: draw `which` of each row, [B] or [B, len(which)]."""
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
        """Which pixels each shape covers, bool [B, 4, H, W]."""
        places = np.arange(SIZE)
        dx = places[None, None, None, :] - x[..., None, None]
        dy = places[None, None, :, None] - y[..., None, None]
        r, kind = radius[..., None, None], kind[..., None, None]
        circle, square = dx**2 + dy**2 <= r**2, np.maximum(abs(dx), abs(dy)) <= 0.8 * r
        triangle = (dy <= 0.7 * r) & (1.7 * abs(dx) <= dy + r)
        return np.where(kind == 0, circle, np.where(kind == 1, square, triangle))

    def background(self, numbers: np.ndarray, style: np.ndarray) -> np.ndarray:
        """[B, 3, H, W]"""
        grain = self.drawn(numbers, np.arange(100, 100 + SIZE**2), 60).reshape(-1, 1, SIZE, SIZE) / 255
        stripes = (np.arange(SIZE) // 4 % 2 * 50 / 255)[None, None, None, :]
        found = np.where(style[:, None, None, None] == 1, grain, 25 / 255)
        return np.where(style[:, None, None, None] == 2, stripes, found) * np.ones((1, 3, 1, 1))


class Images(Questions):
    """Rows of `folder`/questions.csv: columns image, mask (PNG files in the folder), question, answer and,
    where there is one, modality. A tenth of the images is for validation. Raises UserError.
    """

    def __init__(self, folder: str, validation: bool, shuffled: bool = False):
        self.folder, self.shuffled, table = Path(folder), shuffled, Path(folder) / "questions.csv"
        if not table.is_file():
            raise UserError(f"{folder}: no questions.csv there (columns image, mask, question, answer)")
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        lacking = {"image", "mask", "question", "answer"} - set(rows[0] if rows else ())
        if lacking:
            raise UserError(f"{table}: {'no row' if not rows else 'no column ' + ', '.join(sorted(lacking))}")
        self.answers = sorted({row["answer"] for row in rows})
        self.modalities = sorted({row.get("modality") or "" for row in rows})
        self.size = self.check_files(rows)
        held_out = {name for i, name in enumerate(sorted({row["image"] for row in rows})) if i % 10 == 9}
        self.rows = [row for row in rows if (row["image"] in held_out) == validation]
        if not self.rows:
            raise UserError(f"{table}: ten images or more are needed: each tenth is for validation")
        self.fingerprint = f"{of_file(str(table))} {validation}"

    def __len__(self) -> int:
        return len(self.rows)

    def check_files(self, rows: list[dict[str, str]]) -> tuple[int, int]:
        """The size of all images and masks, (width, height). Raises UserError for the first that is missing,
        no PNG, or of another size.
        """
        size = None
        for row in rows:
            for name in (row["image"], row["mask"]):
                path = self.folder / (name or "")
                if not name or not path.is_file():
                    raise UserError(f"{path}: no such file, which questions.csv names")
                found = self.opened(path).size
                size = size or found
                if found != size or found[0] % 4 or found[1] % 4:
                    raise UserError(
                        f"{path}: has {found[0]} × {found[1]} pixels, the first image {size[0]} × {size[1]};"
                        " all must have the same size, in multiples of 4"
                    )
        assert size is not None
        return size

    def opened(self, path: Path):
        try:
            from PIL import Image
        except ImportError:
            raise UserError("images need the package Pillow: pip install pillow") from None
        try:
            return Image.open(path)
        except OSError as error:
            raise UserError(f"{path}: cannot be read as an image: {error}") from None

    def asked(self, number: int) -> str:
        return self.rows[number]["question"]

    def batch(self, numbers: np.ndarray, epoch: int) -> dict[str, torch.Tensor]:
        rows = [self.rows[number] for number in numbers.tolist()]
        images = [np.asarray(self.opened(self.folder / row["image"]).convert("RGB")) for row in rows]
        masks = [np.asarray(self.opened(self.folder / row["mask"]).convert("L")) for row in rows]
        return {
            "image": torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2).astype(np.float32) / 255),
            "question": self.texts(numbers),
            "mask": torch.from_numpy((np.stack(masks) > 127).astype(np.float32)),
            "answer": torch.tensor([self.answers.index(row["answer"]) for row in rows]),
            "modality": torch.tensor([self.modalities.index(row.get("modality") or "") for row in rows]),
            "modality_weight": self.weights(numbers, epoch),
        }

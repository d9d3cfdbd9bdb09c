"""The user's images with questions about places in them: PNG files, masks, and a table of questions."""

import csv
from pathlib import Path

import numpy as np
import torch

from examples.scenes import Questions
from histocc.runtime.errors import UserError
from histocc.runtime.files import checksum

COLUMNS = ("image", "mask", "question", "answer")  # columns of questions.csv


def read_questions(table: Path) -> list[dict[str, str]]:
    """Return the rows of a questions.csv. Raises UserError for the first row that lacks a value."""
    if not table.is_file():
        raise UserError(f"{table}: no such file (its columns: {', '.join(COLUMNS)})")
    try:
        with table.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{table}: cannot be read as CSV in UTF-8: {error}") from None
    if not rows:
        raise UserError(f"{table}: no row")
    for number, row in enumerate(rows, 1):
        if lacking := [name for name in COLUMNS if not row.get(name)]:
            kind = "value" if lacking[0] in row else "column"
            raise UserError(f"{table}, row {number}: no {kind} {', '.join(lacking)}")
    return rows


class Images(Questions):
    """The rows of `folder`/questions.csv: columns image, mask (PNG files in the folder), question, answer
    and, optionally, modality. A tenth of the images is for validation. Raises UserError.
    """

    def __init__(self, folder: str, validation: bool, shuffled: bool = False):
        self.folder, self.shuffled, table = Path(folder), shuffled, Path(folder) / "questions.csv"
        rows = read_questions(table)
        self.answers = sorted({row["answer"] for row in rows})
        self.modalities = sorted({row.get("modality") or "" for row in rows})
        self.size = self.check_files(rows)
        held_out = {name for i, name in enumerate(sorted({row["image"] for row in rows})) if i % 10 == 9}
        self.rows = [row for row in rows if (row["image"] in held_out) == validation]
        if not self.rows:
            raise UserError(f"{table}: ten images or more are needed: every tenth is for validation")
        self.fingerprint = f"{checksum(str(table))} {validation}"

    def __len__(self) -> int:
        return len(self.rows)

    def check_files(self, rows: list[dict[str, str]]) -> tuple[int, int]:
        """Return the size of all images and masks, (width, height). Raises UserError for the first file that
        is missing, not a PNG, or of another size.
        """
        size = None
        for row in rows:
            for name in (row["image"], row["mask"]):
                path = self.folder / name
                if not path.is_file():
                    raise UserError(f"{path}: no such file, but questions.csv names it")
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
            raise UserError(
                "images need the package Pillow: pip install 'histocc[images]' or pip install pillow"
            ) from None
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

"""Rows of a prepared folder as CSV files: held-out, with a letter changed, fewer for training."""

import csv
import glob
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from histocc.data.arrays import PreparedData, RowSet
from histocc.evaluate.baseline import codes_of, texts_of


def prepared(flags: list[str], folder: str) -> PreparedData:
    """What finetune.py prepares in `folder` with `flags`; where that fails, the program ends."""
    command = [sys.executable, "finetune.py", *flags, "--prepare-only", "--save-path", folder]
    done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(done.stdout)
    return PreparedData.open(*glob.glob(os.path.join(folder, "prepared", "*")))


def write(
    path: str,
    rows: RowSet,
    data: PreparedData,
    index: np.ndarray | None = None,
    texts: list[str] | None = None,
) -> str:
    """Writes rows as columns occ1, lang, hisco_1 …; returns the path.

    Args:
        rows: a part of `data`.
        index: int64 [B], which rows; None: all.
        texts: str [B], written instead of their own.
    """
    index = np.arange(len(rows)) if index is None else index
    texts = texts_of(rows, None, index) if texts is None else texts
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["occ1", "lang", *(f"hisco_{place + 1}" for place in range(data.max_codes))])
        for text, language, codes in zip(texts, rows.language[index].tolist(), rows.codes[index].tolist()):
            names = [data.codes[code] if code >= 0 else "" for code in codes]
            writer.writerow([text, data.languages[language], *names])
    return path


def with_a_letter_changed(texts: list[str], seed: int) -> list[str]:
    """Each text with one random letter replaced by another that the texts hold. Equal texts change alike."""
    letters = sorted({letter for text in texts for letter in text if letter.isalpha()})

    def changed(text: str) -> str:
        draw = random.Random(f"{seed} {text}")
        places = [place for place, letter in enumerate(text) if letter.isalpha()]
        if not places or len(letters) < 2:
            return text
        place = draw.choice(places)
        other = draw.choice([letter for letter in letters if letter != text[place]])
        return text[:place] + other + text[place + 1 :]

    return list(map(changed, texts))


def nested(rows: RowSet, number: int) -> np.ndarray:
    """Which `number` rows to train on, int64, ascending: the first by hash of text, so that they nest."""
    return np.sort(np.argsort(np.asarray(rows.text_hash), kind="stable")[:number])


def several_codes(rows: RowSet, data: PreparedData) -> np.ndarray:
    """Which rows have two or more codes, int64, ascending."""
    return np.flatnonzero([len(codes) > 1 for codes in codes_of(rows, data.codes)])

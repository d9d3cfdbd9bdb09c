"""Why a text got its codes: the training texts that are nearest to it by the model's own vectors."""

import contextlib
import os

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from histocc.data.arrays import PreparedData, fault, text_keys
from histocc.predict.coder import Coder
from histocc.predict.output import PIECE, file_hash
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles, read_sealed, write_sealed
from histocc.runtime.log import Stage
from histocc.runtime.world import World

MAX_TEXTS = 200_000  # distinct texts of the training, spread over its rows
SHOWN = 3
VECTORS = "training_vectors.bin"  # in the folder of the run


class Examples:
    """Training texts.

    Args:
        vectors: of length 1, float32 [N, H].
        texts, codes: N each; the codes of a text are joined by &.
    """

    def __init__(self, vectors: Tensor, texts: list[str], codes: list[str]):
        self.vectors, self.texts, self.codes = vectors, texts, codes

    def nearest(self, vectors: Tensor) -> list[list[tuple[str, str]]]:
        """The SHOWN texts with the highest cosine similarity to each of `vectors` [B, H], and their codes."""
        with torch.autocast(vectors.device.type, enabled=False):
            similarity = normalize(vectors.float()) @ self.vectors.T  # [B, N]
        best = similarity.topk(min(SHOWN, len(self.texts))).indices
        return [[(self.texts[i], self.codes[i]) for i in row] for row in best.tolist()]


def training_data(weights: str, fingerprint: str) -> tuple[str, PreparedData | None]:
    """(where the prepared data of a run are, or were; these, None if they are not there as they were
    written).

    Args:
        weights: a checkpoint of the run.
        fingerprint: of its data.
    """
    folder = os.path.join(os.path.dirname(weights), "prepared", fingerprint)
    if fault(folder) is None:
        with contextlib.suppress(OSError, ValueError, KeyError, UserError):
            return folder, PreparedData.open(folder)
    return folder, None


def training_examples(coder: Coder, weights: str, world: World) -> Examples:
    """The distinct texts of the run that the weights are of, each with the codes of its first row. Their
    vectors are computed at first use, by rank 0, and kept in the folder of the run. All ranks.

    Raises:
        UserError: the rows of the training are not there.
    """
    folder, data = training_data(weights, coder.data_fingerprint)
    if data is None:
        raise UserError(
            f"--explain shows rows of the training, and they are not in {folder}: name a checkpoint in the"
            " folder of its run; --prepare-only with the command of the training prepares them again"
        )
    rows = np.sort(np.unique(text_keys(data.train.text_hash, data.train.language), return_index=True)[1])
    rows = rows[np.linspace(0, len(rows) - 1, min(len(rows), MAX_TEXTS)).astype(np.int64)]
    texts = data.train.strings(rows)
    rows, texts = rows[[bool(text.strip()) for text in texts]], [text for text in texts if text.strip()]
    codes = [
        "&".join(data.codes[number] for number in row if number >= 0)
        for row in data.train.codes[rows].tolist()
    ]
    path, of = os.path.join(os.path.dirname(weights), VECTORS), file_hash(weights)

    def compute() -> None:
        if read_sealed(path, of) is None:
            world.print(f"Computing the vectors of {len(texts):,} training texts, which stay in {path}")
            languages = [data.languages[number] for number in data.train.language[rows].tolist()]
            parts = []
            with Stage("vectors", len(texts), "texts") as stage:
                for i in range(0, len(texts), PIECE):
                    some = slice(i, i + PIECE)
                    parts.append(coder.embeddings(texts[some], languages[some], ngrams=True))
                    stage.add(len(parts[-1]))
            OwnFiles(os.path.dirname(weights)).claim(VECTORS)
            write_sealed(path, normalize(torch.from_numpy(np.concatenate(parts))).numpy().tobytes(), of)

    world.run_on_main("vectors", compute)
    content = read_sealed(path, of)
    if content is None:
        raise UserError(
            f"{path} cannot be read on every machine of the job: the run must lie in a shared folder"
        )
    vectors = np.frombuffer(bytearray(content), dtype=np.float32).reshape(len(texts), -1)
    return Examples(torch.from_numpy(vectors).to(coder.device), texts, codes)

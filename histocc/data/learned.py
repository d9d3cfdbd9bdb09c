"""Hashes and counts of the training data that a checkpoint keeps, without texts. With them a model can be
evaluated without its data, and its texts are told from new ones in any table.
"""

from typing import Any

import numpy as np
import torch

from histocc.data.arrays import PreparedData, RowSet, code_counts, text_keys
from histocc.data.report import report_lines
from histocc.runtime.rng import mix
from histocc.text import cleaner, text_hashes

PAIRS, USUAL_AGREEMENT, OF_A_LIST = 10, 0.93, 0.1  # see `trained_answers`


def hashes_of(texts: list[str], rule: str) -> np.ndarray:
    """Return the hashes of texts in a checkpoint, int64 [n], the same in every version and on every machine.
    Texts are hashed as a model with this text rule reads them, ignoring case and blanks. Those of several
    columns are joined (`join_columns`). The language does not count: all rows of a text are in one part.
    """
    clean = cleaner(rule)
    cleaned = [clean(text.replace("\0", " ")).strip() for text in texts]
    return text_hashes(cleaned)[: len(texts)].view(np.int64)


def entries(data: PreparedData, *earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Return entries of a checkpoint. `trained` and `validated` are sorted hashes (`hashes_of`) of distinct
    texts, int64 [T]. `data` has plain values about the rows. earlier: checkpoints whose texts the model has
    also learned.
    """
    report = data.report
    about = {
        "lines": [line for line in report_lines(report) if line[:4] not in ("Note", "    ")],
        "files": [file["path"] for file in report["files"]],
        "rows": {part: report.get(f"{part}_rows", 0) for part in ("train", "val", "test")},
        "texts": len(np.unique(data.train.text_hash)),  # for training
        "rare_codes": len(report["rare_codes"]),
        "rows_of_codes": code_counts(data.train, len(data.codes)).tolist(),  # in the order of the key
    }
    parts = [part.text_hash.view(np.int64) for part in (data.train, data.val)]
    trained, validated = (torch.from_numpy(np.unique(hashes)) for hashes in parts)
    known = [state["trained"] for state in earlier if state and "trained" in state]
    return {"trained": torch.cat([trained, *known]).unique(), "validated": validated, "data": about}


def keys_of(hashes: np.ndarray, language: np.ndarray) -> np.ndarray:
    """Return int64 [n], equal for the same text (`hashes_of`) in the same language of a model (numbers)."""
    return text_keys(hashes.view(np.uint64), language).view(np.int64)


def sets_of_codes(rows: RowSet, text: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the different sets of codes of each text, the most frequent one first: their texts in ascending
    order, a row with each, and the number of rows with it, int64 [S] each. text: each row's, int64 [N].
    """
    key = text.astype(np.uint64)
    for column in np.sort(np.asarray(rows.codes), axis=1).astype(np.uint64).T:
        key = mix(mix(key) ^ column)
    _, row, number = np.unique(key, return_index=True, return_counts=True)
    order = np.lexsort((row, -number, text[row]))
    return text[row][order], row[order], number[order]


def trained_answers(rows: RowSet) -> dict[str, Any]:
    """Return the entry "answers" of a checkpoint, the codes of each text in the training. keys int64 [T]:
    sorted keys of text and language (`keys_of`). codes int32 [T, K]: the most frequent set of codes, padded
    with −1. conf float32 [T]: the probability that a further row has these codes.

    If m of n rows agree, conf is m / (n + a) (a Pólya urn). 1 / (1 + a) is the share of pairs of rows of one
    text that agree. It starts from PAIRS pairs, of which the share USUAL_AGREEMENT agrees. If less than the
    share OF_A_LIST of the texts with several rows agrees, the table lists each text once with each of its
    codes. Then agreeing rows are missing, and the share is USUAL_AGREEMENT.
    """
    of_rows = keys_of(np.asarray(rows.text_hash), rows.language)
    keys, text, count = np.unique(of_rows, return_inverse=True, return_counts=True)
    of_text, row, number = sets_of_codes(rows, text.reshape(-1))
    pairs = np.bincount(of_text, weights=number * (number - 1.0), minlength=len(count))
    repeated = count > 1
    agreeing = (pairs[repeated] / (count[repeated] * (count[repeated] - 1.0))).sum()
    agreement = (agreeing + PAIRS * USUAL_AGREEMENT) / (repeated.sum() + PAIRS)
    if agreeing < OF_A_LIST * repeated.sum():
        agreement = USUAL_AGREEMENT
    first = np.unique(of_text, return_index=True)[1]  # the most frequent set of each text
    conf = number[first] / (count + 1 / agreement - 1)
    return {
        "keys": torch.from_numpy(keys),
        "codes": torch.from_numpy(np.asarray(rows.codes)[row[first]].astype(np.int32)),
        "conf": torch.from_numpy(conf.astype(np.float32)),
    }

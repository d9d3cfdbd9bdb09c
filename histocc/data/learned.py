"""What a checkpoint keeps of the data of its training: hashes and counts, and no texts. By them a model is
evaluated without these data, and its texts are told from new ones wherever a table lies.
"""

from typing import Any

import numpy as np
import torch

from histocc.data.arrays import PreparedData, code_counts
from histocc.data.report import report_lines
from histocc.text import cleaner, text_hashes

ENTRIES = ("trained", "validated", "data")  # of a checkpoint, by `entries`


def hashes_of(texts: list[str], rule: str) -> np.ndarray:
    """Return the hashes by which a checkpoint knows texts, int64 [n], the same in every version and on every
    machine: of the texts as a model with this text rule reads them, but for case and blanks. Texts of several
    columns are joined (`join_columns`). The language does not count: all rows of a text are in one part.
    """
    clean = cleaner(rule)
    cleaned = [clean(text.replace("\0", " ")).strip() for text in texts]
    return text_hashes(cleaned)[: len(texts)].view(np.int64)


def entries(data: PreparedData, *earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Return ENTRIES: `trained` and `validated`, the sorted hashes (`hashes_of`) of distinct texts, int64
    [T]; `data`, plain values about the rows. earlier: checkpoints whose texts the model has learned, too.
    """
    report = data.report
    about = {
        "lines": [line for line in report_lines(report) if line[:4] not in ("Note", "    ")],
        "files": [file["path"] for file in report["files"]],
        "rows": {part: report.get(f"{part}_rows", 0) for part in ("train", "val", "test")},
        "rare_codes": len(report["rare_codes"]),
        "rows_of_codes": code_counts(data.train, len(data.codes)).tolist(),  # in the order of the key
    }
    parts = [part.text_hash.view(np.int64) for part in (data.train, data.val)]
    trained, validated = (torch.from_numpy(np.unique(hashes)) for hashes in parts)
    known = [state["trained"] for state in earlier if state and "trained" in state]
    return {"trained": torch.cat([trained, *known]).unique(), "validated": validated, "data": about}

"""What a checkpoint keeps of the data of its training: hashes and counts, and no texts. By them a model is
evaluated without these data, and its texts are told from new ones wherever a table lies.
"""

from typing import Any

import numpy as np
import torch

from histocc.data.arrays import PreparedData, code_counts
from histocc.data.report import report_lines


def entries(data: PreparedData, *earlier: dict[str, Any] | None) -> dict[str, Any]:
    """Return entries of a checkpoint: `trained` and `validated`, the sorted `text_hashes` of distinct texts,
    int64 [T]; `data`, plain values about the rows. earlier: checkpoints that the model started from.
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

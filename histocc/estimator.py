"""A classifier with the conventions of scikit-learn, which itself is not needed."""

import copy
import io
import shutil
import threading
from collections import Counter
from contextlib import redirect_stdout, suppress
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from torch.random import fork_rng

from histocc.data.rows import MISSING_WORDS, csv_text
from histocc.job import inputs, train
from histocc.job.config import FinetuneConfig
from histocc.occ_canine import columns_of_frame, texts_and_languages
from histocc.predict.coder import Coder
from histocc.predict.coding import DEFAULT_K
from histocc.runtime.world import World
from histocc.text import UNKNOWN_LANGUAGE, join_columns

one_run = threading.Lock()  # a run changes settings of the process, and prints


class OccupationClassifier:
    """A classifier that learns like `finetune.py --model-size ngrams`, with flags of it as arguments.
    X: texts, or a table of them. y: a label for each row, or several in a list or in a table ("" for none).

    Example:
        >>> from histocc import OccupationClassifier
        >>> texts = ["wine merchant", "smith", "blacksmith", "merchant of wine", "a smith", "dealer in wine"]
        >>> codes = ["41025", "83110", "83110", "41025", "83110", "41025"]
        >>> classifier = OccupationClassifier(prior="none", language="en").fit(texts, codes)
        >>> classifier.predict(["old smith"]).tolist()
        ['83110']
        >>> classifier.score(texts, codes)
        1.0
    """

    def __init__(self, prior="auto", language=UNKNOWN_LANGUAGE, language_col=None, formatter="auto"):
        self.prior, self.language = prior, language
        self.language_col, self.formatter = language_col, formatter

    def get_params(self, deep: bool = True) -> dict:
        return {name: value for name, value in vars(self).items() if name == name.strip("_")}

    def set_params(self, **params) -> "OccupationClassifier":
        if unknown := params.keys() - self.get_params():
            raise ValueError(f"{min(unknown)!r} is not a parameter. Use {', '.join(self.get_params())}")
        self.__init__(**self.get_params() | params)
        return self

    def __repr__(self) -> str:
        return f"OccupationClassifier({', '.join(f'{k}={v!r}' for k, v in self.get_params().items())})"

    def __sklearn_tags__(self):
        from sklearn.utils import ClassifierTags, InputTags, Tags, TargetTags

        of_texts = InputTags(one_d_array=True, two_d_array=False, string=True)
        return Tags("classifier", TargetTags(True), None, ClassifierTags(), input_tags=of_texts)

    def fit(self, X, y) -> "OccupationClassifier":
        """Learn, and return the estimator. Raises ValueError for bad X or y, UserError as in finetune.py."""
        table, (labels, self._has_several) = texts_of(X), labels_of(y)
        counts = Counter(label for row in labels for label in row)
        if self.language_col and self.language_col not in table:
            raise ValueError(f"X has no column {self.language_col!r} (language_col)")
        if {*map(len, table.values())} != {len(labels)}:
            raise ValueError(f"rows of y: {len(labels)}, but of X: {len(next(iter(table.values())))}")
        if [] in labels:
            what = f"row {labels.index([])} of y has no label (none, NA and the like are not labels)"
            raise ValueError(f"{what}: leave it out of X and y")
        if len(counts) < 2:
            raise ValueError("y has no more than one class, and two are needed")
        targets = {f"label_{i}": cells for i, cells in enumerate(zip_longest(*labels, fillvalue=""), 1)}
        self._texts = [name for name in table if name != self.language_col]
        how = self.get_params() | {"target_cols": [*targets], "input_col": self._texts, "delimiter": ","}
        own = TemporaryDirectory(ignore_cleanup_errors=True)  # Windows keeps what an error leaves mapped
        with own as folder, one_run, fork_rng([]), redirect_stdout(io.StringIO()):
            rows, run = f"{folder}/rows.csv", f"{folder}/run"
            Path(rows).write_bytes(csv_text([[*table, *targets], *zip(*table.values(), *targets.values())]))
            args = FinetuneConfig(dataset=[rows], save_path=run, model_size="ngrams", ditto="none", **how)
            train.run_training(*inputs.prepare_data(args, World(), [rows], []), World())
            self._coder = Coder.load(run, split_texts=self._has_several)
            self._run = Path(shutil.make_archive(run, "tar", run)).read_bytes()
        label_of, kind, codes = {str(x): x for x in counts}, type(labels[0][0]), self._coder.codes
        self.classes_, places = np.unique([label_of.get(x, kind(x)) for x in codes], return_inverse=True)
        self._place = dict(zip(codes, places.tolist()))
        self._shares = np.array([counts[label] for label in self.classes_.tolist()]) / counts.total()
        return self

    def predict(self, X) -> np.ndarray:
        """Return each text's label, or a list if y had several. Unknown texts get the most frequent label."""
        rows = [[self._place[x] for x in one.codes] or [self._shares.argmax()] for one in self._coded(X)]
        several = np.fromiter((self.classes_[row].tolist() for row in rows), dtype=object)
        return several if self._has_several else self.classes_[[row[0] for row in rows]]

    def predict_proba(self, X) -> np.ndarray:
        """Return the probability of each class, [texts, classes]. For unknown texts it is its share in y."""
        probs = []
        for one in self._coded(X, choices=True):
            places, of_code = [self._place[code] for code, _ in one.choices], [p for _, p in one.choices]
            probs.append(np.bincount(places, of_code, len(self.classes_)) if one.codes else self._shares)
        table = np.reshape(probs, (-1, len(self.classes_)))
        return table if self._has_several else table / table.sum(axis=1, keepdims=True)

    def score(self, X, y, sample_weight=None) -> float:
        """Return the share of rows that get all their labels and no others."""
        pairs = zip(*(map(set, labels_of(each)[0]) for each in (y, self.predict(X))), strict=True)
        return float(np.average([labels == found for labels, found in pairs], weights=sample_weight))

    def save(self, folder) -> None:
        """Write the run folder, completely or not at all. Raises ValueError if the folder is not empty."""
        if Path(folder).is_dir() and any(Path(folder).iterdir()):
            raise ValueError(f"{folder} is not empty: choose another folder, or remove it")
        Path(folder).absolute().parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="histocc_", dir=Path(folder).absolute().parent) as part:
            Path(part, "run.tar").write_bytes(self._run)
            shutil.unpack_archive(f"{part}/run.tar", f"{part}/run")
            Path(part, "run").replace(folder)

    def _coded(self, X, choices: bool = False):
        """Yield the answers to texts. choices: include the probabilities of all codes."""
        with suppress(ImportError):
            from sklearn.utils.validation import check_is_fitted

            check_is_fitted(self)
        table, coder = texts_of(X), copy.copy(self._coder)
        if lacking := {*self._texts, *filter(None, [self.language_col])} - table.keys():
            raise ValueError(f"X has no column {min(lacking)!r}; it has {', '.join(map(repr, table))}")
        first, *others = (table[name] for name in self._texts)
        texts, coder.choices = join_columns(first, others), choices * len(coder.codes)
        languages = table[self.language_col] if self.language_col else [self.language] * len(texts)
        for i in range(0, len(texts), 512):  # in groups: probabilities of all codes take memory
            yield from coder.code(texts[i : i + 512], languages[i : i + 512], k=max(coder.room, DEFAULT_K))


def texts_of(X) -> dict[str, list[str]]:
    """Return the columns of X by name. Raises ValueError."""
    columns = columns_of_frame(X) if hasattr(X, "columns") else {"occ1": X}
    return {name: texts_and_languages(cells, None, False)[1] for name, cells in columns.items()}


def labels_of(y) -> tuple[list[list], bool]:
    """Return the labels of each row, and whether rows may have several."""
    cells = [*np.atleast_1d(np.asarray(y, dtype=object))]
    has_several = any(isinstance(row, list | tuple | set | np.ndarray) for row in cells)
    rows, blank = (row if has_several else [row] for row in cells), {"", *MISSING_WORDS}
    return [[x for x in row if str(x).strip().casefold() not in blank] for row in rows], has_several

"""The model as an object, for scripts and notebooks:

    from histocc import OccCANINE

    model = OccCANINE("./output")
    model.predict(["wine merchant", "huusmand og væver"], lang=["en", "da"])
    model.finetune("data.csv", target_cols=["hisco_1", "hisco_2"], language_col="lang", save_path="./mine")

The calls and the shapes of their results are the same as in the published package (histocc of Dahl, Johansen
and Vedel, 2024, arXiv 2402.13604). docs/published.md lists the differences.
"""

import contextlib
import math
import os
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from numbers import Number, Real
from typing import Any

import numpy as np
import torch

from histocc.data.config import column_of_languages, text_columns
from histocc.data.descriptions import descriptions_of, read_descriptions
from histocc.data.records import fill, is_ditto
from histocc.data.rows import key_reader, language_name
from histocc.formatter import CLASSES, DEEPEST, NUMBER_CLASSES, OF_LEVEL, hisco_classes, is_missing
from histocc.job import inputs, train
from histocc.job.card import PAPER
from histocc.job.config import FinetuneConfig, finetune_parser
from histocc.predict.coder import FIRST_USE, Coded, Coder
from histocc.predict.decoders import BY_THRESHOLD, DECODERS
from histocc.predict.fitting import fit_ranked
from histocc.published import formats, models
from histocc.published.formats import Given
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision, device_of, settings_of_torch
from histocc.runtime.errors import UserError
from histocc.runtime.log import counted
from histocc.runtime.signals import Stopped, listening
from histocc.runtime.world import World
from histocc.text import UNKNOWN_LANGUAGE, repaired_cells

HUB_NAME = "OccCANINE_s2s_mix"
BEHAVIORS = {"good": "greedy", "fast": "flat"}
PREDICTION_TYPES = {kind: name for name, each in DECODERS.items() for kind in (name, *each.published)}
MODEL_TYPES = {"mixer": "mix", "seq2seq": "seq2seq", "flat": "flat"}  # kinds by their published names
BIBTEX = """@misc{dahl2024occcanine,
  author = {Dahl, Christian M{\\o}ller and Johansen, Torben and Vedel, Christian},
  title = {Breaking the {HISCO} Barrier: Automatic Occupational Standardization with {OccCANINE}},
  year = {2024}, eprint = {2402.13604}, archivePrefix = {arXiv}, primaryClass = {cs.CL}
}"""


class OccCANINE:
    """A trained model. It can be pickled and copied, with its weights.

    Args:
        name: folder of a run, a checkpoint, an exported or published model, or its name on the hub
            (OccCANINE_s2s_mix, Christianvedel/…). None: the published HISCO model there.
        device: "cpu", "cuda", "cuda:1", a torch.device, or None or "auto" for a GPU if there is one.
        batch_size: texts at once, which may be set later. verbose: whether to say what is loaded.
        system: the system of published weights, hisco or another. It always names the columns.
        key, use_within_block_sep, target_cols: facts about published weights that they do not contain.
        descriptions: words of the codes, for columns desc_1, desc_2, …: a file, or a table with columns
            system_code and desc. None: the titles of HISCO codes.
        classes: social classes of HISCO codes to add as columns: hisclass, hisclass_5, socpo, hiscam.
        hf: False: only files and folders, no name on the hub. force_download: load from the hub again.
        model_type: "mix", "seq2seq" or "flat". A warning says if the loaded model is of another type.
        raw_confidence, int8: as in `histocc.predict`.

    Raises:
        ValueError: an argument has a wrong type or value.
        UserError: a file or name cannot be used.

    Example:
        >>> from histocc import OccCANINE
        >>> model = OccCANINE("./output")
        >>> model.system, len(model.codes)
        ('hisco', 289)
    """

    def __init__(
        self,
        name: str | None = None,
        device: str | torch.device | None = None,
        batch_size: int = 256,
        verbose: bool = False,
        *,
        system: str | None = None,
        key: str | None = None,
        descriptions: Any = None,
        classes: Sequence[str] = (),
        hf: bool | None = None,
        force_download: bool = False,
        model_type: str | None = None,
        use_within_block_sep: bool = False,
        target_cols: Sequence[str] | None = None,
        raw_confidence: bool = False,
        int8: bool = False,
    ):
        self.name = HUB_NAME if name is None else os.fspath(name)
        self.device = device_of(device)
        self._key_file, self._descriptions, self._system = key and os.fspath(key), descriptions, system
        self._classes = [classes] if isinstance(classes, str) else list(classes or [])
        if set(self._classes) - set(CLASSES):
            raise ValueError(f"classes: found {self._classes}, expected some of {', '.join(CLASSES)}")
        self._options: dict[str, Any] = {
            "batch_size": count_of("batch_size", batch_size),
            "precision": Precision("int8" if int8 else "float32", self.device),
            "raw_confidence": raw_confidence,
        }
        if hf is False and not os.path.exists(self.name):
            raise UserError(f"{self.name}: no such file or folder (hf=False: the hub is not searched)")
        kind = "hisco" if (system or "").lower() == "hisco" else None
        columns = [target_cols] if isinstance(target_cols, str) else list(target_cols or []) or None
        given = Given(kind, key_reader(self._key_file), columns, use_within_block_sep, system)
        self._load(models.find_weights(self.name, self.name, force_download), given)
        if model_type not in (None, self.model_type):
            warnings.warn(f"{self.name} is of type {self.model_type!r}, not {model_type!r}", stacklevel=2)
        if verbose:
            print(f"{self!r}, {counted(len(self.codes), 'code')}")
            print(f"Decoder: {self.coder.best_decoder} ({self.coder.why_best})")

    def _load(self, file: str, given: Given) -> None:
        """Become the model in `file`, or stay unchanged if that raises an error."""
        state = formats.load_content(file)
        brings = models.brings_settings(state)
        model, formatter, state = models.model_of_content(
            file, state, given._replace(formatter=None) if brings else given
        )
        if given.system and not brings and (formatter.kind == "hisco") != (given.system.lower() == "hisco"):
            raise UserError(f"{file}: writes {formatter.kind} codes, not codes of {given.system}")
        coder = Coder(model.to(self.device), formatter, state, **self._options)
        if self._classes and formatter.kind != "hisco":
            raise UserError(f"classes: exist only for HISCO codes, but {file} writes {coder.system}")
        self.key_desc = self._words(coder)
        self.file, self.coder, self.model, self.formatter = file, coder, model, formatter
        self.system, self.model_type = given.system or coder.system, MODEL_TYPES[coder.kind]
        self.codes, self.key = coder.codes, dict(enumerate(coder.codes))  # in the order of the linear outputs

    def _words(self, coder: Coder) -> dict[str, str]:
        """Return the words of each code that has any."""
        given = self._descriptions
        if given is None or isinstance(given, str | os.PathLike):
            path = None if given is None else os.fspath(given)
            return read_descriptions(path, coder.codes, coder.formatter)
        columns = columns_of_frame(given)
        if lacking := [name for name in ("system_code", "desc") if name not in columns]:
            found = ", ".join(map(repr, columns))
            raise ValueError(f"descriptions: has no column {lacking[0]!r}; it has {found}")
        pairs = zip(columns["system_code"], columns["desc"], strict=True)
        rows = [list(map(str, pair)) for pair in pairs if not any(map(is_missing, pair))]
        return descriptions_of("descriptions", rows, coder.codes, coder.formatter)

    def __repr__(self) -> str:
        options = f"name={self.name!r}, device='{self.device}', batch_size={self.batch_size}"
        return f"OccCANINE({options}, system={self.system!r}, model_type={self.model_type!r})"

    @property
    def batch_size(self) -> int:
        return self.coder.batch_size

    @batch_size.setter
    def batch_size(self, texts: int) -> None:
        self._options["batch_size"] = self.coder.batch_size = count_of("batch_size", texts)

    def predict(
        self,
        occ1: Any,
        lang: str | Sequence[str] | None = None,
        what: str | int = "pred",
        threshold: float | dict[str | None, float] | None = None,
        behavior: str | None = None,
        prediction_type: str | None = None,
        k_pred: int = 5,
        deduplicate: bool = True,
        *,
        order_invariant_conf: bool = True,
        get_dict: bool = False,
        get_df: bool = True,
        concat_in: bool = False,
        ditto: bool = False,
        level: str | int | None = None,
        target_accuracy: float | None = None,
    ):
        """Return the codes of texts, or the values behind them.

        Args:
            occ1: one text or several, also as a column of pandas, polars or Arrow. Numbers become
                digits, and None and NaN become empty texts.
            lang: one language, or one per text in the same order, of which None, NaN and empty mean unk.
                None: the language of all training rows if they had one, else unk.
            what: pred: a row per text: occ1, lang, up to k_pred codes hisco_1, prob_1, desc_1, …, conf. A
                number n is pred with k_pred = n. probs: array float32 [texts, codes], from the decoder flat
                if chosen, else full, NaN for a text without a code. logits (flat): a table of the same
                before the sigmoid. bin: 1 for each code that pred gives, columns hisco_CODE. embeddings: the
                encoder's pooled output (zeros without one), then the model's vector of n-grams, if any.
            threshold: least probability of codes (flat, both, full), also by language. None: the model's.
            behavior: "good" (greedy) or "fast" (flat). None: the decoder that `auto` chooses.
            prediction_type: a decoder, overriding behavior: greedy, flat, both, topk, full, or greedy-topk:
                topk with k_pred rows per text and a column top-k-pos.
            order_invariant_conf: False: conf of greedy is the probability of the codes in the order written.
            get_dict: return a list of dicts even if pandas is installed. get_df=False means the same.
            level, target_accuracy: as in `histocc.predict`. pred then has level_code, level and level_conf.
            ditto: code texts such as do. or ditto as the text before them.
            deduplicate, concat_in: have no effect on the result.

        Returns:
            A DataFrame with the index of a Series occ1, else 0 … n − 1. Without pandas, a list of dicts. The
            columns depend only on the arguments. Text columns have pandas' text dtype even if no row has a
            text. Missing cells are NaN, but None in dicts and for texts before pandas 3.

        Raises:
            ValueError: an argument is not as above.
            UserError: the model has no such decoder.

        Example:
            >>> model = OccCANINE("./output")
            >>> texts, languages = ["blacksmith", "huusmand og væver"], ["en", "da"]
            >>> for row in model.predict(texts, languages, get_dict=True):
            ...     print(row["hisco_1"], row["hisco_2"], row["conf"] > 0.9)
            83110 None True
            61115 75400 True
            >>> model.predict("blacksmith", lang="en", what="probs").shape
            (1, 289)
        """
        what, k, kind = self._choices(what, k_pred, behavior, prediction_type)
        decoder = "full" if what == "probs" and kind != "flat" else PREDICTION_TYPES[kind]
        with FIRST_USE:
            fit_ranked(self.coder, self.file, decoder, World())
        by_language = thresholds_of(threshold)
        lang = self.coder.language if lang is None else lang
        cells, texts, languages = texts_and_languages(occ1, lang, ditto)
        texts = repaired_cells(texts)[0] if self.coder.repair_text else texts  # as in its training
        self._warn(languages, by_language, what, kind)
        table = partial(as_table, get_dict=get_dict or not get_df, like=occ1)
        if what == "probs":
            return self.coder.probabilities(texts, languages, decoder)
        if what in ("logits", "embeddings"):
            logits = partial(self.coder.probabilities, logits=True)
            values = {"logits": logits, "embeddings": self.coder.embeddings}[what](texts, languages)
            return table({"occ1": cells, **dict(enumerate(values.T))})
        how: dict[str, Any] = {"in_any_order": order_invariant_conf}
        if level is not None:
            if level == DEEPEST and target_accuracy is None:
                raise ValueError("target_accuracy: level='auto' needs it, such as 0.9")
            named = level if isinstance(level, str) else str(count_of("level", level))
            how["levels"] = self.coder.asked_levels(named, PREDICTION_TYPES[kind], self.name)
        coded = self._code(texts, languages, kind, k, by_language, **how)
        if what == "bin":
            ones = {code: np.array([float(code in one.codes) for one in coded]) for code in self.codes}
            return table({f"{self.system}_{code}": column for code, column in ones.items()})
        columns = self._columns(cells, languages, coded, k, kind == "greedy-topk")
        if level is not None:
            answer, least = self.coder.levels.answer, target_accuracy or 0.0
            found = [answer(one.codes, how["levels"], one.levels, least) or (None,) * 3 for one in coded]
            columns |= {name: [each[i] for each in found] for i, name in enumerate(OF_LEVEL)}
            columns["level_conf"] = np.array(columns["level_conf"], dtype=float)
        return table(columns)

    __call__ = predict

    def _choices(
        self, what: Any, k_pred: int, behavior: str | None, prediction_type: str | None
    ) -> tuple[str, int, str]:
        """Return `what`, the most codes of a text, and one of PREDICTION_TYPES. Raises ValueError."""
        if isinstance(what, Number):
            what, k_pred = "pred", count_of("what", what)
        k_pred = count_of("k_pred", k_pred)
        check_choice("what", what, ("pred", "probs", "logits", "bin", "embeddings"))
        check_choice("behavior", behavior, (None, *BEHAVIORS))
        check_choice("prediction_type", prediction_type, (None, *PREDICTION_TYPES))
        kind = prediction_type or (BEHAVIORS[behavior] if behavior else self.coder.best_decoder)
        if what == "logits" and kind != "flat":
            raise ValueError("what='logits' is for the linear decoder: behavior='fast'")
        return what, min(k_pred, self.coder.most_codes(PREDICTION_TYPES[kind])), kind

    def _warn(self, languages: list[str], thresholds: dict | None, what: str, kind: str) -> None:
        """Warn of languages that the model does not know, and of thresholds without effect."""
        known, unk = self.coder.known, UNKNOWN_LANGUAGE
        if unknown := Counter(name for name in languages if known(name) == unk != language_name(name)):
            names = ", ".join(f"{name!r} ({count:,})" for name, count in unknown.most_common(10))
            names += f"; it knows {', '.join(self.coder.languages)}"
            warnings.warn(f"languages that the model does not know: {names}", stacklevel=3)
        counts = what in ("pred", "bin") and PREDICTION_TYPES[kind] in ("full", *BY_THRESHOLD)
        if thresholds is not None and not counts:
            warnings.warn(f"threshold: has no effect on {what} with {kind}", stacklevel=3)

    def _code(
        self, texts: list, languages: list[str], kind: str, k: int, given: dict | None, **how
    ) -> list[Coded]:
        """Return codes of texts, with `full` only those above published or given thresholds."""
        decoder = PREDICTION_TYPES[kind]
        coded = self.coder.code(texts, languages, decoder, k, given, **how)
        thresholds = self.coder.thresholds.with_given(given)
        if decoder == "full" and thresholds.source in ("given", "published"):  # as in the published package
            for i, (one, language) in enumerate(zip(coded, languages)):
                least = thresholds.least(self.coder.known(language))
                n = int(thresholds.number(torch.tensor(sum(prob > least for prob in one.probs))))
                coded[i] = one._replace(codes=one.codes[:n], probs=one.probs[:n])
        return coded

    def _columns(
        self, cells: list, languages: list[str], coded: list[Coded], k: int, long: bool
    ) -> dict[str, Any]:
        """Return a row per text: occ1, lang, up to `k` of SYSTEM_i, prob_i and each code's words and classes,
        conf. If `long`, return `k` rows per text, the most probable code first. Then top-k-pos counts from 0
        and conf is the probability of the code.
        """
        words = {"desc": self.key_desc} if self.key_desc else {}
        words |= {name: hisco_classes()[name] for name in self._classes}
        codes = [[*one.codes[:k], *[None] * (k - len(one.codes))] for one in coded]
        probs = np.array([[*one.probs[:k], *[math.nan] * (k - len(one.probs))] for one in coded], dtype=float)
        probs = probs.reshape(len(coded), k)
        conf = np.array([math.nan if one.conf is None else one.conf for one in coded], dtype=float)
        if long:  # treats each code as a text
            cells, languages = ([cell for cell in column for _ in range(k)] for column in (cells, languages))
            codes, conf = [[code] for row in codes for code in row], probs.flatten()
        columns: dict[str, Any] = {"occ1": cells, "lang": languages}
        for i in range(1 if long else k):
            of_rows = [row[i] for row in codes]
            columns[f"{self.system}_{i + 1}"] = of_rows
            columns |= {} if long else {f"prob_{i + 1}": probs[:, i]}
            for name, texts in words.items():
                of_codes = [code and texts.get(code) or None for code in of_rows]
                is_number = name in NUMBER_CLASSES
                columns[f"{name}_{i + 1}"] = np.array(of_codes, dtype=float) if is_number else of_codes
        more = {"top-k-pos": np.tile(np.arange(k), len(coded))} if long else {}
        return {**columns, "conf": conf, **more}

    def citation(self, BibTex: bool = False) -> None:
        """Print the citation of the published models."""
        print(BIBTEX if BibTex else PAPER)

    def finetune(
        self,
        dataset: Any,
        save_path: str | os.PathLike | None = None,
        input_col: str | None = None,
        language: str | None = None,
        language_col: str | None = None,
        target_cols: Sequence[str] | None = None,
        **arguments,
    ) -> "OccCANINE":
        """Continue training from this model like `finetune.py`, in one process. Become the best model of that
        run and return itself. Ctrl-C or a signal saves the run and stops it. After that or a failure, the
        model keeps its weights, and the same call resumes.

        Args:
            dataset: a table in a file, or a DataFrame.
            language: ignored if language_col is given. Without both, a DataFrame's column lang is used.
            arguments: flags of finetune.py, with underscores and its defaults: num_epochs=3. The formatter is
                this model's unless named. Its codes keep their order, and new codes are appended.

        Raises:
            UserError, TrainingError: where the script would end with them.

        Example, for a model with an encoder:
            >>> import contextlib
            >>> model = OccCANINE("./encoder")
            >>> with contextlib.redirect_stdout(None):  # hides what finetune.py prints
            ...     model = model.finetune("data.csv", save_path="./more", max_steps=1)
            >>> model.file
            './more/best.bin'
        """
        device = device_of(self.device if arguments.get("device") is None else arguments.pop("device"))
        own = self.formatter.to_dict()
        given = {"initial_checkpoint": self.file, "initial_key": self._key_file}
        is_general = own["kind"] in ("gpf", "classes")  # kept by --formatter auto if it can write all codes
        given |= {"target_cols": own["target_cols"]} if is_general else {"formatter": own["kind"]}
        asked = {"save_path": save_path, "input_col": input_col, "target_cols": target_cols, **arguments}
        there = getattr(dataset, "columns", ())
        language_col = column_of_languages(language, language_col, text_columns(input_col), there)
        asked |= {"language_col": language_col, "device": device.type}
        asked["language"] = language if language_col is None else None
        given |= {name: value for name, value in asked.items() if value is not None}
        given = finetune_parser().checked(given, "finetune")
        with tempfile.TemporaryDirectory(prefix="histocc_") as folder:
            args = FinetuneConfig(**given, dataset=[_dataset_file(dataset, folder)])
            if args.distributed:
                raise UserError("start several processes with a launcher: torchrun finetune.py …")
            self._train(args, device)
        return self

    def _train(self, args, device: torch.device) -> None:
        world, gpus = World(device=device), [device] if device.type == "cuda" else []
        with listening() as stop:
            try:
                current = torch.cuda.device(device if gpus else -1)
                with settings_of_torch(), torch.random.fork_rng(gpus), current:
                    train.run_training(
                        *inputs.prepare_data(args, world, *inputs.dataset_files(args.dataset)), world
                    )
            except Stopped:
                stop.acted = True
        trains = not (args.prepare_only or args.eval_only or args.dry_run)
        if trains and stop.acted:
            what = f"fine-tuning was stopped by {stop.reason}: the model keeps its earlier weights;"
            what += f" the same call resumes; OccCANINE({args.save_path!r}) loads the best so far"
            warnings.warn(what, stacklevel=3)
        elif trains and checkpoint.find(args.save_path) is not None:
            self._load(models.find_weights(args.save_path, args.save_path), Given(system=self._system))
            self.name = args.save_path
        if stop.signal is not None:  # the run is saved. Pass the signal on to the caller
            signal.raise_signal(stop.signal)


# ---- texts in any form, and tables


def check_choice(name: str, value: Any, choices: Sequence[str | None]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: found {value!r:.60}, expected one of {', '.join(map(repr, choices))}")


def count_of(name: str, value: Any) -> int:
    """Return a whole number of at least 1, also from numpy or R (3.0). Raises ValueError."""
    number = float(value) if isinstance(value, Real) else 0.0
    if not (number >= 1 and number % 1 == 0):
        raise ValueError(f"{name}: found {value!r:.60}, expected a whole number of at least 1")
    return int(number)


def cells_of(name: str, given: Any, kinds: tuple[type, ...]) -> list:
    """Return the cells of an argument: a value of these kinds, a list, array or column. Raises ValueError."""
    if is_missing(given) or isinstance(given, kinds):
        given = [given]
    is_table = isinstance(given, Mapping | set | bytes) or hasattr(given, "columns")
    if is_table or not isinstance(given, Iterable):
        raise ValueError(
            f"{name}: found {type(given).__name__}, expected a text, or a list, array or column of texts."
            " Of a table pass a column: predict(table['occ1'], lang=table['lang']), in R predict(table$occ1)"
        )
    cells = list(getattr(given, "to_pylist", given.__iter__)())  # Arrow's cells are scalar objects
    for i, cell in enumerate(cells):
        if isinstance(cell, bool) or not isinstance(cell, kinds) and not is_missing(cell):
            raise ValueError(f"{name}: row {i} (counted from 0): {cell!r:.60} is not a text")
    return cells


def texts_and_languages(occ1: Any, lang: Any, ditto: bool) -> tuple[list, list[str], list[str]]:
    """Return the texts as given, as strings, and the language of each. Raises ValueError."""
    cells = cells_of("occ1", occ1, (str, Number))
    one_language = is_missing(lang) or isinstance(lang, str)
    languages: list = [lang] * len(cells) if one_language else cells_of("lang", lang, (str,))
    if len(languages) != len(cells):
        raise ValueError(
            f"lang: found {counted(len(cells), 'text')}, but {counted(len(languages), 'language')}"
        )
    if hasattr(occ1, "reindex") and hasattr(lang, "reindex") and not occ1.index.equals(lang.index):
        raise ValueError("lang: has another index than occ1; pass lang[occ1.index], or list(lang)")
    texts = ["" if is_missing(cell) else str(cell) for cell in cells]
    if ditto:
        fill(texts, [i for i, text in enumerate(texts) if is_ditto(text)], "")
    return cells, texts, [UNKNOWN_LANGUAGE if is_missing(one) or not one else one for one in languages]


def thresholds_of(given: float | dict[str | None, float] | None) -> dict[str | None, float] | None:
    """Return a threshold by language, None for all others. Raises ValueError."""
    values = given if isinstance(given, dict) else {} if given is None else {None: given}
    if not all(isinstance(value, Real) and 0 <= value <= 1 for value in values.values()):
        raise ValueError(f"threshold: found {given!r:.60}, expected a probability from 0 to 1")
    return {name and language_name(name): value for name, value in values.items()} or None


def _dataset_file(dataset: Any, folder: str) -> str:
    """Return a file as given, or write a DataFrame to one in `folder`. Raises UserError."""
    if isinstance(dataset, str | os.PathLike):
        return os.fspath(dataset)
    if not hasattr(dataset, "to_csv"):
        raise UserError(f"dataset: found {dataset!r:.60}, expected a file or a DataFrame")
    # pandas stores whole numbers with gaps as floats, but codes have no .0. R's missing value is -2^31
    dataset = dataset.mask(dataset == -(2**31))
    kinds, file = dataset.dtypes.items(), os.path.join(folder, "DataFrame.csv")
    whole = [name for name, kind in kinds if kind.kind == "f" and (dataset[name].dropna() % 1 == 0).all()]
    dataset.astype(dict.fromkeys(whole, "Int64")).to_csv(file, index=False)
    return file


def columns_of_frame(table: Any) -> dict[str, list]:
    """Return the columns of a DataFrame, a dict of columns or a list of dicts, named in the first one."""
    if isinstance(table, (list, tuple)):
        return {str(name): [row.get(name) for row in table] for name in (table[0] if table else {})}
    return {str(name): list(table[name]) for name in getattr(table, "columns", table)}


def as_table(columns: dict[Any, Any], get_dict: bool = False, like: Any = None):
    """Return columns of equal length as a DataFrame, text columns with pandas' text dtype even if all cells
    are missing. Without pandas, or with get_dict, return a list of dicts, with None instead of NaN. like: a
    Series whose index the DataFrame gets, with each label repeated for its rows.
    """
    arrays = {name: cells for name, cells in columns.items() if isinstance(cells, np.ndarray)}
    with contextlib.suppress(ImportError):
        if not get_dict:
            import pandas

            texts, of_text = {}, pandas.Series([""]).dtype  # str from pandas 3 on, object before
            for name in columns.keys() - arrays:
                numbers = any(isinstance(v, Number) and v == v for v in columns[name])  # occ1 as given
                texts[name] = pandas.Series(columns[name], dtype=object if numbers else of_text)
            frame = pandas.DataFrame(columns | texts)
            if isinstance(like, pandas.Series):
                frame.index = like.index.repeat(len(frame) // max(1, len(like)))
            return frame
    lists = columns | {name: cells.tolist() for name, cells in arrays.items()}
    return [  # NaN does not equal itself
        {name: v if name == "occ1" or v == v else None for name, v in zip(columns, row)}
        for row in zip(*lists.values())
    ]

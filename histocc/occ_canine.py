"""The model as an object, for scripts and notebooks:

    from histocc import OccCANINE

    model = OccCANINE("./output")
    model.predict(["wine merchant", "huusmand og væver"], lang=["en", "da"])
    model.finetune("data.csv", target_cols=["hisco_1", "hisco_2"], language_col="lang", save_path="./mine")

The calls are those of the published package (histocc of Dahl, Johansen and Vedel, 2024, arXiv 2402.13604),
and so are the shapes of their results; where a result is deliberately another one, its docstring says so.
"""

import contextlib
import gc
import numbers
import operator
import os
import signal
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from histocc.data.dataset import read_descriptions
from histocc.data.rows import fill_dittos, key_reader
from histocc.formatter import CLASSES, hisco_classes, is_missing
from histocc.job import build, train
from histocc.job.config import FinetuneConfig, finetune_parser
from histocc.predict import tables
from histocc.predict.coder import Coded, Coder
from histocc.predict.tables import as_table
from histocc.published import formats, models
from histocc.published.formats import Given
from histocc.runtime import checkpoint
from histocc.runtime.config import shown
from histocc.runtime.device import Precision, device_of, settings_of_torch
from histocc.runtime.errors import UserError
from histocc.runtime.signals import Stopped, listening
from histocc.runtime.world import World
from histocc.text import UNKNOWN_LANGUAGE

HUB_NAME = "OccCANINE_s2s_mix"
BEHAVIORS = {"good": "greedy", "fast": "flat"}
# prediction_type → decoder
PREDICTION_TYPES = {name: name for name in ("greedy", "topk", "flat", "both", "full")} | {
    "greedy-topk": "topk"
}
WHAT = ("pred", "probs", "logits", "bin", "embeddings")
MODEL_TYPES = {"mixer": "mix", "seq2seq": "seq2seq", "flat": "flat"}  # kinds by their published names

PAPER = (
    "Dahl, C. M., Johansen, T., & Vedel, C. (2024). Breaking the HISCO Barrier: Automatic Occupational"
    " Standardization with OccCANINE. arXiv:2402.13604. https://arxiv.org/abs/2402.13604"
)
BIBTEX = """@misc{dahl2024occcanine,
  author = {Dahl, Christian M{\\o}ller and Johansen, Torben and Vedel, Christian},
  title = {Breaking the {HISCO} Barrier: Automatic Occupational Standardization with {OccCANINE}},
  year = {2024}, eprint = {2402.13604}, archivePrefix = {arXiv}, primaryClass = {cs.CL}
}"""


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ValueError for what is neither None nor one of the choices."""
    if value is not None and not (isinstance(value, str) and value in choices):
        raise ValueError(f"{name}: found {value!r:.60}, expected one of {', '.join(map(repr, choices))}")


def count_of(name: str, value: Any) -> int:
    """A whole number of at least 1, also one of numpy. Raises ValueError."""
    try:
        number = 0 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(f"{name}: found {value!r:.60}, expected a whole number of at least 1")
    return number


class OccCANINE:
    """A trained model. It can be pickled and copied, with its weights; threads may call it at the same time:
    one call is answered after the other.

    Args:
        name: folder of a run, a checkpoint, an exported or published model, or its name on the hub, also as
            the published program takes it (OccCANINE_s2s_mix, Christianvedel/…); None for the published HISCO
            model there.
        device: "cpu", "cuda", "cuda:1", a torch.device, or None or "auto" for a GPU if there is one.
        batch_size: texts at once; may be set later.
        verbose: whether to say what is done; False, unlike in the published package.
        system: of published weights: hisco, or another one; in any case the name of the columns, instead of
            the model's own.
        key: file of the codes of published weights that hold none. With a column of words (see
            `histocc.predict --descriptions`) results have its words.
        descriptions: words of the codes, columns desc_1, desc_2, …: a file, or a table with columns
            system_code and desc; None: the titles of HISCO codes.
        classes: also columns of the social classes of HISCO codes: of hisclass, hisclass_5, socpo, hiscam.
        hf: True: a name on the hub, unless it is a file or folder here; False: a file or folder; None:
            whichever is there.
        force_download: load from the hub again.
        model_type: "mix", "seq2seq" or "flat", only compared with what is loaded.
        use_within_block_sep, target_cols: of a published general-purpose model, if it does not say it.
        raw_confidence, int8: as of `histocc.predict`.

    Attributes: name, file, model, formatter, system, coder, codes, key, key_desc, model_type, device,
    batch_size.

    Raises:
        ValueError: an argument is of another kind.
        UserError: a file or name cannot be used.
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
        classes: Sequence[str] | None = None,
        hf: bool | None = None,
        force_download: bool = False,
        model_type: str | None = None,
        use_within_block_sep: bool = False,
        target_cols: Sequence[str] | None = None,
        raw_confidence: bool = False,
        int8: bool = False,
    ):
        check_choice("model_type", model_type, list(MODEL_TYPES.values()))
        self._lock = threading.RLock()  # held while codes are computed or the model changes
        self.name = HUB_NAME if name is None else os.fspath(name)
        self.device, self.verbose = device_of(device), verbose
        self._batch_size = count_of("batch_size", batch_size)
        self._key_file, self._descriptions, self._system = key and os.fspath(key), descriptions, system
        self._classes = [classes] if isinstance(classes, str) else list(dict.fromkeys(classes or []))
        if set(self._classes) - set(CLASSES):
            raise ValueError(f"classes: found {self._classes}, expected some of {', '.join(CLASSES)}")
        self._raw_confidence = raw_confidence
        self._precision = Precision("int8" if int8 else "float32", self.device)
        said = Given(
            "hisco" if (system or "").lower() == "hisco" else None,
            key_reader(self._key_file),
            [target_cols] if isinstance(target_cols, str) else list(target_cols or []) or None,
            use_within_block_sep,
            system,
        )
        self._load(self._file(hf, force_download), said)
        if model_type not in (None, self.model_type):
            warnings.warn(
                f"model_type {model_type!r}: {self.name} is of type {self.model_type!r}", stacklevel=2
            )
        if verbose:
            print(f"{self!r}, {len(self.codes):,} codes")
            print(f"Decoder: {self.coder.best_decoder} ({self.coder.why_best})")

    def __getstate__(self) -> dict:
        left_out = ("_lock", "model", "formatter")  # the last two are the coder's
        held = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**held, "device": str(self.device)}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state, _lock=threading.RLock())
        try:
            self.device = device_of(state["device"])
        except UserError as error:
            self.device = torch.device("cpu")
            warnings.warn(f"{self.name}: was on {state['device']}, is on the CPU now ({error})", stacklevel=2)
        self.model, self.formatter = self.coder.to(self.device).model, self.coder.formatter

    def _file(self, hf: bool | None, force_download: bool) -> str:
        if hf is False and not os.path.exists(self.name):
            raise UserError(f"{self.name}: no such file or folder, and hf=False leaves the hub out")
        if hf and not os.path.exists(self.name) or force_download:
            folder = formats.from_hub(self.name, force_download)
            return models.find_weights(folder, self.name)
        return models.find_weights(self.name, self.name)

    def _load(self, file: str, given: Given = Given()) -> None:
        """Becomes the model in `file`, or stays what it is where that raises an error."""
        state = formats.load_content(file)
        brings = models.brings_settings(state)
        model, formatter, state = models.model_of(
            file, state, given._replace(formatter=None) if brings else given
        )
        if given.system and not brings and (formatter.kind == "hisco") != (given.system.lower() == "hisco"):
            raise UserError(
                f"{file}: writes {formatter.kind} codes, which those of {given.system} are others than"
            )
        coder = Coder(
            model.to(self.device),
            formatter,
            state,
            batch_size=self._batch_size,
            precision=self._precision,
            raw_confidence=self._raw_confidence,
        )
        words = self._words(coder)
        if self._classes and formatter.kind != "hisco":
            raise UserError(f"classes: are of HISCO codes, and {file} writes {coder.system}")
        with self._lock:
            self.file, self.coder, self.model, self.formatter = file, coder, model, formatter
            self.system, self.key_desc = given.system or coder.system, words

    def _words(self, coder: Coder) -> dict[str, str]:
        """Code → words, of the codes that have some."""
        given, key = self._descriptions, self._key_file
        if isinstance(given, str | os.PathLike):
            return read_descriptions(os.fspath(given), coder.codes, coder.formatter)
        if given is None:
            titles = hisco_classes()["title"] if coder.formatter.kind == "hisco" else {}
            if key is None or not os.path.isfile(key):
                return titles
            return read_descriptions(key, coder.codes, coder.formatter, required=False) or titles
        columns = [tables.column_of("descriptions", given, name) for name in ("system_code", "desc")]
        words = {
            coder.formatter.repair(str(code))[0]: str(text)
            for code, text in reversed(list(zip(*columns, strict=True)))
            if not is_missing(code) and not is_missing(text)
        }
        if not set(coder.codes) & words.keys():
            raise UserError(
                f"descriptions: none of the {len(coder.codes):,} codes of the model stands in column"
                " 'system_code'"
            )
        return words

    def __repr__(self) -> str:
        return (
            f"OccCANINE(name={self.name!r}, device='{self.device}', batch_size={self.batch_size},"
            f" system={self.system!r}, model_type={self.model_type!r})"
        )

    def __call__(self, occ1, *args, **kwargs):
        return self.predict(occ1, *args, **kwargs)

    @property
    def codes(self) -> list[str]:
        """The codes that the model knows, in the order of its linear outputs."""
        return self.coder.codes

    @property
    def key(self) -> dict[int, str]:
        """Number of a linear output → code."""
        return dict(enumerate(self.codes))

    @property
    def model_type(self) -> str:
        """mix, seq2seq or flat."""
        return MODEL_TYPES[self.coder.kind]

    @property
    def batch_size(self) -> int:
        return self._batch_size

    @batch_size.setter
    def batch_size(self, texts: int) -> None:
        self._batch_size = self.coder.batch_size = count_of("batch_size", texts)

    def predict(
        self,
        occ1: Any,
        lang: str | Sequence[str] = UNKNOWN_LANGUAGE,
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
    ):
        """Codes of texts, or what they are made of.

        Args:
            occ1: texts, one or several; numbers count as their digits, None and NaN as empty, which gives no
                code. They are cleaned by the model's rule; the result shows them as they were given.
            lang: one language, or one per text, paired by position (None, NaN and empty are unk); one that
                the model does not know counts as unk, with a warning.
            what: pred: a row per text: occ1, lang, up to k_pred codes hisco_1, prob_1, desc_1, … (the
                system's name; desc if words of the codes are known), conf. A number n stands for pred
                with k_pred = n.
                probs: array float32 [texts, codes], a probability for each code of `codes`, by the linear
                decoder (flat) or the other one. logits: the same before the sigmoid, flat alone, as a table
                with the numbers of the codes as columns. bin: 1 for each code that pred gives, columns
                hisco_CODE. embeddings: the encoder's pooled output, one column per number.
            threshold: probability above which a code counts, 0 to 1, one number or by language, of the linear
                decoder and of full; None for the model's own: published ones, fitted ones, else 0.5 (full of
                a model without published ones gives the k_pred best). A warning says if it has no effect.
            behavior: "good" (greedy) or "fast" (flat); None for the one that was right more often on the
                model's validation texts; good if the model does not say, as published ones.
            prediction_type: says more than behavior, and counts if both are given: greedy; flat; both (as
                many codes as flat, ranked by both decoders); full (the most probable codes of the key by the
                seq2seq decoder, each alone); topk (the same, faster); greedy-topk (the same with k_pred rows
                per text and a column top-k-pos).
            order_invariant_conf: False: conf of greedy is the probability of the codes in the order in which
                they were written.
            get_dict: a list of dicts, also if pandas is installed; get_df=False is the same.
            ditto: texts such as do. or ditto are coded as the text before them.
            deduplicate, concat_in: of the published package; the result does not depend on them.

        Returns a DataFrame, or a list of dicts if pandas is not installed; the columns depend on the
        arguments alone. Codes that are not there are None, probabilities NaN (None in dicts).

        docs/published.md says what differs from the published package.

        Raises:
            ValueError: an argument is not as above.
            UserError: the model has no such decoder.
        """
        if isinstance(what, str) or what is None:
            check_choice("what", what or "", WHAT)
        else:
            what, k_pred = "pred", count_of("what", what)
        k_pred = count_of("k_pred", k_pred)
        check_choice("behavior", behavior, list(BEHAVIORS))
        check_choice("prediction_type", prediction_type, list(PREDICTION_TYPES))
        threshold = self._threshold(threshold)
        cells, texts, languages = tables.texts_and_languages(occ1, lang, UNKNOWN_LANGUAGE)
        if ditto:
            fill_dittos(texts, "", fill=True)
        as_dict = get_dict or not get_df
        with self._lock:
            kind = prediction_type or (BEHAVIORS[behavior] if behavior else self.coder.best_decoder)
            decoder = PREDICTION_TYPES[kind]
            unknown = Counter(name for name in languages if self.coder.known(name) != name.strip())
            if unknown:
                names = ", ".join(f"{name!r} ({count:,})" for name, count in unknown.most_common(10))
                self._warn(
                    f"languages that the model does not know, coded as unk: {names}; it knows"
                    f" {self.coder.known_for(unknown)}"
                )
            if threshold is not None and (what not in ("pred", "bin") or decoder in ("greedy", "topk")):
                self._warn(f"threshold: has no effect on what={what!r} with prediction_type {kind!r}")
            if behavior == "fast" and kind != "flat":
                self._warn(f"behavior 'fast' has no effect: prediction_type {kind!r} says otherwise")
            if what == "probs":
                return self.coder.probabilities(texts, languages, "flat" if kind == "flat" else "full")
            if what in ("logits", "embeddings"):
                if what == "logits" and kind != "flat":
                    raise ValueError("what='logits' is for the linear decoder: behavior='fast'")
                array = (
                    self.coder.embeddings(texts, languages)
                    if what == "embeddings"
                    else self.coder.probabilities(texts, languages, "flat", logits=True)
                )
                return as_table({"occ1": cells, **dict(enumerate(array.T))}, as_dict)
            coded = self.coder.code(
                texts, languages, decoder, k_pred, threshold, in_any_order=order_invariant_conf
            )
            if decoder == "full":
                coded = self._above_thresholds(coded, languages, threshold)
            if what == "bin":
                return as_table(tables.binary(coded, self.codes, self.system), as_dict)
            k = min(k_pred, self.formatter.max_num_codes if decoder == "greedy" else len(self.codes))
            columns = tables.a_row_per_code if kind == "greedy-topk" else tables.a_row_per_text
            words = {"desc": self.key_desc} if self.key_desc else {}
            words |= {name: hisco_classes()[name] for name in self._classes}
            return as_table(columns(cells, languages, coded, k, self.system, words), as_dict)

    def _threshold(self, given: Any) -> float | dict[str | None, float] | None:
        """Raises ValueError for what is no probability, nor a dict of them by language."""
        values = given if isinstance(given, dict) else {} if given is None else {None: given}
        known = (None, *self.coder.languages)
        for name, value in values.items():
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= 1:  # pyright: ignore[reportOperatorIssue]
                raise ValueError(f"threshold: found {given!r:.60}, expected a probability from 0 to 1")
            if name not in known:
                raise ValueError(
                    f"threshold: found {given!r:.60}, expected languages that the model knows:"
                    f" {', '.join(self.coder.languages)}; None stands for the others"
                )
        return {name: float(value) for name, value in values.items()} or None

    def _above_thresholds(self, coded: list[Coded], languages: list[str], given: Any) -> list[Coded]:
        """Codes of full as in the published package: those above a threshold, if there is one."""
        thresholds = self.coder.thresholds.with_given(given)
        if given is None and thresholds.source != "published":
            return coded
        counts = [
            sum(prob > thresholds.least(self.coder.known(language)) for prob in one.probs)
            for one, language in zip(coded, languages)
        ]
        counts = thresholds.number(torch.tensor(counts, dtype=torch.long)).tolist()
        return [one._replace(codes=one.codes[:n], probs=one.probs[:n]) for one, n in zip(coded, counts)]

    def _warn(self, message: str) -> None:
        warnings.warn(message, stacklevel=3)

    def citation(self, BibTex: bool = False) -> None:
        """Prints what to cite where the models of the paper are used."""
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
        """Trains on from this model as `finetune.py` does, in one process, and becomes the best model of that
        run; returns itself.

        Args:
            dataset: a CSV or Parquet file, or a DataFrame.
            language: not used if language_col is given.
            arguments: those of finetune.py, with underscores and its defaults: num_epochs=3,
                freeze_encoder=True. The formatter is this model's unless named; its codes stay, in their
                order, and new ones of the data are appended.

        If it fails or is stopped (Ctrl-C, a signal, stop_after, each of which saves first), this object keeps
        the weights that it had; the same call resumes, and OccCANINE(save_path) is the best so far.

        Raises:
            UserError, TrainingError: as the script ends with them.
        """
        device = device_of(self.device if arguments.get("device") is None else arguments.pop("device"))
        given = {
            "save_path": save_path,
            "input_col": input_col,
            "language": language if language_col is None else None,
            "language_col": language_col,
            "target_cols": target_cols,
            **arguments,
            "device": device.type,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        asked = finetune_parser().checked(self._defaults() | asked, "finetune")
        with contextlib.ExitStack() as held:
            asked["dataset"] = _dataset_file(dataset, held)
            args = FinetuneConfig(**asked)
            if args.distributed:
                raise UserError(
                    "several processes are started by a launcher: torchrun --nproc_per_node=2 finetune.py"
                    " --distributed …"
                )
            self._train(args, device)
        return self

    def _train(self, args, device: torch.device) -> None:
        world = World(device=device)
        with listening() as stop:
            stop.limit(args.stop_after)
            try:
                with (
                    settings_of_torch(),
                    torch.random.fork_rng([world.device] if world.device.type == "cuda" else []),
                ):
                    train_files, val_files = build.dataset_files(args.dataset)
                    args, settings, data = build.prepare_data(args, world, train_files, val_files)
                    train.train(args, settings, world, data)
            except Stopped:
                stop.acted = True
            finally:
                gc.collect()
        trains = not (args.prepare_only or args.eval_only or args.dry_run)
        if trains and stop.acted:
            warnings.warn(
                f"fine-tuning was stopped by {stop.reason}: these are the weights from before it; "
                f"the same call resumes, and OccCANINE({args.save_path!r}) is the best so far",
                stacklevel=3,
            )
        elif trains and checkpoint.find(args.save_path) is not None:
            self._load(models.find_weights(args.save_path, args.save_path), Given(system=self._system))
            self.name = args.save_path
        if stop.signal is not None:  # the run is saved; now it is the caller's
            signal.raise_signal(stop.signal)

    def _defaults(self) -> dict:
        """Arguments of a run that starts from this model."""
        own = self.formatter.to_dict()
        general = (
            {
                "block_size": own["block_size"],
                "use_within_block_sep": own["within_block_sep"] is not None,
                "allow_codes_shorter_than_block_size": own["allow_short"],
                "target_cols": own["target_cols"],
            }
            if own["kind"] == "gpf"
            else {}
        )
        return {
            "initial_checkpoint": self.file,
            "initial_key": self._key_file,
            "formatter": own["kind"],
            **general,
        }


def _dataset_file(dataset: Any, held: contextlib.ExitStack) -> str:
    """The file of a data set that is given in Python; a DataFrame goes into one that `held` removes. Raises
    UserError.
    """
    if isinstance(dataset, str | os.PathLike):
        return os.fspath(dataset)
    if not hasattr(dataset, "to_csv"):
        raise UserError(f"dataset: found {shown(dataset)}, expected a file or a DataFrame")
    file = os.path.join(held.enter_context(tempfile.TemporaryDirectory(prefix="histocc_")), "DataFrame.csv")
    # whole numbers among missing values are floats in pandas, and codes have no .0
    kinds = dataset.dtypes.items()
    whole = [name for name, kind in kinds if kind.kind == "f" and (dataset[name].dropna() % 1 == 0).all()]
    dataset.astype(dict.fromkeys(whole, "Int64")).to_csv(file, index=False)
    return file

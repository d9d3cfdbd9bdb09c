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
import os
import signal
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from histocc.data.dataset import read_descriptions
from histocc.data.rows import key_reader
from histocc.formatter import CLASSES, hisco_classes
from histocc.job import data as job_data
from histocc.job import train
from histocc.job.config import FinetuneConfig, finetune_parser
from histocc.job.data import dataset_file
from histocc.predict import tables as coded_tables
from histocc.predict.coder import Coded, Coder
from histocc.predict.tables import (
    as_table,
    described,
    indexes_differ,
    is_count,
    is_threshold,
    require,
    texts_and_languages,
)
from histocc.published import formats, models
from histocc.published.formats import Given
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision, device_of, settings_of_torch
from histocc.runtime.errors import UserError
from histocc.runtime.signals import Stopped, listening
from histocc.runtime.world import World
from histocc.text import UNKNOWN_LANGUAGE

HUB_NAME = "OccCANINE_s2s_mix"
BEHAVIORS = {"good": "greedy", "fast": "flat"}
PREDICTION_TYPES = {
    "greedy": "greedy",
    "greedy-topk": "topk",
    "topk": "topk",
    "flat": "flat",
    "both": "both",
    "full": "full",
}
WHAT = ("pred", "probs", "logits", "bin", "embeddings")
# kinds of models by their published names
MODEL_TYPES = {
    "mixer": "mix",
    "seq2seq": "seq2seq",
    "flat": "flat",
}

PAPER = (
    "Dahl, C. M., Johansen, T., & Vedel, C. (2024). Breaking the HISCO Barrier: Automatic Occupational"
    " Standardization with OccCANINE. arXiv:2402.13604. https://arxiv.org/abs/2402.13604"
)
BIBTEX = """@misc{dahl2024occcanine,
  author = {Dahl, Christian M{\\o}ller and Johansen, Torben and Vedel, Christian},
  title = {Breaking the {HISCO} Barrier: Automatic Occupational Standardization with {OccCANINE}},
  year = {2024}, eprint = {2402.13604}, archivePrefix = {arXiv}, primaryClass = {cs.CL}
}"""


class OccCANINE:
    """A trained model.

    Args:
        name: folder of a run, a checkpoint, an exported or published model, or its name on the hub, also as
            the published program takes it (OccCANINE_s2s_mix, Christianvedel/…); None for the published HISCO
            model there.
        device: "cpu", "cuda", "cuda:1", a torch.device, or None or "auto" for a GPU where there is one.
        batch_size: texts at once; may be set later.
        verbose: whether to say what is done; False, unlike in the published package.
        system: of published weights: hisco, or another one; in any case the name of the columns, instead of
        the model's own.
        key: file of the codes of published weights that hold none. With a column of words (see
            `histocc.predict --descriptions`) results have its words.
        descriptions: words of the codes, columns desc_1, desc_2, …: a file, or a DataFrame with columns
            system_code and desc; None: the titles of HISCO codes.
        classes: also columns of the social classes of HISCO codes: of hisclass, hisclass_5, socpo, hiscam.
        hf: True: a name on the hub, unless it is a file or folder here; False: a file or folder; None:
        whichever is there.
        force_download: load from the hub again.
        model_type: "mix", "seq2seq" or "flat", only compared with what is loaded.
        use_within_block_sep, target_cols: of a published general-purpose model, where it does not say it.
        raw_confidence: probabilities are those of the decoders themselves, not what the checkpoint has fitted
            to how often they are right.
        int8: matrix products in int8, on CPUs alone; `histocc.predict --int8` says how the codes compare.

    Attributes: name, file, model, formatter, system, coder, codes, key, key_desc, model_type, device,
    batch_size.

    It can be pickled and copied, with its weights: one that comes back where its GPU is not there is on the
    CPU, with a warning. Threads may call it at the same time: one call is answered after the other.

    Raises ValueError for arguments of another kind, UserError for files and names that cannot be used.
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
        model_types = (None, *MODEL_TYPES.values())
        require(model_type in model_types, "model_type", model_type, f"one of {model_types}")
        self._lock = threading.RLock()  # held while codes are computed or the model changes
        self.name, self.device, self.verbose = os.fspath(name or HUB_NAME), device_of(device), verbose
        self._key_file = None if key is None else os.fspath(key)
        self._said = {"descriptions": described(descriptions), "system": system}
        self._classes = list(dict.fromkeys([classes] if isinstance(classes, str) else classes or []))
        if set(self._classes) - set(CLASSES):
            raise ValueError(f"classes: found {self._classes}, expected some of {', '.join(CLASSES)}")
        self._raw_confidence = raw_confidence
        self._precision = Precision("int8" if int8 else "float32", self.device)
        self._batch_size = self._checked_batch_size(batch_size)
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
        said, key = self._said["descriptions"], self._key_file
        if isinstance(said, str):
            return read_descriptions(said, coder.codes, coder.formatter)
        if said is None:
            found = {}
            if key and os.path.isfile(key):
                found = read_descriptions(key, coder.codes, coder.formatter, required=False)
            return found or (hisco_classes()["title"] if coder.formatter.kind == "hisco" else {})
        found = {coder.formatter.repair(code)[0]: words for code, words in reversed(said)}
        if not set(coder.codes) & found.keys():
            raise UserError(
                f"descriptions: none of the {len(coder.codes):,} codes of the model stands in "
                "column 'system_code'"
            )
        return found

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
        self._batch_size = self.coder.batch_size = self._checked_batch_size(texts)

    @staticmethod
    def _checked_batch_size(texts: int) -> int:
        require(is_count(texts), "batch_size", texts, "a whole number of at least 1")
        return int(texts)

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
                a model without published ones gives the k_pred best). A warning says where it has no effect.
            behavior: "good" (greedy) or "fast" (flat); None for the one that was right more often on the
                model's validation texts; good if the model does not say, as published ones.
            prediction_type: says more than behavior, and counts if both are given: greedy; flat; both (as
                many codes as flat, ranked by both decoders); full (the most probable codes of the key by the
                seq2seq decoder, each alone); topk (the same, faster); greedy-topk (the same with k_pred rows
                per text and a column top-k-pos).
            order_invariant_conf: False: conf of greedy is the probability of the codes in the order in which
            they were written.
            get_dict: a list of dicts, also where pandas is installed; get_df=False is the same. concat_in is
                not used, as in the published package.

        Returns a DataFrame, or a list of dicts where pandas is not installed; the columns depend on the
        arguments alone. Codes that are not there are None, probabilities NaN (None in dicts).

        Unlike in the published package: greedy has up to k_pred columns whatever the rows hold; conf is the
        probability of the set of codes and of nothing else after it, not the product over what pads the
        sequence; top-k codes are the exact ones, not those of a beam; -1, -2 and -3 are written so, not
        -0001; occ1 is the text alone, without its language; an empty text has no code; several languages may
        have thresholds of their own in one call; a language that the model does not know is read as unk.

        Raises ValueError for arguments that are not as above, and UserError where the
        model has no such decoder.
        """
        require(what in WHAT or is_count(what), "what", what, f"one of {WHAT}, or a number of codes")
        require(behavior in (None, *BEHAVIORS), "behavior", behavior, f"one of {(*BEHAVIORS,)}")
        kinds = (*PREDICTION_TYPES,)
        require(
            prediction_type in (None, *kinds), "prediction_type", prediction_type, f"None or one of {kinds}"
        )
        require(is_count(k_pred), "k_pred", k_pred, "a whole number of at least 1")
        languages = self.coder.languages
        require(
            is_threshold(threshold, languages),
            "threshold",
            threshold,
            "a probability from 0 to 1, None, or a dict of probabilities by language (those that the model"
            f" knows: {', '.join(languages)}; None stands for the others)",
        )
        threshold = None if threshold == {} else threshold
        if not isinstance(what, str):
            what, k_pred = "pred", what
        shown_as, texts, languages = texts_and_languages(occ1, lang)
        with self._lock:
            kind = prediction_type or BEHAVIORS.get(behavior or "") or self.coder.best_decoder
            self._warn(kind, what, threshold, behavior, occ1, lang, languages)
            decoder, get_dict = PREDICTION_TYPES[kind], get_dict or not get_df
            if what in ("probs", "logits", "embeddings"):
                return self._numbers(what, shown_as, texts, languages, decoder, deduplicate, get_dict)
            coded = self._coded(
                texts, languages, decoder, k_pred, threshold, deduplicate, order_invariant_conf
            )
            if what == "bin":
                return as_table(coded_tables.binary(coded, self.codes, self.system), get_dict)
            most = min(k_pred, self.formatter.max_num_codes if decoder == "greedy" else len(self.codes))
            columns = coded_tables.a_row_per_code if kind == "greedy-topk" else coded_tables.a_row_per_text
            words = {"desc": self.key_desc} if self.key_desc else {}
            words |= {name: hisco_classes()[name] for name in self._classes}
            return as_table(columns(shown_as, languages, coded, most, self.system, words), get_dict)

    def _coded(
        self,
        texts: list[str],
        languages: list[str],
        decoder: str,
        k_pred: int,
        threshold,
        deduplicate: bool,
        in_any_order: bool,
    ) -> list[Coded]:
        coded = self.coder.code(
            texts, languages, decoder, k_pred, threshold, deduplicate, in_any_order=in_any_order
        )
        thresholds = self.coder.thresholds.with_given(threshold)
        if decoder != "full" or threshold is None and thresholds.source != "published":
            return coded
        above = torch.tensor(
            [
                sum(prob > thresholds.least(self.coder.known(language)) for prob in each.probs)
                for each, language in zip(coded, languages)
            ],
            dtype=torch.long,
        )
        return [
            each._replace(codes=each.codes[:count], probs=each.probs[:count])
            for each, count in zip(coded, thresholds.number(above).tolist())
        ]

    def _numbers(
        self,
        what: str,
        shown_as: list,
        texts: list[str],
        languages: list[str],
        decoder: str,
        deduplicate: bool,
        get_dict: bool,
    ):
        if what == "probs":
            return self.coder.probabilities(
                texts, languages, "flat" if decoder == "flat" else "full", deduplicate
            )
        if what == "logits" and decoder != "flat":
            raise ValueError(
                "what='logits' is for the linear decoder: behavior='fast', or prediction_type='flat'"
            )
        found = (
            self.coder.embeddings(texts, languages, deduplicate)
            if what == "embeddings"
            else self.coder.probabilities(texts, languages, "flat", deduplicate, logits=True)
        )
        return as_table({"occ1": shown_as, **dict(enumerate(found.T))}, get_dict)

    def _warn(
        self, kind: str, what: str, threshold: Any, behavior: str | None, occ1: Any, lang: Any, languages
    ) -> None:
        """Of arguments that have no effect, or perhaps not the one that was meant."""
        unknown = Counter(
            language for language in languages if self.coder.known(language) != language.strip()
        )
        names = ", ".join(f"{language!r} ({number:,})" for language, number in unknown.most_common(10))
        known = self.coder.known_for(unknown)
        of_codes = what in ("pred", "bin")
        named = f"prediction_type {kind!r}" if of_codes else f"what={what!r}"
        has_one = of_codes and kind in ("flat", "both", "full")
        for holds, message in (
            (unknown, f"languages that the model does not know, coded as unk: {names}; it knows {known}"),
            (
                threshold is not None and not has_one,
                (
                    f"threshold: has no effect on {named}, which has none; it is for the linear decoder "
                    "(behavior='fast', prediction_type='flat') and prediction_type='full'"
                ),
            ),
            (
                behavior == "fast" and kind != "flat",
                f"behavior 'fast' has no effect: prediction_type {kind!r} says otherwise",
            ),
            (
                indexes_differ(occ1, lang),
                "occ1 and lang have different indexes: their rows are paired by position",
            ),
        ):
            if holds:
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
        """Trains on from this model as `finetune.py` does, and becomes the best model of that run; returns
        itself.

        dataset: a CSV or Parquet file, or a DataFrame. The others are the arguments of finetune.py, with
        underscores and its defaults: num_epochs=3, learning_rate=2e-5, freeze_encoder=True. The formatter is
        this model's unless named; its codes stay, in their order, and new ones of the data are appended
        (shrink_key=True: those of the data alone). Where language_col is given, language is not used. One
        process; torchrun starts several, with finetune.py.

        Where it fails or is stopped (Ctrl-C, a signal, stop_after, each of which saves first), this object
        keeps the weights that it had; the same call resumes, and OccCANINE(save_path) is the best so far.

        Unlike in the published package, nothing is frozen, left out or filled up unless asked for:
        freeze_encoder, drop_bad_labels, allow_codes_shorter_than_block_size.

        Raises UserError, TrainingError.
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
            asked["dataset"] = dataset_file(dataset, held)
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
                    train_files, val_files = job_data.dataset_files(args.dataset)
                    args, settings, data, read = job_data.prepared(args, world, train_files, val_files)
                    train.train(args, settings, world, data, read)
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
            self._load(
                models.find_weights(args.save_path, args.save_path), Given(system=self._said["system"])
            )
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

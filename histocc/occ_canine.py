"""The model as an object, for scripts and notebooks:

    from histocc import OccCANINE

    model = OccCANINE("./output")
    model.predict(["wine merchant", "huusmand og væver"], lang=["en", "da"])
    model.finetune("data.csv", target_cols=["hisco_1", "hisco_2"], language_col="lang", save_path="./mine")

The calls are those of the published package (histocc of Dahl, Johansen and Vedel, 2024, arXiv 2402.13604), and so are the shapes of their
results; where a result is deliberately another one, its docstring says so.
"""

import contextlib
import gc
import numbers
import os
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from histocc import checkpoint, cli, coded_tables, dry_run, job_data, model_io, published
from histocc.coded_tables import as_table, texts_and_languages
from histocc.coder import Coded, Coder
from histocc.descriptions import read_descriptions
from histocc.distributed import World, choose_device
from histocc.errors import UserError
from histocc.published import Given
from histocc.stopping import Stopped, StopRequest
from histocc.text import UNKNOWN_LANGUAGE

HUB_NAME = "OccCANINE_s2s_mix"
BEHAVIORS = {"good": "greedy", "fast": "flat"}
PREDICTION_TYPES = {"greedy": "greedy", "greedy-topk": "topk", "topk": "topk", "flat": "flat", "full": "full"}
WHAT = ("pred", "probs", "logits", "bin", "embeddings")
MODEL_TYPES = {"mixer": "mix", "seq2seq": "seq2seq", "flat": "flat"}          # kinds of models by their published names
PAPER = ("Dahl, C. M., Johansen, T., & Vedel, C. (2024). Breaking the HISCO Barrier: Automatic Occupational Standardization with "
         "OccCANINE. arXiv:2402.13604. https://arxiv.org/abs/2402.13604")
BIBTEX = """@misc{dahl2024occcanine,
  author = {Dahl, Christian M{\\o}ller and Johansen, Torben and Vedel, Christian},
  title = {Breaking the {HISCO} Barrier: Automatic Occupational Standardization with {OccCANINE}},
  year = {2024}, eprint = {2402.13604}, archivePrefix = {arXiv}, primaryClass = {cs.CL}
}"""


class OccCANINE:
    """A trained model.

    Args:
        name: folder of a run, a checkpoint, an exported or published model, or its name on the hub, also as the published program takes
            it (OccCANINE_s2s_mix, Christianvedel/…); None for the published HISCO model there.
        device: "cpu", "cuda", "cuda:1", a torch.device, or None or "auto" for a GPU where there is one.
        batch_size: texts at once; may be set later.
        verbose: whether to say what is done; False, unlike in the published package.
        system: of published weights: hisco, or another one; in any case the name of the columns, instead of the model's own.
        key: file of the codes of published weights that hold none. With a column of words (see `histocc.predict --descriptions`)
            results have columns desc_1, desc_2, ….
        descriptions: words of the codes: a file, or a DataFrame with columns system_code and desc.
        hf: True: a name on the hub, unless it is a file or folder here; False: a file or folder; None: whichever is there.
        force_download: load from the hub again.
        model_type: "mix", "seq2seq" or "flat", only compared with what is loaded.
        use_within_block_sep, target_cols: of a published general-purpose model, where it does not say it.

    Attributes: name, file, model, formatter, system, coder, codes, key, key_desc, model_type, device, batch_size.

    Raises UserError.
    """

    def __init__(self, name: str | None = None, device: str | torch.device | None = None, batch_size: int = 256, verbose: bool = False, *,
                 system: str | None = None, key: str | None = None, descriptions: Any = None, hf: bool | None = None,
                 force_download: bool = False, model_type: str | None = None, use_within_block_sep: bool = False,
                 target_cols: Sequence[str] | None = None):
        self.name, self.device, self.verbose, self._key_file = name or HUB_NAME, device_of(device), verbose, key
        self._batch_size, self._said = batch_size, {"descriptions": descriptions, "system": system}
        given = Given("hisco" if (system or "").lower() == "hisco" else None, key, list(target_cols) if target_cols else None,
                      use_within_block_sep, system)
        self._load(self._file(hf, force_download), given)
        if model_type not in (None, self.model_type):
            warnings.warn(f"model_type {model_type!r}: {self.name} is of type {self.model_type!r}", stacklevel=2)
        if verbose:
            print(f"{self!r}, {len(self.codes):,} codes")

    def _file(self, hf: bool | None, force_download: bool) -> str:
        if hf is False and not os.path.exists(self.name):
            raise UserError(f"{self.name}: no such file or folder, and hf=False leaves the hub out")
        if hf and not os.path.exists(self.name) or force_download:
            folder = published.from_hub(self.name, force_download)
            return model_io.find_weights(folder, self.name)
        return model_io.find_weights(self.name, self.name)

    def _load(self, file: str, given: Given = Given()) -> None:
        self.file, state = file, model_io.load_state(file)
        brings = model_io.brings_settings(state)
        with torch.random.fork_rng([]):              # weights that are replaced at once are drawn at random: not from the caller's numbers
            model, formatter, state = model_io.model_of(file, state, given._replace(formatter=None) if brings else given)
        if given.system and not brings and (formatter.kind == "hisco") != (given.system.lower() == "hisco"):
            raise UserError(f"{file}: writes {formatter.kind} codes, which those of {given.system} are others than")
        self.coder = Coder(model.to(self.device), formatter, state, batch_size=self._batch_size)
        self.model, self.formatter, self.system = model, formatter, given.system or self.coder.system
        self.key_desc = self._words()

    def _words(self) -> dict[str, str]:
        """Code → words, of the codes that have some."""
        said = self._said["descriptions"]
        if said is None:
            return read_descriptions(self._key_file, self.codes, self.formatter, required=False) if self._key_file and os.path.isfile(self._key_file) else {}
        if isinstance(said, (str, os.PathLike)):
            return read_descriptions(os.fspath(said), self.codes, self.formatter)
        missing = [name for name in ("system_code", "desc") if name not in said]
        if missing:
            raise UserError(f"descriptions: need columns system_code and desc; {' and '.join(missing)} missing")
        return {self.formatter.repair(str(code))[0]: str(words) for code, words in zip(said["system_code"], said["desc"])}

    def __repr__(self) -> str:
        return (f"OccCANINE(name={self.name!r}, device='{self.device}', batch_size={self.batch_size}, system={self.system!r}, "
                f"model_type={self.model_type!r})")

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
        if isinstance(texts, bool) or not isinstance(texts, numbers.Integral) or texts < 1:
            raise ValueError(f"batch_size must be a whole number of at least 1, not {texts!r}")
        self._batch_size = self.coder.batch_size = int(texts)

    def predict(self, occ1: Any, lang: str | Sequence[str] = UNKNOWN_LANGUAGE, what: str | int = "pred",
                threshold: float | dict[str | None, float] | None = None, behavior: str | None = None, prediction_type: str | None = None,
                k_pred: int = 5, deduplicate: bool = True, *, order_invariant_conf: bool = True, get_dict: bool = False, get_df: bool = True, concat_in: bool = False):
        """Codes of texts, or what they are made of.

        Args:
            occ1: texts, one or several; numbers count as their digits, None and NaN as empty, which gives no code. They are cleaned by
                the model's rule; the result shows them as they were given.
            lang: one language, or one per text (None, NaN and empty are unk); one that the model does not know counts as unk, with a
                warning.
            what: pred: a row per text: occ1, lang, up to k_pred codes hisco_1, prob_1, desc_1, … (the system's name; desc only where
                words of the codes are known), conf. A number n stands for pred with k_pred = n.
                probs: array float32 [texts, codes], a probability for each code of `codes`, by the linear decoder (flat) or the other
                one. logits: the same before the sigmoid, flat alone, as a table with the numbers of the codes as columns. bin: 1 for
                each code that pred gives, columns hisco_CODE. embeddings: the encoder's pooled output, one column per number.
            threshold: probability above which a code counts, one number or by language, of the linear decoder and of full; None for the
                model's own: published ones, fitted ones, else 0.5 (full of a model without published ones gives the k_pred best).
            behavior: "good" (greedy) or "fast" (flat); None for the one that the model has, good before fast.
            prediction_type: says more than behavior: greedy; flat; full (the most probable codes of the key by the seq2seq decoder,
                each alone); topk (the same, faster); greedy-topk (the same with k_pred rows per text and a column top-k-pos).
            order_invariant_conf: False: conf of greedy is the probability of the codes in the order in which they were written.
            get_dict: a list of dicts, also where pandas is installed; get_df=False is the same. concat_in is not used, as in the
                published package.

        Returns a DataFrame, or a list of dicts where pandas is not installed; the columns depend on the arguments alone. Codes that are
        not there are None, probabilities NaN (None in dicts).

        Unlike in the published package: greedy has up to k_pred columns whatever the rows hold; conf is the probability of the set
        of codes and of nothing else after it, not the product over what pads the sequence; top-k codes are the exact ones, not those of
        a beam; -1, -2 and -3 are written so, not -0001; occ1 is the text alone, without its language; an empty text has no code;
        several languages may have thresholds of their own in one call; a language that the model does not know is read as unk.

        Raises ValueError, and UserError where the model has no such decoder.
        """
        if isinstance(what, numbers.Integral) and not isinstance(what, bool):
            what, k_pred = "pred", int(what)
        get_dict, behavior = get_dict or not get_df, behavior or ("fast" if self.coder.kind == "flat" else "good")
        for given, choices in ((what, WHAT), (behavior, BEHAVIORS), (prediction_type, (None, *PREDICTION_TYPES))):
            if given not in choices:
                raise ValueError(f"{given!r} is not one of {', '.join(map(repr, choices))}")
        if k_pred < 1:
            raise ValueError(f"k_pred must be at least 1, not {k_pred}")
        shown, texts, languages = texts_and_languages(occ1, lang)
        self._check_threshold(threshold)
        self._warn_of_unknown(languages)
        kind = prediction_type or BEHAVIORS[behavior]
        decoder = PREDICTION_TYPES[kind]
        if what in ("probs", "logits", "embeddings"):
            return self._numbers(what, shown, texts, languages, decoder, deduplicate, get_dict)
        coded = self._coded(texts, languages, decoder, k_pred, threshold, deduplicate, order_invariant_conf)
        if what == "bin":
            return as_table(coded_tables.binary(coded, self.codes, self.system), get_dict)
        most = min(k_pred, self.formatter.max_num_codes if decoder == "greedy" else len(self.codes))
        columns = coded_tables.a_row_per_code if kind == "greedy-topk" else coded_tables.a_row_per_text
        return as_table(columns(shown, languages, coded, most, self.system, self.key_desc), get_dict)

    def _coded(self, texts: list[str], languages: list[str], decoder: str, k_pred: int, threshold, deduplicate: bool,
               in_any_order: bool) -> list[Coded]:
        coded = self.coder.code(texts, languages, decoder, k_pred, threshold, deduplicate, in_any_order=in_any_order)
        thresholds = self.coder.thresholds.with_given(threshold)
        if decoder != "full" or threshold is None and thresholds.source != "published":
            return coded
        kept = [sum(prob > thresholds.least(self.coder.known(language)) for prob in each.probs) for each, language in zip(coded, languages)]
        return [each._replace(codes=each.codes[:count], probs=each.probs[:count]) for each, count in zip(coded, kept)]

    def _numbers(self, what: str, shown: list, texts: list[str], languages: list[str], decoder: str, deduplicate: bool, get_dict: bool):
        if what == "probs":
            return self.coder.probabilities(texts, languages, "flat" if decoder == "flat" else "full", deduplicate)
        if what == "logits" and decoder != "flat":
            raise ValueError("what='logits' is for the linear decoder: behavior='fast', or prediction_type='flat'")
        found = (self.coder.embeddings(texts, languages, deduplicate) if what == "embeddings" else
                 self.coder.probabilities(texts, languages, "flat", deduplicate, logits=True))
        return as_table({"occ1": shown, **dict(enumerate(found.T))}, get_dict)

    def _check_threshold(self, threshold: Any) -> None:
        values = threshold if isinstance(threshold, dict) else {} if threshold is None else {None: threshold}
        unknown = [name for name in values if name is not None and name not in self.coder.languages]
        if unknown:
            raise ValueError(f"threshold: the model does not know the language {unknown[0]!r}; it knows {', '.join(self.coder.languages)}")
        if any(isinstance(value, bool) or not isinstance(value, numbers.Real) for value in values.values()):
            raise ValueError(f"threshold {threshold!r} is not a number, nor numbers by language")

    def _warn_of_unknown(self, languages: list[str]) -> None:
        unknown = Counter(language for language in languages if self.coder.known(language) != language.strip())
        if unknown:
            names = ", ".join(f"{language!r} ({number:,})" for language, number in unknown.most_common(10))
            warnings.warn(f"languages that the model does not know, coded as unk: {names}; it knows {', '.join(self.coder.languages)}", stacklevel=3)

    def citation(self, BibTex: bool = False) -> None:
        """Prints what to cite where the models of the paper are used."""
        print(BIBTEX if BibTex else PAPER)

    def finetune(self, dataset: Any, save_path: str | os.PathLike | None = None, input_col: str | None = None, language: str | None = None,
                 language_col: str | None = None, target_cols: Sequence[str] | None = None, **arguments) -> "OccCANINE":
        """Trains on from this model as `finetune.py` does, and becomes the best model of that run; returns itself.

        dataset: a CSV or Parquet file, or a DataFrame. The others are the arguments of finetune.py, with underscores and its defaults:
        num_epochs=3, learning_rate=2e-5, freeze_encoder=True. The formatter is this model's unless named; its codes stay, in their
        order, and new ones of the data are appended (shrink_key=True: those of the data alone). Where language_col is given,
        language is not used. The same call resumes where an interrupted one stopped; Ctrl-C saves first. One process; torchrun starts
        several, with finetune.py.

        Unlike in the published package, nothing is frozen, left out or filled up unless asked for: freeze_encoder,
        drop_bad_labels, allow_codes_shorter_than_block_size.

        Raises UserError, TrainingError.
        """
        device = device_of(arguments.get("device", self.device))
        named = {"save_path": save_path, "input_col": input_col, "language": None if language_col else language, "language_col": language_col,
                 "target_cols": [target_cols] if isinstance(target_cols, str) else target_cols and list(target_cols)}
        named = {name: value for name, value in named.items() if value is not None}
        with contextlib.ExitStack() as held:
            file = self._dataset_file(dataset, held)
            args = finetune_parser().parse_args(["--dataset", file, *as_flags(self._defaults() | named | arguments | {"device": device.type})])
            if args.distributed:
                raise UserError("several processes are started by a launcher: torchrun --nproc_per_node=2 finetune.py --distributed …")
            self._train(args, device)
        return self

    def _train(self, args, device: torch.device) -> None:
        stop = StopRequest()
        stop.limit(args.stop_after)
        listening = stop.listening() if threading.current_thread() is threading.main_thread() else contextlib.nullcontext()
        world = World(device=device, stop=stop)
        try:
            with listening, settings_of_torch(), torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
                train_files, val_files = job_data.dataset_files(args.dataset)
                data, formatter = job_data.prepared(args, world, train_files, val_files)
                dry_run.run_as_asked(args, world, data, formatter, files=train_files)
        except Stopped:
            stop.acted = True
        finally:
            gc.collect()
        trains = not (args.prepare_only or args.eval_only or args.dry_run)
        if trains and checkpoint.find(args.save_path) is not None:
            self.name = args.save_path
            self._load(model_io.find_weights(args.save_path, args.save_path), Given(system=self._said["system"]))
        if stop.acted and stop.exit_code:
            raise KeyboardInterrupt

    @staticmethod
    def _dataset_file(dataset: Any, held: contextlib.ExitStack) -> str:
        """A data set's file; a DataFrame goes into one that `held` removes."""
        if isinstance(dataset, (str, os.PathLike)):
            return os.fspath(dataset)
        if not hasattr(dataset, "to_csv"):
            raise UserError(f"dataset: a file or a DataFrame, not {type(dataset).__name__}")
        if len(set(dataset.columns)) < len(dataset.columns):
            raise UserError(f"dataset: has columns of the same name: {', '.join(map(str, dataset.columns))}")
        file = os.path.join(held.enter_context(tempfile.TemporaryDirectory(prefix="histocc_")), "DataFrame.csv")
        frame = dataset.copy()
        for name in frame.columns:                   # whole numbers among missing values are floats in pandas, and codes have no .0
            if frame[name].dtype.kind == "f" and (frame[name].dropna() % 1 == 0).all():
                frame[name] = frame[name].astype("Int64")
        frame.to_csv(file, index=False)
        return file

    def _defaults(self) -> dict:
        """Arguments of a run that starts from this model."""
        own = self.formatter.to_dict()
        general = {"block_size": own["block_size"], "use_within_block_sep": own["within_block_sep"] is not None,
                   "allow_codes_shorter_than_block_size": own["allow_short"], "target_cols": own["target_cols"]} if own["kind"] == "gpf" else {}
        return {"initial_checkpoint": self.file, "initial_key": self._key_file, "formatter": own["kind"], **general}


def device_of(given: str | torch.device | None) -> torch.device:
    """Raises ValueError for what is no device, UserError for one that is not there."""
    name, sign, number = str("auto" if given is None else given).partition(":")
    if name not in ("auto", "cpu", "cuda") or sign and not (name == "cuda" and number.isdecimal() or str(given) == "cpu:0"):
        raise ValueError(f"device {given!r} is none of None, 'auto', 'cpu', 'cuda', 'cuda:N'")
    if sign and name == "cuda" and int(number) >= max(1, torch.cuda.device_count()):
        raise UserError(f"device {given}: {torch.cuda.device_count()} GPUs are visible here")
    with settings_of_torch():
        device = choose_device(name, 0, 1)
    if device.type == "cuda" and sign:
        device = torch.device("cuda", int(number))
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def settings_of_torch():
    """Afterwards torch has the settings that it had: threads, the precision of matrix products, cuDNN's attention. A run sets them."""
    threads, precision, cudnn = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


def finetune_parser() -> cli.Parser:
    """The arguments of finetune.py."""
    parser = cli.make_parser("finetune", "")
    parser.add_argument("--dataset", required=True)
    cli.add_finetune_arguments(parser)
    return parser


def as_flags(arguments: dict) -> list[str]:
    """Arguments by name as a command line, so that they are checked as there; None is one not given, as is False where nothing else
    can be said."""
    flags, off = [], finetune_parser()._option_string_actions
    for name, value in arguments.items():
        if value is False and cli.flag(f"no_{name}") in off:
            flags.append(cli.flag(f"no_{name}"))
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
        single = len(values) == 1 and not isinstance(value, (list, tuple))
        flags += [f"{cli.flag(name)}={values[0]}"] if single else [cli.flag(name), *(os.fspath(v) if isinstance(v, os.PathLike) else str(v) for v in values)]
    return flags

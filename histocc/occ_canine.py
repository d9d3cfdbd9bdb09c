"""The model as an object, for scripts and notebooks:

    from histocc import OccCANINE

    model = OccCANINE("./output")
    model.predict(["wine merchant", "huusmand og væver"], lang=["en", "da"])
    model.finetune("data.csv", target_cols=["hisco_1", "hisco_2"], language_col="lang", save_path="./mine")
"""

import contextlib
import gc
import math
import os
import threading
import warnings
from collections import Counter
from collections.abc import Sequence

import torch

from histocc import checkpoint, cli, dry_run, job_data, model_io
from histocc.coder import Coder
from histocc.distributed import World, choose_device
from histocc.errors import UserError
from histocc.stopping import Stopped, StopRequest
from histocc.text import UNKNOWN_LANGUAGE

HUB_NAME = "Christianvedel/OccCANINE_s2s_mix"
BEHAVIORS = {"good": "greedy", "fast": "flat"}
PREDICTION_TYPES = {"greedy": "greedy", "greedy-topk": "topk", "flat": "flat", "full": "full"}


class OccCANINE:
    """A trained model.

    name: folder of a run, a checkpoint, a published model, or its name on the hub; None for the published HISCO model there.
    device: "cpu", "cuda", "cuda:1", a torch.device, or None or "auto" for a GPU where there is one. batch_size: texts at once. system, key: of published weights, "hisco" or
    "occ1950", and the file of their codes where they hold none; a run brings both, and its system is then in `system`. Raises UserError.
    """

    def __init__(self, name: str | None = None, device: str | torch.device | None = None, batch_size: int = 256, system: str = "hisco", key: str | None = None):
        self.device = device_of(device)
        self.batch_size = batch_size
        self._load(name or HUB_NAME, system, key)

    def _load(self, path: str, system: str | None = None, key: str | None = None) -> None:
        self.file = model_io.find_weights(path, path)
        state = model_io.load_state(self.file)
        with torch.random.fork_rng([]):              # weights that are replaced at once are drawn at random: not from the caller's numbers
            model, formatter, state = model_io.model_of(self.file, state, None if model_io.brings_settings(state) else system, key)
        self.coder = Coder(model.to(self.device), formatter, state, batch_size=self.batch_size)
        self.model, self.formatter, self.system = model, formatter, self.coder.system

    @property
    def codes(self) -> list[str]:
        """The codes that the model knows, in the order of its linear outputs."""
        return self.coder.codes

    def predict(self, texts: str | Sequence[str], lang: str | Sequence[str] = UNKNOWN_LANGUAGE, what: str = "pred", behavior: str = "good",
                prediction_type: str | None = None, k_pred: int = 5, threshold: float | dict[str, float] = 0.5, deduplicate: bool = True):
        """A row per text: a list of dicts, or a DataFrame where pandas is installed. Every row has `occ1` and `lang`, and with what =

        pred: up to k_pred codes `hisco_1`, `prob_1`, … (the system's name; None where there is no further one) and `conf`, how sure the
        model is of them together (see `histocc.coder.Coded`); all None for an empty text.
        probs: a probability for each code of `codes`, by the linear decoder (flat) or the seq2seq decoder.
        embeddings: `embedding`, the encoder's pooled output, float32 [width].

        texts: one or several; None and NaN count as empty. lang: one language, or one per text (None, NaN and empty are unk); one that the model does not know
        counts as unk, with a warning. behavior: "good" (greedy) or
        "fast" (flat), unless prediction_type says more: greedy, greedy-topk (the most probable codes of the key, each alone), flat, full
        (the same by way of every code's probability). threshold: flat alone, one number or by language. deduplicate: the same text in the
        same language is coded once. Raises ValueError, and UserError where the model has no such decoder.
        """
        for given, choices in ((what, ("pred", "probs", "embeddings")), (behavior, BEHAVIORS), (prediction_type, (None, *PREDICTION_TYPES))):
            if given not in choices:
                raise ValueError(f"{given!r} is not one of {', '.join(map(repr, choices))}")
        if k_pred < 1:
            raise ValueError(f"k_pred must be at least 1, not {k_pred}")
        given = [texts] if isinstance(texts, str) else list(texts)
        texts = [text_of(i, text) for i, text in enumerate(given)]
        languages = [lang] * len(texts) if isinstance(lang, str) else list(lang)
        if len(languages) != len(texts):
            raise ValueError(f"{len(texts)} texts, but {len(languages)} languages")
        languages = [text_of(i, language) or "unk" for i, language in enumerate(languages)]
        self._warn_of_unknown(languages)
        decoder = PREDICTION_TYPES[prediction_type or BEHAVIORS[behavior]]
        rows = [{"occ1": text, "lang": language} for text, language in zip(given, languages)]
        if what == "embeddings":
            for row, vector in zip(rows, self.coder.embeddings(texts, languages, deduplicate)):
                row["embedding"] = vector
        elif what == "probs":
            found = self.coder.probabilities(texts, languages, "flat" if decoder == "flat" else "full", deduplicate)
            for row, probs in zip(rows, found.tolist()):
                row.update(zip(self.codes, probs))
        else:
            thresholds = {None: 0.5, **threshold} if isinstance(threshold, dict) else threshold
            most = min(k_pred, self.formatter.max_num_codes if decoder == "greedy" else len(self.codes))
            for row, coded in zip(rows, self.coder.code(texts, languages, decoder, k_pred, thresholds, deduplicate)):
                for i in range(most):
                    there = i < len(coded.codes)
                    row[f"{self.system}_{i + 1}"], row[f"prob_{i + 1}"] = (coded.codes[i], coded.probs[i]) if there else (None, None)
                row["conf"] = coded.conf
        return as_table(rows)

    def _warn_of_unknown(self, languages: list[str]) -> None:
        unknown = Counter(language for language in languages if self.coder.known(language) != language.strip())
        if unknown:
            names = ", ".join(f"{language!r} ({number:,})" for language, number in unknown.most_common(10))
            warnings.warn(f"languages that the model does not know, coded as unk: {names}; it knows {', '.join(self.coder.languages)}", stacklevel=3)

    def finetune(self, dataset: str, **arguments) -> "OccCANINE":
        """Trains on from this model as `finetune.py` does, and becomes the best model of that run; returns itself.

        dataset: a CSV or Parquet file. arguments: those of finetune.py, with underscores: target_cols=["hisco_1"], num_epochs=3,
        save_path="./mine", language_col="lang". The formatter is this model's unless named. The same call goes on where an interrupted
        one stopped; Ctrl-C saves first. One process; torchrun starts several, with finetune.py. Raises UserError, TrainingError.
        """
        device = device_of(arguments.get("device", self.device))
        args = finetune_parser().parse_args(["--dataset", str(dataset), *as_flags(self._defaults() | arguments | {"device": device.type})])
        if args.distributed:
            raise UserError("several processes are started by a launcher: torchrun --nproc_per_node=2 finetune.py --distributed …")
        stop = StopRequest()
        stop.limit(args.stop_after)
        listening = stop.listening() if threading.current_thread() is threading.main_thread() else contextlib.nullcontext()
        world = World(device=device, stop=stop)
        try:
            with listening, settings_of_torch(), torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
                data, formatter = job_data.prepared(args, world, train_files=[args.dataset], val_files=[])
                dry_run.run_as_asked(args, world, data, formatter, files=[args.dataset])
        except Stopped:
            stop.acted = True
        finally:
            gc.collect()
        trains = not (args.prepare_only or args.eval_only or args.dry_run)
        if trains and checkpoint.find(args.save_path) is not None:
            self._load(args.save_path)
        if stop.acted and stop.exit_code:
            raise KeyboardInterrupt
        return self

    def _defaults(self) -> dict:
        """Arguments of a run that starts from this model."""
        own = self.formatter.to_dict()
        general = {"block_size": own["block_size"], "use_within_block_sep": own["within_block_sep"] is not None,
                   "allow_codes_shorter_than_block_size": own["allow_short"]} if own["kind"] == "gpf" else {}
        return {"initial_checkpoint": self.file, "formatter": own["kind"], **general}


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
    """Arguments by name as a command line, so that they are checked as there; None and False are those not given."""
    flags = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, (list, tuple)) else [value]
        single = len(values) == 1 and not isinstance(value, (list, tuple))
        flags += [f"{cli.flag(name)}={values[0]}"] if single else [cli.flag(name), *(os.fspath(v) if isinstance(v, os.PathLike) else str(v) for v in values)]
    return flags


def text_of(row: int, given) -> str:
    """A text as it is; none and NaN, as pandas has them, are empty. Raises ValueError for anything else."""
    if given is None or isinstance(given, float) and math.isnan(given) or type(given).__name__ == "NAType":
        return ""
    if not isinstance(given, str):
        raise ValueError(f"row {row} (counted from 0): {given!r} is not a text")
    return given


def as_table(rows: list[dict]):
    try:
        import pandas
    except ImportError:
        return rows
    return pandas.DataFrame(rows)

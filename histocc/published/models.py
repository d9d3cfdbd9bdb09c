"""Models from checkpoints, exported files and published weights, and the initial weights of a run."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch.overrides import TorchFunctionMode

from histocc import lexicon
from histocc.figure import Figure
from histocc.formatter import NEVER_SHORT, PAD_IDX, WITHIN_BLOCK_SEP, BlockyFormatter, hisco_key
from histocc.model.canine import CanineConfig
from histocc.model.confidence import PUBLISHED, Confidence, Thresholds
from histocc.model.mixer import MODEL_SIZES, NGRAMS, Seq2SeqMixerOccCANINE, model_config
from histocc.model.ngrams import LONGEST
from histocc.published import built_in, formats
from histocc.published.formats import Given, PublishedWeights
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.text import AS_IS, LANGUAGES, TEXT_RULES

Loaded = tuple[Seq2SeqMixerOccCANINE, BlockyFormatter, dict]
# Prefixes of the tensors that a kind of model lacks.
LACKING = {"mixer": (), "seq2seq": ("linear_decoder.",), "flat": ("decoder.",)}
# Prefixes of further tensors that a model in closed form lacks.
LACKING_OF_RIDGE = (
    "linear_decoder.",
    "ngrams.table.",
    "ngrams.linear.",
    "ngrams.word_to_",
    "ngrams.text_to_",
)
# Entries of a checkpoint that coding needs, if the model has them.
CODING = ["config", "key", "kind", "formatter", "system", "languages", "thresholds", "linear_share", "splits"]
CODING += ["figure", "confidence", "source", "origin", "hisco_numbers", "prior", "trained", "answers"]
OF_CODES = {  # their dimension of the codes
    "linear_decoder.weight": 0,
    "linear_decoder.bias": 0,
    "ngrams.linear.weight": 0,
}
OF_BLOCKS = ("kind", "block_size", "within_block_sep")  # settings of a formatter: how it writes blocks


def new_model(
    config: dict, formatter: BlockyFormatter, codes: int, dropout: float = 0.0, ngram_dropout: float = 0.0
) -> Seq2SeqMixerOccCANINE:
    """Return the model that a checkpoint's `config` describes, with random weights from torch's generator.
    Raises ValueError for settings that contradict each other.
    """
    encoder = CanineConfig.from_dict(config)
    positions = min(encoder.max_position_embeddings, encoder.num_hash_buckets)
    if type(config["max_len"]) is not int or not 16 <= -(-config["max_len"] // 4) * 4 <= positions:
        raise ValueError(f"max_len: found {config['max_len']!r}, expected 16 … {positions}, its positions")
    if config["text"] not in TEXT_RULES:
        raise ValueError(f"text: found {config['text']!r}, expected one of {', '.join(TEXT_RULES)}")
    return Seq2SeqMixerOccCANINE(
        num_classes=formatter.num_classes,
        num_classes_flat=codes,
        dropout_rate=dropout,
        decoder_dim_feedforward=config["decoder_dim_feedforward"],
        config=encoder,
        memory_mask=config["memory_mask"],
        target_mask=config["target_mask"],
        ngrams=config.get("ngrams"),
        ngram_dropout=ngram_dropout,
        encoder=config.get("encoder", True),
        ridge=config.get("ridge"),
    )


class _WithoutWeights(TorchFunctionMode):
    """A mode for the meta device that draws no random numbers and keeps computed values in memory. Otherwise
    torch would import its compiler, which takes seconds.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):  # methods of Tensor, and torch.nn.init
            return args[0] if args else (kwargs or {})["tensor"]
        computes = func in (torch.arange, torch.tensor)
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if computes else {})})


def model_with_weights(
    config: dict, formatter: BlockyFormatter, codes: int, weights: dict, kind: str = "mixer"
) -> Seq2SeqMixerOccCANINE:
    """Return the model that `config` describes, in evaluation mode and float32, made only of these `weights`.
    Nothing else is allocated. A missing linear decoder knows no codes, a missing other decoder writes none.
    Raises ValueError, RuntimeError and others if the weights do not fit.
    """
    lacks = LACKING[kind] + (LACKING_OF_RIDGE if config.get("ridge") else ())
    if not config.get("ridge") and config["hidden_size"] not in {
        size for tensor in weights.values() for size in tensor.shape
    }:
        raise ValueError(f"hidden_size: found {config['hidden_size']!r:.60}, which no tensor has")
    with torch.device("meta"), _WithoutWeights():
        model = new_model(config, formatter, codes)
    expected = model.state_dict()
    lacking = {
        name: torch.zeros(()).expand(x.shape) for name, x in expected.items() if name.startswith(lacks)
    }
    if kind == "flat":
        lacking["decoder.head.bias"] = (torch.arange(len(expected["decoder.head.bias"])) == PAD_IDX).float()
    model.load_state_dict({**lacking, **weights}, strict=True, assign=True)
    for name, tensor in model.float().state_dict().items():
        if tensor.dtype != expected[name].dtype or not checkpoint.is_finite(tensor):
            raise ValueError(f"{name}: {tensor.dtype}, or numbers that are not finite")
    return model.eval()


# ---- from files


def find_weights(path: str, what: str, force_download: bool = False) -> str:
    """Return the file of weights for a path, the built-in model, or a name on the hub. what: start of the
    UserError's message.
    """
    path = built_in.folder() if path == built_in.NAME and not os.path.lexists(path) else path
    file = formats.local_weights(path)
    is_path = path.startswith((".", "/", "~")) or path.endswith((".bin", ".safetensors"))
    if not os.path.lexists(path) and path.count("/") <= 1 and not is_path:
        file = formats.local_weights(formats.from_hub(path, force_download))
    if file is None:
        raise UserError(f"{what}: no checkpoint there: neither a file nor the folder of a run or a model")
    return file


def is_shared(model: str) -> bool:
    """Return whether other projects also use a model: a name on the hub, the built-in model or its folder, or
    a link. Its file and its folder must not be written to.
    """
    file = formats.local_weights(model) or ""
    kept = os.path.join(os.path.realpath(built_in.cache_folder()), "")
    return not os.path.lexists(model) or os.path.islink(file) or os.path.realpath(file).startswith(kept)


def outline(model: str) -> Loaded | None:
    """Return a stand-in for the built-in model if that is named but not made yet, else None. It knows no
    texts, but its languages, codes and decoder allow names to be checked first.
    """
    if model != built_in.NAME or os.path.lexists(model) or built_in.is_made(built_in.path()):
        return None
    formatter, key = BlockyFormatter("hisco", ["hisco_1", "hisco_2", "hisco_3"]), hisco_key()
    numbers = {code: i for i, code in enumerate(key)}
    state = {"kind": "flat", "languages": lexicon.LEXICON_LANGUAGES, "key": numbers}
    state |= {"args": {"language_col": "lang"}, "config": {"text": AS_IS, "max_len": LONGEST}}
    sizes = formatter.num_classes, len(key), None, None
    how = {"config": model_config(NGRAMS), "ngrams": {"rows": 1, "width": 1}, "encoder": False}
    return Seq2SeqMixerOccCANINE(*sizes, **how), formatter, state


def load_model(path: str, device: torch.device | str = "cpu", given: Given = Given()) -> Loaded:
    """Return (model in evaluation mode, formatter, checkpoint) from a checkpoint, a run's folder, an exported
    file, or published weights. given: only for published weights. Raises UserError.

    Example:
        >>> from histocc import load_model
        >>> model, formatter, state = load_model("./output")
        >>> state["step"], len(state["key"])
        (0, 289)
    """
    file = find_weights(path, path)
    model, formatter, state = model_of_content(file, formats.load_content(file), given)
    return model.to(device), formatter, state


def brings_settings(content: dict) -> bool:
    """Return whether a file of weights is a checkpoint or an export of histocc, with formatter and sizes."""
    return "format" in content or "config" in content or formats.SETTINGS_ENTRY in content


def model_of_content(file: str, content: dict, given: Given = Given()) -> Loaded:
    """Return `load_model`'s result for the output of `formats.load_content`, on the CPU."""
    if not brings_settings(content):
        with checkpoint.reading(file):
            return _published_model(formats.read_published(file, content), given)
    if given.formatter or given.key:
        raise UserError(f"{file}: has its own formatter and key; leave out --formatter and --key")
    return model_of_checkpoint(file, content)


def model_of_checkpoint(file: str, content: dict) -> Loaded:
    """Return `model_of_content`'s result for a run's or an exported file. Raises UserError."""
    with checkpoint.reading(file):
        settings, weights = content.get(formats.SETTINGS_ENTRY, content), content["model"]
        checkpoint.check_format(file, settings.get("format"))
        codes = formats.codes_of_key(file, content["key"])
        formatter = BlockyFormatter.from_dict(settings["formatter"])
        model = model_with_weights(
            settings["config"], formatter, len(codes), weights, settings.get("kind", "mixer")
        )
        state = {
            **settings,
            "model": weights,
            "key": {code: i for i, code in enumerate(codes)},
            "system": str(settings["system"]),
            "languages": list(map(str, settings["languages"])),
        }
        Thresholds.of(state)
        Confidence.of(state)
        Figure.of(state)
        for name, kind in (("step", int), ("position", dict), ("args", dict)):
            if not isinstance(state.get(name, kind()), kind):
                raise ValueError(f"{name}: found {state[name]!r:.60}, expected {kind.__name__}")
        check_numbers(model, state)
        if "" in codes or not 0 <= (state.get("linear_share") or 0.0) <= 1:
            raise ValueError("an output without a code, or a linear_share that is not 0 … 1")
    return model, formatter, state


def check_numbers(model: Seq2SeqMixerOccCANINE, state: dict) -> None:
    """Raise an error if numbers of a closed form, or of its answers to its training texts, point at missing
    entries.
    """
    ridge, answers, prior = model.ridge, state.get("answers"), state.get("prior")
    name, key = (prior["name"], prior["key"]) if prior else ("none", ())
    codes, fits = torch.zeros(0), ridge is None or ridge.prior == len(key)
    if ridge is not None:
        ridge.texts()
        codes = torch.cat([ridge.outputs, ridge.places])
        fits &= bool((ridge.outputs >= 0).all())
    if answers:
        codes = torch.cat([codes, answers["codes"].flatten()])
        fits &= len(answers["keys"]) == len(answers["codes"]) == len(answers["conf"])
    if not fits or ((codes < -1) | (codes >= len(state["key"]))).any():
        raise ValueError(f"found codes, texts or a prior ({name}) that differ from the training")


def load_run(file: str) -> dict:
    """Return a checkpoint to resume a run from, its key in the order of the outputs. Raises UserError."""
    return model_of_checkpoint(file, checkpoint.load_resumable(file))[2]


def _published_model(found: PublishedWeights, given: Given) -> Loaded:
    """Return a published model. It reads and decodes as it was trained: texts in lower-case ASCII, padded to
    128 positions. A seq2seq decoder also attends to padding. Raises UserError.
    """
    if found.kind == "encoder":
        raise UserError(f"{found.file}: only an encoder, it cannot code; --initial-checkpoint trains from it")
    found = found.with_codes(given.key() if given.key else _codes(found))
    formatter = _published_formatter(found, given)
    key = {formatter.repair(code)[0]: i for i, code in enumerate(found.codes)}
    model = model_with_weights(found.config, formatter, len(found.codes), found.weights, found.kind)
    if len(key) < len(found.codes):
        raise ValueError("key: a code is listed twice, with and without its leading zero")
    state = {
        "model": found.weights,
        "key": key,
        "config": found.config,
        "formatter": formatter.to_dict(),
        "system": given.system or system_name(formatter),
        "languages": list(LANGUAGES),
        "kind": found.kind,
        "thresholds": PUBLISHED,
        "source": "published",
    }
    return model, formatter, state


# ---- codes and formatters of published weights


def _codes(found: PublishedWeights) -> list[str]:
    """Return the codes of the linear outputs from the file, or from the HISCO key if that fits."""
    is_hisco = not found.tokens or _kind_of_formatter(found) == "hisco"
    fits = is_hisco and found.outputs in (0, len(hisco_key()))
    return found.codes or (list(hisco_key()) if fits else [])


def _kind_of_formatter(found: PublishedWeights) -> str | None:
    """Return hisco, occ1950 or gpf, from the tokens or a flat classifier's codes, or None if unknown."""
    if not found.tokens:
        repair = BlockyFormatter("hisco", None).repair
        return "hisco" if [repair(code)[0] for code in found.codes] == list(hisco_key()) else None
    # the published program treats any file with its own tokens as general-purpose
    for kind in ("gpf",) if found.chars else ("hisco", "occ1950", "gpf"):
        if found.tokens == BlockyFormatter(kind, ["code"], chars=found.chars).num_classes[0] + 1:
            return kind
    return None


def _published_formatter(found: PublishedWeights, given: Given) -> BlockyFormatter:
    """Return the formatter of a published model. For gpf, block size and separator come from the key, as in
    the published program, the number of codes from config.json or the target columns. Raises UserError.
    """
    kind = _kind_of_formatter(found) or (None if found.tokens else given.formatter)
    if kind is None or given.formatter not in (None, kind):
        raise UserError(
            f"{found.file}: its {found.tokens or 'no'} tokens belong to formatter {kind or 'unknown'}:"
            " name the system with --formatter, its tokens in a chars.json next to the file"
        )
    if kind != "gpf":
        return BlockyFormatter(kind, given.target_cols)
    separated = given.use_within_block_sep or WITHIN_BLOCK_SEP in "".join(found.codes)
    block_size = max(code_lengths(found.codes, separated), default=5)
    short = code_lengths(set(found.codes) - NEVER_SHORT, separated) - {block_size}
    columns = list(given.target_cols or [])
    count, rest = divmod(found.positions - 2, block_size) if found.positions else (len(columns), 0)
    if rest or count < max(1, len(columns)):  # BOS, the blocks, EOS
        raise UserError(
            f"{found.file}: a general-purpose model that does not say how many codes it writes: name the"
            " columns of its training with --target-cols, one for each code"
        )
    columns += [f"{given.system or 'code'}_{i}" for i in range(len(columns) + 1, count + 1)]
    return BlockyFormatter(kind, columns, block_size, separated, allow_short=bool(short), chars=found.chars)


def code_lengths(codes: Iterable[str], separated: bool) -> set[int]:
    """Return the numbers of tokens of codes in a general-purpose key. separated: by commas."""
    return {len(code.split(WITHIN_BLOCK_SEP) if separated else code) for code in codes}


# ---- sizes and names


def has_size(config: dict, name: str) -> bool:
    """Return whether the encoder of `config` has the sizes of --model-size `name`."""
    sizes = {field: value for field, value in model_config(name).to_dict().items() if "dropout" not in field}
    return sizes.items() <= config.items() and config.get("encoder", True) == (name != NGRAMS)


def size_name(config: dict) -> str | None:
    """Return tiny, small or base, or None for other sizes."""
    return next((name for name in MODEL_SIZES if has_size(config, name)), None)


def system_name(formatter: BlockyFormatter) -> str:
    """Return the name of the output columns: hisco, occ1950, or the common part of the target columns."""
    if formatter.kind in ("hisco", "occ1950"):
        return formatter.kind
    # hisco_1, code1, but OCC1950 stays
    bare = [re.sub(r"_\d+$|(?<=[A-Za-z])\d$", "", name) for name in formatter.target_cols]
    return os.path.commonprefix(bare).rstrip("_") or formatter.target_cols[0]


# ---- weights that a run starts from


def initial_weights(file: str, content: dict, initial_key: list[str] | None, key: list[str] | None) -> dict:
    """Return the entries that a run takes from --initial-checkpoint, from any program. Raises UserError.

    Args:
        content: the result of `formats.load_content`.
        initial_key: codes to use instead of the codes of published weights, or None.
        key: codes of the run, for published weights without codes of a system other than HISCO, or None.

    Returns:
        model, key, config, args and formatter as in a checkpoint, formatter None if it is not known. what: a
        description of the file. A published decoder attends to padding, as in its training. PAD is masked.
    """
    if brings_settings(content):
        state = {
            "args": {},
            **model_of_checkpoint(file, content)[2],
            "what": f"{file}, a checkpoint of histocc",
        }
    else:
        with checkpoint.reading(file):
            found, formatter = formats.read_published(file, content), None
            if found.kind != "encoder" and (codes := initial_key or _codes(found) or key):
                found = found.with_codes(codes)
            if found.kind != "encoder" and _kind_of_formatter(found):
                formatter = _published_formatter(found, Given(target_cols=["code"])).to_dict()
        state = {
            "model": found.weights,
            "key": {code: i for i, code in enumerate(found.codes)},
            "args": {},
            "config": found.config,
            "formatter": formatter,
            "what": f"{file}, {formats.MODEL_KINDS[found.kind]}",
            "source": "published",
        }
    if state.get("source") == "published":
        state["config"] = {**state["config"], "target_mask": True}
    return state


def load_initial_weights(
    model: Seq2SeqMixerOccCANINE,
    first: dict,
    codes: list[str],
    formatter: BlockyFormatter,
    only_encoder: bool,
    say: Callable[[str], None],
) -> None:
    """Copy the result of `initial_weights` into the model of a run where name and shape fit. From a linear
    decoder with another key, copy the rows of the common codes. Report which weights are new.
    """
    say(f"Initial weights: {first['what']}" + ", only the encoder" * only_encoder)
    weights = {name: x for name, x in first["model"].items() if name.startswith("encoder." * only_encoder)}
    own = model.state_dict()
    if model.ngrams and "ngrams.idf" not in weights:
        model.ngrams.zero_output()  # they add nothing until they are trained
        own = {name: x for name, x in own.items() if not name.startswith("ngrams.")}
    rows = {formatter.repair(code)[0]: i for i, code in enumerate(first["key"])}  # 01110 may be 1110
    if list(rows) != codes and "linear_decoder.weight" in weights:
        new = torch.tensor([i for i, code in enumerate(codes) if code in rows], dtype=torch.long)
        old = torch.tensor([rows[code] for code in codes if code in rows], dtype=torch.long)
        say(
            f"  the key differs: the linear decoder keeps the weights of {len(new):,} of {len(codes):,}"
            " codes, the others are new" + "; --initial-key names its codes" * (not rows)
        )
        for name in {*OF_CODES} & own.keys() & weights.keys():
            kept = weights[name].index_select(OF_CODES[name], old).to(own[name])
            weights[name] = own[name].index_copy(OF_CODES[name], new, kept)
    fitting = {name: x for name, x in weights.items() if name in own and own[name].shape == x.shape}
    model.load_state_dict(fitting, strict=False)
    missing = own.keys() - fitting
    for what, names in (("new, with random weights", missing), ("unused", weights.keys() - fitting)):
        if names:
            parts = Counter(name.partition(".")[0] for name in names)
            say(f"  {what}, tensors: {', '.join(f'{n} of {part}' for part, n in sorted(parts.items()))}")
    if first["formatter"] and not only_encoder:
        kind, size, separator = before = [first["formatter"][name] for name in OF_BLOCKS]
        if before != [formatter.to_dict()[name] for name in OF_BLOCKS]:
            flags = f"--formatter {kind} --block-size {size}" + " --use-within-block-sep" * bool(separator)
            keeps = f": {flags} keeps it" if kind != "classes" else ""
            say(f"  its decoder writes codes in other blocks than this run{keeps}")

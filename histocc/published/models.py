"""Models out of checkpoints, exported files and what others published."""

import os
import re

import torch
from torch.overrides import TorchFunctionMode

from histocc.formatter import (
    NEVER_SHORT,
    PAD_IDX,
    WITHIN_BLOCK_SEP,
    BlockyFormatter,
    CodeError,
    hisco_key,
    make_formatter,
)
from histocc.model.canine import CanineConfig
from histocc.model.confidence import PUBLISHED, Confidence, Thresholds
from histocc.model.mixer import MODEL_SIZES, NGRAMS, Seq2SeqMixerOccCANINE, model_config
from histocc.published import formats
from histocc.published.formats import Given, Published
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.files import kind_of
from histocc.text import LANGUAGES, TEXT_RULES

Loaded = tuple[Seq2SeqMixerOccCANINE, BlockyFormatter, dict]
# What a kind of model lacks: its tensors begin with this.
LACKING = {"mixer": (), "seq2seq": ("linear_decoder.",), "flat": ("decoder.",)}


def build_model(
    config: dict, formatter: BlockyFormatter, codes: int, dropout: float = 0.0, ngram_dropout: float = 0.0
) -> Seq2SeqMixerOccCANINE:
    """The model that a checkpoint's `config` describes, with random weights from torch's generator. Raises
    ValueError for settings that do not go together.
    """
    encoder = CanineConfig.from_dict(config)
    positions = min(encoder.max_position_embeddings, encoder.num_hash_buckets)
    if type(config["max_len"]) is not int or not 16 <= -(-config["max_len"] // 4) * 4 <= positions:
        raise ValueError(f"max_len: found {config['max_len']!r}, expected 16 … {positions}, its positions")
    if encoder.downsampling_rate != 4:
        raise ValueError(f"downsampling_rate: found {encoder.downsampling_rate}, expected 4")
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
    )


class _WithoutWeights(TorchFunctionMode):
    """On the meta device: no random numbers are drawn, and what is computed lies in memory. Either would make
    torch import its compiler, which takes seconds.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):  # of Tensor, and of torch.nn.init
            return args[0] if args else (kwargs or {})["tensor"]
        computes = func in (torch.arange, torch.tensor)
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if computes else {})})


def model_with(
    config: dict, formatter: BlockyFormatter, codes: int, weights: dict, kind: str = "mixer"
) -> Seq2SeqMixerOccCANINE:
    """The model that `config` describes, in evaluation mode and float32, made of just these `weights`:
    nothing is allocated that they do not hold. Of what a model of this kind lacks, the linear decoder knows
    no code, and the other writes none. Raises ValueError, RuntimeError and others where they do not fit.
    """
    if config["hidden_size"] not in {size for tensor in weights.values() for size in tensor.shape}:
        raise ValueError(f"hidden_size: found {config['hidden_size']!r:.60}, which no tensor has")
    with torch.device("meta"), _WithoutWeights():
        model = build_model(config, formatter, codes)
    expected, lacking = model.state_dict(), {}
    for name, tensor in expected.items():
        if name.startswith(LACKING[kind]):
            lacking[name] = torch.zeros(()).expand(tensor.shape)
            if name == "decoder.head.bias":
                lacking[name] = (torch.arange(len(tensor)) == PAD_IDX).float()
    model.load_state_dict({**lacking, **weights}, strict=True, assign=True)
    for name, tensor in model.float().state_dict().items():
        if tensor.dtype != expected[name].dtype or not checkpoint.is_finite(tensor):
            raise ValueError(f"{name}: {tensor.dtype}, or numbers that are not finite")
    return model.eval()


def load_model(path: str, device: torch.device | str = "cpu", given: Given = Given()) -> Loaded:
    """(model in eval mode, formatter, checkpoint) of a checkpoint file, a run's folder, its best one first,
    an exported file, or what
    others published: a file, a folder, or a name on the hub.

    given: for published models alone. Raises UserError.
    """
    file = find_weights(path, path)
    model, own, state = model_of(file, formats.load_content(file), given)
    return model.to(device), own, state


def brings_settings(state: dict) -> bool:
    """Whether a file of weights is a checkpoint or an export of histocc, which holds formatter and sizes."""
    return "format" in state or "config" in state or formats.SETTINGS in state


def model_of(file: str, content: dict, given: Given = Given()) -> Loaded:
    """As `load_model`, of what `formats.load_content` gave, on the CPU."""
    if not brings_settings(content):
        with checkpoint.reading(file):
            return published_model(file, content, given)
    superfluous = [flag for flag, said in (("--formatter", given.formatter), ("--key", given.key)) if said]
    if superfluous:
        raise UserError(f"{file}: brings its formatter and its key; leave {superfluous[0]} out")
    return own_model(file, content)


def own_model(file: str, content: dict) -> Loaded:
    """As `model_of`, of a file of histocc, a run's or an exported one. Raises UserError."""
    with checkpoint.reading(file):
        settings = content.get(formats.SETTINGS, content)
        checkpoint.check_format(file, settings.get("format"))
        weights = content["model"]
        if settings is not content:
            weights = formats.tensors_of(file, content)
            if settings["config"].get("encoder", True):
                weights = formats.with_our_names(file, weights)[1]
        key = formats.checked_key(file, content["key"])
        columns = list(settings["formatter"]["target_cols"])
        formatter = BlockyFormatter.from_dict({**settings["formatter"], "target_cols": columns})
        kind = settings.get("kind", "mixer")
        model = model_with(settings["config"], formatter, len(key), weights, kind)
        state = {
            **settings,
            "model": weights,
            "key": key,
            "formatter": formatter.to_dict(),
            "system": str(settings["system"]),
            "languages": list(map(str, settings["languages"])),
        }
        Thresholds.of(state)
        Confidence.of(state)
        if not 0 <= (state.get("linear_share") or 0.0) <= 1:
            raise ValueError(f"linear_share: found {state['linear_share']!r:.60}, expected 0 … 1")
    return model, formatter, state


def load_resumable(file: str) -> dict:
    """A checkpoint from which a run can be resumed, its key in the order of the outputs. Raises UserError."""
    return own_model(file, checkpoint.load_resumable(file))[2]


def published_model(file: str, content: dict, given: Given) -> Loaded:
    """As `load_model`, of weights that come without settings. `kind` in the checkpoint: mixer, seq2seq, which
    has no linear decoder, or flat, which has no decoder that writes codes.

    It reads and decodes as it was trained: texts in lower-case ASCII, padded to 128 positions, at which a
    seq2seq decoder looks too. Raises UserError.
    """
    found = formats.read(file, content)
    if found.kind == "encoder":
        raise UserError(
            f"{file}: holds an encoder alone, which codes nothing; train from it with --initial-checkpoint"
        )
    codes = published_codes(found, given)
    outputs = len(codes) if found.outputs is None else found.outputs
    if not codes and found.outputs is None:
        raise UserError(
            f"{file}: does not say which codes it knows; --key FILE names them, columns code and system_code"
            " (or hisco)"
        )
    formatter = published_formatter(file, found, given, codes) if len(codes) == outputs else None
    codes = [formatter.repair(code)[0] for code in codes] if formatter else codes
    if formatter is None or len(set(codes)) < outputs:
        raise UserError(
            f"{file}: has {outputs:,} outputs, and its key {len(set(codes)):,} different codes; --key FILE"
            " names its codes, columns code and system_code (or hisco)"
        )
    model = model_with(found.config, formatter, outputs, found.weights, found.kind)
    state = {
        "model": found.weights,
        "key": {code: i for i, code in enumerate(codes)},
        "config": found.config,
        "formatter": formatter.to_dict(),
        "system": given.system or system_name(formatter),
        "languages": list(LANGUAGES),
        "kind": found.kind,
        "thresholds": PUBLISHED,
        "source": "published",
    }
    return model, formatter, state


def published_codes(found: Published, given: Given) -> list[str]:
    """Codes of the linear outputs: those of --key, those that the file or key.json beside it names, or the
    HISCO key where it fits.
    """
    if given.key:
        return given.key()
    if found.key or not is_hisco(found) or given.formatter not in (None, "hisco"):
        return list(found.key)
    return list(hisco_key())


def is_hisco(found: Published) -> bool:
    """Whether published weights have the outputs of the HISCO key and, where they write codes, its tokens."""
    return (
        found.outputs in (None, len(hisco_key()))
        and found.chars is None
        and (found.tokens == vocabulary("hisco") or found.tokens is None and found.outputs is not None)
    )


def vocabulary(kind: str, chars: list[str] | None = None) -> int:
    """Tokens of the decoder of a formatter."""
    return make_formatter(kind, ["code"], chars=chars).num_classes[0] + 1


def kind_of_formatter(found: Published, codes: list[str]) -> str | None:
    """hisco, occ1950 or gpf, as far as tokens and codes tell; None where they leave it open."""
    if found.tokens is None:  # a flat classifier: perhaps codes that only one system has
        possible = [kind for kind in ("hisco", "occ1950") if fits(make_formatter(kind, None), codes)]
        return possible[0] if len(possible) == 1 else None
    if found.chars is not None:  # its program takes such files for general-purpose ones, whatever the tokens
        return "gpf" if found.tokens == vocabulary("gpf", found.chars) else None
    return next((kind for kind in ("hisco", "occ1950", "gpf") if found.tokens == vocabulary(kind)), None)


def published_formatter(file: str, found: Published, given: Given, codes: list[str]) -> BlockyFormatter:
    """The formatter of published weights. Raises UserError where that is not known, or not the one that is
    given.
    """
    kind = kind_of_formatter(found, codes)
    if found.tokens is None and kind is None:
        kind = given.formatter
    if kind is None or given.formatter not in (None, kind):
        what = f"{found.tokens} tokens" if found.tokens is not None else "no tokens"
        raise UserError(
            f"{file}: the weights have {what}, and those of "
            + (
                f"formatter {given.formatter} are others"
                if given.formatter
                else (
                    "no formatter of this version alone; --formatter names the system, chars.json beside the"
                    " file its tokens"
                )
            )
        )
    if kind != "gpf":
        return make_formatter(kind, given.target_cols)
    return general_formatter(file, found, given, codes)


def general_formatter(file: str, found: Published, given: Given, codes: list[str]) -> BlockyFormatter:
    """The general-purpose formatter of published weights: block size and separator from the key, as their
    program finds them; number of codes from config.json beside the file, or the target columns. Raises
    UserError where these do not tell.
    """
    if not codes:
        raise UserError(
            f"{file}: a general-purpose model, of which no key is known: --key FILE names its codes, columns"
            " code and system_code"
        )
    separated = given.use_within_block_sep or are_separated(codes)
    block_size = max(code_lengths(codes, separated))
    columns = given.target_cols
    if found.positions is not None:
        count, rest = divmod(found.positions - 2, block_size)
        if rest or count < 1:
            raise UserError(
                f"{file}: config.json beside it says {found.positions} positions, which are no whole blocks"
                f" of {block_size} tokens as its key has"
            )
        if columns is not None and len(columns) > count:
            raise UserError(
                f"{file}: writes up to {count} codes, and {len(columns)} target columns are named:"
                f" {', '.join(columns)}"
            )
        columns = [
            *(columns or []),
            *(f"{given.system or 'code'}_{i}" for i in range(len(columns or []) + 1, count + 1)),
        ]
    if columns is None:
        raise UserError(
            f"{file}: a general-purpose model that does not say how many codes it writes: --target-cols names"
            " the columns with which it was trained, one for each code"
        )
    short = any(
        min(code_lengths([code], separated)) < block_size for code in codes if code not in NEVER_SHORT
    )
    return make_formatter("gpf", columns, block_size, separated, allow_short=short, chars=found.chars)


def are_separated(codes) -> bool:
    """Whether the tokens of the codes of a general-purpose key are separated by commas, as far as it
    shows.
    """
    return any(WITHIN_BLOCK_SEP in code for code in codes)


def code_lengths(codes: list[str], separated: bool) -> set[int]:
    """How many tokens the codes of a general-purpose key have."""
    return {len(code.split(WITHIN_BLOCK_SEP) if separated else code) for code in codes}


def fits(formatter: BlockyFormatter, codes) -> bool:
    """Whether there are codes and the formatter can write each."""
    try:
        return bool([formatter.encode_code(formatter.repair(code)[0]) for code in codes])
    except CodeError:
        return False


def by_part(found: list[str], among: dict) -> list[str]:
    """«name [shape]» of tensors; a part of the model (`decoder`, `linear_decoder`) of which all are named
    stands for them.
    """
    names = []
    for part in dict.fromkeys(name.partition(".")[0] for name in found):
        inside = [name for name in found if name.startswith(part + ".")]
        whole = len(inside) == sum(name.startswith(part + ".") for name in among)
        names += [f"all {len(inside)} tensors of {part}"] if whole and len(inside) > 2 else inside
    return names


def has_size(config: dict, name: str) -> bool:
    """Whether the encoder of `config` has the sizes that --model-size `name` makes."""
    sizes = model_config(name).to_dict()
    if config.get("encoder", True) == (name == NGRAMS):
        return False
    return all(config[field] == value for field, value in sizes.items() if "dropout" not in field)


def size_name(config: dict) -> str | None:
    """tiny, small or base; None for other sizes."""
    return next((name for name in MODEL_SIZES if has_size(config, name)), None)


def system_name(formatter: BlockyFormatter) -> str:
    """Name of the output columns: hisco, occ1950, or what the target columns have in common."""
    if formatter.kind != "gpf":
        return formatter.kind
    # hisco_1, code1, but OCC1950 stays
    bare = [re.sub(r"_\d+$|(?<=[A-Za-z])\d$", "", name) for name in formatter.target_cols]
    return (
        bare[0]
        if len(set(bare)) == 1 and bare[0]
        else os.path.commonprefix(bare).rstrip("_") or formatter.target_cols[0]
    )


def find_weights(path: str, said: str, force_download: bool = False) -> str:
    """The file of weights that `path` names: itself, the best or last of a run, the one in a published
    folder, or of a name on the hub.

    said: what a message begins with; force_download: of a name on the hub, loads it again. Raises UserError.
    """
    if kind_of(path) not in (None, "a file", "a folder"):
        raise UserError(f"{said}: found {kind_of(path)}, expected a file of weights or a folder of them")
    file = checkpoint.find(path, (checkpoint.BEST, checkpoint.LAST)) or formats.find_weights(path)
    if file is None and os.path.isdir(path):
        raise UserError(
            f"{said}: no checkpoint there (neither {checkpoint.BEST}, {checkpoint.LAST} nor "
            f"{' nor '.join(formats.WEIGHTS)})"
        )
    if (
        file is None
        and path.count("/") <= 1
        and not path.startswith((".", "/", "~"))
        and not path.endswith((".bin", ".safetensors"))
    ):
        file = formats.find_weights(formats.from_hub(path, force_download))
    if file is None:
        raise UserError(
            f"{said}: no checkpoint there" + ("" if os.path.exists(path) else " (no such file or folder)")
        )
    return file

"""What the files of a model hold, entry by entry: checkpoints of a run, exported models, and what lies
beside published weights.

Each table says what an entry is by itself; the functions below, how entries agree: config with tensors, key
with outputs, formatter with
the vocabulary, state of the optimizer with the weights. Nothing is built before all of it holds.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from histocc.formatter import BlockyFormatter
from histocc.model import confidence, encoder_sizes, ngrams, thresholds
from histocc.model.canine import ACTIVATIONS, CanineConfig
from histocc.model.linear_loss import LINEAR_LOSSES
from histocc.model.loss import BLOCK_LOSSES
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.runtime.errors import UserError
from histocc.runtime.schema import (
    Check,
    Wrong,
    apart,
    both,
    dense,
    described,
    either,
    flag,
    floats,
    kind,
    listing,
    mapping,
    maybe,
    one_of,
    plain,
    real,
    require,
    text,
    whole,
)
from histocc.text_rules import TEXT_RULES

DECODER_HEADS = 8
LARGEST = 1e6  # of weights: larger ones, as a flipped bit makes them, would overflow in the layers behind
COUNT = whole(0, 2**62)
NAME = text(1000)
# What a kind of model lacks: its tensors begin with this.
LACKING = {"mixer": (), "seq2seq": ("linear_decoder.",), "flat": ("decoder.",)}

FORMATTER = mapping(
    {
        "kind": one_of("hisco", "occ1950", "gpf"),
        "block_size": whole(1, 1024),
        "max_codes": whole(1, 1024),
        "sep_value": text(1),
        "within_block_sep": maybe(text(1)),
        "target_cols": listing(text(1000, empty=True), 1, 1024),
        "allow_short": flag,
    },
    {"chars": listing(text(1000), 1, 100_000)},
    rest=lambda value: Wrong("", described(value), "no such entry"),
)
NGRAMS = mapping({"rows": whole(1, 1 << ngrams.MOST_BITS), "width": whole(1, 1 << 16)})
CONFIG = both(
    mapping(
        {
            **encoder_sizes.FIELDS,
            "hidden_act": one_of(*ACTIVATIONS),
            "max_len": whole(16, 1 << 20),
            "memory_mask": flag,
            "target_mask": flag,
            "decoder_dim_feedforward": whole(1, encoder_sizes.WIDEST),
            "text": one_of(*TEXT_RULES),
        },
        {"ngrams": maybe(NGRAMS), "encoder": flag},
    ),
    encoder_sizes.problem,
    lambda config: _room(config),
)
ARGS = mapping(
    {},
    {
        "num_epochs": whole(1),
        "seed": whole(-(2**63), 2**63),
        "model_size": maybe(text(100)),
        "seq2seq_weight": real(0, 1),
        "empty_blocks": one_of("all", "first"),
        "block_loss": one_of(*BLOCK_LOSSES),
        "linear_loss": one_of(*LINEAR_LOSSES),
        "many_codes_weight": real(0, above=True),
        "input_col": NAME,
        "language": maybe(NAME),
        "language_col": maybe(NAME),
        "freeze_encoder": flag,
        "key": maybe(either(flag, NAME)),
    },
    rest=plain,
)
MODEL = mapping({}, rest=dense)


def hashes(shape: tuple[int, ...]) -> Check:
    """Increasing whole numbers, int64 of this shape."""
    return both(
        dense,
        kind(
            f"increasing whole numbers, torch.int64 {list(shape)}",
            lambda value: (
                value.dtype == torch.int64 and value.shape == shape and bool((value[1:] > value[:-1]).all())
            ),
        ),
    )


# Entries with which every form of our models codes; `key` is read by `published.checked_key`.
_SETTINGS = {
    "config": CONFIG,
    "formatter": FORMATTER,
    "system": NAME,
    "languages": listing(text(1000), 1, 256),
}
_MORE = {
    "kind": one_of(*LACKING),
    "thresholds": maybe(thresholds.TABLE),
    "source": text(100),
    "hisco_numbers": flag,
    "linear_share": maybe(real(0, 1)),
    "confidence": maybe(confidence.TABLE),
}
RUN = both(
    mapping(
        {
            "model": MODEL,
            "key": kind("codes and their numbers", lambda value: isinstance(value, dict)),
            "args": ARGS,
            "kept_codes": COUNT,
            **_SETTINGS,
        },
        {
            "step": COUNT,
            "rng": mapping({}, rest=plain),
            "position": mapping({}, {"fingerprint": text(100)}, rest=plain),
            **_MORE,
        },
    ),
    lambda state: _share(state),
)
EXPORTED = both(
    mapping({**_SETTINGS, "kind": one_of(*LACKING), "args": ARGS}, _MORE),
    lambda state: _share(state),
)
# config.json beside published weights.
CONFIG_JSON = mapping(
    {},
    {
        **encoder_sizes.FIELDS,
        "hidden_act": one_of(*ACTIVATIONS),
        "model_type": one_of("canine"),
        "num_classes": listing(whole(1, 1 << 24), 3, 1 << 16),
        "num_classes_flat": whole(1, 1 << 24),
    },
    rest=plain,
)
CHARS = listing(either(text(1000), whole(-(10**9), 10**9)), 1, 100_000)


def _room(config: dict) -> Wrong | None:
    """Positions of the encoder, and heads of the decoder."""
    positions = -(-config["max_len"] // 4) * 4
    most = min(config["max_position_embeddings"], config["num_hash_buckets"])
    if positions > most:
        return Wrong("max_len", str(config["max_len"]), f"at most {most}, the positions of the encoder")
    if config["hidden_size"] % DECODER_HEADS:
        return Wrong(
            "hidden_size",
            str(config["hidden_size"]),
            f"a multiple of {DECODER_HEADS}, the heads of the decoder",
        )
    if config["downsampling_rate"] != 4:
        return Wrong("downsampling_rate", str(config["downsampling_rate"]), "4")
    return None


def _share(state: dict) -> Wrong | None:
    """Only a model with both decoders has a share of the linear one."""
    if state.get("linear_share") and state.get("kind", "mixer") != "mixer":
        return Wrong(
            "linear_share", described(state["linear_share"]), "nothing, as the model has one decoder"
        )
    return None


def formatter_of(file: str, settings: Any, entry: str = "formatter") -> BlockyFormatter:
    """The formatter that a file describes. Raises UserError."""
    require(file, FORMATTER, settings, entry)
    if settings["max_codes"] * settings["block_size"] > 1 << 16:
        raise UserError(
            f"{file}: {entry}: block_size: found {settings['block_size']}, expected blocks of at "
            f"most {1 << 16} tokens altogether"
        )
    try:
        return BlockyFormatter.from_dict({**settings, "target_cols": list(settings["target_cols"])})
    except ValueError as error:
        raise UserError(f"{file}: {entry}: {error}") from None


def build(
    config: dict, num_classes: list[int], codes: int, dropout: float = 0.0, ngram_dropout: float = 0.0
) -> Seq2SeqMixerOccCANINE:
    """The model that `config` describes, with random weights from torch's generator."""
    return Seq2SeqMixerOccCANINE(
        num_classes=num_classes,
        num_classes_flat=codes,
        dropout_rate=dropout,
        decoder_dim_feedforward=config["decoder_dim_feedforward"],
        config=CanineConfig.from_dict(config),
        memory_mask=config["memory_mask"],
        target_mask=config["target_mask"],
        ngrams=config.get("ngrams"),
        ngram_dropout=ngram_dropout,
        encoder=config.get("encoder", True),
    )


class _NoDraws(TorchFunctionMode):
    """No random numbers are drawn, and sequences are made in memory: on the meta device either makes torch
    import its compiler, which takes
    seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):  # of Tensor, and of torch.nn.init
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **{**(kwargs or {}), **({"device": "cpu"} if func is torch.arange else {})})


def shapes_of(config: dict, num_classes: list[int], codes: int) -> tuple[dict[str, torch.Size], list[str]]:
    """(shape of each tensor of the model's state dict, names of its parameters in their order), without
    memory for the weights."""
    with torch.device("meta"), _NoDraws():
        model = build(config, num_classes, codes)
    return {name: tensor.shape for name, tensor in model.state_dict().items()}, [
        name for name, _ in model.named_parameters()
    ]


def check_weights(
    file: str, weights: dict, config: dict, formatter: BlockyFormatter, key: dict, kind_: str = "mixer"
) -> None:
    """Raises UserError unless `weights` are those of the model that `config`, `formatter` and `key`
    describe: names, shapes, finite numbers."""
    require(file, MODEL, weights, "model")
    if wrong := apart(weights):
        raise UserError(f"{file}: model: {wrong}")
    if wrong := encoder_sizes.disagreement(config, weights):
        raise UserError(f"{file}: config does not fit its weights: {wrong}")
    lacking = LACKING[kind_]
    for name, size, what in (
        (
            "decoder.token_emb.embedding.weight",
            formatter.num_classes[0] + 1,
            "formatter has (its tokens, and one more)",
        ),
        (
            "decoder.positional_encoding.pos_embedding",
            max(128, formatter.max_seq_len),
            "formatter writes at most",
        ),
        ("linear_decoder.weight", len(key), "key has codes"),
    ):
        if name in weights and weights[name].shape[:1] != (size,):
            raise UserError(
                f"{file}: model: {name}: found {described(weights[name])}, expected {size:,} "
                f"rows, as many as the {what}"
            )
    shapes, _ = shapes_of(config, formatter.num_classes, len(key))
    table = {
        name: hashes(shape) if name == "ngrams.hashes" else floats(shape, most=LARGEST)
        for name, shape in shapes.items()
        if not name.startswith(lacking or ("\0",))
    }
    require(
        file,
        mapping(table, rest=lambda value: Wrong("", described(value), "no tensor of this name")),
        weights,
        "model",
    )

"""Weights that other programs have published, and those that `export` writes: files, folders, names on the
hub, and what they hold.

What is read is always data: tensors and plain Python values.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from histocc.model.canine import CanineConfig
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.files import opened
from histocc.runtime.world import is_first_rank
from histocc.text import AS_IS, ASCII_LOWER

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
BESIDE = ("config.json", "key.json", "chars.json")
KINDS = {
    "mixer": "a mixer",
    "seq2seq": "a seq2seq model without linear decoder",
    "flat": "a flat classifier",
    "encoder": "an encoder alone",
}
SETTINGS = "histocc"  # entry of an exported file with what the weights do not say: see `export`
HUB_OWNER = "Christianvedel"
# names that the published program takes beside those of the hub
HUB_NAMES = {"occ-canine-v1": f"{HUB_OWNER}/OccCANINE"}
MAX_LEN = 128
MAX_JSON = 1 << 26  # bytes of a JSON file
NO_CODE = ("", "nan", "none", "null")  # what the published trainer writes into a key if a row has no code
POSITIONS = "encoder.char_embeddings.char_position_embeddings.weight"
ENCODER_PARTS = ("char_embeddings.", "initial_char_encoder.", "chars_to_molecules.", "encoder.")
ENCODER_PARTS += ("projection.", "final_char_encoder.", "pooler.")


class Given(NamedTuple):
    """What the user says of weights that do not say it."""

    formatter: str | None = None  # its kind
    key: Callable[[], list[str]] | None = None  # reads the codes of the outputs, "" for one without
    target_cols: list[str] | None = None
    use_within_block_sep: bool = False  # whether commas separate the tokens of a code
    system: str | None = None  # its name


@dataclass(frozen=True)
class Published:
    """What a file of published weights holds."""

    file: str
    kind: str  # one of KINDS
    weights: dict[str, torch.Tensor]  # by our names
    codes: list[str]  # of the linear outputs, "" for one without; [] if the file does not say them
    chars: list[str] | None  # tokens of its formatter, None for the usual ones
    positions: int | None  # length of its token sequences; None if no config.json says it
    config: dict  # sizes by our names, and how the model reads

    def rows_of(self, name: str) -> int | None:
        """Rows of a weight: tokens of decoder.token_emb.embedding, outputs of linear_decoder; or None."""
        weight = self.weights.get(f"{name}.weight")
        return None if weight is None else len(weight)

    @property
    def tokens(self) -> int | None:
        return self.rows_of("decoder.token_emb.embedding")

    @property
    def outputs(self) -> int | None:
        return self.rows_of("linear_decoder")

    def with_codes(self, codes: list[str]) -> "Published":
        """The same, with these codes for its linear outputs. An output without a code is left out, so that
        it is never answered. Raises UserError unless there are as many codes as outputs, or one fewer.
        """
        outputs = len(codes) if self.outputs is None else self.outputs
        if outputs - len(codes) not in (0, 1) or not codes:
            raise UserError(
                f"{self.file}: has {outputs:,} outputs, and its key {len(codes):,} codes: name the key that"
                " belongs to it, columns code and system_code (or hisco), with --key (to train from it:"
                " --initial-key), or put it beside it as key.json"
            )
        codes = codes + [""] * (outputs - len(codes))
        kept = [i for i, code in enumerate(codes) if code]
        weights = dict(self.weights)
        if len(kept) < outputs:
            _say(f"{self.file}: {outputs - len(kept)} of {outputs:,} outputs have no code: never answered")
            for name in ("linear_decoder.weight", "linear_decoder.bias") if self.outputs else ():
                weights[name] = weights[name][kept]
        return replace(self, weights=weights, codes=[codes[i] for i in kept])


@cache  # a file may be read several times
def _say(line: str) -> None:
    if is_first_rank():
        print(line, file=sys.stderr)


# ---- where they are


def local_weights(path: str) -> str | None:
    """The file of weights at `path`: itself, the best or last checkpoint of a run, that of a published
    folder; or None.
    """
    names = (checkpoint.BEST, checkpoint.LAST, *WEIGHTS)
    files = [path, *(os.path.join(path, name) for name in names)]
    return next((file for file in files if os.path.isfile(file)), None)


def files_of(model: str) -> list[str]:
    """The file of weights at a path, and those beside it that are read with it; [] for a name on the hub."""
    file = local_weights(model)
    return [file, *filter(os.path.exists, (_path(file, name) for name in BESIDE))] if file else []


def hub_name(name: str) -> str:
    """The full name of a model on the hub: OccCANINE_s2s_mix is Christianvedel/OccCANINE_s2s_mix."""
    short = "/" not in name and name.lower().startswith("occcanine")
    return HUB_NAMES.get(name.lower(), f"{HUB_OWNER}/{name}" if short else name)


def from_hub(name: str, force_download: bool = False) -> str:
    """The folder of a published model, loaded from the hub. Raises UserError."""
    try:
        from huggingface_hub import snapshot_download

        files = [*WEIGHTS, *BESIDE]
        return snapshot_download(hub_name(name), allow_patterns=files, force_download=force_download)
    except Exception as error:  # no connection, no such name, no permission: the library's own words
        why = str(error).strip().splitlines()[0][:200]
        install = "; pip install huggingface_hub" if isinstance(error, ImportError) else ""
        raise UserError(
            f"{name}: no such file or folder, and it could not be loaded from the hub as {hub_name(name)} "
            f"({why}{install})"
        ) from None


# ---- what they hold


def load_content(file: str) -> dict:
    """What a file of weights holds, its checksum compared if it has one; an exported safetensors file that
    lost its metadata is completed from the JSON files beside it. Raises UserError.
    """
    if not file.endswith(".safetensors"):
        return checkpoint.load(file)
    content, beside = _read_safetensors(file), _beside(file, "config.json", {})
    if SETTINGS not in content and SETTINGS in beside:
        content |= {SETTINGS: beside[SETTINGS], "key": _beside(file, "key.json", {})}
    if isinstance(settings := content.get(SETTINGS), dict):
        checkpoint.check_format(file, settings.get("format"))
        checkpoint.check_checksum(file, {**settings, "model": content["model"], "key": content.get("key")})
    return content


def read(file: str, content: dict | None = None) -> Published:
    """What a file of published weights holds; content: if it is loaded already.

    Raises UserError if it is none of KINDS.
    """
    content = load_content(file) if content is None else content
    beside = _beside(file, "config.json", {})
    with checkpoint.reading(file):
        kind, weights = with_our_names(file, tensors_of(content))
        if endless := [name for name, tensor in weights.items() if not checkpoint.is_finite(tensor)]:
            raise ValueError(f"{endless[0]}: numbers that are not finite")
        key, of_key = content.get("key"), file
        if not key:
            key, of_key = _beside(file, "key.json", {}), _path(file, "key.json")
        codes = codes_of_key(of_key, key)
        chars = content.get("chars") or _beside(file, "chars.json", [])
    with checkpoint.reading(_path(file, "config.json") if beside else file):
        shown = sizes(weights)
        width, heads = shown["hidden_size"], {"num_attention_heads": max(1, shown["hidden_size"] // 64)}
        positions = len(beside["num_classes"]) if "num_classes" in beside else None
        encoder = CanineConfig.from_dict({**heads, **beside, **shown}).to_dict()
    feed_forward = weights.get("decoder.decoder.layers.0.linear1.weight")
    reads_padding = kind in ("mixer", "seq2seq")
    config = {
        **encoder,
        "decoder_dim_feedforward": width if feed_forward is None else len(feed_forward),
        "memory_mask": not reads_padding,
        "target_mask": not reads_padding,
        "max_len": MAX_LEN,
        "text": AS_IS if kind == "encoder" else ASCII_LOWER,
    }
    return Published(file, kind, weights, codes, list(map(str, chars)) or None, positions, config)


def codes_of_key(file: str, key: dict) -> list[str]:
    """The codes of a key (code → number of its output, or the reverse) in the order of the outputs, "" for an
    output without one: the published trainer writes NaN, None or an empty name for rows without a code, and
    skips a number if two of these are one. Raises UserError unless the numbers are 0, 1, 2 … with at most one
    gap, and the codes differ.
    """
    for pairs in (list(key.items()), [(code, number) for number, code in key.items()]):
        if not all(_is_number(number) for _, number in pairs):
            continue
        named = {int(number): name_of_code(code) for code, number in pairs}
        count = max(named, default=-1) + 1
        distinct = set(named.values()) - {""}
        if len(named) == len(pairs) >= count - 1 and len(distinct) == sum(map(bool, named.values())):
            return [named.get(i, "") for i in range(count)]
    raise UserError(
        f"{file}: its key must number its {len(key):,} different codes 0 … {len(key) - 1}, each once; it "
        "begins with " + ", ".join(f"{code!r:.60}: {number!r:.60}" for code, number in list(key.items())[:3])
    )


def name_of_code(code: Any) -> str:
    """A code of a published key as text; "" for none."""
    text = str(code).strip()
    return "" if text.lower() in NO_CODE else text


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) < 18 and value.isdecimal() and value == str(int(value))
    return type(value) is int and 0 <= value < 10**18


def tensors_of(content: dict) -> dict[str, torch.Tensor]:
    """The weights of a file, without the prefix of a wrapped model."""
    held = content["model"] if isinstance(content.get("model"), dict) else content
    tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    return {name.removeprefix("module."): value.detach() for name, value in tensors.items()}


def with_our_names(file: str, weights: dict[str, torch.Tensor]) -> tuple[str, dict[str, torch.Tensor]]:
    """(kind, weights by our names), without a published position table 0, 1, 2, … and heads of other tasks.
    Raises UserError if they are of no CANINE model.
    """
    if any(name.startswith("basemodel.") for name in weights):
        renamed = {flat_name(name): value for name, value in weights.items()}
    elif POSITIONS in weights:
        renamed = weights
    else:
        bare = {name.removeprefix("canine."): value for name, value in weights.items()}
        renamed = {f"encoder.{name}": value for name, value in bare.items() if name.startswith(ENCODER_PARTS)}
    renamed = {name: value for name, value in renamed.items() if not name.endswith("position_ids")}
    if POSITIONS not in renamed:
        raise UserError(
            f"{file}: holds no weights of a CANINE model; it has "
            f"{', '.join(sorted(weights)[:5]) or 'no tensors'}" + (" …" if len(weights) > 5 else "")
        )
    classifies = "linear_decoder.weight" in renamed
    if "decoder.head.weight" in renamed:
        return "mixer" if classifies else "seq2seq", renamed
    return "flat" if classifies else "encoder", renamed


def flat_name(name: str, back: bool = False) -> str:
    """Our name of a tensor of a published flat classifier; back: the published one of ours."""
    for theirs, ours in (("basemodel.", "encoder."), ("out.", "linear_decoder.")):
        old, new = (ours, theirs) if back else (theirs, ours)
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def sizes(weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """Those fields of the encoder's config that the shapes of `weights`, by our names, show."""
    shown = {
        "num_hash_buckets": (POSITIONS, 0),
        "hidden_size": (POSITIONS, 1),
        "type_vocab_size": ("encoder.char_embeddings.token_type_embeddings.weight", 0),
        "intermediate_size": ("encoder.initial_char_encoder.layer.0.intermediate.dense.weight", 0),
        "downsampling_rate": ("encoder.chars_to_molecules.conv.weight", 2),
        "upsampling_kernel_size": ("encoder.projection.conv.weight", 2),
    }
    config = {field: weights[name].shape[axis] for field, (name, axis) in shown.items() if name in weights}
    for field, prefix in (
        ("num_hidden_layers", "encoder.encoder.layer."),
        ("num_hash_functions", "encoder.char_embeddings.HashBucketCodepointEmbedder_"),
    ):
        parts = (name.removeprefix(prefix).partition(".")[0] for name in weights if name.startswith(prefix))
        config[field] = len(set(parts))
    return config


def _read_safetensors(file: str) -> dict:
    try:
        from safetensors import safe_open
    except ImportError:
        raise UserError(f"{file}: needs the safetensors package: pip install safetensors") from None
    with checkpoint.reading(file), safe_open(file, "pt") as held:
        metadata = held.metadata() or {}
        entries = {
            name: json.loads(metadata[name]) for name in ("key", "chars", SETTINGS) if name in metadata
        }
        # a copy lies aligned, which sums in the same order as any other model
        weights = {name: held.get_tensor(name).clone() for name in held.keys()}  # noqa: SIM118 (not a dict)
        return {"model": weights, **entries}


def _path(file: str, name: str) -> str:
    """That of a file beside the weights."""
    return os.path.join(os.path.dirname(file), name)


def _beside(file: str, name: str, default: Any) -> Any:
    """The content of a JSON file beside the weights, of the type of `default`, which stands for none. Raises
    UserError.
    """
    path = _path(file, name)
    if not os.path.lexists(path):
        return default
    with checkpoint.reading(path), opened(path) as source:
        content = json.loads(source.read(MAX_JSON))
        if type(content) is not type(default):
            raise ValueError(f"found {content!r:.60}, expected a {type(default).__name__}")
        return content

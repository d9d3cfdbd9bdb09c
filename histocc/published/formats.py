"""Weights that other programs have published or `export` has written: files, folders, names on the hub, and
their content, which is tensors and plain Python values, never code.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from histocc.formatter import name_of_code
from histocc.model.canine import CanineConfig
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.files import opened
from histocc.runtime.world import is_first_rank
from histocc.text import AS_IS, ASCII_LOWER

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
FILES_BESIDE = ("config.json", "key.json", "chars.json")
MODEL_KINDS = {"mixer": "a mixer", "flat": "a flat classifier", "encoder": "an encoder without decoders"}
MODEL_KINDS |= {"seq2seq": "a seq2seq model without linear decoder"}
SETTINGS_ENTRY = "histocc"  # entry of an exported file with the settings of the model: see `export`
TENSOR = "tensor"  # entry of settings in JSON that names a tensor of the file
MAX_LEN = 128
OUTPUT_NUMBER = "'?(0|[1-9][0-9]{0,8})'?"  # an output in a key, as Python prints a number or a text
POSITION_WEIGHTS = "encoder.char_embeddings.char_position_embeddings.weight"
ENCODER_PARTS = ("char_embeddings.", "initial_char_encoder.", "chars_to_molecules.", "encoder.")
ENCODER_PARTS += ("projection.", "final_char_encoder.", "pooler.")


class Given(NamedTuple):
    """Facts that the user states because the weights do not."""

    formatter: str | None = None  # its kind
    key: Callable[[], list[str]] | None = None  # reads the codes of the outputs, "" for one without
    target_cols: list[str] | None = None
    use_within_block_sep: bool = False  # whether commas separate the tokens of a code
    system: str | None = None  # its name


class PublishedWeights(NamedTuple):
    """The content of a file of published weights."""

    file: str
    kind: str  # one of MODEL_KINDS
    weights: dict[str, torch.Tensor]  # under our names
    codes: list[str]  # by linear output, "" for one without, or [] if the file has none
    chars: list[str] | None  # tokens of its formatter, None for the usual ones
    positions: int  # length of its token sequences, or 0 if no config.json has it
    config: dict  # sizes under our names, and how the model reads

    @property
    def tokens(self) -> int:  # number of tokens of the decoder that writes codes, 0 without it
        return len(self.weights.get("decoder.token_emb.embedding.weight", ()))

    @property
    def outputs(self) -> int:  # number of outputs of the linear decoder, 0 without it
        return len(self.weights.get("linear_decoder.weight", ()))

    def with_codes(self, codes: list[str]) -> "PublishedWeights":
        """Return a copy with these codes for its linear outputs. An output without a code is dropped, so that
        it is never predicted. Raises UserError unless there are as many codes as outputs, or one fewer.
        """
        outputs = self.outputs or len(codes)
        if outputs - len(codes) not in (0, 1) or not codes:
            raise UserError(
                f"{self.file}: outputs ({outputs:,}) and codes of its key ({len(codes):,}) differ: name"
                " its key with --key (to train from it: --initial-key), or put it beside the file as key.json"
            )
        kept, weights = [i for i, code in enumerate(codes) if code], self.weights
        if len(kept) < outputs:
            _say_once(
                f"{self.file}: outputs without a code, never predicted: {outputs - len(kept)} of {outputs:,}"
            )
            linear = [name for name in weights if name.startswith("linear_decoder.")]
            weights = {**weights, **{name: weights[name][kept] for name in linear}}
        return self._replace(weights=weights, codes=[codes[i] for i in kept])


@cache  # a file may be read several times
def _say_once(line: str) -> None:
    if is_first_rank():
        print(line, file=sys.stderr)


# ---- where they are


def local_weights(path: str) -> str | None:
    """Return the file of weights at `path`, which may be a run's or a published folder, or None."""
    return checkpoint.find(path, (checkpoint.BEST, checkpoint.LAST, *WEIGHT_FILES))


def model_files(model: str) -> list[str]:
    """Return the file of weights at a path and the files read with it, or [] for a name on the hub."""
    file = local_weights(model)
    return [file, *filter(os.path.exists, (_path(file, name) for name in FILES_BESIDE))] if file else []


# errors of the hub other than network failures
NOT_THERE = ("RepositoryNotFoundError", "GatedRepoError", "RevisionNotFoundError", "HFValidationError")


def hub_name(name: str) -> str:
    """Return the full name of a model on the hub: OccCANINE_s2s_mix is Christianvedel/OccCANINE_s2s_mix."""
    name = "OccCANINE" if name.lower() == "occ-canine-v1" else name  # as the published program calls it
    return f"Christianvedel/{name}" if "/" not in name and name.lower().startswith("occcanine") else name


def from_hub(name: str, force_download: bool = False) -> str:
    """Return the folder of a published model, downloaded from the hub. Raises UserError."""
    try:
        from huggingface_hub import snapshot_download

        files = [*WEIGHT_FILES, *FILES_BESIDE]
        return snapshot_download(hub_name(name), allow_patterns=files, force_download=force_download)
    except Exception as error:  # no connection, no such name, no permission: in the library's own words
        why = f"the hub could not be asked for {hub_name(name)}: is there a network?"
        if isinstance(error, ImportError):
            why = "the hub cannot be asked without a package: pip install huggingface_hub"
        elif type(error).__name__ in NOT_THERE:
            why = f"the hub has no model {hub_name(name)}, or keeps it private"
        raise UserError(f"{name}: no such file or folder, and {why}") from None


# ---- their content


def load_content(file: str) -> dict:
    """Return the content of a file of weights, after comparing its checksum if it has one. An exported
    safetensors file without metadata is completed from the JSON files next to it. Raises UserError.
    """
    if not file.endswith(".safetensors"):
        return checkpoint.load(file)
    try:
        from safetensors import safe_open
    except ImportError:
        raise UserError(f"{file}: needs the safetensors package: pip install safetensors") from None
    with checkpoint.reading(file), safe_open(file, "pt") as held:
        texts = held.metadata() or {}
        content = {
            name: json.loads(texts[name]) for name in ("key", "chars", SETTINGS_ENTRY) if name in texts
        }
        # a copy is aligned, so that sums are in the same order as in any other model
        content["model"] = {name: held.get_tensor(name).clone() for name in held.keys()}  # noqa: SIM118
        if SETTINGS_ENTRY not in content and SETTINGS_ENTRY in (beside := _beside(file, "config.json", {})):
            content |= {SETTINGS_ENTRY: beside[SETTINGS_ENTRY], "key": _beside(file, "key.json", {})}
        if SETTINGS_ENTRY in content:
            content[SETTINGS_ENTRY] = with_tensors(content[SETTINGS_ENTRY], content["model"])
            summed = content[SETTINGS_ENTRY] | {"model": content["model"], "key": content.get("key")}
            checkpoint.check_checksum(file, summed)
        return content


def without_tensors(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return nested settings for JSON. Their tensors go to `tensors`, under names that begin with `name`."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value.contiguous()
        return {TENSOR: name}
    if isinstance(value, dict):
        return {key: without_tensors(part, f"{name}.{key}", tensors) for key, part in value.items()}
    return value


def with_tensors(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the settings from before `without_tensors`, with their tensors removed from `tensors`."""
    if isinstance(value, dict):
        is_tensor = [*value] == [TENSOR]
        return (
            tensors.pop(value[TENSOR]) if is_tensor else {x: with_tensors(value[x], tensors) for x in value}
        )
    return value


def read_published(file: str, content: dict | None = None) -> PublishedWeights:
    """Return a file of published weights. content: the result of `load_content`, if loaded. Raises UserError
    if the file is not one of MODEL_KINDS.
    """
    content = content or load_content(file)
    beside, key, of_key = _beside(file, "config.json", {}), content.get("key"), file
    if not key:
        key, of_key = _beside(file, "key.json", {}), _path(file, "key.json")
    with checkpoint.reading(file):
        kind, weights = with_our_names(file, content)
        codes = codes_of_key(of_key, key)
        chars = content.get("chars") or _beside(file, "chars.json", [])
    with checkpoint.reading(_path(file, "config.json") if beside else file):
        shown = sizes(weights)
        heads = {"num_attention_heads": max(1, shown["hidden_size"] // 64)}
        positions = len(beside.get("num_classes", ()))
        encoder = CanineConfig.from_dict({**heads, **beside, **shown}).to_dict()
    feed_forward = weights.get("decoder.decoder.layers.0.linear1.weight", weights[POSITION_WEIGHTS].T)
    masks = dict.fromkeys(("memory_mask", "target_mask"), kind not in ("mixer", "seq2seq"))
    config = {**encoder, **masks, "decoder_dim_feedforward": len(feed_forward), "max_len": MAX_LEN}
    config["text"] = AS_IS if kind == "encoder" else ASCII_LOWER
    return PublishedWeights(file, kind, weights, codes, list(map(str, chars)) or None, positions, config)


def codes_of_key(file: str, key: dict) -> list[str]:
    """Return the codes in the order of the outputs, "" if an output has none. The key maps each code to the
    number of its output, or the reverse. The published trainer writes NaN, None or an empty name for rows
    without a code, and skips a number if two of these occur. Raises UserError unless the numbers are 0, 1, 2
    … with at most one gap.
    """
    for pairs in (list(key.items()), [(code, number) for number, code in key.items()]):
        if all(re.fullmatch(OUTPUT_NUMBER, repr(number)) for _, number in pairs):
            named = {int(number): name_of_code(code) for code, number in pairs}
            count, codes = max(named, default=-1) + 1, list(filter(None, named.values()))
            if len(named) == len(pairs) >= count - 1 and len(set(codes)) == len(codes):
                return [named.get(i, "") for i in range(count)]
    raise UserError(
        f"{file}: its key must number its different codes 0 … {len(key) - 1}, each once; it "
        "begins with " + ", ".join(f"{code!r:.60}: {number!r:.60}" for code, number in list(key.items())[:3])
    )


def with_our_names(file: str, content: dict) -> tuple[str, dict[str, torch.Tensor]]:
    """Return (kind, weights under our names) of a file, without the prefix of a wrapped model, a published
    position table 0, 1, 2, … and heads of other tasks. Raises UserError if it holds no CANINE model.
    """
    held = content["model"] if isinstance(content.get("model"), dict) else content
    tensors = {name: value.detach() for name, value in held.items() if isinstance(value, torch.Tensor)}
    weights = {flat_name(name.removeprefix("module.")): value for name, value in tensors.items()}
    if POSITION_WEIGHTS not in weights:  # only an encoder
        bare = {name.removeprefix("canine."): value for name, value in weights.items()}
        weights = {f"encoder.{name}": value for name, value in bare.items() if name.startswith(ENCODER_PARTS)}
    weights = {name: value for name, value in weights.items() if not name.endswith("position_ids")}
    if POSITION_WEIGHTS not in weights:
        names = ", ".join(sorted(tensors)[:5]) or "no tensors"
        raise UserError(f"{file}: holds no weights of a CANINE model; it has {names}")
    classifies = "linear_decoder.weight" in weights
    if "decoder.head.weight" in weights:
        return "mixer" if classifies else "seq2seq", weights
    return "flat" if classifies else "encoder", weights


def flat_name(name: str) -> str:
    """Return our name for a tensor of a published flat classifier."""
    return re.sub("^basemodel[.]", "encoder.", re.sub("^out[.]", "linear_decoder.", name))


def sizes(weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """Return the fields of the encoder's config that follow from the shapes of `weights`, under our names."""
    shown = {
        "num_hash_buckets": (POSITION_WEIGHTS, 0),
        "hidden_size": (POSITION_WEIGHTS, 1),
        "type_vocab_size": ("encoder.char_embeddings.token_type_embeddings.weight", 0),
        "intermediate_size": ("encoder.initial_char_encoder.layer.0.intermediate.dense.weight", 0),
    }
    config = {field: weights[name].shape[axis] for field, (name, axis) in shown.items() if name in weights}
    tables = "encoder.char_embeddings.HashBucketCodepointEmbedder_"
    for field, prefix in (("num_hidden_layers", "encoder.encoder.layer."), ("num_hash_functions", tables)):
        parts = (name.removeprefix(prefix).partition(".")[0] for name in weights if name.startswith(prefix))
        config[field] = len(set(parts))
    return config


def _path(file: str, name: str) -> str:
    return os.path.join(os.path.dirname(file), name)


def _beside(file: str, name: str, default: Any) -> Any:
    """Read a JSON file next to the weights, of the type of `default`, or return that. Raises UserError."""
    path = _path(file, name)
    if not os.path.lexists(path):
        return default
    with checkpoint.reading(path), opened(path) as source:
        content = json.load(source)
        if type(content) is not type(default):
            raise ValueError(f"found {content!r:.60}, expected a {type(default).__name__}")
        return content

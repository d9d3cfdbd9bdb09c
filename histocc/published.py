"""Weights of others: the published encoder, mixer and flat classifier, as files, folders or names on the hub.

What is read is always data: tensors and plain Python values.
"""

import json
import os
from dataclasses import dataclass

import torch

from histocc import checkpoint
from histocc.canine import CanineConfig
from histocc.errors import UserError

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
KINDS = {"mixer": "a mixer", "flat": "a flat classifier", "encoder": "an encoder alone"}


@dataclass(frozen=True)
class Published:
    """kind: one of KINDS; weights: by our names; key: code → number of its linear output, {} where there is none; config: sizes of
    the encoder and the decoder's feed-forward, by our names."""

    kind: str
    weights: dict[str, torch.Tensor]
    key: dict[str, int]
    config: dict

    def as_checkpoint(self) -> dict:
        """As far as a run's own checkpoint: model, key, config."""
        return {"model": self.weights, "key": self.key, "config": self.config}


def find_weights(path: str) -> str | None:
    """The file of weights that `path` names: itself, or the one in a published folder; None where there is none."""
    if os.path.isfile(path):
        return path
    return next((file for file in (os.path.join(path, name) for name in WEIGHTS) if os.path.isfile(file)), None)


def from_hub(name: str) -> str:
    """The folder of a published model, loaded from the hub. Raises UserError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(f"{name}: no such file or folder. If it is a name on the hub, install what loads from there: "
                        "pip install huggingface_hub") from None
    try:
        return snapshot_download(name, allow_patterns=[*WEIGHTS, "config.json"])
    except Exception as error:                        # no connection, no such name, no permission: the library's own words
        raise UserError(f"{name}: no such file or folder, and it could not be loaded from the hub "
                        f"({str(error).strip().splitlines()[0][:200]})") from None


def read(file: str, content: dict | None = None) -> Published:
    """What a file of weights holds; content: where it is loaded already. Raises UserError where it is none of KINDS, names what it holds instead, and never runs code."""
    if content is None:
        content = load_content(file)
    key = content.get("key") if isinstance(content.get("key"), dict) else {}
    weights = content["model"] if isinstance(content.get("model"), dict) else content
    weights = {name.removeprefix("module."): value for name, value in weights.items() if isinstance(value, torch.Tensor)}
    kind, weights = with_our_names(file, weights)
    if any(isinstance(name, int) for name in key):
        key = {str(code): number for number, code in key.items()}
    return Published(kind, weights, {str(code): int(number) for code, number in sorted(key.items(), key=lambda item: int(item[1]))},
                     sizes(file, weights))


def load_content(file: str) -> dict:
    return read_safetensors(file) if file.endswith(".safetensors") else checkpoint.load_plain(file)


def read_safetensors(file: str) -> dict:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UserError(f"{file}: files of this kind are read by the safetensors package: pip install safetensors") from None
    try:
        with safe_open(file, "pt") as found:
            key = json.loads((found.metadata() or {}).get("key", "{}"))
            return {"model": {name: found.get_tensor(name) for name in found.keys()}, "key": key}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read, it may be damaged ({error})") from None


def with_our_names(file: str, weights: dict[str, torch.Tensor]) -> tuple[str, dict[str, torch.Tensor]]:
    """(kind, weights by our names). A published position table 0, 1, 2, … and heads of other tasks are left out."""
    if any(name.startswith("basemodel.") for name in weights):
        renamed = {name.replace("basemodel.", "encoder.", 1).replace("out.", "linear_decoder.", 1) if name.startswith(("basemodel.", "out."))
                   else name: value for name, value in weights.items()}
        kind = "flat"
    elif any(name.startswith("encoder.char_embeddings.") for name in weights):
        renamed, kind = weights, "mixer"
    else:
        bare = {name.removeprefix("canine."): value for name, value in weights.items()}
        parts = ("char_embeddings.", "initial_char_encoder.", "chars_to_molecules.", "encoder.", "projection.", "final_char_encoder.", "pooler.")
        renamed, kind = {f"encoder.{name}": value for name, value in bare.items() if name.startswith(parts)}, "encoder"
    renamed = {name: value for name, value in renamed.items() if not name.endswith("position_ids")}
    if "encoder.char_embeddings.char_position_embeddings.weight" not in renamed:
        raise UserError(f"{file}: holds no weights of a CANINE model; it has {', '.join(sorted(weights)[:5]) or 'no tensors'}"
                        + (" …" if len(weights) > 5 else ""))
    return kind, renamed


def sizes(file: str, weights: dict[str, torch.Tensor]) -> dict:
    """config as in a run's checkpoint: from config.json beside the file where there is one, and from the shapes."""
    width = weights["encoder.char_embeddings.char_position_embeddings.weight"].shape[1]
    layers = {name.split(".")[3] for name in weights if name.startswith("encoder.encoder.layer.")}
    found = {"hidden_size": width, "num_hidden_layers": len(layers), "num_attention_heads": max(1, width // 64),
             "intermediate_size": weights["encoder.initial_char_encoder.layer.0.intermediate.dense.weight"].shape[0]}
    beside = os.path.join(os.path.dirname(file), "config.json")
    if os.path.isfile(beside):
        try:
            with open(beside, encoding="utf-8") as text:
                found |= {name: value for name, value in json.load(text).items() if name in CanineConfig.__dataclass_fields__}
        except (ValueError, AttributeError) as error:
            raise UserError(f"{beside}: is not readable as JSON ({error})") from None
    feedforward = weights.get("decoder.decoder.layers.0.linear1.weight")
    return {**CanineConfig.from_dict(found).to_dict(), "decoder_dim_feedforward": width if feedforward is None else feedforward.shape[0]}

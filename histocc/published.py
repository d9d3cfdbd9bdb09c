"""Published checkpoints: the encoder, mixer, seq2seq model and flat classifier, as files, folders or
names on the hub.

What is read is always data: tensors and plain Python values.
"""

import json
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch

from histocc import checkpoint
from histocc.canine import CanineConfig
from histocc.errors import UserError
from histocc.text_rules import AS_IS, ASCII_LOWER

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
BESIDE = ("config.json", "key.json", "chars.json")
KINDS = {
    "mixer": "a mixer",
    "seq2seq": "a seq2seq model without linear decoder",
    "flat": "a flat classifier",
    "encoder": "an encoder alone",
}
SETTINGS = "histocc"  # entry of an exported file with what the weights do not say: see `histocc.export`
HUB_OWNER = "Christianvedel"
HUB_NAMES = {
    "occ-canine-v1": f"{HUB_OWNER}/OccCANINE"
}  # names that the published program takes beside those of the hub
MAX_LEN = 128


class Given(NamedTuple):
    """What the user says of weights that do not say it: kind of formatter, file of the key, target columns,
    whether the tokens of a code are separated by commas, and the name of the system; None and False where nothing is
    said."""

    formatter: str | None = None
    key: str | None = None
    target_cols: list[str] | None = None
    use_within_block_sep: bool = False
    system: str | None = None


@dataclass(frozen=True)
class Published:
    """kind: one of KINDS; weights: by our names; key: code → number of its linear output, {} where there is
    none; chars: the tokens of its formatter, None for the usual ones; positions: of its token sequences, None
    where no config.json says; config: sizes of the encoder and the decoder's feed-forward, by our names, and
    how the model reads."""

    kind: str
    weights: dict[str, torch.Tensor]
    key: dict[str, int]
    chars: list[str] | None
    positions: int | None
    config: dict

    @property
    def tokens(self) -> int | None:
        """Size of the vocabulary; None where there is no decoder that writes codes."""
        table = self.weights.get("decoder.token_emb.embedding.weight")
        return None if table is None else len(table)

    @property
    def outputs(self) -> int | None:
        """Of the linear decoder; or None."""
        weight = self.weights.get("linear_decoder.weight")
        return None if weight is None else len(weight)


def find_weights(path: str) -> str | None:
    """The file of weights that `path` names: itself, or the one in a published folder; None where there is
    none."""
    if os.path.isfile(path):
        return path
    return next(
        (file for file in (os.path.join(path, name) for name in WEIGHTS) if os.path.isfile(file)), None
    )


def hub_name(name: str) -> str:
    """The name on the hub of a model as the published program takes it: OccCANINE_s2s_mix is
    Christianvedel/OccCANINE_s2s_mix."""
    if name.lower() in HUB_NAMES:
        return HUB_NAMES[name.lower()]
    return f"{HUB_OWNER}/{name}" if "/" not in name and name.lower().startswith("occcanine") else name


def from_hub(name: str, force_download: bool = False) -> str:
    """The folder of a published model, loaded from the hub. Raises UserError."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"{name}: no such file or folder. If it is a name on the hub, install what loads from there: "
            "pip install huggingface_hub"
        ) from None
    try:
        return snapshot_download(
            hub_name(name), allow_patterns=[*WEIGHTS, *BESIDE], force_download=force_download
        )
    except Exception as error:  # no connection, no such name, no permission: the library's own words
        raise UserError(
            f"{name}: no such file or folder, and it could not be loaded from the hub as {hub_name(name)} "
            f"({str(error).strip().splitlines()[0][:200]})"
        ) from None


def read(file: str, content: dict | None = None) -> Published:
    """What a file of weights holds; content: where it is loaded already.

    Raises UserError where it is none of KINDS, names what it holds instead, and never runs code.
    """
    if content is None:
        content = load_content(file)
    weights = content["model"] if isinstance(content.get("model"), dict) else content
    weights = {
        name.removeprefix("module."): value
        for name, value in weights.items()
        if isinstance(value, torch.Tensor)
    }
    kind, weights = with_our_names(file, weights)
    key = (
        content.get("key")
        if isinstance(content.get("key"), dict) and content["key"]
        else _beside(file, "key.json", dict)
    )
    chars = content.get("chars") or _beside(file, "chars.json", list)
    positions = (_beside(file, "config.json", dict) or {}).get("num_classes")
    as_trained = {
        "memory_mask": kind not in ("mixer", "seq2seq"),
        "target_mask": kind not in ("mixer", "seq2seq"),
        "max_len": MAX_LEN,
        "text": AS_IS if kind == "encoder" else ASCII_LOWER,
    }
    return Published(
        kind,
        weights,
        checked_key(file, key or {}),
        list(map(str, chars)) if chars else None,
        len(positions) if isinstance(positions, list) else None,
        {**sizes(file, weights), **as_trained},
    )


def checked_key(file: str, key: dict) -> dict[str, int]:
    """code → number in the order of the numbers, from that or from its reverse. Raises UserError unless these
    are 0, 1, 2 …, each once."""
    for pairs in (list(key.items()), [(code, number) for number, code in key.items() if isinstance(code, str)]):
        if len(pairs) == len(key) and all(is_number(number) for _, number in pairs):
            found = {str(code).strip(): int(number) for code, number in sorted(pairs, key=lambda pair: int(pair[1]))}
            if list(found.values()) == list(range(len(key))):
                return found
    raise UserError(
        f"{file}: its key must number its {len(key):,} different codes 0 … {len(key) - 1}, each once; it "
        "begins with "
        + ", ".join(f"{code!r}: {number!r}" for code, number in list(key.items())[:3])
    )


def is_number(value) -> bool:
    """Whether it is a whole number, or a text of one as it is usually written."""
    if isinstance(value, str):
        return value.isdecimal() and value == str(int(value))
    return isinstance(value, int) and not isinstance(value, bool)


def load_content(file: str) -> dict:
    """What a file of weights holds; an exported safetensors file that was saved again without its metadata is
    completed from the JSON files beside it. Raises UserError."""
    if not file.endswith(".safetensors"):
        return checkpoint.load_plain(file)
    content, beside = read_safetensors(file), _beside(file, "config.json", dict) or {}
    if SETTINGS not in content and SETTINGS in beside:
        content |= {SETTINGS: beside[SETTINGS], "key": _beside(file, "key.json", dict) or {}}
    elif SETTINGS not in content and "memory_mask" in beside:
        raise UserError(
            f"{file}: was exported by an earlier version of histocc, which did not write all that coding needs: "
            "export it again from its run"
        )
    return content


def read_safetensors(file: str) -> dict:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UserError(
            f"{file}: files of this kind are read by the safetensors package: pip install safetensors"
        ) from None
    try:
        with safe_open(file, "pt") as found:
            said = found.metadata() or {}
            entries = {name: json.loads(said[name]) for name in ("key", "chars", SETTINGS) if name in said}
            return {"model": {name: found.get_tensor(name) for name in found.keys()}, **entries}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read, it may be damaged ({error})") from None


def _beside(file: str, name: str, kind: type):
    """The content of a JSON file beside the weights; or None. Raises UserError."""
    path = os.path.join(os.path.dirname(file), name)
    if not os.path.isfile(path):
        return None
    try:
        with open(path, encoding="utf-8") as text:
            content = json.load(text)
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: is not readable as JSON ({error})") from None
    if not isinstance(content, kind):
        raise UserError(
            f"{path}: expected {'names and values' if kind is dict else 'a list'}, found "
            f"{json.dumps(content)[:80]}"
        )
    return content


def with_our_names(file: str, weights: dict[str, torch.Tensor]) -> tuple[str, dict[str, torch.Tensor]]:
    """(kind, weights by our names). A published position table 0, 1, 2, … and heads of other tasks are left
    out."""
    if any(name.startswith("basemodel.") for name in weights):
        renamed = {flat_name(name): value for name, value in weights.items()}
    elif any(name.startswith("encoder.char_embeddings.") for name in weights):
        renamed = weights
    else:
        bare = {name.removeprefix("canine."): value for name, value in weights.items()}
        parts = (
            "char_embeddings.",
            "initial_char_encoder.",
            "chars_to_molecules.",
            "encoder.",
            "projection.",
            "final_char_encoder.",
            "pooler.",
        )
        renamed = {f"encoder.{name}": value for name, value in bare.items() if name.startswith(parts)}
    renamed = {name: value for name, value in renamed.items() if not name.endswith("position_ids")}
    if "encoder.char_embeddings.char_position_embeddings.weight" not in renamed:
        raise UserError(
            f"{file}: holds no weights of a CANINE model; it has "
            f"{', '.join(sorted(weights)[:5]) or 'no tensors'}"
            + (" …" if len(weights) > 5 else "")
        )
    writes, classifies = "decoder.head.weight" in renamed, "linear_decoder.weight" in renamed
    kind = {
        (True, True): "mixer",
        (True, False): "seq2seq",
        (False, True): "flat",
        (False, False): "encoder",
    }[writes, classifies]
    return kind, renamed


def flat_name(name: str, back: bool = False) -> str:
    """Our name of a tensor of a published flat classifier; back: the published one of ours."""
    for theirs, ours in (("basemodel.", "encoder."), ("out.", "linear_decoder.")):
        old, new = (ours, theirs) if back else (theirs, ours)
        if name.startswith(old):
            return new + name[len(old) :]
    return name


def sizes(file: str, weights: dict[str, torch.Tensor]) -> dict:
    """config as in a run's checkpoint: from config.json beside the file where there is one, and from the
    shapes."""
    width = weights["encoder.char_embeddings.char_position_embeddings.weight"].shape[1]
    layers = {name.split(".")[3] for name in weights if name.startswith("encoder.encoder.layer.")}
    found = {
        "hidden_size": width,
        "num_hidden_layers": len(layers),
        "num_attention_heads": max(1, width // 64),
        "intermediate_size": weights["encoder.initial_char_encoder.layer.0.intermediate.dense.weight"].shape[
            0
        ],
    }
    beside = _beside(file, "config.json", dict) or {}
    found |= {name: value for name, value in beside.items() if name in CanineConfig.__dataclass_fields__}
    feedforward = weights.get("decoder.decoder.layers.0.linear1.weight")
    return {
        **CanineConfig.from_dict(found).to_dict(),
        "decoder_dim_feedforward": width if feedforward is None else feedforward.shape[0],
    }

"""Published checkpoints: the encoder, mixer, seq2seq model and flat classifier, as files, folders or
names on the hub.

What is read is always data: tensors and plain Python values.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from histocc.model.canine import CanineConfig
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.files import opened
from histocc.text import AS_IS, ASCII_LOWER

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
# names that the published program takes beside those of the hub
HUB_NAMES = {"occ-canine-v1": f"{HUB_OWNER}/OccCANINE"}
MAX_LEN = 128
MAX_JSON = 1 << 26  # bytes of a JSON file


class Given(NamedTuple):
    """What the user says of weights that do not say it: kind of formatter, what reads the codes of the key,
    target columns, whether the tokens of a code are separated by commas, and the name of the system; None and
    False where nothing is said.
    """

    formatter: str | None = None
    key: Callable[[], list[str]] | None = None
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


def files_of(model: str) -> list[str]:
    """The file of weights that a file or folder names, and the files that are read beside it; [] for a name
    on the hub.
    """
    file = checkpoint.find(model, (checkpoint.BEST, checkpoint.LAST)) or find_weights(model)
    return [] if file is None else [file, *(os.path.join(os.path.dirname(file), name) for name in BESIDE)]


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
    with checkpoint.reading(file):
        parts, weights = with_our_names(file, tensors_of(file, content))
        if not_finite := [name for name, tensor in weights.items() if not checkpoint.is_finite(tensor)]:
            raise ValueError(f"{not_finite[0]}: numbers that are not finite")
        key, key_file = content.get("key"), file
        if not key:
            key, key_file = _beside(file, "key.json", dict), os.path.join(os.path.dirname(file), "key.json")
        key = checked_key(key_file, key or {})
        chars = content.get("chars") or _beside(file, "chars.json", list)
        path, beside = (
            os.path.join(os.path.dirname(file), "config.json"),
            _beside(file, "config.json", dict) or {},
        )
        shown = sizes(weights)
        width = shown["hidden_size"]
        with checkpoint.reading(path if beside else file):
            positions = len(beside["num_classes"]) if "num_classes" in beside else None
            for field, size in shown.items():
                if beside.get(field, size) != size:
                    raise ValueError(
                        f"{field}: found {beside[field]!r:.60}, and in the weights of {file} {size}"
                    )
            heads = {"num_attention_heads": max(1, width // 64)}
            encoder = CanineConfig.from_dict({**heads, **shown, **beside}).to_dict()
        feed_forward = weights.get("decoder.decoder.layers.0.linear1.weight")
        reads_all = parts in ("mixer", "seq2seq")
        config = {
            **encoder,
            "decoder_dim_feedforward": width if feed_forward is None else len(feed_forward),
            "memory_mask": not reads_all,
            "target_mask": not reads_all,
            "max_len": MAX_LEN,
            "text": AS_IS if parts == "encoder" else ASCII_LOWER,
        }
        chars = list(map(str, chars)) if chars else None
        return Published(parts, weights, key, chars, positions, config)


def tensors_of(file: str, content: dict) -> dict[str, torch.Tensor]:
    """The weights of a file, of whatever names but for the prefix of a wrapped model. Raises UserError where
    two have the same name.
    """
    held = content["model"] if isinstance(content.get("model"), dict) else content
    weights = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
    bare = {name.removeprefix("module."): value.detach() for name, value in weights.items()}
    if len(bare) < len(weights):
        raise UserError(
            f"{file}: model: found tensors with and without 'module.' before their names, expected one of"
            " both"
        )
    return bare


def checked_key(file: str, key: dict) -> dict[str, int]:
    """code → number in the order of the numbers, from that or from its reverse. Raises UserError unless these
    are 0, 1, 2 …, each once, and the codes differ and are not empty."""
    for pairs in (
        list(key.items()),
        [(code, number) for number, code in key.items() if isinstance(code, str)],
    ):
        if len(pairs) == len(key) and all(is_number(number) and is_code(code) for code, number in pairs):
            found = {
                str(code).strip(): int(number)
                for code, number in sorted(pairs, key=lambda pair: int(pair[1]))
            }
            if list(found.values()) == list(range(len(key))):
                return found
    raise UserError(
        f"{file}: its key must number its {len(key):,} different codes 0 … {len(key) - 1}, each once; it "
        "begins with " + ", ".join(f"{code!r:.60}: {number!r:.60}" for code, number in list(key.items())[:3])
    )


def is_number(value) -> bool:
    """Whether it is a whole number, or a text of one as it is usually written."""
    if isinstance(value, str):
        return len(value) < 18 and value.isdecimal() and value == str(int(value))
    return type(value) is int and 0 <= value < 10**18


def is_code(value) -> bool:
    """Whether it can be a code: a text that is not empty, or a whole number for one."""
    return (
        isinstance(value, str)
        and 0 < len(value.strip()) <= 1000
        or type(value) is int
        and abs(value) < 10**18
    )


def load_content(file: str) -> dict:
    """What a file of weights holds; an exported safetensors file that was saved again without its metadata is
    completed from the JSON files beside it. What an exported file says, and what lies beside it, is compared
    with its checksum. Raises UserError.
    """
    if not file.endswith(".safetensors"):
        return checkpoint.load(file)
    content, beside = read_safetensors(file), _beside(file, "config.json", dict) or {}
    if SETTINGS not in content and SETTINGS in beside:
        content |= {SETTINGS: beside[SETTINGS], "key": _beside(file, "key.json", dict) or {}}
    settings = content.get(SETTINGS)
    if not isinstance(settings, dict):
        return content
    _check_beside(file, content, beside)
    checkpoint.check_format(file, settings.get("format"))
    checkpoint.check_checksum(file, {**settings, "model": content["model"], "key": content.get("key")})
    return content


def _check_beside(file: str, content: dict, beside: dict) -> None:
    """Raises UserError where the JSON files that were written with an exported file say something else than
    it does.
    """
    settings, folder = content[SETTINGS], os.path.dirname(file)
    config = settings.get("config") if SETTINGS in beside and isinstance(settings.get("config"), dict) else {}
    expected: dict[str, tuple[Any, Any]] = {
        "config.json": ({name: beside.get(name) for name in config}, config)
    }
    if SETTINGS in beside:
        expected["config.json: histocc"] = (beside[SETTINGS], settings)
        for name, there in (("key.json", content.get("key")), ("chars.json", content.get("chars"))):
            found = _beside(file, name, dict if name == "key.json" else list)
            expected[name] = (found, there if found is not None else None)
    for name, (found, there) in expected.items():
        if found != there:
            raise UserError(
                f"{os.path.join(folder, name)}: found something else than {os.path.basename(file)} says, with"
                " which it was written: it was changed, or belongs to another model. Put back the one that"
                " was exported, or export again"
            )


def read_safetensors(file: str) -> dict:
    try:
        from safetensors import safe_open
    except ImportError:
        raise UserError(
            f"{file}: files of this kind are read by the safetensors package: pip install safetensors"
        ) from None
    with checkpoint.reading(file), safe_open(file, "pt") as held:
        said = held.metadata() or {}
        entries = {
            name: parsed(f"{file}: metadata: {name}", said[name])
            for name in ("key", "chars", SETTINGS)
            if name in said
        }
        # a copy lies aligned, which sums in the same order as any other model
        weights = {name: held.get_tensor(name).clone() for name in held.keys()}  # noqa: SIM118 (not a dict)
        return {"model": weights, **entries}


def parsed(said: str, text: str) -> Any:
    """The value that a JSON text writes. said: what a message begins with. Raises UserError, also for names
    that stand there twice, and numbers that are not finite.
    """

    def pairs(found: list[tuple[str, Any]]) -> dict:
        if len(dict(found)) < len(found):
            names = [name for name, _ in found]
            raise ValueError(
                f"the name {next(name for name in names if names.count(name) > 1)!r} is there twice"
            )
        return dict(found)

    def number(digits: str) -> float:
        value = float(digits)
        if not math.isfinite(value):
            raise ValueError(f"{digits[:40]} is no finite number")
        return value

    try:
        return json.loads(text, object_pairs_hook=pairs, parse_float=number, parse_constant=number)
    except RecursionError:
        raise UserError(f"{said}: is not readable as JSON (lists in lists without end)") from None
    except ValueError as error:
        raise UserError(f"{said}: is not readable as JSON ({str(error)[:200]})") from None


def _beside(file: str, name: str, type_: type) -> Any:
    """The content of a JSON file beside the weights; or None. Raises UserError."""
    path = os.path.join(os.path.dirname(file), name)
    if not os.path.lexists(path):
        return None
    with opened(path) as source:
        text = source.read(MAX_JSON + 1)
    if len(text) > MAX_JSON:
        raise UserError(f"{path}: found more than {MAX_JSON:,} bytes, expected a small JSON file")
    try:
        content = parsed(path, text.decode("utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is not readable as JSON ({error})") from None
    if not isinstance(content, type_):
        what = "names and values" if type_ is dict else "a list"
        raise UserError(f"{path}: found {content!r:.60}, expected {what}")
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
            f"{', '.join(sorted(weights)[:5]) or 'no tensors'}" + (" …" if len(weights) > 5 else "")
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


def sizes(weights: dict[str, torch.Tensor]) -> dict[str, int]:
    """Those fields of the encoder's config that the shapes of `weights`, by our names, show."""
    shown = {
        "num_hash_buckets": ("encoder.char_embeddings.char_position_embeddings.weight", 0),
        "hidden_size": ("encoder.char_embeddings.char_position_embeddings.weight", 1),
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

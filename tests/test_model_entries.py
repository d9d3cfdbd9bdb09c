"""Each entry of a file of a model that is not what it must be has its message: file, entry, found,
expected."""

import math
import os
import shutil

import pytest
import torch
from test_model_files import (  # noqa: F401
    CODES,
    CONFIG,
    FORMATTER,
    codes,
    forms,
    resumed,
    run_state,
    trained,
)

from histocc.model import model_io, published
from histocc.model.resume_schema import trained_shapes
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles


def put(state: dict, entry: str, value) -> None:
    *names, last = entry.split(": ")
    for name in names:
        state = state[name] if name in state else state[int(name)]
    last = int(last) if last.isdecimal() and last not in state else last
    if value is Ellipsis:
        del state[last]
    else:
        state[last] = value


POSITIONS = "encoder.char_embeddings.char_position_embeddings.weight"
CODING = [
    ("languages", 5, "found 5, expected a list"),
    ("languages", ["en", ""], "languages: 1: found ''"),
    ("config: max_len", 0, "a whole number 16"),
    ("config: max_len", 10**9, "expected a whole number"),
    ("config: max_len", 64, None),
    ("config: max_len", 65, "at most 64, the positions of the encoder"),
    ("config: max_position_embeddings", 10, "at most 10"),
    ("config: hidden_size", 0, "expected a whole number 1"),
    ("config: hidden_size", 64, "32, as the weights have it"),
    ("config: num_attention_heads", 0, "expected a whole number"),
    ("config: num_attention_heads", 3, "a number of which hidden_size 32 is a multiple"),
    ("config: layer_norm_eps", "a", "found 'a', expected a number above 0"),
    ("config: layer_norm_eps", math.nan, "found nan"),
    ("config: layer_norm_eps", -1, "found -1"),
    ("config: hidden_act", ["gelu"], "expected one of 'gelu'"),
    ("config: num_hidden_layers", 10**7, "expected a whole number 0 … 1,000"),
    ("config: num_hidden_layers", 2, "found 2, expected 1, as the weights have it"),
    ("config: memory_mask", 1, "true or false"),
    ("config: text", "rot13", "'rot13'"),
    ("config", [], "config: found a list"),
    ("formatter: block_size", 10**9, "expected a whole number 1 … 1,024"),
    ("formatter: kind", "occ1950", "formatter"),
    ("key: 22222", 0, "must number its 5"),
    ("key: 22222", None, "must number its 5"),
    ("key: 22222", 1.0, "must number its 5"),
    ("key: 22222", True, "must number"),
    ("key: 22222 ", 5, "must number its 6"),
    ("key: 44444", ..., "5, 32], expected 4 rows, as many as the key has codes"),
    ("thresholds: default", 2.0, "expected a number 0 … 1"),
    ("kind", "ensemble", "expected one of 'mixer'"),
    ("kept_codes", -1, "at least 0"),
    ("args", 5, "names and values"),
    ("args: x", {1, 2}, "expected plain values"),
    ("format", 2, "written by a newer histocc: format 2; this version reads 1"),
    ("format", True, "found True, expected 1"),
    (
        f"model: {POSITIONS}",
        torch.zeros(64, 32).index_fill(0, torch.tensor([3]), math.nan),
        "found values that are not finite",
    ),
    (f"model: {POSITIONS}", torch.full((64, 32), 1e37), "none beyond 1,000,000"),
    (f"model: {POSITIONS}", torch.zeros(64, 32, dtype=torch.int64), "a tensor of numbers of type float16"),
    (f"model: {POSITIONS}", torch.zeros(1).expand(64, 32), "in a memory of 4"),
    (f"model: {POSITIONS}", torch.zeros(64, 32, device="meta"), "an ordinary tensor"),
    ("model: linear_decoder.bias", torch.zeros(6), "a tensor of shape [5]"),
    ("model: linear_decoder.bias", ..., "linear_decoder.bias: found nothing"),
    ("model: encoder.more", torch.zeros(1), "no tensor of this name"),
]
RESUMING = [
    ("optimizer", ..., "optimizer: found nothing"),
    ("scheduler", ..., "scheduler: found nothing"),
    ("step", ..., "step: found nothing"),
    ("args", {}, "num_epochs: found nothing"),
    ("position", {}, "epoch: found nothing"),
    ("rng: threads", 0, "expected a whole number 1 … 1,024"),
    ("rng: threads", -5, "found -5"),
    ("rng: threads", 10**9, "found 1000000000"),
    ("rng: threads", "x", "found 'x'"),
    ("optimizer: state: 3: exp_avg", torch.zeros(7), "expected [32] as its parameter has"),
    ("optimizer: state: 0: exp_avg_sq", torch.zeros(9, 4), "as its parameter has"),
    ("optimizer: state: 3: exp_avg", torch.full((32,), math.nan), "not finite"),
    ("optimizer: state: 3: exp_avg_sq", torch.full((32,), -1.0), "none below 0"),
    ("optimizer: state: 3", ..., "or none"),
    ("position: batch", 1, "found 1, expected 2"),
    ("step", 6, "found 1, expected 2"),
    ("scheduler: base_lrs", [0.0, 0.0], "above 0"),
    ("scaler", {"scale": 0}, "above 0"),
    ("optimizer: param_groups: 0: params", [0], "found"),
]


@pytest.mark.parametrize("entry, value, said", CODING)
def test_each_entry_has_its_message(tmp_path, entry, value, said):
    state = run_state(5)
    put(state, entry, value)
    torch.save(state, tmp_path / "last.bin")
    if said is None:
        codes(tmp_path / "last.bin")
        return
    for read in (codes, lambda file: model_io.newest_good(str(file.parent))):
        with pytest.raises(UserError) as caught:
            read(tmp_path / "last.bin")
        assert f"{tmp_path}/last.bin: " in str(caught.value) and said in str(caught.value), caught.value


@pytest.mark.parametrize("entry, value, said", RESUMING)
def test_a_checkpoint_that_cannot_be_resumed_is_passed_over(tmp_path, entry, value, said):
    checkpoint.save(OwnFiles(str(tmp_path)), ["2.bin"], run_state(2))
    state = run_state(5)
    put(state, entry, value)
    torch.save(state, tmp_path / "last.bin")
    path, found, wrong = model_io.newest_good(str(tmp_path))
    assert (
        path.endswith("2.bin")
        and found["step"] == 2
        and len(wrong) == 1
        and said in wrong[0]
        and "last.bin: " in wrong[0]
    ), wrong
    if entry.startswith(("optimizer", "scheduler", "rng", "position")):
        codes(tmp_path / "last.bin")  # which asks for none of that


def test_a_newer_format_is_never_passed_over(tmp_path):
    checkpoint.save(OwnFiles(str(tmp_path)), ["2.bin"], run_state(2))
    checkpoint.save(OwnFiles(str(tmp_path)), ["last.bin"], {**run_state(5), "format": 2})
    with pytest.raises(UserError, match="written by a newer histocc: format 2; this version reads 1"):
        model_io.newest_good(str(tmp_path))


def test_the_state_of_other_parameters_is_said(tmp_path):
    state = run_state(5)
    state["optimizer"]["state"][0] = {
        name: value if name == "step" else value[:-1].clone()
        for name, value in state["optimizer"]["state"][0].items()
    }
    torch.save(state, tmp_path / "last.bin")
    # how many rows of the tables are trained is known to the data alone
    found = model_io.newest_good(str(tmp_path))[1]
    with pytest.raises(UserError, match="optimizer: state: 0: found a state of shape"):
        resumed(found)


def test_shapes_of_what_is_trained_are_those_of_the_optimizer():
    _, optimizer = trained()
    shapes = [tuple(p.shape) for group in optimizer.param_groups for p in group["params"]]
    found = trained_shapes(CONFIG, FORMATTER, len(CODES), False)
    assert found[0] == (None, 4) and found[1] == (None, 32) and found[2:] == shapes[2:]


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("config.json", "[]", "names and values"),
        ("config.json", "{", "not readable as JSON"),
        ("config.json", '{"layer_norm_eps": NaN}', "not readable as JSON"),
        ("config.json", '{"layer_norm_eps": 1e999}', "no finite number"),
        ("config.json", '{"layer_norm_eps": -1}', "layer_norm_eps: found -1"),
        ("config.json", '{"hidden_act": ["gelu"]}', "hidden_act: found a list"),
        ("config.json", '{"hidden_size": 8, "hidden_size": 32}', "is there twice"),
        ("config.json", "[" * 100_000, "in lists without end"),
        ("config.json", b'{"\xff": 1}', "not readable as JSON"),
        ("config.json", None, "found a pipe"),
        ("config.json", '{"num_attention_heads": ' + "9" * 5000 + "}", "not readable as JSON"),
        ("config.json", '{"num_hidden_layers": 1000}', "1, as the weights have it"),
        ("config.json", '{"num_classes": 5}', "num_classes: found 5"),
        ("config.json", '{"model_type": "bert"}', "model_type"),
        ("key.json", ..., "found a folder"),
        ("key.json", '{"a": 0, "b": 0}', "must number"),
        ("key.json", '{"a": -1, "b": 0}', "must number"),
        ("chars.json", '["a", {}]', "chars: 1: found a dict"),
        ("chars.json", '{"a": 1}', "expected a list"),
    ],
)
def test_what_lies_beside_published_weights_is_checked(forms, tmp_path, name, content, said):  # noqa: F811
    file = tmp_path / "model" / "model.safetensors"
    shutil.copytree(forms["published safetensors"][0].parent, file.parent)
    beside = file.parent / name
    beside.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(beside)
    elif content is ...:
        beside.mkdir()
    else:
        beside.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        codes(file)
    assert name in str(caught.value) and said in str(caught.value), caught.value


def test_a_flipped_bit_of_an_export_is_noticed(forms, tmp_path):  # noqa: F811
    """Wherever it is in the weights of a safetensors file; and an edited file beside it."""
    file = tmp_path / "model" / "model.safetensors"
    shutil.copytree(forms["exported safetensors"][0].parent, file.parent)
    whole = file.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in range(start, len(whole), (len(whole) - start) // 15):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(UserError, match=r"model: \S+: found another content"):
            published.load_content(str(file))
    file.write_bytes(whole)
    for name in ("config.json", "key.json"):
        kept = (file.parent / name).read_text()
        (file.parent / name).write_text(
            kept.replace(
                "0.3" if name == "config.json" else "22222", "0.4" if name == "config.json" else "22223"
            )
        )
        with pytest.raises(UserError, match=f"{name}.*found something else than model.safetensors says"):
            codes(file)
        (file.parent / name).write_text(kept)
    assert codes(file) == forms["exported safetensors"][1]

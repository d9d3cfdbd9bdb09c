"""No file of a model is believed: it codes as before, or one message says what is wrong with it."""

import copy
import functools
import json
import math
import os
import random
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import all_tests, mutations, read

from histocc import export
from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.model.canine import CanineConfig
from histocc.model.confidence import Thresholds
from histocc.predict.coder import Coder
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles
from histocc.runtime.world import World
from histocc.trainer import loop, script
from histocc.trainer.batches import Rows
from histocc.trainer.config import ScriptConfig
from histocc.trainer.schedule import make_optimizer

MUTATIONS = mutations(10 / 3 if all_tests() else 0.8)  # of each form
LONGEST = 10.0  # seconds of CPU time for one file
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
SIZES |= {"num_hash_buckets": 64, "max_position_embeddings": 64, "type_vocab_size": 2}
CONFIG = {**CanineConfig(**SIZES).to_dict(), "max_len": 32, "decoder_dim_feedforward": 40}
CONFIG |= {"memory_mask": True, "target_mask": True, "text": "as-is"}
THRESHOLDS = {"default": 0.3, "by_language": {"da": 0.25}, "source": "fitted", "at_least_one": True}
CODES = ["-1", "22222", "22233", "33333", "44444"]
FORMATTER = BlockyFormatter("hisco", ["hisco_1", "hisco_2"])
TEXTS, LANGUAGES = ["smed", "wine merchant", "x" * 40], ["da", "en", "se"]


def make_model(config: dict = CONFIG):
    torch.manual_seed(5)
    model = models.new_model(config, FORMATTER, len(CODES)).eval()
    with torch.no_grad():
        model.decoder.head.weight.mul_(3)
        model.decoder.head.bias[PAD_IDX] -= 2
        model.decoder.head.bias[10:12] += 4
        model.linear_decoder.weight.mul_(30)
    return model


def trained():
    """(model, optimizer) as a run makes them."""
    model = make_model()
    model.encoder.char_embeddings.train_rows_of(torch.arange(97, 110), CONFIG["max_len"])
    return model, make_optimizer(model, 0.01, 1e-3, (["linear_decoder.weight", "linear_decoder.bias"], 3.0))


def take_steps(optimizer, steps: int) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                p.grad = torch.full_like(p, 1e-3 * (i + step + 1))
        optimizer.step()


def run_state(steps: int) -> dict:
    return copy.deepcopy(made_state(steps))


@functools.cache
def made_state(steps: int) -> dict:
    model, optimizer = trained()
    take_steps(optimizer, steps)
    position = {"fingerprint": "abc", "launchers": [""], "run": "r", "samples": 8 * steps, "grad_norm": 2.0}
    position |= {"sums": [{"loss": 1.5}], "best_val_loss": 2.5, "since_best": 0, "bad_steps": 0}
    return {
        "model": dict(model.state_dict()),
        "optimizer": optimizer.state_dict(),
        "scheduler": {"base_lrs": [1e-3, 3e-3], "last_epoch": steps},
        "scaler": {},
        "step": steps,
        "format": 1,
        "config": CONFIG,
        "formatter": FORMATTER.to_dict(),
        "key": {code: i for i, code in enumerate(CODES)},
        "system": "hisco",
        "languages": ["unk", "en", "da"],
        "args": {"num_epochs": 3, "seed": 42, "target_cols": ["hisco_1"], "seq2seq_weight": 0.5},
        "kept_codes": 0,
        "hisco_numbers": False,
        "rng": {"seed": 42, "threads": 1, "processes": 1},
        "thresholds": THRESHOLDS,
        "linear_share": 0.7,
        "position": {**position, "finite_step": None, "unfinished": False},
    }


def publish(folder: Path, weights: dict) -> Path:
    """A folder as the hub has it; the file of its weights."""
    from safetensors.torch import save_file

    folder.mkdir()
    config = {"model_type": "canine", "num_attention_heads": 2, "max_position_embeddings": 160}
    (folder / "config.json").write_text(json.dumps({**config, "num_classes": FORMATTER.num_classes}))
    (folder / "key.json").write_text(json.dumps({code: i for i, code in enumerate(CODES)}))
    save_file(weights, folder / "model.safetensors")
    return folder / "model.safetensors"


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """Form → (folder, its file of weights): a good file of each, and what it codes."""
    pytest.importorskip("safetensors")
    root = tmp_path_factory.mktemp("forms")
    state, found = run_state(5), {}
    (root / "run").mkdir()
    checkpoint.save(OwnFiles(str(root / "run")), ["last.bin"], state)
    found["run"] = root / "run" / "last.bin"
    for form, name in (("published", "model.bin"), ("safetensors", "model.safetensors")):
        export.main([str(found["run"]), "--to", form, str(root / f"exported {form}" / name)])
        found[f"exported {form}"] = root / f"exported {form}" / name
    wide = {**CONFIG, "num_hash_buckets": 160, "max_position_embeddings": 160, "max_len": 128}
    weights = {name: tensor.contiguous() for name, tensor in make_model(wide).state_dict().items()}
    found["published safetensors"] = publish(root / "published", weights)
    return {form: (file, codes(file)) for form, file in found.items()}


def codes(file) -> list:
    coder = Coder.load(str(file))
    return [coder.code(TEXTS, LANGUAGES, decoder) for decoder in ("greedy", "flat", "topk")]


def test_they_code(forms):
    assert resumed_from(forms["run"][0].parent)["step"] == 5
    assert all(any(text.codes for text in decoder) for _, answers in forms.values() for decoder in answers)
    for name in ("run", "exported published", "exported safetensors"):
        assert forms[name][1] == forms["run"][1], name
        coder = Coder.load(str(forms[name][0]))
        assert coder.linear_share == 0.7 and coder.thresholds == Thresholds.of({"thresholds": THRESHOLDS})


# ---- with our checksum: the same codes, or one message


def change(value, draw: random.Random, inside: float = 1.0):
    """Something else in the place of one value inside of nested dicts and lists, at any depth. Returns it."""
    if isinstance(value, (dict, list)) and value and draw.random() < inside:
        name = draw.choice(list(value) if isinstance(value, dict) else range(len(value)))
        if draw.random() < 0.1:
            del value[name]
        else:
            value[name] = change(value[name], draw, 0.85)
        return value
    if isinstance(value, torch.Tensor):
        other = value.clone()
        if value.numel() and value.is_floating_point():
            at = value.numel() // 2
            other.view(-1)[at] = draw.choice([math.nan, -math.inf, float(value.view(-1)[at]) + 1])
        ways = [other, value[:-1] if value.dim() else value[None], value.half(), value.long()]
        ways += [value.flip(0) if value.dim() else value, torch.zeros(()).expand(value.shape)]
        return draw.choice([*ways, value.tolist(), "a tensor", None])
    ways = [0, -1, 1.5, 10**9, 10**30, math.nan, math.inf, None, True, "", [], {}, [[[1]]], {"": None}]
    return draw.choice([*ways, [value], {"x": value}, str(value)])


def mutate(file: Path, draw: random.Random) -> str:
    """Changes an entry, or bytes, of a file. Returns what was done."""
    entry = ["entry"] * 3 * (file.suffix == ".bin")
    how = draw.choice([*entry, "byte", "bytes", "cut"])
    if how != "entry":
        content = bytearray(file.read_bytes())
        at = draw.randrange(len(content))
        if how == "byte":
            content[at] ^= 1 << draw.randrange(8)
        elif how == "bytes":
            content[at : at + 40] = draw.randbytes(40)
        file.write_bytes(content[:at] if how == "cut" else content)
        return f"{how} {at}"
    torch.save(change(torch.load(file, weights_only=True), draw), file)
    return how


@pytest.mark.parametrize("form", ["run", "exported published", "exported safetensors"])
def test_a_changed_file_codes_as_before_or_is_refused(forms, tmp_path, form):
    original, expected = forms[form]
    file, refused = tmp_path / "model" / original.name, 0
    for number in range(MUTATIONS):
        shutil.rmtree(file.parent, ignore_errors=True)
        shutil.copytree(original.parent, file.parent)
        what = mutate(file, random.Random(f"{form} {number}"))
        started = time.process_time()
        try:
            assert codes(file) == expected, f"{number}: {what}: other codes"
        except UserError as error:
            assert str(file.parent) in str(error) and "Traceback" not in str(error), f"{number}: {what}"
            refused += 1
        assert time.process_time() - started < LONGEST, f"{number}: {what}"
    assert refused > MUTATIONS // 4


# ---- without it: data, loaded strictly

POSITIONS = "encoder.char_embeddings.char_position_embeddings.weight"
TO_CODE = {
    "languages": [5],
    "config: max_len": [0, 10**9, 32.5],
    "config: hidden_size": [0, 10**9],
    "config: num_attention_heads": [0],
    "config: layer_norm_eps": ["a", -1],
    "config: num_hidden_layers": [10**7, 2],
    "config: decoder_dim_feedforward": [10**12],
    "config: ngrams": [{"rows": 10**12, "width": 10**12}],
    "config: text": ["rot13"],
    "config": [[]],
    "formatter: block_size": [10**9],
    "formatter: kind": ["occ1950"],
    "formatter": [5],
    "key: 22222": [0, None, 1.0],
    "key": [7],
    "thresholds: default": [2.0],
    "confidence": [
        {"texts": "x"},
        {"curves": {}, "maps": {"topk": [1.0, 0.0]}},
        {"curves": {}, "maps": {"topk": [1.0, 0.0, math.nan, 0.0]}},
        {"curves": {"topk": [[0.1, 2.0]]}, "maps": {"topk": [1.0, 0.0, 0.0, 0.0]}},
    ],
    "linear_share": ["x"],
    "kind": ["ensemble"],
    "step": ["x"],
    "position": [None],
    "format": [2],
    "model": [..., {}],
    f"model: {POSITIONS}": [
        torch.zeros(64, 32).index_fill(0, torch.tensor([3]), math.nan),
        torch.zeros(64, 32, dtype=torch.int64),
        torch.zeros(64, 32, dtype=torch.complex64),
        torch.zeros(1).expand(1 << 30, 32),
        torch.zeros(64, 32, device="meta"),
        "a tensor",
    ],
    "model: linear_decoder.bias": [torch.zeros(6), ...],
    "model: encoder.more": [torch.zeros(1)],
}
TO_RESUME = {
    "optimizer": [...],
    "position": [{}],
    "position: sums": [5],
    "rng: threads": [0],
    "rng": [{}],
    "optimizer: state: 3: exp_avg": [torch.zeros(7)],
    "optimizer: state: 3: step": [...],
    "optimizer: param_groups": [[]],
    "optimizer: param_groups: 0: params": [[0]],
    "scheduler: base_lrs": [["x", "y"]],
}


def put(state: dict, entry: str, value) -> None:
    *names, last = entry.split(": ")
    for name in names:
        state = state[name] if name in state else state[int(name)]
    if value is ...:
        del state[last]
    else:
        state[last] = value


def resumed_from(folder: Path) -> dict:
    asked = SimpleNamespace(save_path=str(folder), overwrite=False, dry_run=True)
    threads = torch.get_num_threads()
    state = script.find_resumable(asked, World(), models.load_run, lambda _: None, "abc")
    torch.set_num_threads(threads)
    assert state is not None
    with checkpoint.reading(state["path"]):
        loop.State.resumed(state["step"], state["position"], World())
    model, optimizer = trained()
    model.load_state_dict(state["model"])
    script.restore(state, optimizer, Precision("float32"))
    take_steps(optimizer, 1)
    return state


def test_a_checkpoint_brings_back_optimizer_rates_and_the_scale_of_fp16():
    model, optimizer = trained()
    take_steps(optimizer, 3)
    precision, other = Precision("fp16"), Precision("fp16")
    precision.scaler.load_state_dict(precision.scaler.state_dict() | {"scale": 4.0, "_growth_tracker": 7})
    run = loop.Run(model, None, optimizer, World(), precision)
    training = script.Training(model, None, Rows(), entries={"key": {}})
    kept = loop.State(3, 9, {"loss": 1.5}, 2.5, 0.5, 2, 1, 2, unfinished=True)
    same = {"run": "r", "files": {}, "total_batch": 4}
    content = script.checkpoint_content(ScriptConfig(), training, run, same, 3, kept.position(World()))
    content |= {"path": "x"}
    state, rate, name = script.place_of(ScriptConfig(), World(), training, 4, content)
    assert (replace(state, started=None), rate, name, content["key"]) == (kept, 1e-3, "r", {})
    position = content["position"] | {"sums": [{"loss": 1.0}, {"loss": 2.0}]}  # of two ranks, for three
    sums = [loop.State.resumed(3, position, World(rank, size=3)).sums for rank in range(3)]
    assert sums == [{"loss": 3.0}, {"loss": 0.0}, {"loss": 0.0}]
    again = make_optimizer(model, 0.01, 5e-2, (["linear_decoder.weight", "linear_decoder.bias"], 3.0))
    script.restore(copy.deepcopy(content), again, other)
    assert other.scaler.state_dict() == precision.scaler.state_dict()
    torch.testing.assert_close(again.state_dict(), optimizer.state_dict(), rtol=0, atol=0)
    assert {group["initial_lr"] for group in again.param_groups} == {1e-3, 3e-3}


@pytest.mark.parametrize(
    "entry, value, for_coding",
    [(entry, value, True) for entry, values in TO_CODE.items() for value in values]
    + [(entry, value, False) for entry, values in TO_RESUME.items() for value in values],
)
def test_an_entry_that_is_something_else_is_refused(tmp_path, entry, value, for_coding):
    state = run_state(5)
    put(state, entry, value)
    torch.save(state, tmp_path / "last.bin")
    started = time.process_time()
    if for_coding:
        with pytest.raises(UserError) as caught:
            codes(tmp_path / "last.bin")
        assert f"{tmp_path}/last.bin: " in str(caught.value) and "Traceback" not in str(caught.value)
    with pytest.raises(UserError) as caught:
        resumed_from(tmp_path)
    assert f"{tmp_path}/last.bin: " in str(caught.value)
    assert time.process_time() - started < 2 * LONGEST


@pytest.mark.parametrize(
    "kind, lacks, decoder", [("flat", "decoder.", "flat"), ("seq2seq", "linear_decoder.", "greedy")]
)
def test_a_model_without_one_of_its_decoders(forms, tmp_path, kind, lacks, decoder):
    state = {**run_state(5), "kind": kind}
    state["model"] = {name: part for name, part in state["model"].items() if not name.startswith(lacks)}
    torch.save(state, tmp_path / "last.bin")
    coder = Coder.load(str(tmp_path / "last.bin"))
    assert coder.code(TEXTS, LANGUAGES, decoder) == forms["run"][1][decoder == "flat"]
    model = coder.model
    with torch.no_grad():
        memory, text = model.encode(torch.full((1, 32), 97), torch.ones(1, 32))
        written = model.decode(memory, torch.full((1, 4), 2)).argmax(-1)
        assert (written == PAD_IDX).all() if kind == "flat" else not model.classify(text).any()


@pytest.mark.parametrize(
    "name, content, said",
    [
        ("config.json", "[]", "expected a dict"),
        ("config.json", "{", "JSONDecodeError"),
        ("config.json", '{"layer_norm_eps": NaN}', "layer_norm_eps: found nan"),
        ("config.json", "[" * 100_000, "RecursionError"),
        ("config.json", None, "is a pipe"),
        ("config.json", '{"num_attention_heads": ' + "9" * 5000 + "}", "cannot be read"),
        ("config.json", '{"num_classes": 5}', "no len()"),
        ("config.json", '{"model_type": "bert"}', "model_type"),
        ("key.json", ..., "is a folder"),
        ("key.json", '{"a": 0, "b": 0}', "must number"),
        ("chars.json", '{"a": 1}', "expected a list"),
    ],
)
def test_what_lies_beside_published_weights_is_checked(forms, tmp_path, name, content, said):
    file = tmp_path / "model" / "model.safetensors"
    shutil.copytree(forms["published safetensors"][0].parent, file.parent)
    beside = file.parent / name
    beside.unlink(missing_ok=True)
    if content is None:
        os.mkfifo(beside)
    elif content is ...:
        beside.mkdir()
    else:
        beside.write_text(content)
    with pytest.raises(UserError) as caught:
        codes(file)
    assert name in str(caught.value) and said in str(caught.value), caught.value


@pytest.mark.parametrize("decoder", ["greedy", "flat", "topk", "full"])
def test_a_checkpoint_of_an_earlier_version_codes_as_it_did(decoder):
    """A run on the sample (width 32, no optimizer state), and its answers."""
    data = Path(__file__).parent / "data"
    expected = [row for row in read(data / "run_of_2026.csv") if row["decoder"] == decoder]
    coder = Coder(*models.load_model(str(data / "run_of_2026.bin")))
    coded = coder.code([row["occ1"] for row in expected], [row["lang"] for row in expected], decoder=decoder)
    for row, answer in zip(expected, coded, strict=True):
        assert "&".join(answer.codes) == row["codes"]
        assert answer.probs == pytest.approx([float(value) for value in row["probs"].split()], abs=1e-4)
        assert (answer.conf or 0.0) == pytest.approx(float(row["conf"] or 0), abs=1e-4)

"""No file of a model is believed: whatever stands in one, it codes as before, or one message says what is
wrong with it.

HISTOCC_MUTATIONS is the number of changed files that are tried.
"""

import copy
import csv
import json
import math
import shutil
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from helpers import mutations
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from histocc import export
from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.model import model_io
from histocc.model.canine import CanineConfig
from histocc.model.checkpoint_schema import build
from histocc.predict.coder import Coder
from histocc.runtime import checkpoint
from histocc.runtime.checksums import SUMS, with_sums
from histocc.runtime.errors import UserError
from histocc.runtime.files import OwnFiles
from histocc.runtime.world import World
from histocc.trainer import loop, resume

LONGEST = 5.0  # seconds of CPU time
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "num_hash_buckets": 64,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}
CONFIG = {
    **CanineConfig(**SIZES).to_dict(),
    "max_len": 32,
    "memory_mask": True,
    "target_mask": True,
    "decoder_dim_feedforward": 40,
    "text": "as-is",
}
CODES = ["-1", "22222", "22233", "33333", "44444"]
FORMATTER = BlockyFormatter("hisco", ["hisco_1", "hisco_2"])
TEXTS, LANGUAGES = ["smed", "wine merchant", "x" * 40], ["da", "en", "se"]
ENDED: Counter = Counter()


def make_model(config: dict = CONFIG):
    torch.manual_seed(5)
    model = build(config, FORMATTER.num_classes, len(CODES)).eval()
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
    rest = [
        p
        for name, p in model.named_parameters()
        if p.requires_grad and not name.startswith("linear_decoder.")
    ]
    optimizer = torch.optim.AdamW(
        [{"params": rest}, {"params": list(model.linear_decoder.parameters()), "lr": 3e-3}],
        lr=1e-3,
        fused=True,
    )
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    return model, optimizer


def take_steps(optimizer, steps: int) -> None:
    for step in range(steps):
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                p.grad = torch.full_like(p, 1e-3 * (i + step + 1))
        optimizer.step()


def run_state(steps: int) -> dict:
    model, optimizer = trained()
    take_steps(optimizer, steps)
    return checkpoint.to_cpu(
        {
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
            "args": {
                "num_epochs": 3,
                "seed": 42,
                "target_cols": ["hisco_1"],
                "key": None,
                "seq2seq_weight": 0.5,
            },
            "kept_codes": 0,
            "hisco_numbers": False,
            "rng": {"seed": 42, "threads": 1, "processes": 1},
            "thresholds": {"default": 0.3, "by_language": {"da": 0.25}, "source": "fitted"},
            "position": {
                "epoch": steps // 3,
                "batch": steps % 3,
                "total_batch": 8,
                "steps_per_epoch": 3,
                "fingerprint": "abc",
                "launchers": [""],
                "run": "r",
                "samples": 8 * steps,
                "running": [
                    {
                        "sums": {"loss": 1.5},
                        "count": 3,
                        "seconds_data": 0.1,
                        "skipped": 0,
                        "grad_norm": 2.0,
                    }
                ],
                "best_val_loss": 2.5,
                "bad_in_row": 0,
                "val_not_finite": 0,
                "finite_step": None,
                "before": steps,
                "files": {},
                "unfinished": None,
            },
        },
    )


def publish(folder: Path, weights: dict, form: str) -> None:
    folder.mkdir()
    key = {code: i for i, code in enumerate(CODES)}
    config = {
        "model_type": "canine",
        "num_attention_heads": 2,
        "max_position_embeddings": 160,
        "num_classes": FORMATTER.num_classes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    if form == "bin":
        torch.save({"model": weights, "key": key, "step": 3}, folder / "model.bin")
        return
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors")
    (folder / "key.json").write_text(json.dumps(key))


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
        export.export(str(found["run"]), form, str(root / f"exported {form}" / name))
        found[f"exported {form}"] = root / f"exported {form}" / name
    wide = {**CONFIG, "num_hash_buckets": 160, "max_position_embeddings": 160, "max_len": 128}
    weights = {name: tensor.contiguous() for name, tensor in make_model(wide).state_dict().items()}
    for form in ("bin", "safetensors"):
        publish(root / f"published {form}", weights, form)
        found[f"published {form}"] = root / f"published {form}" / f"model.{form}"
    return {form: (file, codes(file)) for form, file in found.items()}


def codes(file) -> list:
    coder = Coder.load(str(file))
    return [coder.code(TEXTS, LANGUAGES, decoder) for decoder in ("greedy", "flat", "topk")]


def test_they_code(forms):
    assert all(any(text.codes for text in decoder) for _, found in forms.values() for decoder in found)
    assert forms["run"][1] == forms["exported published"][1] == forms["exported safetensors"][1]


# ---- changes of any entry at any depth

NUMBERS = (0, -1, 1, 3, 1.5, 10**9, 10**30, math.nan, math.inf, -0.5)
OTHERS = (
    None,
    True,
    False,
    "",
    "x",
    "0",
    "1e999",
    "gpf",
    [],
    {},
    [[[[1]]]],
    {"a": {"b": [1]}},
    ["x"],
    {"": None},
)


def of_tensor(tensor: torch.Tensor) -> list:
    flat = tensor.reshape(-1)
    first = tensor[:1] if tensor.dim() else tensor[None]

    def with_first(value: float) -> torch.Tensor:
        changed = flat.clone()
        changed[len(changed) // 2] = value
        return changed.reshape(tensor.shape)

    return [
        lambda: tensor[:-1] if tensor.dim() else tensor[None],
        lambda: flat.clone(),
        lambda: torch.cat([first, first]).clone(),
        lambda: tensor.half(),
        lambda: tensor.double(),
        lambda: tensor.long(),
        lambda: tensor.to(torch.complex64),
        lambda: tensor.to(torch.float8_e4m3fn),
        lambda: tensor.bool(),
        lambda: with_first(math.nan),
        lambda: with_first(-math.inf),
        lambda: with_first(float(flat[0]) + 1),
        lambda: flat.flip(0).reshape(tensor.shape),
        lambda: torch.zeros(1).expand(tensor.shape),
        lambda: torch.zeros(1).expand(1 << 30, 3),
        lambda: tensor.to("meta"),
        lambda: tensor.to_sparse(),
        lambda: tensor.clone().requires_grad_(),
        lambda: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8),
        lambda: torch.zeros(0),
        lambda: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor,
        lambda: "a tensor",
        lambda: tensor.tolist(),
    ]


def of_number(value) -> list:
    return [
        lambda: value + 1,
        lambda: -value,
        lambda: value * 2,
        lambda: str(value),
        lambda: float(value),
        lambda: not value,
        lambda: [value],
    ]


def of_container(value) -> list:
    def again():
        return dict(reversed(value.items())) if isinstance(value, dict) else list(value)[::-1]

    def more():
        return {**value, "more": 1} if isinstance(value, dict) else [*value, *value[:1], "more"]

    deep: list = []
    for _ in range(600):
        deep = [deep]
    return [
        again,
        more,
        lambda: type(value)(list(value.items())[1:]) if isinstance(value, dict) else list(value)[1:],
        lambda: deep,
        lambda: list(value),
        lambda: {
            str(name): part for name, part in (value.items() if isinstance(value, dict) else enumerate(value))
        },
    ]


def changes_of(value) -> list:
    own = (
        of_tensor(value)
        if isinstance(value, torch.Tensor)
        else (
            of_container(value)
            if isinstance(value, (dict, list, tuple))
            else (
                of_number(value)
                if isinstance(value, (int, float))
                else (
                    [lambda: value + "x", lambda: value.upper(), lambda: value[::-1], lambda: [value]]
                    if isinstance(value, str)
                    else []
                )
            )
        )
    )
    return own + [lambda other=other: copy.deepcopy(other) for other in (*NUMBERS, *OTHERS)]


def change(content, draw):
    """One entry of nested dicts and lists is removed, renamed or replaced, in place. Returns the content and
    what was done."""
    parent, name, value, entry = None, None, content, []
    while isinstance(value, (dict, list, tuple)) and len(value) and (not entry or draw(st.integers(0, 3))):
        names = list(value) if isinstance(value, dict) else range(len(value))
        if isinstance(value, tuple):
            break
        parent, name = value, names[draw(st.integers(0, len(names) - 1))]
        value = parent[name]
        entry.append(str(name))
    ways = changes_of(value)
    way = draw(st.integers(-2, len(ways) - 1))
    if way == -2 or way == -1 and isinstance(parent, list):
        del parent[name]
    elif way == -1:
        parent[f"{name} " if isinstance(name, str) else -1] = parent.pop(name)
    else:
        parent[name] = ways[way]()
    return f"{': '.join(entry)} {way}"


def write_changed(file: Path, draw, sums: bool = True) -> str:
    """Changes one entry, or bytes, of a file or of what lies beside it."""
    target = (
        file.parent
        / sorted(path.name for path in file.parent.iterdir())[
            draw(st.integers(0, len(list(file.parent.iterdir())) - 1))
        ]
    )
    how = draw(st.sampled_from(["entry", "entry", "entry", "entry", "entry", "bytes", "cut"]))
    if how != "entry":
        content = bytearray(target.read_bytes())
        place = draw(st.integers(0, len(content) - 1))
        if how == "cut":
            content = content[:place]
        else:
            content[place] ^= 1 << draw(st.integers(0, 7))
        target.write_bytes(content)
        return f"{target.name} {how} {place}"
    if target.suffix == ".bin":
        content = torch.load(target, weights_only=True)
        content.pop("model_state_dict", None)
        if not sums:
            content.pop(SUMS, None)
        done = change(content, draw)
        torch.save(content, target)
    elif target.suffix == ".json":
        held = [json.loads(target.read_text())]
        done = change(held, draw)
        target.write_text(json.dumps(held[0] if held else None, default=str))
    else:
        done = change_safetensors(target, draw)
    return f"{target.name} {done}"


def change_safetensors(target: Path, draw) -> str:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(target, "pt") as opened:
        content = {
            "said": {
                name: json.loads(text) if name != "format" else text
                for name, text in sorted((opened.metadata() or {}).items())
            },
            "weights": {name: opened.get_tensor(name) for name in sorted(opened.keys())},
        }
    done = change(content, draw)
    said, weights = content.get("said"), content.get("weights")
    said = (
        {
            str(name): json.dumps(value, default=str) if name != "format" else str(value)
            for name, value in said.items()
        }
        if isinstance(said, dict)
        else {}
    )
    weights = weights if isinstance(weights, dict) else {}
    written = {
        str(name): value.detach().contiguous()
        for name, value in weights.items()
        if isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
        and value.numel() < 1 << 20
    }
    save_file(written, target, said)
    return done


def outcome(work, expected, may_differ: bool, what: str):
    """Counts how it ended; fails where it is neither as before nor one message."""
    for _ in range(3):  # on a busy machine threads that wait for each other take CPU time, too
        started = time.process_time()
        try:
            found = work()
            ended = "the same" if found == expected else "another result"
        except UserError as error:
            ended = "refused"
            assert str(error).strip() and "Traceback" not in str(error)
        seconds = time.process_time() - started
        if seconds < LONGEST:
            break
    assert seconds < LONGEST, f"{what}: took {seconds:.1f} s, three times"
    assert ended != "another result" or may_differ, f"{what}: read, with another result"
    return ended


def tried(number: int):
    return settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@tried(mutations(0.4))
@given(data=st.data())
def test_a_changed_file_codes_as_before_or_is_refused(forms, data):
    """Files with checksums code the very same. Without them, numbers that could be others are taken as they
    are."""
    form = data.draw(st.sampled_from(sorted(forms)))
    sums = data.draw(st.booleans())
    original, expected = forms[form]
    folder = original.parent.parent / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original.parent, folder)
    what = write_changed(folder / original.name, data.draw, sums)
    ended = outcome(
        lambda: codes(folder / original.name),
        expected,
        form.startswith("published") or not sums and original.suffix == ".bin",
        f"{form}: {what}",
    )
    ENDED[f"{form}{'' if sums or original.suffix != '.bin' else ' without checksums'}: {ended}"] += 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    older, newer = run_state(2), run_state(5)
    checkpoint.save(OwnFiles(str(folder)), ["2.bin"], older)
    checkpoint.save(OwnFiles(str(folder)), ["last.bin"], newer)
    return folder, [resumed(state) for state in (older, newer)]


def resumed(state: dict) -> tuple:
    """What a run that is resumed from `state` consists of: plain values, comparable."""
    model, optimizer = trained()
    model.load_state_dict(state["model"])
    resume.restore(state, loop.Run(model, None, optimizer, World()))
    held = (
        state["step"],
        state["position"],
        state["args"],
        state["key"],
        optimizer.state_dict()["param_groups"],
        [
            with_sums({"model": dict(model.state_dict())})[SUMS],
            with_sums({"optimizer": optimizer.state_dict()["state"]})[SUMS],
        ],
    )
    held = copy.deepcopy(held)
    take_steps(optimizer, 1)  # with what was restored, a step can be taken
    return held


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@tried(mutations(0.06))
@given(data=st.data())
def test_a_changed_checkpoint_is_resumed_as_it_was_or_passed_over(run, data):
    folder, (older, newer) = run
    sums, alone = data.draw(st.booleans()), data.draw(st.booleans())
    here = folder.parent / "changed run"
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    shutil.copy(folder / "last.bin", here)
    what = write_changed(here / "last.bin", data.draw, sums)
    if not alone:
        shutil.copy(folder / "2.bin", here)

    def work():
        path, state, wrong = model_io.newest_good(str(here))
        found = resumed(state)
        assert wrong == [] if path.endswith("last.bin") else len(wrong) == 1 and found == older
        return newer if path.endswith("2.bin") else found

    ended = outcome(work, newer, not sums, what)
    ENDED[f"resuming{'' if sums else ' without checksums'}: {ended}"] += 1


def test_how_the_changed_files_ended():
    """Both ways occur. With -s the counts are shown."""
    if not ENDED:
        pytest.skip("nothing was tried")
    print("\n".join(f"{count:6,} {name}" for name, count in sorted(ENDED.items())))
    assert {name.rpartition(": ")[2] for name in ENDED} >= {"refused", "the same"}


@pytest.mark.parametrize("decoder", ["greedy", "flat", "topk", "full"])
def test_a_checkpoint_of_an_earlier_version_codes_as_it_did(decoder):
    """A run on the sample (width 32, no optimizer state), and its answers."""
    data = Path(__file__).parent / "data"
    with open(data / "run_of_2026.csv", encoding="utf-8", newline="") as file:
        expected = [row for row in csv.DictReader(file) if row["decoder"] == decoder]
    coder = Coder(*model_io.load_model(str(data / "run_of_2026.bin")))
    coded = coder.code([row["occ1"] for row in expected], [row["lang"] for row in expected], decoder=decoder)
    for row, answer in zip(expected, coded, strict=True):
        assert "&".join(answer.codes) == row["codes"]
        assert answer.probs == pytest.approx([float(value) for value in row["probs"].split()], abs=1e-4)
        assert (answer.conf or 0.0) == pytest.approx(float(row["conf"] or 0), abs=1e-4)

"""Checkpoints: whole or not there, and data, never code."""

import argparse
import os
import re
import zipfile
from collections import OrderedDict
from datetime import timedelta

import pytest
import torch

from histocc.job.initial_weights import transfer_linear_rows
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.files import LIST, OwnFiles

STATE = {
    "model": OrderedDict(
        weight=torch.arange(6.0).reshape(2, 3),
        bias=torch.tensor([1, 2], dtype=torch.int64),
        empty=torch.zeros(0),
    ),
    "optimizer": {
        "state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.ones(2, dtype=torch.float64)}},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}],
    },
    "step": 12,
    "key": {"61110": 0, "-1": 1},
    "languages": ["unk", "da"],
    "args": {"flag": True, "none": None, "text": "æ𝔊", "big": 2**70},
}


def same(value, other) -> bool:
    """Equal in every bit and type, tensors too."""
    if type(value) is not type(other):
        return False
    if isinstance(value, torch.Tensor):
        return (
            value.dtype == other.dtype
            and value.shape == other.shape
            and value.numpy().tobytes() == other.numpy().tobytes()
        )
    if isinstance(value, dict):
        return list(value) == list(other) and all(same(value[name], other[name]) for name in value)
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    return value == other


def state_at(step: int) -> dict:
    return {**STATE, "step": step}


def save(folder, *names, step: int = 12) -> None:
    checkpoint.save(OwnFiles(str(folder)), list(names), state_at(step))


def step_of(path) -> int:
    return checkpoint.load(str(path))["step"]


def names_in(folder) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != LIST)


def refusal(path) -> str:
    with pytest.raises(UserError) as caught:
        checkpoint.load(str(path))
    assert str(path) in str(caught.value)
    return str(caught.value)


# ---- what is in a file


def test_round_trip_as_weights_only(tmp_path):
    save(tmp_path, "last.bin")
    assert same(checkpoint.load(str(tmp_path / "last.bin")), STATE)
    loaded = torch.load(tmp_path / "last.bin", weights_only=True)
    assert loaded["model_state_dict"] is loaded["model"]  # by its second name, once in the file
    assert loaded["checksums"].keys() == STATE.keys()
    assert same(
        {name: value for name, value in loaded.items() if name not in ("model_state_dict", "checksums")},
        STATE,
    )


def test_tensors_are_saved_without_their_gradients(tmp_path):
    layer = torch.nn.Linear(2, 2)
    checkpoint.save(OwnFiles(str(tmp_path)), ["last.bin"], {"model": dict(layer.named_parameters())})
    loaded = checkpoint.load(str(tmp_path / "last.bin"))["model"]
    assert all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in loaded.values())
    assert torch.equal(loaded["weight"], layer.weight)


# ---- whole or not there


@pytest.mark.parametrize("failing", ["torch.save", "os.fsync", "os.replace"])
def test_a_failure_leaves_the_old_file_and_no_half_one(tmp_path, monkeypatch, failing):
    save(tmp_path, "last.bin", "best.bin", step=1)
    old = (tmp_path / "last.bin").read_bytes()

    def fails(*arguments, **_):
        if failing == "torch.save":
            arguments[1].write(b"half a file")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        module, name = failing.split(".")
        patch.setattr({"torch": torch, "os": os}[module], name, fails)
        with pytest.raises(OSError, match="disk full"):
            save(tmp_path, "last.bin", step=2)
    assert (tmp_path / "last.bin").read_bytes() == old and names_in(tmp_path) == ["best.bin", "last.bin"]


def test_content_is_on_the_disk_before_its_name(tmp_path, monkeypatch):
    done = []

    def record(name, original):
        def call(*arguments):
            at = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else arguments[1]
            done.append((name, re.sub(r"\.tmp\d+", "", os.path.basename(at))))
            return original(*arguments)

        monkeypatch.setattr(os, name, call)

    for name in ("fsync", "replace", "link"):
        record(name, getattr(os, name))
    save(tmp_path, "100.bin", "last.bin")
    folder = tmp_path.name
    of_files = [each for each in done if each[1] != LIST]
    for name in ("last.bin", "100.bin"):
        named = of_files.index(("replace", name))
        assert ("fsync", "last.bin") in of_files[:named] and ("fsync", folder) in of_files[named:]


def test_names_of_one_state_share_its_bytes(tmp_path):
    save(tmp_path, "100.bin", "best.bin", "last.bin")
    assert len({(tmp_path / name).stat().st_ino for name in ("100.bin", "best.bin", "last.bin")}) == 1
    assert names_in(tmp_path) == ["100.bin", "best.bin", "last.bin"]


def test_file_systems_without_links_get_copies(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("not supported")

    monkeypatch.setattr(os, "link", fails)
    save(tmp_path, "100.bin", "last.bin", step=1)
    save(tmp_path, "200.bin", "last.bin", step=2)
    assert {name: step_of(tmp_path / name) for name in names_in(tmp_path)} == {
        "100.bin": 1,
        "200.bin": 2,
        "last.bin": 2,
    }


def test_a_new_state_leaves_other_names_of_the_old_one_alone(tmp_path):
    save(tmp_path, "100.bin", "best.bin", "last.bin", step=1)
    save(tmp_path, "200.bin", "last.bin", step=2)
    save(tmp_path, "last.bin", step=3)
    assert {name: step_of(tmp_path / name) for name in names_in(tmp_path)} == {
        "100.bin": 1,
        "200.bin": 2,
        "best.bin": 1,
        "last.bin": 3,
    }


@pytest.mark.parametrize("names", [["200.bin", "last.bin"], ["last.bin"]])
def test_what_a_killed_process_left_does_no_harm(tmp_path, names):
    """Killed between linking and renaming; the next process may have the same number, as in containers."""
    save(tmp_path, "100.bin", step=1)
    os.link(tmp_path / "100.bin", tmp_path / f"last.bin.tmp{os.getpid()}")
    (tmp_path / f"200.bin.tmp{os.getpid()}").write_bytes(b"half a file")
    save(tmp_path, *names, step=2)
    assert step_of(tmp_path / "100.bin") == 1 and {step_of(tmp_path / name) for name in names} == {2}
    assert not [name for name in names_in(tmp_path) if name.startswith(names[-1] + ".tmp")]


# ---- which files there are


def test_prune_keeps_the_newest_and_never_best_or_epochs(tmp_path):
    others = ["best.bin", "epoch_1.bin", "last.bin", "10.bin.tmp5", "a10.bin", "logs.csv"]
    own = OwnFiles(str(tmp_path))
    for name in ["9.bin", "10.bin", "100.bin", "1000.bin", "200.bin", *others]:
        own.claim(name)
        (tmp_path / name).touch()
    (tmp_path / "8.bin").write_text("somebody's")  # which the run did not write
    for keep in (7, 5):
        checkpoint.prune(own, keep)
        assert len(names_in(tmp_path)) == 12
    checkpoint.prune(own, 3)
    assert names_in(tmp_path) == sorted(["8.bin", "100.bin", "200.bin", "1000.bin", *others])
    checkpoint.prune(own, 1)
    assert names_in(tmp_path) == sorted(["8.bin", "1000.bin", *others])


def test_find(tmp_path):
    assert checkpoint.find(str(tmp_path)) is None and not checkpoint.exists_in(str(tmp_path))
    assert checkpoint.find(str(tmp_path / "none")) is None
    (tmp_path / "best.bin").touch()
    assert checkpoint.find(str(tmp_path)) == str(tmp_path / "best.bin") and checkpoint.exists_in(
        str(tmp_path)
    )
    (tmp_path / "last.bin").touch()
    assert checkpoint.find(str(tmp_path)) == str(tmp_path / "last.bin") and checkpoint.exists_in(
        str(tmp_path)
    )
    assert checkpoint.find(str(tmp_path), ("best.bin", "last.bin")) == str(tmp_path / "best.bin")
    assert checkpoint.find(str(tmp_path / "best.bin")) == str(tmp_path / "best.bin")


# ---- files that are refused


class RunsCode:
    def __reduce__(self):
        return os.mkdir, (self.folder,)

    def __init__(self, folder):
        self.folder = folder


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_checkpoint_is_not_run(tmp_path, legacy):
    sign = tmp_path / "the code has run"
    torch.save(
        {**STATE, "args": RunsCode(str(sign))},
        tmp_path / "evil.bin",
        _use_new_zipfile_serialization=not legacy,
    )
    message = refusal(tmp_path / "evil.bin")
    assert not sign.exists()
    assert re.search(r"(posix|nt)\.mkdir", message)
    assert "refused" in message and "weights_only" not in message
    torch.load(tmp_path / "evil.bin", weights_only=False)
    assert sign.exists()  # it would have


def test_foreign_objects_are_named(tmp_path):
    torch.save({**STATE, "args": argparse.Namespace(lr=1), "time": timedelta(1)}, tmp_path / "published.bin")
    message = refusal(tmp_path / "published.bin")
    assert "argparse.Namespace" in message and "datetime.timedelta" in message and "state_dict" in message


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda state: state["model"]["bias"].add_(1), "model: bias: found another content"),
        (lambda state: state.update(step=13), "step: found another content"),
        (lambda state: state["key"].update({"x": 2}), "key: found another content"),
        (lambda state: state.pop("key"), "key: found nothing"),
        (lambda state: state.update(thresholds={}), "thresholds: found an entry that was added"),
        (lambda state: state["model"].pop("bias"), "model: bias: found another"),
        (
            lambda state: state["checksums"].update(step="x"),
            "checksums: step: found 'x', expected a whole number",
        ),
        (lambda state: state.update(checksums=[1]), "checksums: found a list"),
        (
            lambda state: state["args"].update(flag=torch.zeros(1).expand(1 << 40)),
            "args: flag: found a tensor float32 .* bytes in a memory of 4",
        ),
    ],
)
def test_what_was_changed_after_it_was_written_is_named(tmp_path, change, said):
    save(tmp_path, "last.bin")
    state = torch.load(tmp_path / "last.bin", weights_only=True)
    change(state)
    torch.save(state, tmp_path / "last.bin")
    assert re.search(said, refusal(tmp_path / "last.bin"))
    if isinstance(state["checksums"], dict):
        assert (
            "removes the entry checksums" in refusal(tmp_path / "last.bin")
            or "a whole number" in said
            or "bytes" in said
        )


def test_files_without_checksums_and_those_that_lack_what_resuming_needs_are_read(tmp_path):
    save(tmp_path, "last.bin")
    state = torch.load(tmp_path / "last.bin", weights_only=True)
    del state["optimizer"]
    torch.save(state, tmp_path / "small.bin")
    assert checkpoint.load(str(tmp_path / "small.bin")).keys() == STATE.keys() - {"optimizer"}
    del state["checksums"]
    state["step"] = 99
    torch.save(state, tmp_path / "edited.bin")
    assert step_of(tmp_path / "edited.bin") == 99


def test_a_pipe_is_not_waited_for_and_a_bomb_not_unpacked(tmp_path):
    os.mkfifo(tmp_path / "last.bin")
    assert "found a pipe or device, expected a file" in refusal(tmp_path / "last.bin")
    with zipfile.ZipFile(tmp_path / "bomb.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("bomb/data.pkl", bytes(1 << 20))
    assert "compressed parts" in refusal(tmp_path / "bomb.bin")


def test_values_that_share_parts_without_end_are_refused(tmp_path):
    deep = ["x"]
    for _ in range(18):
        deep = [deep] * 10
    torch.save({**STATE, "args": deep, "checksums": {}}, tmp_path / "last.bin")
    assert "found values inside of values without end" in refusal(tmp_path / "last.bin")


def test_truncated_file(tmp_path):
    save(tmp_path, "last.bin")
    whole = (tmp_path / "last.bin").read_bytes()
    for size in [0, 1, *range(7, len(whole), 41), len(whole) - 1]:
        (tmp_path / "cut.bin").write_bytes(whole[:size])
        refusal(tmp_path / "cut.bin")


@pytest.mark.parametrize("bit", range(8))
def test_flipped_bit_is_refused_or_harmless(tmp_path, bit):
    save(tmp_path, "last.bin")
    whole = (tmp_path / "last.bin").read_bytes()
    for place in range(bit, len(whole), 29):
        (tmp_path / "bad.bin").write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        )
        try:
            assert same(checkpoint.load(str(tmp_path / "bad.bin")), STATE), (
                f"byte {place} was read as something else"
            )
        except UserError as error:
            assert "bad.bin" in str(error)


def test_flipped_bit_in_the_weights_is_refused(tmp_path):
    checkpoint.save(OwnFiles(str(tmp_path)), ["last.bin"], {"model": {"weight": torch.full((500,), 7.0)}})
    whole = (tmp_path / "last.bin").read_bytes()
    middle = whole.index(torch.full((500,), 7.0).numpy().tobytes()) + 1001
    (tmp_path / "bad.bin").write_bytes(whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :])
    assert "damaged" in refusal(tmp_path / "bad.bin")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"hello, this is text\n",
        b"occ1,hisco_1\nfarmer,61110\n",
        b"\x80\x02}q\x00.",
        b"\x80\x04\x95",
        bytes(range(256)),
        b"PK\x03\x04" + bytes(100),
        b"]q\x00(K\x01e.",
    ],
)
def test_no_checkpoint_at_all(tmp_path, content):
    (tmp_path / "last.bin").write_bytes(content)
    assert "weights_only" not in refusal(tmp_path / "last.bin")


@pytest.mark.parametrize("value", [[1, 2], {"weights": torch.ones(2)}, torch.ones(2), 3, None])
def test_something_else_than_a_checkpoint(tmp_path, value):
    torch.save(value, tmp_path / "other.bin")
    assert "'model'" in refusal(tmp_path / "other.bin")


def test_no_file(tmp_path):
    assert "no such file" in refusal(tmp_path / "none.bin")
    refusal(tmp_path)


# ---- continuing, and starting from other weights


def test_differing_args():
    saved = {"learning_rate": 1e-3, "seed": 1, "batch_size": 8, "target_cols": ["a", "b"], "only_then": 1}
    assert checkpoint.differing_args(saved, {**saved, "only_now": 2}, set()) == []
    now = {"learning_rate": 2e-3, "seed": 1, "batch_size": 16, "target_cols": ["b", "a"], "only_now": 2}
    assert checkpoint.differing_args(saved, now, {"batch_size"}) == [
        "--learning-rate was 0.001, now it is 0.002",
        "--target-cols was ['a', 'b'], now it is ['b', 'a']",
    ]


def test_load_matching():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = {
        "0.weight": torch.full((2, 3), 7.0),
        "0.bias": torch.zeros(3),
        "1.bias": torch.ones(4),
        "2.bias": torch.ones(4),
    }
    assert checkpoint.load_matching(model, weights) == [
        ["0.bias [2]", "1.weight [4, 2]"],
        ["0.bias [3]", "2.bias [4]"],
    ]
    after = model.state_dict()
    assert (after["0.weight"] == 7).all() and (after["1.bias"] == 1).all()
    assert torch.equal(after["0.bias"], before["0.bias"]) and torch.equal(
        after["1.weight"], before["1.weight"]
    )


def linear_state(rows: int, start: float, width: int = 2, dtype=torch.float32) -> dict:
    return {
        "linear_decoder.weight": torch.arange(start, start + rows * width, dtype=dtype).reshape(rows, width),
        "linear_decoder.bias": torch.arange(start, start + rows, dtype=dtype),
    }


def test_transfer_of_the_rows_that_both_keys_hold():
    state, weights = linear_state(3, 0, dtype=torch.float64), linear_state(4, 100)
    assert (
        transfer_linear_rows(state, weights, {"a": 0, "b": 1, "c": 2, "d": 3}, {"d": 0, "x": 1, "b": 2}) == 2
    )
    assert state["linear_decoder.weight"].tolist() == [[106, 107], [2, 3], [102, 103]]
    assert (
        state["linear_decoder.bias"].tolist() == [103, 1, 101]
        and state["linear_decoder.bias"].dtype == torch.float64
    )


@pytest.mark.parametrize(
    "weights, old_key",
    [
        (linear_state(2, 100), {"x": 0, "y": 1}),
        ({}, {"a": 0, "b": 1}),
        (linear_state(2, 100, width=3), {"a": 0, "b": 1}),
        (linear_state(3, 100), {"a": 0, "b": 1}),
    ],
    ids=["no code in common", "no weights", "another width", "another key"],
)
def test_nothing_to_transfer(weights, old_key):
    state = linear_state(2, 0)
    assert transfer_linear_rows(state, weights, old_key, {"a": 0, "b": 1}) == 0
    assert same(state, linear_state(2, 0))

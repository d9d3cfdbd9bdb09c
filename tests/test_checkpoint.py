"""Checkpoints of runs: whole or not there, data and never code; which are kept, and which one is resumed."""

import argparse
import builtins
import errno
import math
import os
import pickle
import re
import signal
from collections import OrderedDict
from datetime import timedelta

import pytest
import torch
from helpers import run_here, state_of

from histocc.predict import __main__ as predict
from histocc.runtime import checkpoint, signals
from histocc.runtime.errors import UserError
from histocc.runtime.files import LIST, OwnFiles
from histocc.runtime.world import World

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
    "format": 1,
    "key": {"61110": 0, "-1": 1},
    "languages": ["unk", "da"],
    "args": {"flag": True, "none": None, "text": "æ𝔊", "big": 2**70},
    "scheduler": {},
    "rng": {},
    "position": {},
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


def save(folder, *names, step: int = 12) -> None:
    checkpoint.save(OwnFiles(str(folder)), list(names), {**STATE, "step": step})


def load(path) -> dict:
    return checkpoint.load(str(path))


def names_in(folder) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != LIST)


def refusal(path) -> str:
    with pytest.raises(UserError) as caught:
        load(path)
    assert str(path) in str(caught.value) and "weights_only" not in str(caught.value)
    return str(caught.value)


def test_round_trip_as_weights_only(tmp_path):
    save(tmp_path, "last.bin")
    content = load(tmp_path / "last.bin")
    assert type(content.pop("checksum")) is int and same(content, STATE)
    plain = state_of(tmp_path)
    assert plain["model_state_dict"] is plain["model"]  # by its second name, once in the file
    layer = torch.nn.Linear(2, 2)
    checkpoint.save(OwnFiles(str(tmp_path)), ["last.bin"], {"model": dict(layer.named_parameters())})
    weights = load(tmp_path / "last.bin")["model"]
    assert all(type(tensor) is torch.Tensor and not tensor.requires_grad for tensor in weights.values())
    assert torch.equal(weights["weight"], layer.weight)


# ---- whole or not there


def test_content_is_on_the_disk_before_its_name_and_last_comes_first(tmp_path, monkeypatch):
    done = []

    def record(name, original):
        def call(*arguments):
            at = os.readlink(f"/proc/self/fd/{arguments[0]}") if name == "fsync" else arguments[1]
            done.append((name, re.sub(r"\.tmp\d+", "", os.path.basename(at))))
            return original(*arguments)

        return call

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, record(name, getattr(os, name)))
    save(tmp_path, "100.bin", "last.bin")
    last, step = (done.index(("replace", name)) for name in ("last.bin", "100.bin"))
    assert last < step and ("fsync", "last.bin") in done[:last] and ("fsync", tmp_path.name) in done[step:]


@pytest.mark.parametrize("links", [True, False])
def test_names_of_one_state_and_of_the_next(tmp_path, monkeypatch, links):
    if not links:  # a file system without them gets copies
        monkeypatch.setattr(os, "link", lambda *_: os.stat("/nowhere"))
    save(tmp_path, "100.bin", "best.bin", "last.bin", step=1)
    numbers = {(tmp_path / name).stat().st_ino for name in ("100.bin", "best.bin", "last.bin")}
    assert len(numbers) == (1 if links else 3)
    checkpoint.rewrite(str(tmp_path / "best.bin"), {**load(tmp_path / "best.bin"), "confidence": 1})
    changed = [tmp_path / name for name in names_in(tmp_path) if "confidence" in load(tmp_path / name)]
    assert len(changed) == (3 if links else 1) and len({path.stat().st_ino for path in changed}) == 1
    save(tmp_path, "200.bin", "last.bin", step=2)
    save(tmp_path, "last.bin", step=3)
    steps = {name: load(tmp_path / name)["step"] for name in names_in(tmp_path)}
    assert steps == {"100.bin": 1, "200.bin": 2, "best.bin": 1, "last.bin": 3}


def test_names_that_a_killed_save_left_out_are_given_later(tmp_path):
    save(tmp_path, "1.bin", "best.bin", "epoch_1.bin", "last.bin", step=1)
    own, names = OwnFiles(str(tmp_path)), ["2.bin", "best.bin", "last.bin"]
    checkpoint.save(own, ["last.bin"], {**STATE, "step": 2, checkpoint.NAMES_ENTRY: names})
    checkpoint.complete(own, load(tmp_path / "last.bin"), 1)
    steps = {name: load(tmp_path / name)["step"] for name in names_in(tmp_path)}
    assert steps == {**dict.fromkeys(names, 2), "epoch_1.bin": 1}


# ---- which files there are


def test_prune_keeps_the_newest_and_never_best_or_epochs(tmp_path):
    others = ["best.bin", "epoch_1.bin", "last.bin", "10.bin.tmp5", "a10.bin", "logs.csv"]
    own = OwnFiles(str(tmp_path))
    for name in ["9.bin", "10.bin", "100.bin", "1000.bin", "200.bin", *others]:
        own.claim(name)
        (tmp_path / name).touch()
    (tmp_path / "8.bin").write_text("somebody's")  # which the run did not write
    checkpoint.prune(own, 7)  # more than there are
    assert len(names_in(tmp_path)) == 12
    checkpoint.prune(own, 3)
    assert names_in(tmp_path) == sorted(["8.bin", "100.bin", "200.bin", "1000.bin", *others])
    checkpoint.prune(own, 1)
    assert names_in(tmp_path) == sorted(["8.bin", "1000.bin", *others])


def no_space(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_saves_that_fail_remove_no_checkpoint(tmp_path, monkeypatch):
    write, said, own = torch.save, [], OwnFiles(str(tmp_path))
    saver = checkpoint.Saver(own, 3, World(), lambda step, _: STATE | {"step": step}, said.append)
    for step in range(1, 7):
        monkeypatch.setattr(torch, "save", no_space if step in (3, 4, 5) else write)
        saver(step, [f"{step}.bin", "last.bin"], {})
    assert names_in(tmp_path) == ["1.bin", "2.bin", "6.bin", "last.bin"] == sorted(own.names)
    assert [line.startswith("WARNING") for line in said] == [False, False, True, True, True, False]
    assert load(tmp_path / "last.bin")[checkpoint.NAMES_ENTRY] == ["6.bin", "last.bin"]


@pytest.mark.parametrize("ends", ["space", "limit", "signal"])
def test_the_last_save_waits_for_space_until_the_limit_or_a_signal(tmp_path, monkeypatch, ends):
    write, pauses, said, own = torch.save, [], [], OwnFiles(str(tmp_path))
    saver = checkpoint.Saver(own, 3, World(time_limit=600.0), lambda *_: STATE, said.append)
    monkeypatch.setattr(torch, "save", no_space)
    saver(12, ["last.bin"], {})
    with signals.listening() as stop:

        def sleep(seconds):
            pauses.append(seconds)
            if len(pauses) == 3 and ends == "signal":
                stop.receive(signal.SIGTERM)
            if len(pauses) == 3 and ends == "space":
                monkeypatch.setattr(torch, "save", write)

        monkeypatch.setattr(checkpoint.time, "sleep", sleep)
        saver.wait_for_space()
    assert ("no space left" in saver.failed) == (ends != "space") and len(said) == 2 + (ends == "space")
    assert "Note: the run waits for up to 10 minutes (--timeout-minutes), or until a signal" in said[1]
    assert sum(pauses) == 600 if ends == "limit" else len(pauses) == 3
    assert names_in(tmp_path) == ["last.bin"] * (ends == "space")


def newest(folder) -> tuple[str, int, list[str]]:
    path, state, wrong = checkpoint.newest_good(str(folder), checkpoint.load_resumable)
    return os.path.basename(path), state["step"], wrong


def test_the_newest_good_one_after_a_torn_last(tmp_path):
    save(tmp_path, "best.bin", step=1)
    for step in (20, 100):
        save(tmp_path, f"{step}.bin", "last.bin", step=step)
    assert newest(tmp_path) == ("last.bin", 100, [])
    torn = (tmp_path / "last.bin").read_bytes()[:-100]
    for name in ("last.bin", "100.bin"):
        (tmp_path / name).unlink()
        (tmp_path / name).write_bytes(torn)
    name, step, wrong = newest(tmp_path)
    assert (name, step) == ("20.bin", 20) and len(wrong) == 1 and "last.bin: " in wrong[0]
    state = load(tmp_path / "20.bin")
    del state["optimizer"], state["checksum"]
    torch.save(state, tmp_path / "20.bin")
    name, step, wrong = newest(tmp_path)
    assert (name, step) == ("best.bin", 1) and "20.bin: cannot be resumed from: it lacks optim" in wrong[-1]
    (tmp_path / "best.bin").unlink()
    with pytest.raises(UserError, match="--overwrite"):
        newest(tmp_path)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("place", [(builtins, "open"), (torch, "load")])
def test_a_file_that_the_system_fails_to_hand_over_is_tried_again_and_never_passed_over(
    tmp_path, monkeypatch, number, place
):
    for step in (20, 100):
        save(tmp_path, f"{step}.bin", "last.bin", step=step)
    fails, original = [1], getattr(*place)

    def failing(path, *args, **named):
        if fails and "last.bin" in str(getattr(path, "name", path)):
            fails.pop()
            raise OSError(number, os.strerror(number))
        return original(path, *args, **named)

    monkeypatch.setattr(*place, failing)
    assert newest(tmp_path) == ("last.bin", 100, []) and not fails
    fails.extend([1] * 1000)
    monkeypatch.setattr(checkpoint, "READ_SECONDS", 0)
    with pytest.raises(UserError, match=f"last.bin: cannot be read: {os.strerror(number)}$"):
        newest(tmp_path)


def test_what_another_program_or_version_has_written_is_never_passed_over(tmp_path):
    save(tmp_path, "2.bin")
    foreign = {name: value for name, value in STATE.items() if name != "format"}
    newer = {**STATE, "format": 2, "checksum": "as others write it"}
    for state, said in ((newer, "format 2; this version reads 1"), (foreign, "--initial-checkpoint")):
        torch.save(state, tmp_path / "last.bin")
        with pytest.raises(UserError, match=said):
            newest(tmp_path)


# ---- files that are refused


class RunsCode:
    def __reduce__(self):
        return os.mkdir, (self.folder,)

    def __init__(self, folder):
        self.folder = folder


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_checkpoint_is_not_run(tmp_path, legacy):
    sign, file = tmp_path / "the code has run", tmp_path / "evil.bin"
    torch.save({**STATE, "args": RunsCode(str(sign))}, file, _use_new_zipfile_serialization=not legacy)
    message = refusal(file)
    assert not sign.exists() and re.search(r"refused.*(posix|nt)\.mkdir", message)
    torch.load(file, weights_only=False)
    assert sign.exists()  # it would have


def test_foreign_objects_are_named(tmp_path):
    torch.save({**STATE, "args": argparse.Namespace(lr=1), "time": timedelta(1)}, tmp_path / "published.bin")
    message = refusal(tmp_path / "published.bin")
    assert "argparse.Namespace" in message and "datetime.timedelta" in message and "state_dict" in message


CHANGES = {
    "a weight": lambda state: state["model"]["bias"].add_(1),
    "another shape": lambda state: state["model"].update(weight=state["model"]["weight"].T),
    "a weight more": lambda state: state["model"].update({float("nan"): torch.zeros(1)}),
    "an argument of another type": lambda state: state["args"].update(flag=1),
    "the checksum as text": lambda state: state.update(checksum=str(state["checksum"])),
    "a newer format": lambda state: state.update(format=10**30),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_after_it_was_written_is_refused(tmp_path, change):
    save(tmp_path, "last.bin")
    state = state_of(tmp_path)
    CHANGES[change](state)
    torch.save(state, tmp_path / "last.bin")
    refusal(tmp_path / "last.bin")


def test_damage_of_any_byte_is_refused_or_harmless(tmp_path):
    save(tmp_path, "last.bin")
    whole, bad = (tmp_path / "last.bin").read_bytes(), tmp_path / "bad.bin"
    cut = [whole[:size] for size in [0, 1, *range(7, len(whole), 97), len(whole) - 1]]
    places = range(0, len(whole), 13)
    flipped = [whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :] for at in places]
    for damaged in (*cut, *flipped, whole + b"x" * 100, b"x" * 100 + whole):
        bad.write_bytes(damaged)
        try:
            state = load(bad)
        except UserError as error:
            assert "bad.bin" in str(error)
        else:
            read = {name: value for name, value in state.items() if name in STATE}
            assert same(read, STATE) and len(state) == len(STATE) + 1
    bad.write_bytes(whole[: len(whole) // 2])
    assert f"is damaged or incomplete ({len(whole) // 2:,} bytes): copy it again" in refusal(bad)
    middle = whole.index(torch.arange(6.0).numpy().tobytes()) + 9
    bad.write_bytes(whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :])
    assert "not what its checksum says" in refusal(bad)


def test_no_checkpoint_at_all(tmp_path):
    file = tmp_path / "last.bin"
    texts = [b"", b"occ1,hisco_1\nfarmer,61110\n", bytes(10_000), b"PK\x03\x04" + bytes(100), b"\x80\x04\x95"]
    for content in (*texts, pickle.dumps({"model": {}}, 2), [1, 2], torch.ones(2), None):
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            torch.save(content, file)
        refusal(file)
    line = ["--model", tmp_path, "--input", __file__, "--output", tmp_path / "out.csv"]
    assert str(file) in run_here(predict.main, *line, code=2)


def test_weights_that_are_not_finite_are_not_written(tmp_path):
    weights, said = torch.zeros(3), []

    def content(step, position):
        return {"model": {}, "optimizer": {}, "step": step, position["of"]: {"w": weights}}

    saver = checkpoint.Saver(OwnFiles(str(tmp_path / "run")), 3, World(), content, said.append)
    for step, names in ((2, ["2.bin", "best.bin"]), (4, ["4.bin", "last.bin"]), (6, ["last.bin"])):
        assert saver(step, names, {"of": "model"}) == "" and saver.seconds > 0
    assert len(said) == 3 and "2.bin, best.bin of step 2: 0 MB" in said[0]
    for wrong, of in ((math.nan, "model"), (math.inf, "model"), (math.nan, "optimizer")):
        weights[1] = wrong
        assert "no longer finite" in saver(7, ["7.bin", "best.bin", "last.bin"], {"of": of})
        assert "WARNING: the checkpoint of step 7" in said[-1]
    assert names_in(saver.files.folder) == ["2.bin", "4.bin", "best.bin", "last.bin"]

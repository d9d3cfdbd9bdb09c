"""The live view of a run, from its files alone."""

import json

import pytest

from histocc import watch
from histocc.runtime.files import OwnFiles, run_lock
from histocc.seq2seq_mixer_engine import COLUMNS
from histocc.trainer.log import STATUS, RunLog
from histocc.trainer.schedule import Steps

ROW = {
    "epoch": 0,
    "grad_norm": 1.0,
    "lr": 1e-4,
    "samples_per_sec": 320.0,
    "seconds_data": 0.1,
    "data_share": 0.0,
    "model_flops_per_sec": 41.26e9,
    "mfu": 0.23,
    "train_loss_linear": 0.1,
    "train_loss_seq2seq": 0.1,
}


@pytest.fixture
def run(tmp_path):
    """A run of 1,000 steps that has come to step 300."""
    (tmp_path / "args.json").write_text(json.dumps({"model_size": "tiny", "dataset": "data.csv"}))
    log = RunLog(OwnFiles(str(tmp_path), overwrite=True), Steps(5000, stop=1000), COLUMNS, bar=False)
    for step, loss in ((100, 2.0), (200, 1.0), (300, 1.5)):
        log.row({**ROW, "step": step, "samples": step * 64, "train_loss": loss})
    log.row({"step": 300, "epoch": 0, "val_loss": 0.9, "seq_acc": 0.5, "token_acc": 0.75, "flat_acc": 0.0})
    return tmp_path, log


def text(folder, width=100, **options):
    return "\n".join(watch.lines(watch.read(str(folder)), width, **options))


def test_view_of_a_live_run(run):
    folder, log = run
    log.say("Note: something to look at")
    with run_lock(str(folder)):
        found = text(folder)
        assert watch.read(str(folder)).running
    assert "(tiny, data.csv)" in found and " 30%  step 300 of 1,000 (--max-steps; 5,000 in all)" in found
    assert (
        "█▁▅ 1.5000  lowest 1.0000" in found
        and "320 samples/s · 41.3 GFLOP/s (23% of matmul) · learning rate 1.00e-04 · epoch 1 · 19,200 samples"
        in found
    )
    assert (
        "0.9000 at step 300; lowest 0.9000 at step 300" in found
        and "seq_acc 50.0% · token_acc 75.0% · flat_acc 0.0%" in found
    )
    assert "time left   2m20s" in found  # 700 steps of 64 at 320 samples/s
    assert "state       running" in found and "Note: something to look at" in found


def test_a_run_without_a_word_for_long_may_be_dead(run):
    folder, _ = run
    with run_lock(str(folder)):
        updated = watch.read(str(folder)).status["updated"]
        late = text(folder, now=updated + 700)
        assert "it may be dead" in late and "last row 11m40s ago" in late
        assert "it may be dead" not in text(folder, now=updated + 300)


def test_a_run_that_was_killed_is_not_running(run):
    folder, _ = run
    assert not watch.read(str(folder)).running
    assert "ended without a word: killed, or by an error" in text(folder)
    # a lock that another machine holds is not judged
    (folder / "run.lock").write_text(json.dumps({"host": "elsewhere", "process": 1, "since": "2026-01-01"}))
    assert watch.read(str(folder)).running


def test_it_looks_again_until_the_run_ends(run, capsys, monkeypatch):
    folder, log = run
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 2:
            log.close("finished")

    monkeypatch.setattr(watch.time, "sleep", sleep)
    with run_lock(str(folder)):
        assert watch.main([str(folder), "--once"]) == 0
        assert capsys.readouterr().out.count("progress") == 1
        assert watch.main([str(folder), "--every", "7"]) == 0
    said = capsys.readouterr().out
    assert looks == [7.0, 7.0] and said.count("progress") == 3 and "state       finished, last row" in said


def test_a_run_that_has_not_logged_yet(tmp_path, capsys):
    with run_lock(str(tmp_path)):
        assert watch.main([str(tmp_path), "--once"]) == 0
    assert "running, before the first step" in capsys.readouterr().out
    assert watch.main([str(tmp_path), "--once"]) == 2 and "no status.json there" in capsys.readouterr().err
    RunLog(OwnFiles(str(tmp_path), overwrite=True), Steps(10), COLUMNS, bar=False)
    assert "step 0 of 10" in text(tmp_path) and "loss" not in text(tmp_path)


def add_row(folder, **cells):
    """A row of step 400, as damaged as `cells` make it."""
    row = {**ROW, "step": 400, "samples": 25600, "train_loss": 1.25, **cells}
    with open(folder / "logs.csv", "a", encoding="utf-8") as file:
        file.write(",".join(str(row.get(name, "")) for name in COLUMNS) + "\n")


@pytest.mark.parametrize(
    "cells",
    [
        *({name: ""} for name in ("lr", "epoch", "samples", "mfu")),
        *({"samples_per_sec": value} for value in ("nan", "inf", "-1", "1e-300")),
        *({"model_flops_per_sec": value, "mfu": value} for value in ("nan", "inf", "-1")),
    ],
)
def test_what_a_row_lacks_is_left_out(run, cells):
    folder, _ = run
    add_row(folder, **cells)
    with run_lock(str(folder)):
        found = text(folder)
    assert "step 400 of 1,000" in found and "1.2500  lowest 1.0000" in found
    for name, words in (("samples", "25,600 samples"), ("epoch", "epoch 1"), ("lr", "learning rate")):
        assert (words in found) == (name not in cells)


@pytest.mark.parametrize(
    "cells",
    [
        {"step": "4" * 400},
        *({"epoch": value} for value in ("inf", "nan", "-1")),
        *({"samples": value} for value in ("nan", "-inf", "1e300")),
    ],
)
def test_rows_without_a_countable_place_are_left_out(run, cells):
    folder, _ = run
    add_row(folder, **cells)
    with open(folder / "logs.csv", "a", encoding="utf-8") as file:
        file.write("400,0,25600,oops" + "," * (len(COLUMNS) - 4) + "\n" + "500,0,320")  # half written
    with run_lock(str(folder)):
        assert "step 300 of 1,000" in text(folder) and "1.5000  lowest 1.0000" in text(folder)


def test_a_step_beyond_the_end_fills_the_bar(run):
    folder, _ = run
    add_row(folder, step=9_000_000)
    with run_lock(str(folder)):
        assert "100%  step 9,000,000 of 1,000" in text(folder) and "time left   0s" in text(folder)


@pytest.mark.parametrize(
    "name, changes",
    [
        (STATUS, [{"step": value} for value in (None, "3", float("nan"), True)]),
        (STATUS, [{"stop_step": 10**400}, {"total_steps": [1]}, {"state": 3}, {"warning": {}}]),
        (STATUS, [{"updated": value} for value in ("now", float("inf"), None)]),
        ("args.json", [{"model_size": 3}, {"dataset": 3}, {"train_data": ["a", 3]}, {"train_data": "a.csv"}]),
    ],
)
def test_damaged_files_are_named(run, capsys, name, changes):
    file = run[0] / name
    sound = json.loads(file.read_text())
    for change in changes:
        file.write_text(json.dumps(sound | change))
        assert watch.main([str(run[0]), "--once"]) == 2
        said = f"error: {file}: is damaged; missing or not what a run writes: {next(iter(change))}\n"
        assert capsys.readouterr().err == said


def test_one_look_that_fails_does_not_end_the_view(run, capsys, monkeypatch):
    folder, log = run
    looks = []

    def sleep(_):
        looks.append((folder / STATUS).exists())
        if len(looks) == 1:
            (folder / STATUS).rename(folder / "away")
        elif len(looks) == 2:
            (folder / STATUS).write_text(json.dumps({"state": "running"}))
        else:
            log.close("finished")

    monkeypatch.setattr(watch.time, "sleep", sleep)
    with run_lock(str(folder)):
        assert watch.main([str(folder)]) == 0
    found = capsys.readouterr()
    assert looks == [True, False, True] and found.err == "" and "state       finished" in found.out
    assert found.out.count("step 300 of") == 4 and found.out.count("it looks again") == 2


def test_what_is_no_run_is_said(tmp_path, capsys):
    folder = tmp_path / "run"
    assert watch.main([str(folder)]) == 2 and "no such folder" in capsys.readouterr().err
    folder.mkdir()
    (folder / STATUS).write_text("{")
    assert watch.main([str(folder)]) == 2 and "is not the folder of a run" in capsys.readouterr().err


def test_bars_and_what_is_not_finite(run):
    folder, log = run
    bars = {(): "", (2.0, 2.0): "▁▁", (0.0, 7.0, 14.0): "▁▅█", (1.0, float("nan"), 0.0, float("inf")): "█×▁×"}
    assert {values: watch.spark(list(values), 10) for values in bars} == bars
    assert len(watch.spark([float(i) for i in range(1000)], 40)) == 40
    log.row({**ROW, "step": 400, "samples": 25600, "train_loss": float("nan")})
    log.row({"step": 400, "epoch": 0, "val_loss": float("nan"), "seq_acc": 0.0})
    assert "nan  lowest 1.0000" in text(folder) and "lowest 0.9000 at step 300" in text(folder)


def test_a_disk_that_is_full_does_not_end_the_run(run, monkeypatch):
    folder, log = run

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("histocc.runtime.files.os.replace", full)
    log.say("WARNING: full")
    log.close("finished")
    assert json.loads((folder / STATUS).read_text())["state"] == "running"

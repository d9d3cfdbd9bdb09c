"""The live view of a run, from its files alone."""

import io
import json
import sys

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


def new_log(folder, *steps, **options):
    return RunLog(OwnFiles(str(folder), overwrite=True), Steps(*steps, **options), COLUMNS, bar=False)


@pytest.fixture
def run(tmp_path):
    """A run of 1,000 steps that has come to step 300."""
    (tmp_path / "args.json").write_text(json.dumps({"model_size": "tiny", "dataset": "data.csv"}))
    log = new_log(tmp_path, 5000, stop=1000)
    for step, loss in ((100, 2.0), (200, 1.0), (300, 1.5)):
        log.row({**ROW, "step": step, "samples": step * 64, "train_loss": loss})
    log.row({"step": 300, "epoch": 0, "val_loss": 0.9, "seq_acc": 0.5, "token_acc": 0.75, "flat_acc": 0.0})
    return tmp_path, log


def text(folder, **options):
    return watch.view(str(folder), 100, **options)[0]


def is_running(folder):
    return watch.view(str(folder))[1]


def test_view_of_a_live_run(run):
    folder, log = run
    log.say("Note: something to look at")
    with run_lock(str(folder)):
        shown = text(folder)
        assert is_running(folder)
    for words in (
        "(tiny, data.csv)",
        " 30%  step 300 of 1,000 (--max-steps; 5,000 in all)",
        "█▁▅ 1.5000  lowest 1.0000",
        "320 samples/s · 41.3 GFLOP/s (23% of matmul) · learning rate 1.00e-04 · epoch 1 · 19,200 samples",
        "0.9000 at step 300; lowest 0.9000 at step 300",
        "seq_acc 50.0% · token_acc 75.0% · flat_acc 0.0%",
        "time left   2m20s",  # 700 steps of 64 at 320 samples/s
        "state       running",
        "Note: something to look at",
    ):
        assert words in shown


def test_a_run_without_a_row_for_long_may_be_dead_and_one_that_was_killed_is(run):
    folder, _ = run
    with run_lock(str(folder)):
        updated = json.loads((folder / STATUS).read_text())["updated"]
        late = text(folder, now=updated + 700)
        assert "it may be dead" in late and "last row 11m40s ago" in late
        assert "it may be dead" not in text(folder, now=updated + 300)
    assert not is_running(folder) and "ended without a word: killed, or by an error" in text(folder)
    # a lock that another machine holds is not judged
    (folder / "run.lock").write_text(json.dumps({"host": "elsewhere", "process": 1, "since": "2026-01-01"}))
    assert is_running(folder)


def test_it_looks_until_the_run_ends_and_outlasts_looks_that_fail(run, capsys, monkeypatch):
    folder, log = run
    looks = []

    def sleep(seconds):
        looks.append(seconds)
        if len(looks) == 1:
            (folder / STATUS).rename(folder / "away")
        elif len(looks) == 2:
            (folder / STATUS).write_text(json.dumps({"state": "running"}))
        else:
            log.close("finished")

    monkeypatch.setattr(watch.time, "sleep", sleep)
    with run_lock(str(folder)):
        assert watch.main([str(folder), "--once"]) == 0
        assert capsys.readouterr().out.count("progress") == 1
        assert watch.main([str(folder), "--every", "7"]) == 0
    shown = capsys.readouterr()
    assert looks == [7.0, 7.0, 7.0] and shown.err == "" and "state       finished, last row" in shown.out
    assert shown.out.count("step 300 of") == 4 and shown.out.count("it looks again") == 2


def test_it_ends_with_its_reader(run, monkeypatch):
    class Broken(io.StringIO):
        def flush(self):
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(sys, "stdout", Broken())
    with run_lock(str(run[0])):
        assert watch.main([str(run[0]), "--every", "0.1"]) == 0


def test_a_run_that_has_not_logged_yet(tmp_path, capsys):
    with run_lock(str(tmp_path)):
        assert watch.main([str(tmp_path), "--once"]) == 0
    assert "running, before the first step" in capsys.readouterr().out
    assert watch.main([str(tmp_path), "--once"]) == 2 and "no status.json there" in capsys.readouterr().err
    new_log(tmp_path, 10)
    assert "step 0 of 10" in text(tmp_path) and "loss" not in text(tmp_path)
    assert watch.main([str(tmp_path / "none")]) == 2 and "no such folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "cells, is_shown",
    [
        *(({name: ""}, True) for name in ("lr", "epoch", "samples", "mfu")),
        *(({"samples_per_sec": value}, True) for value in ("nan", "inf", "-1", "1e-300")),
        *(({"model_flops_per_sec": value, "mfu": value}, True) for value in ("nan", "inf", "-1")),
        ({"step": "4" * 400}, False),
        *(({"epoch": value}, False) for value in ("inf", "nan", "-1")),
        *(({"samples": value}, False) for value in ("nan", "-inf", "1e300", "oops")),
    ],
)
def test_what_a_row_lacks_is_left_out_and_so_is_a_row_without_a_countable_place(run, cells, is_shown):
    folder, _ = run
    row = {**ROW, "step": 400, "samples": 25600, "train_loss": 1.25, **cells}
    with open(folder / "logs.csv", "a", encoding="utf-8") as file:
        file.write(",".join(str(row.get(name, "")) for name in COLUMNS) + "\n500,0,320")  # half written
    with run_lock(str(folder)):
        shown = text(folder)
    assert ("step 400 of 1,000" in shown and "1.2500  lowest 1.0000" in shown) == is_shown
    assert ("step 300 of 1,000" in shown and "1.5000  lowest 1.0000" in shown) != is_shown


@pytest.mark.parametrize(
    "name, change",
    [
        *((STATUS, {"step": value}) for value in (None, "a", float("nan"), [3])),
        *((STATUS, change) for change in ({"stop_step": 10**400}, {"updated": "now"}, {"updated": None})),
        *(("args.json", change) for change in ({"model_size": 3}, {"dataset": 3})),
    ],
)
def test_damaged_files_are_named(run, capsys, name, change):
    file = run[0] / name
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert watch.main([str(run[0]), "--once"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: is damaged")


def test_bars_and_what_is_not_finite(run):
    folder, log = run
    bars = {(): "", (2.0, 2.0): "▁▁", (0.0, 7.0, 14.0): "▁▅█", (1.0, float("nan"), 0.0, float("inf")): "█×▁×"}
    assert {values: watch.spark(list(values), 10) for values in bars} == bars
    assert len(watch.spark([float(i) for i in range(1000)], 40)) == 40
    log.row({**ROW, "step": 9_000_000, "samples": 25600, "train_loss": float("nan")})
    log.row({"step": 9_000_000, "epoch": 0, "val_loss": float("nan"), "seq_acc": 0.0})
    with run_lock(str(folder)):
        shown = text(folder)
    assert "nan  lowest 1.0000" in shown and "lowest 0.9000 at step 300" in shown
    assert "100%  step 9,000,000 of 1,000" in shown and "time left   0s" in shown

"""The live view of a run, from its files alone."""

import json
import threading
import time

import pytest

from histocc import watch
from histocc.runtime.files import OwnFiles, run_lock
from histocc.seq2seq_mixer_engine import COLUMNS
from histocc.trainer.log import STATUS, RunLog

ROW = {"epoch": 0, "grad_norm": 1.0, "lr": 1e-4, "samples_per_sec": 320.0, "data_share": 0}


def new_log(folder, *steps, **options):
    return RunLog(OwnFiles(str(folder), overwrite=True), COLUMNS, *steps, **options)


@pytest.fixture
def run(tmp_path):
    """A run of 1,000 steps that has come to step 300."""
    log = new_log(tmp_path, 5000, stop_step=1000)
    for step, loss in ((100, 2.0), (200, 1.0), (300, 1.5)):
        log.row({**ROW, "step": step, "samples": step * 64, "train_loss": loss})
    log.row({"step": 300, "epoch": 0, "val_loss": 0.9, "seq_acc": 0.5, "token_acc": 0.75, "flat_acc": 0.0})
    return tmp_path, log


def view(folder):
    return watch.view(str(folder), 100)


def test_view_of_a_live_run(run):
    folder, log = run
    log.say("Note: something to look at")
    with run_lock(str(folder)):
        text, is_running = view(folder)
    assert is_running
    for words in (
        " 30%  step 300 of 1,000",
        "█▁▅ 1.5000  lowest 1.0000",
        "320 samples/s · learning rate 1.00e-04",
        "validation  ▁ 0.9000  lowest 0.9000",
        "seq_acc 50.0 % · token_acc 75.0 % · flat_acc 0.0 %",
        "time left   2m20s",  # 700 steps of 64 at 320 samples/s
        "state       running",
        "Note: something to look at",
    ):
        assert words in text


def test_a_run_that_was_killed(run):
    folder, _ = run
    text, is_running = view(folder)
    assert not is_running and "ended unexpectedly" in text
    # a lock that another machine holds is not judged
    (folder / "run.lock").write_text(json.dumps({"host": "elsewhere", "process": 1, "since": "2026-01-01"}))
    assert view(folder)[1]


def test_a_row_of_both_kinds_is_shown_once(run):
    folder, log = run
    log.row({**ROW, "step": 400, "samples": 25600, "train_loss": 1.0, "val_loss": 0.8, "seq_acc": 0.6})
    text, _ = view(folder)
    assert text.count("320 samples/s") == text.count("seq_acc 60.0 %") == 1


def test_it_looks_until_the_run_ends(run, capsys):
    folder, log = run
    with run_lock(str(folder)):
        assert watch.main([str(folder), "--once"]) == 0
        assert capsys.readouterr().out.count("progress") == 1
        log.close("finished")
        held, still = view(folder)
        assert still and "state       finished; its process is still working" in held and "left" not in held
        watched = threading.Thread(target=watch.main, args=([str(folder), "--every", "0.3"],))
        watched.start()
        time.sleep(0.9)
    watched.join()
    shown = capsys.readouterr()
    last = shown.out.rstrip().rpartition("\n")[2]
    assert shown.err == "" and last.startswith("state       finished, last row")
    assert shown.out.count("step 300 of") >= 2


def test_a_run_that_has_not_logged_yet(tmp_path, capsys):
    for held in (tmp_path, tmp_path / "prepared"):  # while data are prepared
        with run_lock(str(held)):
            assert watch.main([str(tmp_path), "--once"]) == 0
        assert "running, before the first step" in capsys.readouterr().out
    for folder in (tmp_path, tmp_path / "none"):
        assert watch.main([str(folder), "--once"]) == 2
        assert "(no status.json)" in capsys.readouterr().err
    new_log(tmp_path, 10)
    text, _ = view(tmp_path)
    assert "step 0 of 10" in text and "loss" not in text


@pytest.mark.parametrize("change", [{"step": None}, {"updated": "now"}])
def test_a_damaged_status_is_named(run, capsys, change):
    file = run[0] / STATUS
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert watch.main([str(run[0]), "--once"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {file}: is damaged")


def test_rows_that_are_half_written_or_not_finite(run):
    folder, log = run
    log.row({**ROW, "step": 400, "samples": 25600, "train_loss": float("nan")})
    with open(folder / "logs.csv", "a", encoding="utf-8") as file:
        file.write("500,0,320")
    with run_lock(str(folder)):
        text, _ = view(folder)
    assert "step 400 of 1,000" in text and "█▁▅× nan  lowest 1.0000" in text
    bars = {(): "", (2.0, 2.0): "▁▁", (0.0, 7.0, 14.0): "▁▅█", (1.0, float("nan"), 0.0, float("inf")): "█×▁×"}
    assert {values: watch.spark(list(values), 10) for values in bars} == bars
    assert len(watch.spark([float(i) for i in range(1000)], 40)) == 40

"""logs.csv and the lines on the console."""

import csv
import os

import pytest

from histocc.runtime.console import duration
from histocc.seq2seq_mixer_engine import COLUMNS
from histocc.trainer.run_log import RunLog, flops_in_words
from histocc.trainer.schedule import Steps

VALUES = {
    "step": 1200,
    "epoch": 1,
    "samples": 153600,
    "train_loss": 1 / 3,
    "train_loss_linear": 2 / 3,
    "train_loss_seq2seq": 1e-9 / 3,
    "grad_norm": 1.23456789,
    "lr": 2e-5 / 3,
    "samples_per_sec": 1234.5678,
    "seconds_data": 0.0123456789,
    "data_share": 0.034,
    "model_flops_per_sec": 41.26e9 + 1 / 3,
    "mfu": 0.23123456789,
}
VALIDATION = {
    "val_loss": 1 / 7,
    "val_loss_linear": 2 / 7,
    "val_loss_seq2seq": 3 / 7,
    "seq_acc": 0.5,
    "token_acc": 2 / 3,
    "flat_acc": 1 / 3,
}


def rows(folder):
    with open(folder / "logs.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def steps(folder):
    return [row["step"] for row in rows(folder)]


def log_with(folder, *steps, **options):
    log = RunLog(str(folder), Steps(5000, options.pop("step", 0)), COLUMNS, **options)
    for step in steps:
        log.row({**VALUES, **VALIDATION, "step": step})
    return log


def test_columns_and_their_order(tmp_path):
    RunLog(str(tmp_path), Steps(10), COLUMNS)
    assert (tmp_path / "logs.csv").read_bytes() == (
        b"step,epoch,samples,train_loss,train_loss_linear,train_loss_seq2seq,grad_norm,lr,samples_per_sec,"
        b"seconds_data,val_loss,val_loss_linear,val_loss_seq2seq,seq_acc,token_acc,flat_acc,skipped_steps,"
        b"model_flops_per_sec,mfu\n"
    )
    assert ",".join(COLUMNS) + "\n" == (tmp_path / "logs.csv").read_text()


def test_row(tmp_path):
    log = RunLog(str(tmp_path), Steps(5000), COLUMNS)
    log.row(VALUES)
    log.row({"step": 1300, "epoch": 2, **VALIDATION})
    log.close()
    trained, validated = rows(tmp_path)
    assert trained == {
        **dict.fromkeys(COLUMNS, ""),
        "step": "1200",
        "epoch": "1",
        "samples": "153600",
        "train_loss": "0.333333333333",
        "train_loss_linear": "0.666666666667",
        "train_loss_seq2seq": "3.33333333333e-10",
        "grad_norm": "1.23457",
        "lr": "6.66667e-06",
        "samples_per_sec": "1234.57",
        "seconds_data": "0.0123457",
        "model_flops_per_sec": "4.126e+10",
        "mfu": "0.231235",
    }
    assert validated == {
        **dict.fromkeys(COLUMNS, ""),
        "step": "1300",
        "epoch": "2",
        "val_loss": "0.142857142857",
        "val_loss_linear": "0.285714285714",
        "val_loss_seq2seq": "0.428571428571",
        "seq_acc": "0.5",
        "token_acc": "0.666666666667",
        "flat_acc": "0.333333333333",
    }


def test_each_row_is_in_the_file_at_once(tmp_path):
    log = RunLog(str(tmp_path), Steps(5000), COLUMNS)
    for step in (100, 200):
        log.row({**VALUES, "step": step})
        assert steps(tmp_path)[-1] == str(step)


def test_new_run_starts_a_new_file(tmp_path):
    log_with(tmp_path, 100, 200)
    RunLog(str(tmp_path), Steps(5000), COLUMNS)
    assert rows(tmp_path) == []


def test_resumed_run_drops_later_rows(tmp_path):
    log_with(tmp_path, 100, 200, 300)
    before = rows(tmp_path)
    log_with(tmp_path, 250, step=200)
    assert steps(tmp_path) == ["100", "200", "250"] and rows(tmp_path)[:2] == before[:2]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["histocc.json", "logs.csv", "status.json"]


def test_resumed_run_without_a_log(tmp_path):
    log_with(tmp_path, 300, step=200)
    assert steps(tmp_path) == ["300"]


def test_half_written_last_row_is_dropped(tmp_path):
    log_with(tmp_path, 100, 1200)
    whole = (tmp_path / "logs.csv").read_bytes()
    before = rows(tmp_path)
    last_row = whole.rindex(b"\n", 0, -1) + 1
    for size in range(last_row, len(whole)):
        (tmp_path / "logs.csv").write_bytes(whole[:size])
        log_with(tmp_path, 1300, step=1200)
        kept = rows(tmp_path)[:-1]
        assert kept in (before[:1], before), f"cut after {whole[last_row:size]}"
        assert rows(tmp_path)[-1]["step"] == "1300"


def test_train_line(tmp_path, capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("histocc.trainer.run_log.time.monotonic", lambda: now[0])
    log = RunLog(str(tmp_path), Steps(5000, 1100), COLUMNS)
    now[0] += 50.0  # 100 steps in 50 s: 3,800 more take 1,900 s
    log.row(VALUES)
    assert (
        capsys.readouterr().out
        == "step 1,200/5,000 · epoch 2 · loss 0.3333 · lr 6.67e-06 · 1,235 samples/s · "
        "41.3 GFLOP/s (23% of matmul) · waiting for data 3% · 31m40s left\n"
    )
    log.row({**VALUES, "mfu": None})
    assert "samples/s · 41.3 GFLOP/s · waiting" in capsys.readouterr().out
    log.row({**VALUES, "model_flops_per_sec": None, "mfu": None})
    assert "samples/s · waiting" in capsys.readouterr().out


@pytest.mark.parametrize(
    "rate, text",
    [
        (12.0, "12 FLOP/s"),
        (999.4, "999 FLOP/s"),
        (999.6, "1 kFLOP/s"),
        (4.0e8, "400 MFLOP/s"),
        (9.996e11, "1 TFLOP/s"),
        (5.126e14, "513 TFLOP/s"),
        (3.2e16, "32 PFLOP/s"),
        (3.2e22, "3.2e+04 EFLOP/s"),
        (float("nan"), "nan FLOP/s"),
        (float("inf"), "inf EFLOP/s"),
    ],
)
def test_rates_in_words(rate, text):
    assert flops_in_words(rate, None) == text and flops_in_words(rate, 0.5) == f"{text} (50% of matmul)"


@pytest.mark.parametrize(
    "total_steps, is_main, said",
    [(5000, True, "5 steps took 10s: about 2h16m left\n"), (1105, True, ""), (5000, False, "")],
)
def test_time_is_estimated_once_after_the_first_steps(
    tmp_path, capsys, monkeypatch, total_steps, is_main, said
):
    now = [1000.0]
    monkeypatch.setattr("histocc.trainer.run_log.time.monotonic", lambda: now[0])
    log = RunLog(str(tmp_path), Steps(total_steps, 900 if total_steps == 5000 else 1100), COLUMNS, is_main)
    for _ in range(12):
        now[0] += 2.0
        log.step()
    assert capsys.readouterr().out == said


def test_validation_line(tmp_path, capsys):
    RunLog(str(tmp_path), Steps(5000), COLUMNS).row({"step": 1300, "epoch": 2, **VALIDATION})
    assert (
        capsys.readouterr().out
        == "validation at step 1,300: loss 0.1429 · seq_acc 50.0% · token_acc 66.7% · flat_acc 33.3%\n"
    )


def test_the_time_of_a_validation_is_said(tmp_path, capsys):
    log = RunLog(str(tmp_path), Steps(5000), COLUMNS)
    log.row({"step": 1300, "epoch": 2, **VALIDATION, "seconds_val": 20.0})
    assert capsys.readouterr().out.endswith("flat_acc 33.3% · took 20s\n")


def test_waiting_for_data_in_three_rows_running_is_remarked_on_once(tmp_path, capsys):
    log = RunLog(str(tmp_path), Steps(5000, 1100), COLUMNS, workers=3)
    for share in (0.3, 0.3, 0.1, 0.2, 0.2, 0.2, 0.2, 0.9, 0.9):
        log.row({**VALUES, "data_share": share})
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if "Note" in line] == [
        "Note: 20% of the time goes into waiting for data: --num-workers 6 instead of 3 (per process), or a"
        " faster disk for the data"
    ]
    assert said.index(next(line for line in said if "Note" in line)) == 6


def test_waiting_for_other_processes_is_said_where_it_was_measured(tmp_path, capsys):
    log = RunLog(str(tmp_path), Steps(5000, 1100), COLUMNS)
    log.row({**VALUES, "peer_share": 0.126})
    assert "waiting for data 3% · for other processes 13% · " in capsys.readouterr().out


def test_row_with_both_says_both(tmp_path, capsys):
    log_with(tmp_path, 1200)
    train, validation = capsys.readouterr().out.splitlines()
    assert train.startswith("step 1,200/5,000") and validation.startswith("validation at step 1,200")


def test_only_rank_0_writes_and_speaks(tmp_path, capsys):
    (tmp_path / "logs.csv").write_text("left alone")
    log = log_with(tmp_path, 100, is_main=False)
    log.say("hello")
    log.step()
    log.close()
    assert (tmp_path / "logs.csv").read_text() == "left alone" and capsys.readouterr() == ("", "")


def test_without_a_folder_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunLog(None, Steps(5000), COLUMNS).row(VALUES)
    assert list(tmp_path.iterdir()) == [] and "loss 0.3333" in capsys.readouterr().out


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0s"),
        (59.9, "59s"),
        (60, "1m00s"),
        (190, "3m10s"),
        (3599, "59m59s"),
        (3600, "1h00m"),
        (7500, "2h05m"),
        (86399, "23h59m"),
        (86400, "1d00h"),
        (86400 * 3 + 4 * 3600 + 59, "3d04h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_a_row_that_is_to_be_written_again_is_not_kept(tmp_path):
    log = RunLog(str(tmp_path), Steps(9), COLUMNS, bar=False)
    for step in range(1, 6):
        log.row({"step": step, "epoch": 0})
    RunLog(str(tmp_path), Steps(9, 5), COLUMNS, bar=False, again=True)
    assert [row["step"] for row in csv.DictReader(open(tmp_path / "logs.csv"))] == ["1", "2", "3", "4"]
    RunLog(str(tmp_path), Steps(9, 3), COLUMNS, bar=False)
    assert [row["step"] for row in csv.DictReader(open(tmp_path / "logs.csv"))] == ["1", "2", "3"]


def test_a_log_that_was_deleted_begins_with_its_columns_again(tmp_path):
    log = RunLog(str(tmp_path), Steps(9), COLUMNS, bar=False)
    log.row({"step": 1, "epoch": 0})
    os.remove(tmp_path / "logs.csv")
    log.row({"step": 2, "epoch": 0})
    assert [row["step"] for row in csv.DictReader(open(tmp_path / "logs.csv"))] == ["2"]


def test_damaged_lines_are_left_out_and_counted(tmp_path, capsys):
    log = RunLog(str(tmp_path), Steps(9), COLUMNS, bar=False)
    for step in (1, 2, 3):
        log.row({"step": step, "epoch": 0})
    path = tmp_path / "logs.csv"
    path.write_text(path.read_text().replace("\n2,", "\nx,")[:-4])
    RunLog(str(tmp_path), Steps(9, 3), COLUMNS, bar=False)
    assert "2 damaged lines of" in capsys.readouterr().out
    assert [row["step"] for row in csv.DictReader(open(path))] == ["1"]


def test_rows_that_wait_are_written_at_the_end(tmp_path):
    log = RunLog(str(tmp_path), Steps(9), COLUMNS, bar=False)
    path = tmp_path / "logs.csv"
    content = path.read_text()
    path.unlink()
    path.mkdir()
    log.row({"step": 1, "epoch": 0})
    path.rmdir()
    path.write_text(content)
    log.close()
    assert [row["step"] for row in csv.DictReader(open(path))] == ["1"]

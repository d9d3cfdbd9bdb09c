"""--dry-run says what a run would cost and leaves nothing but the prepared data."""

import os
import re

import pytest
import torch
from helpers import TINY, TRAIN_MIXER, run, run_inside, write_rows

import train_mixer
from histocc.trainer.forecast import Messages, forecast
from histocc.trainer.plan import BatchPlan


@pytest.fixture
def flags(tmp_path):
    return [
        "--train-data",
        write_rows(tmp_path / "train.csv", 40),
        "--val-data",
        write_rows(tmp_path / "val.csv", 9, 100),
        *TINY,
        "--language-col",
        "lang",
        "--batch-size",
        8,
        "--num-epochs",
        4,
        "--eval-interval",
        6,
        "--save-interval",
        5,
        "--save-dir",
        tmp_path / "run",
    ]


def test_what_it_says_and_leaves(flags, tmp_path):
    code, output = run_inside(train_mixer.main, *flags, "--dry-run")
    assert code == 0 and "Everything checks out: without --dry-run it starts the run." in output
    assert re.search(r"Steps:       20 of [\d.e-]+ s", output) and re.search(
        r"Validations: 4 of [\d.e-]+ s", output
    )
    assert "up to 5 files" in output and re.search(
        r"Memory:      \d+\.\d GB at most per process \(CPU\)", output
    )
    assert os.listdir(tmp_path / "run") == ["prepared"]
    run_inside(train_mixer.main, *flags, "--max-steps", 2)
    size = float(re.search(r"Checkpoints: ([\d.]+) GB", output)[1])
    assert abs(os.path.getsize(tmp_path / "run" / "last.bin") / 1e9 - size) < 0.01
    before = torch.load(tmp_path / "run" / "last.bin", weights_only=True)
    code, output = run_inside(train_mixer.main, *flags, "--dry-run")
    assert code == 0 and "Steps:       18 of" in output and "it continues from step 2." in output
    after = torch.load(tmp_path / "run" / "last.bin", weights_only=True)
    assert before["step"] == after["step"] == 2 and all(
        torch.equal(before["model"][name], after["model"][name]) for name in before["model"]
    )


def test_little_room_on_the_disk_is_said(flags, monkeypatch):
    monkeypatch.setattr("histocc.trainer.estimate._free_space", lambda folder: 10_000_000)
    assert (
        "WARNING: not enough disk space for 5 checkpoints"
        in run_inside(train_mixer.main, *flags, "--dry-run")[1]
    )


def test_what_is_wrong_is_said_as_by_the_run(flags, tmp_path):
    code, output = run_inside(train_mixer.main, *flags, "--dry-run", "--target-cols", "nothing")
    assert code == 2 and "nothing" in output and not (tmp_path / "run").exists()
    assert run_inside(train_mixer.main, *flags, "--dry-run", "--eval-only")[0] == 2


def test_a_forecast_by_hand():
    plan = BatchPlan(1000, 40, 4)
    together = forecast(plan, (5, 25), 0.5, Messages(gradients=3e6), 1e6)
    assert together.sending == pytest.approx(20 * 2 * 3 / 4 * 3) and together.seconds == pytest.approx(100)
    assert together.samples_per_second == pytest.approx(40 / (0.5 + 4.5)) and together.total == 40
    # 10 steps together, then two groups of two, which exchange after every fifth step
    groups = Messages(gradients=3e6, moved=2e6, every=5, start=15, members=2)
    found = forecast(plan, (5, 25), 0.5, groups, 1e6)
    assert found.sending == pytest.approx(10 * 4.5 + 10 * 2 / 5)
    assert found.samples_per_second == pytest.approx(40 / (0.5 + 0.4))
    assert forecast(BatchPlan(1000, 10, 1), (0, 100), 0.5, Messages(3e6), 1e6).sending == 0


def lines_of_forecast(output: str) -> dict[int, list[float]]:
    """Processes → total batch, samples/s."""
    found = re.findall(r"^ +(\d+) +([\d,]+) +([\d.,]+) +\w+ +\d+%  +[\d.]+ GB$", output, re.M)
    return {int(n): [float(number.replace(",", "")) for number in rest] for n, *rest in found}


def test_other_numbers_of_processes(flags):
    code, output = run_inside(
        train_mixer.main, *flags, "--dry-run", "--processes", 1, 2, 8, "--link-gbit", 1e-3
    )
    assert code == 0, output
    found = lines_of_forecast(output)
    assert [found[number][0] for number in (1, 2, 8)] == [8, 16, 64]
    megabytes = float(re.search(r"for ([\d.]+) MB of gradients a step over 0.001 Gbit/s", output)[1])
    rate = 40 / (2 * 7 / 8 * megabytes * 1e6 * 8 * 1.06 / 1e6)  # messages alone; 40 rows in all
    assert 0.8 * rate < found[8][1] < rate
    assert found[1][1] > 10 * found[2][1]


def test_what_a_forecast_lacks_is_said(flags):
    for wrong, said in {
        ("--processes", 2): "--processes needs --dry-run",
        ("--dry-run", "--link-gbit", 1): "--link-gbit needs --processes",
        ("--dry-run", "--processes", 2): "--processes needs --link-gbit, the rate of the link",
        ("--dry-run", "--processes", 2, "--link-gbit", 1, "--parallel", "fsdp"): "needs --parallel ddp",
        ("--dry-run", "--processes", 0, "--link-gbit", 1): "--processes",
        ("--dry-run", "--processes", 2, "--link-gbit", 0): "--link-gbit",
    }.items():
        code, output = run_inside(train_mixer.main, *flags, *wrong)
        assert code == 2 and said in output, (wrong, output)


@pytest.mark.processes
@pytest.mark.full
def test_several_processes_measure_the_link(flags, tmp_path):
    output = run(TRAIN_MIXER, *flags, "--dry-run", "--processes", 2, 4, processes=2)
    assert "Gbit/s (measured here)" in output and sorted(lines_of_forecast(output)) == [2, 4]
    assert os.listdir(tmp_path / "run") == ["prepared"]


@pytest.mark.processes
@pytest.mark.full
def test_two_processes(flags, tmp_path):
    output = run(TRAIN_MIXER, *flags, "--dry-run", processes=2)
    assert output.count("Everything checks out") == 1 and os.listdir(tmp_path / "run") == ["prepared"]


def test_processes_of_one_node_are_one_group_and_sum_in_every_step():
    messages = Messages(gradients=100.0, moved=50.0, every=10, start=4, members=2)
    assert messages.of_step(2, alone=True) == messages.of_step(2, alone=False) == 100.0
    assert messages.of_step(8, alone=True) == 2 * 3 / 4 * 50.0 / 10  # four nodes
    assert messages.of_step(8, alone=False) == 2 * 7 / 8 * 100.0

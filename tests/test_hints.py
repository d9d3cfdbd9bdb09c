"""Advice that the rows of a log occasion: when, what, and never twice."""

import pytest

from histocc.runtime.world import World
from histocc.trainer.banner import notes
from histocc.trainer.hints import Hints
from histocc.trainer.plan import BatchPlan


def said(rows, total=1000, **options):
    """(number of the row, sentence) of all hints."""
    hints = Hints(total, **options)
    return [(i, text) for i, row in enumerate(rows) for text in hints.of({"step": (i + 1) * 10, **row})]


def test_waiting_for_data_in_three_rows_running():
    found = said(
        [{"data_share": share} for share in (0.3, 0.3, 0.1, 0.2, 0.2, 0.2, 0.2, 0.9, 0.9)], workers=3
    )
    assert found == [
        (
            5,
            (
                "20% of the time goes into waiting for data: --num-workers 6 instead of 3 (per process), or a"
                " faster disk for the data"
            ),
        )
    ]
    assert (
        "--num-workers 2 instead of 0" in said([{"data_share": 0.5}] * 3)[0][1]
        and said([{"data_share": 0.1}] * 9) == []
    )


def test_one_rank_that_all_others_wait_for():
    rows = [{"peer_shares": [0.4, 0.02, 0.5]}] * 5
    found = said(rows, may_share=True)
    assert "--shares" not in said(rows)[0][1]  # which goes with --reduce after alone, or is given already
    assert found == [
        (
            2,
            (
                "rank 1 is slower than the others, which wait for it 40% of the time: look what else runs on"
                " its machine; python -m histocc.doctor under the same launcher compares them; --shares auto"
                " gives it fewer rows"
            ),
        )
    ]
    assert said([{"peer_shares": [0.4, 0.3, 0.5]}] * 5) == []  # all wait: the network, or nothing
    assert said([{"peer_shares": [0.1, 0.0, 0.1]}] * 5) == []
    assert said([{"peer_shares": shares} for shares in ([0.4, 0.0], [0.0, 0.4]) * 4]) == []  # in turn
    assert said([{"peer_shares": None}, {"peer_shares": [0.4]}] * 3) == []


def test_a_loss_that_does_not_fall_is_said_after_a_tenth_of_the_run():
    still = [{"train_loss": 2.0 + 0.01 * (i % 2)} for i in range(30)]
    ((row, text),) = said(still)
    assert row == 9 and "has not fallen in the first 100 steps (2.003 → 2.007)" in text
    assert said([{"train_loss": 2.0 * 0.97**i} for i in range(30)]) == []
    assert said(still[:5]) == [] and said(still, total=10000) == []  # too early
    assert said(still, first_step=500) == []  # it learnt before
    assert said(still, fitted=True) == []  # and here, without the encoder
    assert len(said([{"train_loss": 2.0 + 0.2 * i} for i in range(30)], fitted=True)) == 1


def test_a_loss_that_rises():
    ((row, text),) = said(
        [{"train_loss": loss} for loss in (2.0, 1.0, 1.0, 1.0, 1.9, 2.0, 2.0, 2.0, 2.0, 2.0, 0.1, 9.0)]
    )
    assert row == 9 and "rose from 1 to 2: lower --learning-rate" in text


def test_a_loss_that_falls_fast_has_not_risen():
    # the last row is far below the mean of three
    assert said([{"train_loss": 3.0 * 0.55**i} for i in range(30)]) == []
    assert (
        said(
            [{"train_loss": loss} for loss in (3.0, 2.0, 1.2, 0.9, 0.7, 0.2, 0.6, 0.5, 0.45, 0.4)], total=100
        )
        == []
    )


def test_a_loss_that_swings():
    ((row, text),) = said([{"train_loss": loss} for loss in [2.0, 1.5] + [0.6, 1.4] * 8])
    assert row == 9 and "goes up and down by 0.8 from row to row: lower --learning-rate" in text
    # a little, while it falls
    assert said([{"train_loss": 2.0 * 0.95**i + 0.05 * (i % 2)} for i in range(20)]) == []


def test_validation_rows_say_nothing_of_the_loss():
    assert said([{"val_loss": 2.0}] * 30) == []


@pytest.mark.parametrize(
    "world, gpus, rows, nodes, expected",
    [
        (World(), 0, 1000, None, []),
        (World(), 4, 1000, None, ["4 GPUs are here and 1 used: torchrun --nproc_per_node=4"]),
        (World(size=4, local_size=4), 4, 1000, "1", []),
        (World(size=4, local_size=4), 4, 1000, "2", ["has 2 nodes, and the run uses 1"]),
        (World(), 0, 20, None, ["takes all 20 rows, fewer than the total batch of 32"]),
    ],
)
def test_what_a_run_leaves_unused(monkeypatch, world, gpus, rows, nodes, expected):
    monkeypatch.delenv("SLURM_JOB_NUM_NODES", raising=False)
    if nodes:
        monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    found = notes(world, BatchPlan(rows, 32, world.size), gpus)
    assert len(found) == len(expected) and all(words in text for words, text in zip(expected, found))

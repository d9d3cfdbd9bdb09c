"""Steps without a finite gradient: skipped, counted, and the end of the run after too many in a row."""

import math

import pytest
import torch

from histocc import seq2seq_mixer_engine as engine
from histocc.formatter import PAD_IDX, hisco_blocky5
from histocc.model.loss import BlockOrderInvariantLoss, LossMixer
from histocc.model.mixer import model_config
from histocc.published import models
from histocc.runtime.errors import TrainingError


class BadAt(LossMixer):
    """The usual loss, but not a number in some of its calls (from 0)."""

    def __init__(self, calls):
        super().__init__(BlockOrderInvariantLoss(PAD_IDX, 5, 5), torch.nn.BCEWithLogitsLoss(), 0.5)
        self.calls, self.number = calls, 0

    def per_sample(self, **arguments):
        found = super().per_sample(**arguments)
        if self.number in self.calls:
            found["loss"] = found["loss"] * float("nan")
        self.number += 1
        return found


def batch(seed: int) -> dict:
    generator = torch.Generator().manual_seed(seed)
    targets = torch.full((2, 27), PAD_IDX)
    targets[:, 0], targets[:, 1:6], targets[:, -1] = 2, torch.randint(8, 18, (2, 5), generator=generator), 3
    return {
        "input_ids": torch.randint(97, 122, (2, 16), generator=generator),
        "attention_mask": torch.ones(2, 16, dtype=torch.bool),
        "targets_seq2seq": targets,
        "targets_linear": torch.tensor([[0], [1]]),
    }


def train(calls, steps=8, **options):
    """(rows of the log, weights after each step, what the run ended with)"""
    torch.manual_seed(1)
    config = model_config("tiny", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).to_dict()
    config |= {"max_len": 128, "memory_mask": True, "target_mask": True, "text": "as-is"}
    config["decoder_dim_feedforward"] = config["hidden_size"]
    model = models.build_model(config, hisco_blocky5(), 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows, weights, error = [], [], None
    try:
        engine.train(
            model,
            {"data_loader_train": [batch(i) for i in range(steps)]},
            BadAt(calls),
            optimizer,
            "cpu",
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps),
            steps,
            log_interval=4,
            log=rows.append,
            step_done=lambda: weights.append(model.encoder.pooler.dense.weight.detach().clone()),
            **options,
        )
    except TrainingError as found:
        error = found
    return rows, weights, error


def test_bad_steps_change_nothing_and_are_counted():
    rows, weights, error = train({2, 5})
    assert error is None and [(row["skipped_steps"], row["samples"]) for row in rows] == [(1, 8), (1, 16)]
    same = [torch.equal(a, b) for a, b in zip(weights, weights[1:])]
    assert same == [False, True, False, False, True, False, False]
    assert all(math.isfinite(row["train_loss"]) and math.isfinite(row["grad_norm"]) for row in rows)
    assert rows[-1]["lr"] == train(set())[0][-1]["lr"]  # the schedule goes by steps, skipped or not


def test_too_many_in_a_row_end_the_run():
    _, weights, error = train({3, 4, 5}, max_bad_steps=3)
    assert "step 6: the gradient was not finite in 3 steps in a row" in str(error) and len(weights) == 6
    assert train({1, 2, 4, 5, 7}, max_bad_steps=3)[2] is None


def test_all_steps_of_a_row_bad():
    rows, _, error = train({0, 1, 2, 3})
    assert error is None and rows[0]["skipped_steps"] == 4
    assert "train_loss" not in rows[0] and rows[1]["train_loss"] > 0


@pytest.mark.parametrize("calls", [set(), {1}])
def test_what_was_open_goes_into_the_checkpoint(calls):
    saved = []
    train(calls, steps=6, save_interval=3, save=lambda step, names, position: saved.append((step, position)))
    step, position = saved[0]
    assert step == 3 and position["sums"][0]["skipped_steps"] == len(calls)
    assert position["bad_steps"] == 0 and not position["unfinished"]

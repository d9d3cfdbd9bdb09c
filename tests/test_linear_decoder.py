"""How the linear decoder starts, and its own learning rate."""

import re

import numpy as np
import pytest
import torch
from helpers import TINY, run_inside, write_rows

import finetune
from histocc.formatter import BlockyFormatter
from histocc.job import build
from histocc.job import data as job_data
from histocc.job.recipe import LinearRate, fast_parameters
from histocc.runtime.world import World
from histocc.trainer.schedule import linear_factor, make_optimizer, set_learning_rate


def flags(data, folder, *more):
    columns = ["--target-cols", "hisco_1", "hisco_2", "--formatter", "hisco"]
    return ["--dataset", data, *columns, *TINY, "--save-path", str(folder), *more]


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("linear")
    asked = flags(write_rows(folder / "data.csv", 120), folder / "run")
    args = finetune.get_args_parser().parse_args(asked)
    args, read, data, _ = job_data.prepared(args, World(), [args.dataset], [])
    formatter = BlockyFormatter.from_dict(read.formatter)
    return data, build.make_model(args, formatter, World(), data, None)[1]


def test_it_starts_at_the_frequencies_of_the_training_rows(setup):
    data, model = setup
    rows = [set(codes[codes >= 0].tolist()) for codes in data.train.codes]
    shares = [(sum(code in row for row in rows) + 0.5) / (len(rows) + 1) for code in range(len(data.codes))]
    found = model.classify(torch.randn(3, model.config.hidden_size)).sigmoid()
    assert np.allclose(found.detach().numpy(), shares, rtol=1e-5) and max(shares) > 1.1 * min(shares)


def test_its_rate_is_a_multiple_of_the_other_at_every_step(setup):
    _, model = setup
    optimizer = make_optimizer(model, 0.01, 1e-3, fast_parameters(model, LinearRate(30.0)))
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert optimizer.param_groups[1]["params"] == list(model.linear_decoder.parameters())
    rates = []
    for step in range(10):
        set_learning_rate(optimizer, linear_factor(step, 2, 10))
        rates.append([group["lr"] for group in optimizer.param_groups])
    assert max(rates)[0] == pytest.approx(1e-3) and np.allclose(
        [linear / other for other, linear in rates], 30
    )
    assert len(make_optimizer(model, 0.01, 1e-3, fast_parameters(model, LinearRate(1.0))).param_groups) == 1


@pytest.mark.full
def test_a_new_one_has_a_higher_rate_and_keeps_it(tmp_path):
    """A run that continues has the rates of its start; one that takes a linear decoder over trains it like
    the rest.
    """
    data = write_rows(tmp_path / "data.csv", 60)

    def rate(folder, *more) -> str:
        asked = flags(data, tmp_path / folder, "--batch-size", 16, *more)
        code, output = run_inside(finetune.main, *asked)
        assert code == 0, output
        return re.search(r"Learning rate: (.*)", output)[1]

    start, published = "(not scaled; warm-up over 1 step)", ["--learning-rate", 2e-5, "--linear-loss", "mean"]
    assert rate("new", "--max-steps", 2) == f"0.001 {start}, of the linear decoder 5 times that"
    assert rate("new", "--max-steps", 4).endswith("of the linear decoder 5 times that")
    mean = rate("published", "--max-steps", 2, *published)
    assert mean == f"2e-05 {start}, of the linear decoder 30 times that"
    assert rate("published", "--max-steps", 4).endswith("of the linear decoder 30 times that")
    initial = ["--max-steps", 1, "--initial-checkpoint", tmp_path / "new"]
    assert rate("initial", *initial) == f"2e-05 {start}"
    chosen = rate("chosen", "--max-steps", 1, "--linear-lr-factor", 5)
    assert chosen.endswith("of the linear decoder 5 times that")

"""How the linear decoder starts, and its own learning rate."""

import finetune
import numpy as np
import pytest
import torch
from helpers import TINY, write_rows

from histocc import job, job_data
from histocc.distributed import World
from histocc.lr_schedule import linear_schedule


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    folder = tmp_path_factory.mktemp("linear")
    args = finetune.get_args_parser().parse_args(["--dataset", write_rows(folder / "data.csv", 120), "--target-cols", "hisco_1", "hisco_2",
                                                  "--formatter", "hisco", *TINY, "--save-path", str(folder / "run")])
    data, formatter = job_data.prepared(args, World(), [args.dataset], [])
    return args, data, job.make_model(args, World(), data, formatter, None)[0]


def test_it_starts_at_the_frequencies_of_the_training_rows(setup):
    _, data, model = setup
    rows = [set(codes[codes >= 0].tolist()) for codes in data.train.codes]
    shares = [(sum(code in row for row in rows) + 0.5) / (len(rows) + 1) for code in range(len(data.codes))]
    found = model.classify(torch.randn(3, model.config.hidden_size)).sigmoid()
    assert np.allclose(found.detach().numpy(), shares, rtol=1e-5) and max(shares) > 1.1 * min(shares)


def test_its_rate_is_a_multiple_of_the_other_at_every_step(setup):
    args, _, model = setup
    args = type(args)(**{**vars(args), "linear_lr_factor": 30.0})
    optimizer = job.make_optimizer(args, model, 1e-3)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))
    assert optimizer.param_groups[1]["params"] == list(model.linear_decoder.parameters())
    scheduler, rates = linear_schedule(optimizer, 2, 10), []
    for _ in range(10):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step(), scheduler.step()
    assert max(rates)[0] == pytest.approx(1e-3) and np.allclose([linear / other for other, linear in rates], 30)
    assert len(job.make_optimizer(type(args)(**{**vars(args), "linear_lr_factor": 1.0}), model, 1e-3).param_groups) == 1

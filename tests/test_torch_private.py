"""Private names of torch and of Python that the program relies on: each is there, and means what it meant."""

import argparse
import atexit
import multiprocessing.queues

import pytest
import torch
from torch.utils.data import DataLoader

from histocc.runtime.torch_private import loading_processes


def scaler() -> torch.amp.GradScaler:
    made = torch.amp.GradScaler("cpu")
    made.scale(torch.ones(()))
    return made


# name → what has it
HOLDERS = {
    "_is_avx512_bf16_supported": lambda: torch.cpu,
    "_is_amx_tile_supported": lambda: torch.cpu,
    "_is_vnni_supported": lambda: torch.cpu,
    "_int_mm": lambda: torch.ops.aten,
    "_linear_pointwise": lambda: torch.ops.mkldnn,
    "_softmax_backward_data": lambda: torch.ops.aten,
    "_is_avx512_supported": lambda: torch.cpu,
    "_scale": scaler,
    "_step_supports_amp_scaling": lambda: torch.optim.AdamW([torch.ones(1)], fused=True),
    "_workers": lambda: iter(DataLoader([0], num_workers=1)),
    "_ArgumentGroup": lambda: argparse,
    "_actions": argparse.ArgumentParser,
    "_action_groups": argparse.ArgumentParser,
    "_option_string_actions": argparse.ArgumentParser,
    "_on_queue_feeder_error": lambda: multiprocessing.queues.Queue,
    "_run_exitfuncs": lambda: atexit,
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_private_name_is_there(name):
    holder = HOLDERS[name]()
    assert hasattr(holder, name), f"torch {torch.__version__}: {holder!r:.100} has no {name} any more"


def test_private_names_mean_what_they_meant():
    """A loading process is found, a fused optimizer skips by `found_inf`, and a scaler has a scale."""
    batches = iter(DataLoader([1, 2], num_workers=1, batch_size=None))
    assert [process.is_alive() for process in loading_processes(batches)] == [True]
    assert list(batches) == [1, 2] and loading_processes(iter([])) == ()

    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight], fused=True)
    assert optimizer._step_supports_amp_scaling
    for found_inf, changes in ((1.0, False), (0.0, True)):
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(found_inf), None
        optimizer.step()
        assert (weight != 1).all().item() is changes
    assert scaler()._scale.item() == 2.0**16

"""Private names of torch and of Python that the program relies on: each is there, and means what it meant."""

import argparse
import atexit
import multiprocessing.queues

import torch
from torch.utils.data import DataLoader


def test_private_names_are_there():
    holders = {
        torch.cpu: ["_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_vnni_supported"],
        torch.ops.aten: ["_int_mm", "_softmax_backward_data"],
        torch.ops.mkldnn: ["_linear_pointwise"],
        argparse: ["_ArgumentGroup"],
        argparse.ArgumentParser(): ["_actions", "_action_groups", "_option_string_actions"],
        multiprocessing.queues.Queue: ["_on_queue_feeder_error"],
        atexit: ["_run_exitfuncs"],
        torch.utils._pytree: ["tree_leaves", "tree_map_only"],
    }
    missing = [name for holder, names in holders.items() for name in names if not hasattr(holder, name)]
    assert not missing and hasattr(torch.cpu, "_is_avx512_supported")


def test_they_mean_what_they_meant():
    """A loading process is found, and a fused optimizer skips by `found_inf`."""
    batches = iter(DataLoader([1, 2], num_workers=1, batch_size=None))
    assert [process.is_alive() for process in batches._workers] == [True] and list(batches) == [1, 2]
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight], fused=True)
    assert optimizer._step_supports_amp_scaling
    for found_inf, changes in ((1.0, False), (0.0, True)):
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(found_inf), None
        optimizer.step()
        assert (weight != 1).all().item() is changes

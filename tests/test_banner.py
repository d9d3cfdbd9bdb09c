"""What is said before a run starts."""

import pytest

from histocc.runtime.world import World
from histocc.trainer.banner import notes
from histocc.trainer.batches import BatchPlan


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

"""Who a process is: the launcher's variables, the flags that must agree with them, the device. One process
here.
"""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist
from helpers import REPO, environment

from histocc.runtime.device import check_one_process_per_gpu
from histocc.runtime.entrypoint import errors_end_all_ranks
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.world import World, choose_device, init_world, launcher_environment

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(monkeypatch):
    """Sets the launcher's variables: launched(rank, local rank, world size), None for one that is not
    there.
    """

    def set_variables(*values):
        for name, value in zip(VARIABLES, values):
            if value is not None:
                monkeypatch.setenv(name, str(value))

    return set_variables


def refusal(*, distributed=False, world_size=None, local_rank=None) -> str:
    with pytest.raises(UserError) as caught:
        launcher_environment(distributed, world_size, local_rank)
    return str(caught.value)


# ---- the launcher's variables


def test_alone():
    assert launcher_environment(False, None, None) == (0, 0, 1) == launcher_environment(False, 1, 0)


@pytest.mark.parametrize("distributed", [False, True])
def test_launched(launched, distributed):
    launched(5, 1, 8)
    assert (
        launcher_environment(distributed, None, None) == (5, 1, 8) == launcher_environment(distributed, 8, 1)
    )


def test_local_rank_as_a_flag(launched):
    launched(3, None, 4)
    assert launcher_environment(True, None, 1) == (3, 1, 4)


def test_a_local_rank_of_minus_one_is_none(launched):
    """So scripts for the older launcher say that there is none, also under torchrun."""
    launched(3, 1, 4)
    assert launcher_environment(True, None, -1) == (3, 1, 4)


def test_empty_variables_are_not_set(launched):
    launched("", "", "")
    assert launcher_environment(False, None, None) == (0, 0, 1)


def test_distributed_without_a_launcher():
    message = refusal(distributed=True)
    assert "torchrun --nproc_per_node=" in message and "RANK, LOCAL_RANK and WORLD_SIZE" in message


def test_world_size_without_a_launcher():
    message = refusal(world_size=4)
    assert "--world-size 4" in message and "torchrun --nproc_per_node=4" in message


@pytest.mark.parametrize(
    "values, missing, there",
    [
        ((0, 0, None), "WORLD_SIZE", "RANK, LOCAL_RANK"),
        ((None, 0, 2), "RANK", "LOCAL_RANK, WORLD_SIZE"),
        ((0, None, 2), "LOCAL_RANK", "RANK, WORLD_SIZE"),
        ((None, None, 2), "RANK, LOCAL_RANK", "WORLD_SIZE"),
        ((0, "", 2), "LOCAL_RANK", "RANK, WORLD_SIZE"),
    ],
)
@pytest.mark.parametrize("distributed", [False, True])
def test_some_variables_missing(launched, values, missing, there, distributed):
    launched(*values)
    assert refusal(distributed=distributed).startswith(f"{missing} not set, but {there} is")


def test_world_size_contradicts_the_launcher(launched):
    launched(0, 0, 2)
    message = refusal(distributed=True, world_size=4)
    assert "--world-size 4" in message and "WORLD_SIZE=2" in message


@pytest.mark.parametrize("values", [(2, 0, 2), (-1, 0, 2), (0, -1, 2), (0, 0, 0), (0, 0, -3)])
def test_variables_that_do_not_fit(launched, values):
    launched(*values)
    message = refusal()
    for name, value in zip(VARIABLES, values):
        assert f"{name}={value}" in message


def test_local_rank_beyond_the_world(launched):
    launched(0, 2, 2)
    assert "LOCAL_RANK=2" in refusal()


def test_local_rank_contradicts_the_launcher(launched):
    launched(1, 1, 2)
    message = refusal(local_rank=0)
    assert "LOCAL_RANK=1" in message


def test_variables_that_are_no_numbers(launched):
    launched(0, 0, "two")
    assert "whole numbers" in refusal() and "WORLD_SIZE='two'" in refusal()


# ---- device


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs; returns the list of devices that were made current."""

    def machine(count):
        current = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        return current

    return machine


def test_device_without_gpus(gpus):
    gpus(0)
    assert choose_device("auto", 3, 4) == choose_device("cpu", 3, 4) == torch.device("cpu")
    with pytest.raises(UserError, match="--device cuda.*--device cpu"):
        choose_device("cuda", 0, 1)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_local_rank_picks_the_gpu(gpus, name):
    current = gpus(4)
    assert [choose_device(name, rank, 4) for rank in range(4)] == [
        torch.device("cuda", rank) for rank in range(4)
    ]
    assert current == [0, 1, 2, 3]


def test_one_gpu_for_each_process(gpus, monkeypatch):
    """As with srun --gpus-per-task=1: each process sees its own as the first."""
    current = gpus(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert [choose_device("auto", rank, 4) for rank in range(4)] == [
        torch.device("cuda", 0)
    ] * 4 and current == [0] * 4
    store = dist.HashStore()
    uuids = iter(["a", "b", "a"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid=next(uuids))
    )
    check_one_process_per_gpu(store, 4, 0, 1)
    check_one_process_per_gpu(store, 5, 1, 2)
    with pytest.raises(UserError, match="LOCAL_RANK=2 has no GPU: 1 visible here. Start at most 1 processes"):
        check_one_process_per_gpu(store, 6, 2, 3)  # the one of rank 4 once more
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(UserError, match="LOCAL_RANK=1 has no GPU"):
        choose_device("auto", 1, 2)


def test_cpu_on_a_machine_with_gpus(gpus):
    current = gpus(2)
    assert choose_device("cpu", 7, 8) == torch.device("cpu") and current == []


@pytest.mark.parametrize("local_rank, local_size", [(2, 3), (0, 3), (5, 1)])
def test_more_processes_than_gpus(gpus, local_rank, local_size):
    """All processes of the machine refuse, not only the last, so that rank 0 says it."""
    current = gpus(2)
    with pytest.raises(
        UserError,
        match=(
            "LOCAL_RANK=[25] has no GPU: 2 visible.*at most 2 processes.*CUDA_VISIBLE_DEVICES.*--device cpu"
        ),
    ):
        choose_device("auto", local_rank, local_size)
    assert current == []


def test_processes_of_other_nodes_need_no_gpu_here(launched, gpus, monkeypatch):
    """16 processes on two nodes, started without torchrun and so without LOCAL_WORLD_SIZE."""
    gpus(8)
    launched(9, 1, 16)
    meetings = []

    def stop(*arguments, **_):
        meetings.append(arguments)
        raise RuntimeError("stop here")

    monkeypatch.setattr("histocc.runtime.world.rendezvous", stop)
    with pytest.raises(UserError, match="stop here"):
        init_world()
    assert meetings == [("env://", 9, 16)]


def test_no_meeting_names_the_address(launched):
    launched(1, 1, 2)
    with pytest.raises(UserError, match="MASTER_ADDR"):
        init_world(device="cpu")


def test_nobody_there_and_a_port_in_use_are_said_by_the_rank_itself(launched, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        launched(0, 0, 2)
        with pytest.raises(
            UserError,
            match=(
                f"Rank 0 could not meet .*MASTER_PORT={port}.*(?s:.*)Another program has this port.*: choose"
                " another MASTER_PORT"
            ),
        ) as taken:
            init_world(device="cpu", timeout_minutes=0.02)
    launched(1, 1, 2)
    with pytest.raises(
        UserError,
        match=(
            f"Rank 1 could not meet .*MASTER_ADDR=127.0.0.1, MASTER_PORT={port}(?s:.*)rank 0 must run on that"
            " one, and the firewall"
        ),
    ) as refused:
        init_world(device="cpu", timeout_minutes=0.02)
    assert taken.value.said_by_all and refused.value.said_by_all


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(UserError, match=r"torch 2.9.1\+cu128 is here, and 2.10 or newer is needed"):
        init_world()


# ---- World


def test_world_of_one_process(gpus):
    gpus(0)
    world = init_world()
    assert world == World() and not dist.is_initialized()
    assert (
        world.rank,
        world.local_rank,
        world.size,
        world.local_size,
        world.device,
        world.backend,
        world.nodes,
    ) == (0, 0, 1, 1, torch.device("cpu"), None, 1)
    assert world.is_main and not World(rank=1, size=2).is_main
    assert [World(size=size, local_size=local).nodes for size, local in ((8, 4), (8, 8), (2, 1))] == [2, 1, 2]
    with pytest.raises(dataclasses.FrozenInstanceError):
        world.rank = 1


def test_rank_0_speaks(capsys):
    World().print("hello", 3)
    World(rank=1, local_rank=0, size=2).print("not me")  # the first of its node, but not of the job
    assert capsys.readouterr().out == "hello 3\n"


def test_collectives_of_one_process():
    world = World()
    totals = {
        "loss": torch.tensor(0.1, requires_grad=True),
        "rows": 3,
        "tokens": torch.tensor(2**53 - 1),
        "share": 0.25,
    }
    assert world.sum_over_ranks(totals) == {
        "loss": pytest.approx(0.1, rel=1e-7),
        "rows": 3.0,
        "tokens": 2.0**53 - 1,
        "share": 0.25,
    }
    assert all(type(value) is float for value in world.sum_over_ranks(totals).values())
    assert world.gather({"a": 1}) == [{"a": 1}] and world.barrier() is None
    assert world.run_on_main("prepare", lambda: "done") == "done"


# ---- work that rank 0 does first, on a store without processes


def ranks_do(work, size: int = 3):
    """What `run_on_main` gives on each rank, each a thread here: its result or the exception."""
    store, outcomes = dist.HashStore(), [None] * size

    def rank(number):
        try:
            outcomes[number] = World(rank=number, size=size, backend="gloo", store=store).run_on_main(
                "name", work
            )
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return outcomes


def test_rank_0_works_alone_and_all_get_the_result(monkeypatch):
    calls, sent, together = [], [], threading.Barrier(3)

    def broadcast(world, value, source):  # the threads of this test have no process group
        if world.rank == source:
            sent.append(value)
        together.wait(10)
        return sent[0]

    def work():
        calls.append(threading.current_thread())
        time.sleep(0.3)
        return {"folder": "å", "cols": ("a", 1)}

    monkeypatch.setattr(World, "broadcast", broadcast)
    assert ranks_do(work) == [{"folder": "å", "cols": ("a", 1)}] * 3 and len(calls) == len(sent) == 1
    assert ranks_do(lambda: None) == [None] * 3 and len(sent) == 1


def test_rank_0_raises_a_mistake_on_every_rank():
    def work():
        raise UserError("no such file: æ")

    outcomes = ranks_do(work)
    assert [(type(error), str(error)) for error in outcomes] == [(UserError, "no such file: æ")] * 3
    assert [error.heard_from_main for error in outcomes] == [False, True, True]


def test_rank_0_ends_every_rank_when_rank_0_breaks_down():
    def work():
        raise ZeroDivisionError

    outcomes = ranks_do(work)
    assert [type(error) for error in outcomes] == [ZeroDivisionError, SystemExit, SystemExit]
    assert [error.code for error in outcomes[1:]] == [1, 1]


# ---- how a mistake ends a process


def end_with(error: Exception) -> int:
    with pytest.raises(SystemExit) as caught, errors_end_all_ranks():
        raise error
    return caught.value.code


@pytest.mark.parametrize("error, code", [(UserError("no column 'x'"), 2), (TrainingError("not finite"), 1)])
@pytest.mark.parametrize("rank", [None, "", "0"])
def test_rank_0_says_what_is_wrong(launched, capsys, error, code, rank):
    launched(rank)
    assert end_with(error) == code
    assert capsys.readouterr() == ("", f"error: {error}\n")


@pytest.mark.parametrize("error, code", [(UserError("no column 'x'"), 2), (TrainingError("not finite"), 1)])
def test_other_ranks_wait_in_silence(launched, capsys, monkeypatch, error, code):
    launched(1)
    handlers, waited = {}, []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(os, "_exit", lambda code: waited.append(("exit", code)))
    assert end_with(error) == code
    assert capsys.readouterr() == ("", "") and sum(waited) >= 5
    handlers[signal.SIGTERM](signal.SIGTERM, None)  # the launcher ends it as soon as rank 0 is gone
    assert waited[-1] == ("exit", code)


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), errors_end_all_ranks():
        _ = 1 / 0


@pytest.mark.full
def test_a_launcher_that_is_process_1_is_there(tmp_path):
    """As in a container whose command is torchrun."""
    inside = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("no namespace of processes can be made here")
    script = tmp_path / "script.py"
    script.write_text(
        "from histocc.runtime.world import die_with_launcher, launcher_id\nimport os\n"
        "die_with_launcher()\nprint('launcher', os.getppid(), launcher_id().split()[1])\n"
    )
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--no-python"]
    done = subprocess.run(
        [*inside, *launch, sys.executable, str(script)],
        env=environment(PYTHONPATH=str(REPO)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "launcher 1 1" in done.stdout, done.stdout + done.stderr

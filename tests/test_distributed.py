"""Who a process is: the launcher's variables, the flags that must agree with them, the device; and what
processes do together. One process here.
"""

import os
import signal
import socket
import threading
import time
import types

import pytest
import torch
import torch.distributed as dist

from histocc.runtime.device import check_one_process_per_gpu
from histocc.runtime.entrypoint import errors_end_all_ranks
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.world import World, choose_device, init_world, launcher_environment

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Sets the launcher's variables: launched(rank, local rank, world size, …), None for one that is not
    there. None is set before.
    """
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def set_variables(*values):
        for name, value in zip(VARIABLES, values):
            if value is not None:
                monkeypatch.setenv(name, str(value))

    return set_variables


# ---- the launcher's variables


@pytest.mark.parametrize(
    "values, flags, place",
    [
        ((), (False, None, None), (0, 0, 1, 1)),
        (("", "", ""), (False, None, None), (0, 0, 1, 1)),  # empty ones are not set
        ((5, 1, 8), (False, None, None), (5, 1, 8, 2)),
        ((5, 1, 8, 4), (True, 8, 1), (5, 1, 8, 4)),
        ((3, None, 4), (True, None, 1), (3, 1, 4, 2)),  # older launchers give it as a flag alone
        ((3, 1, 4), (True, None, -1), (3, 1, 4, 2)),  # so scripts for them say that there is none
    ],
)
def test_the_place_of_a_process(launched, values, flags, place):
    launched(*values)
    assert launcher_environment(*flags) == place


@pytest.mark.parametrize(
    "values, flags, said",
    [
        ((), (True, None, None), "--distributed needs a launcher, .*\n  torchrun --nproc-per-node=2 "),
        ((), (False, 4, None), "--world-size 4 needs a launcher, .*\n  torchrun --nproc-per-node=4 "),
        ((0, 0, 2), (True, 4, None), "--world-size 4 contradicts the launcher, which says 2"),
        ((1, 1, 2), (False, None, 0), "--local-rank 0 contradicts the launcher, which says 1"),
    ],
)
def test_flags_that_contradict_the_launcher(launched, values, flags, said):
    launched(*values)
    with pytest.raises(UserError, match=said):
        launcher_environment(*flags)


@pytest.mark.parametrize(
    "values, said",
    [
        ((0, 0, None), "WORLD_SIZE=not set"),
        ((None, None, 2), "RANK=not set, LOCAL_RANK=not set, WORLD_SIZE=2"),
        ((2, 0, 2), "RANK=2, LOCAL_RANK=0, WORLD_SIZE=2"),
        ((-1, 0, 2), "RANK=-1"),
        ((0, 2, 2), "LOCAL_RANK=2"),
        ((0, 0, 0), "WORLD_SIZE=0"),
        ((0, 0, "two"), "WORLD_SIZE=two"),
        (("9" * 5000, 0, 2), "RANK=999"),
        (("²", 0, 2), "RANK=²"),
        ((1, 1, 2, "1"), "LOCAL_WORLD_SIZE=1"),
    ],
)
def test_variables_that_do_not_fit_are_named_by_the_process_itself(launched, values, said):
    launched(*values)
    with pytest.raises(UserError, match=f"{said}.*sets them all to whole numbers") as error:
        launcher_environment(True)
    assert error.value.said_by_all and len(str(error.value)) < 400


# ---- device


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs; returns the list of devices that were made current."""

    def machine(count):
        current = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
        return current

    return machine


def test_local_rank_picks_the_gpu(gpus):
    gpus(0)
    assert choose_device("auto", 3, 4) == choose_device("cpu", 3, 4) == torch.device("cpu")
    with pytest.raises(
        UserError, match="--device cuda: torch .* finds no accelerator here; take --device cpu"
    ):
        choose_device("cuda")
    current = gpus(4)
    for name in ("auto", "cuda"):
        assert [choose_device(name, rank, 4).index for rank in range(4)] == [0, 1, 2, 3]
    assert current == [0, 1, 2, 3] * 2
    assert choose_device("cpu", 7, 8) == torch.device("cpu") and len(current) == 8


def test_one_gpu_for_each_process(gpus, monkeypatch):
    """As with srun --gpus-per-task=1: each process sees its own as the first."""
    current = gpus(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    assert {choose_device("auto", rank, 4).index for rank in range(4)} == {0} and current == [0] * 4
    store, uuids = dist.HashStore(), iter(["a", "b", "a"])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = lambda _: types.SimpleNamespace(uuid=next(uuids))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    check_one_process_per_gpu(store, 4, 0, 1)
    check_one_process_per_gpu(store, 5, 1, 2)
    with pytest.raises(UserError, match="LOCAL_RANK=2 has no GPU: 1 visible here. Start at most 1 processes"):
        check_one_process_per_gpu(store, 6, 2, 3)  # the one of rank 4 once more


@pytest.mark.parametrize("local_rank, local_size", [(2, 3), (0, 3)])
def test_more_processes_than_gpus(gpus, local_rank, local_size):
    """All processes of the machine refuse, not only the last, so that rank 0 says it."""
    current = gpus(2)
    with pytest.raises(UserError, match="has no GPU: 2 visible.*at most 2 processes.*CUDA_VISIBLE_DEVICES"):
        choose_device("auto", local_rank, local_size)
    assert current == []


# ---- joining


def test_nobody_there_and_a_port_in_use_are_said_by_the_rank_itself(launched):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        launched(0, 0, 2, 2, "127.0.0.1", port)
        said = f"Rank 0 could not meet .*MASTER_PORT={port}.*(?s:.*)choose another MASTER_PORT"
        with pytest.raises(UserError, match=said) as taken:
            init_world(device="cpu", timeout_minutes=0.02)
    launched(1, 1)
    said = f"Rank 1 could not meet .*MASTER_PORT={port}(?s:.*)rank 0 must run on that one, and the firewall"
    with pytest.raises(UserError, match=said) as refused:
        init_world(device="cpu", timeout_minutes=0.02)
    assert taken.value.said_by_all and refused.value.said_by_all


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(UserError, match=r"torch 2.9.1\+cu128 is here, and 2.10 or newer is needed"):
        init_world()


# ---- World


def test_world_of_one_process(capsys):
    world = init_world(device="cpu")
    assert world == World() and world.is_main and not dist.is_initialized()
    assert [World(size=size, local_size=local).nodes for size, local in ((8, 4), (8, 8), (2, 1))] == [2, 1, 2]
    world.print("hello", 3)
    World(rank=1, local_rank=0, size=2).print("not me")  # the first of its node, but not of the job
    assert capsys.readouterr().out == "hello 3\n"
    totals = {"loss": torch.tensor(0.1, requires_grad=True), "tokens": torch.tensor(2**53 - 1), "share": 0.25}
    sums = world.sum_over_ranks(totals)
    assert sums == {"loss": pytest.approx(0.1, rel=1e-7), "tokens": 2.0**53 - 1, "share": 0.25}
    assert all(type(value) is float for value in sums.values())
    assert world.gather({"a": 1}) == [{"a": 1}] and world.run_on_main("prepare", lambda: "done") == "done"


def ranks_do(work, size=3):
    """What `run_on_main` gives on each rank, each a thread here: its result or the exception."""
    store, outcomes = dist.HashStore(), [None] * size

    def rank(number):
        world = World(rank=number, size=size, backend="gloo", store=store)
        try:
            outcomes[number] = world.run_on_main("name", work)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in reversed(range(size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return outcomes


def fails(error):
    def work():
        raise error

    return work


def test_rank_0_works_alone_and_its_mistake_is_raised_on_every_rank():
    calls = []
    assert ranks_do(lambda: time.sleep(0.3) or calls.append(threading.current_thread())) == [None] * 3
    assert len(calls) == 1
    outcomes = ranks_do(fails(UserError("no such file: æ")))
    assert [(type(error), str(error)) for error in outcomes] == [(UserError, "no such file: æ")] * 3
    assert [error.heard_from_main for error in outcomes] == [False, True, True]
    outcomes = ranks_do(fails(ZeroDivisionError()))
    assert [type(error) for error in outcomes] == [ZeroDivisionError, SystemExit, SystemExit]
    assert [error.code for error in outcomes[1:]] == [1, 1]


def test_who_gives_no_sign_of_life_is_missing_and_not_waited_for():
    """Each rank a thread here; the store of the last one does not answer."""
    store, missing = dist.HashStore(), {}
    world = World(rank=1, size=2, backend="gloo", store=store, time_limit=0.5)
    with pytest.raises(TrainingError, match="rank 0 has given no sign of life for ") as error:
        world.run_on_main("name", lambda: None)
    assert error.value.said_by_all

    def asks(rank, seconds, store):
        missing[rank] = World(rank=rank, size=4, backend="gloo", store=store).missing(seconds)

    store = dist.HashStore()
    ranks = [threading.Thread(target=asks, args=(rank, 1.0, store)) for rank in (0, 2)]
    ranks.append(threading.Thread(target=asks, args=(3, 0.0, None)))
    for rank in ranks:
        rank.start()
        time.sleep(0.2)
    for rank in ranks:
        rank.join()
    assert missing == {0: ([1, 3], True), 2: ([1, 3], False), 3: ([0, 1, 2], True)}


# ---- how a mistake ends a process


@pytest.mark.parametrize("error, code", [(UserError("no column 'x'"), 2), (TrainingError("not finite"), 1)])
@pytest.mark.parametrize("rank", [None, "0", "1"])
def test_rank_0_says_what_is_wrong_and_the_others_wait_in_silence(
    launched, capsys, monkeypatch, error, code, rank
):
    launched(rank)
    handlers, waited = {}, []
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr(time, "sleep", waited.append)
    monkeypatch.setattr(os, "_exit", lambda code: waited.append(("exit", code)))
    with pytest.raises(SystemExit) as caught, errors_end_all_ranks():
        raise error
    assert caught.value.code == code
    if rank != "1":
        assert capsys.readouterr() == ("", f"error: {error}\n")
        return
    assert capsys.readouterr() == ("", "") and sum(waited) >= 5
    handlers[signal.SIGTERM](signal.SIGTERM, None)  # the launcher ends it as soon as rank 0 is gone
    assert waited[-1] == ("exit", code)

"""Who a process is: the launcher's variables, the flags that must agree with them; how processes work for
each other, and end.
"""

import errno
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from operator import attrgetter
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers import PIPED, TINY, ended, environment, free_port, start_forked, wait_until_handled, write_rows

from histocc.runtime import world as world_module
from histocc.runtime.config import ProcessFlags
from histocc.runtime.errors import UserError
from histocc.runtime.frame import end_without_others, errors_end_all_ranks
from histocc.runtime.signals import Stopped
from histocc.runtime.world import (
    World,
    all_see,
    init_world,
    is_first_rank,
    launcher_environment,
    srun_environment,
)

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(monkeypatch):
    """Sets the launcher's variables: launched(rank, local rank, world size, …), None for one that is not
    there.
    """

    def set_variables(*values):
        for name, value in zip(VARIABLES, values):
            if value is not None:
                monkeypatch.setenv(name, str(value))

    return set_variables


# ---- the launcher's variables


def given(*flags):
    return ProcessFlags(**dict(zip(("distributed", "world_size", "local_rank", "device"), flags)))


@pytest.mark.parametrize(
    "values, flags, place",
    [
        ((), (False, None, None), (0, 0, 1, 1)),
        ((), (False, 1, 0), (0, 0, 1, 1)),
        (("", "", ""), (False, None, None), (0, 0, 1, 1)),  # empty ones are not set
        ((None, None, 1), (False, None, None), (0, 0, 1, 1)),  # WORLD_SIZE alone
        ((1, None, 2), (True, None, None, "cpu"), (1, 0, 2, 1)),  # some launchers set two
        ((5, 1, 8), (False, None, None), (5, 1, 8, 2)),
        ((5, 1, 8, 4), (True, 8, 1), (5, 1, 8, 4)),
        ((3, None, 4), (True, None, 1), (3, 1, 4, 2)),  # older launchers give it as a flag alone
        ((3, 1, 4), (True, None, -1), (3, 1, 4, 2)),  # so scripts for them say that there is none
    ],
)
def test_the_place_of_a_process(launched, values, flags, place):
    launched(*values)
    assert launcher_environment(given(*flags)) == place


def test_a_rank_that_sees_several_gpus_needs_its_local_rank(launched, monkeypatch):
    launched(1, None, 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert launcher_environment(given(True)) == (1, 0, 2, 1)  # four that the driver is too old for are none
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(UserError, match="RANK=1, LOCAL_RANK=not set"):
        launcher_environment(given(True))


TASK = {"STEP_NUM_TASKS": "4", "NTASKS": "8", "PROCID": "3", "LOCALID": "1", "JOB_ID": "17", "STEP_ID": "2"}
TASK |= {"STEP_NODELIST": "node[003-007,012]"}


@pytest.mark.parametrize(
    "changed, values, place",
    [
        ({}, (), ("3", "1", "4", "node003", "10631")),
        ({"STEP_NODELIST": "gpu-a[1,3],gpu-b7"}, (), ("3", "1", "4", "gpu-a1", "10631")),
        ({"STEP_NODELIST": "rack[1-2]n[04-09]"}, (), ("3", "1", "4", "rack1n04", "10631")),
        ({"STEP_NODELIST": "login2,gpu[1-2]"}, (), ("3", "1", "4", "login2", "10631")),
        ({"STEP_NODELIST": "node1", "STEP_ID": "3"}, (), ("3", "1", "4", "127.0.0.1", "10632")),
        ({}, ("", 0, "", None, "host", 29500), ("3", "0", "4", "host", "29500")),  # what is set stays
        ({}, (0, 0, 2), None),  # torchrun was started by srun
        ({}, (None, None, 1), None),  # each task is to run alone
        ({"STEP_NUM_TASKS": "1", "PROCID": "0"}, (), None),
        ({"STEP_NUM_TASKS": None, "STEP_ID": None, "PROCID": "0"}, (), None),  # a batch script
    ],
)
def test_a_task_of_srun(launched, monkeypatch, changed, values, place):
    launched(*values)
    for name, value in (TASK | changed).items():
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
        if value is not None:
            monkeypatch.setenv(f"SLURM_{name}", value)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert srun_environment() == (dict(zip(names, place)) if place else {})
    assert is_first_rank() == (place is None)


@pytest.mark.parametrize("stdin", ["/dev/null", "a terminal", "a pipe"])
def test_only_a_process_that_srun_started_is_its_task(monkeypatch, stdin):
    """What is submitted or started in a shell on a node has the variables of the task that the shell is."""
    read, write = os.openpty() if stdin == "a terminal" else os.pipe()
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL if "null" in stdin else write) as task:
        try:
            for name, value in (TASK | {"TASK_PID": str(task.pid)}).items():
                monkeypatch.setenv(f"SLURM_{name}", value)
            assert bool(srun_environment()) == (stdin == "a pipe")
        finally:
            task.kill()
            os.close(read)
            os.close(write)


JOINS = """
from histocc.runtime import config, frame

parser = config.Parser(config.ProcessFlags, "x", "x")
frame.start(parser, lambda args, world: world.print(world.gather((world.rank, world.local_rank))))
"""


@pytest.mark.processes
def test_tasks_of_srun_are_ranks_of_one_run(tmp_path):
    (tmp_path / "joins.py").write_text(JOINS)
    tasks, port = [], str(free_port())
    for rank in "01":
        of_task = TASK | {"STEP_NUM_TASKS": "2", "STEP_NODELIST": "node1", "PROCID": rank, "LOCALID": rank}
        variables = {f"SLURM_{name}": value for name, value in of_task.items()} | {"MASTER_PORT": port}
        tasks += start_forked(tmp_path / "joins.py", [], tmp_path / "log", **variables)
    said = f"2 processes meet at MASTER_ADDR=127.0.0.1, MASTER_PORT={port}\n[(0, 0), (1, 1)]\n"
    assert (ended(tasks), (tmp_path / "log").read_text()) == ([0, 0], said)


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
        launcher_environment(given(*flags))


@pytest.mark.parametrize(
    "values, said",
    [
        ((0, 0, None), "WORLD_SIZE=not set"),
        ((None, None, 2), "RANK=not set, LOCAL_RANK=not set, WORLD_SIZE=2"),
        ((2, 0, 2), "RANK=2, LOCAL_RANK=0, WORLD_SIZE=2"),
        ((-1, 0, 2), "RANK=-1"),
        ((0, -1, 2), "LOCAL_RANK=-1"),
        ((0, 2, 2), "LOCAL_RANK=2"),
        ((0, 0, 0), "WORLD_SIZE=0"),
        (("9" * 5000, 0, 2), "RANK=999"),
        (("²", 0, 2), "RANK=²"),
        ((0, 0, 2, "x"), "LOCAL_WORLD_SIZE=x"),
        ((1, 1, 2, "1"), "LOCAL_WORLD_SIZE=1"),
    ],
)
def test_variables_that_do_not_fit_are_named_by_the_process_itself(launched, values, said):
    launched(*values)
    with pytest.raises(UserError, match=f"{said}.*sets them all to whole numbers") as error:
        launcher_environment(given(True))
    assert len(str(error.value)) < 400


def test_nobody_there_and_a_port_in_use_are_said_by_the_rank_itself(launched, capfd):
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        launched(0, 0, 2, 2, "127.0.0.1", port)
        said = f"could not meet .*MASTER_PORT={port}.*(?s:.*)choose another MASTER_PORT"
        with pytest.raises(UserError, match=said):
            init_world(ProcessFlags(device="cpu", timeout_minutes=0.01))
    capfd.readouterr()
    for place in ((1, 1, 2, 2, "127.0.0.1"), (1, 1, 2, 2, "nowhere.invalid"), (0, 0)):
        launched(*place)
        said = f"could not meet .*{port}.*: .[Ee]rrno(?s:.*)rank 0 must run on that one, and the"
        with pytest.raises(UserError, match=said):
            init_world(ProcessFlags(device="cpu", timeout_minutes=0.01))
        assert capfd.readouterr() == ("", "")  # nothing of torch's own, with C++ frames


def test_a_host_that_is_not_known_is_named_long_before_the_limit(launched, monkeypatch, capfd):
    monkeypatch.setattr("histocc.runtime.world.JOINING_SECONDS", 0.3)
    for rank in (0, 1):
        launched(rank, rank, 2, 2, "nowhere.invalid", 29500)
        with pytest.raises(UserError, match="could not meet .*MASTER_ADDR=nowhere.invalid"):
            init_world(ProcessFlags(device="cpu", timeout_minutes=0.015))
        said = f"WARNING: rank {rank} waits for MASTER_ADDR=nowhere.invalid, which its machine does not"
        assert capfd.readouterr().err.count(said) == 1


def test_one_process_needs_no_address_and_nccl_that_fails_is_not_said_to_be_a_firewall(
    launched, monkeypatch, capsys
):
    launched(0, 0, 1)
    world = init_world(ProcessFlags(distributed=True, device="cpu"))
    assert world.backend == "gloo" and world.run_on_main(lambda: 3) == 3
    dist.destroy_process_group()
    last = "Error while creating shared memory segment /dev/shm/nccl-1 (size 9637888), error: No space left"
    text = "NCCL error in: /pytorch/NCCLUtils.cpp:94, unhandled system error, NCCL version 2.28.9\n"
    error = dist.DistBackendError(f"{text}ncclSystemError: System call failed.\nLast error:\n{last}\n")
    monkeypatch.setattr(dist, "init_process_group", Mock(side_effect=error))
    with pytest.raises(UserError) as caught:
        init_world(ProcessFlags(distributed=True, device="cpu"))
    monkeypatch.setattr(os, "_exit", Mock(side_effect=SystemExit))
    monkeypatch.setattr("histocc.runtime.frame.PATIENCE_SECONDS", 0)
    with pytest.raises(SystemExit):  # connections are made by the first message
        end_without_others(world, error)
    for said in (str(caught.value), capsys.readouterr().err):
        assert last in said and "--shm-size=8g" in said and "two ranks on one GPU" in said, said
        assert "NCCL_SOCKET_IFNAME" in said and "firewall" not in said and "lost" not in said


def test_an_old_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(UserError, match=r"torch 2.9.1\+cu128 is installed, and 2.10 or newer is needed"):
        init_world(ProcessFlags())


WITHOUT = """
import runpy, sys
import importlib.abc

class Missing(importlib.abc.MetaPathFinder):  # a build with USE_DISTRIBUTED=0
    def find_spec(self, name, path, target=None):
        if name == "torch.distributed":
            for name in ("_c10d_init", "_rpc_init"):
                delattr(sys.modules["torch._C"], name)
        if name == "torch._C._distributed_c10d":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import torch

sys.modules.pop("torch._C._distributed_c10d", None)
assert not torch.distributed.is_available()
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def run_without_distributed(*args, code=0, **variables):
    line = [sys.executable, "-W", "ignore", "-c", WITHOUT, *map(str, args)]
    done = subprocess.run(line, env=environment(**variables), timeout=120, **PIPED)
    assert done.returncode == code and "Traceback" not in done.stdout, done.stdout
    return done.stdout


def test_a_torch_without_distributed_works_in_one_process_and_is_named_in_several(tmp_path):
    assert "Ready to train" in run_without_distributed("histocc.doctor", "--save-path", tmp_path)
    two = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
    said = run_without_distributed("histocc.doctor", "--device", "cpu", code=2, **two)
    assert said.startswith("error: this torch was built without torch.distributed: start one process"), said


@pytest.mark.full
def test_a_torch_without_distributed_trains_is_resumed_and_codes(tmp_path):
    data = write_rows(tmp_path / "data.csv", 60)
    flags = ["--dataset", data, "--target-cols", "hisco_1", "--formatter", "hisco", *TINY]
    flags += ["--batch-size", 16, "--num-epochs", 1, "--save-path", tmp_path / "run"]
    run_without_distributed("finetune", *flags, "--max-steps", 2)
    said = run_without_distributed("finetune", *flags)
    assert "Resuming from step 2" in said and "Finished at step" in said
    coded = ["--input", data, "--output", tmp_path / "coded.csv", "--overwrite-columns"]
    run_without_distributed("histocc.predict", "--model", tmp_path / "run", *coded)
    assert (tmp_path / "coded.csv").exists()


def test_world_of_one_process(capsys):
    world = init_world(ProcessFlags(device="cpu"))
    assert world == World() and world.is_main and not dist.is_initialized()
    world.print("hello", 3)
    World(rank=1, local_rank=0, size=2).print("not me")  # the first of its node, but not of the job
    assert capsys.readouterr().out == "hello 3\n"
    totals = {"loss": torch.tensor(0.1, requires_grad=True), "tokens": torch.tensor(2**53 - 1), "share": 0.25}
    sums = world.sum_over_ranks(totals)
    assert sums == {"loss": pytest.approx(0.1, rel=1e-7), "tokens": 2.0**53 - 1, "share": 0.25}
    assert all(type(value) is float for value in sums.values())
    assert world.gather({"a": 1}) == [{"a": 1}] and world.run_on_main(lambda: "done") == "done"


# ---- work that rank 0 does first, and who hangs


def ranks_do(work, size=2, minutes=0.2, before=lambda rank: None):
    """What `work(world)` gives on each rank, each a process here: its result, or kind and words of what it
    raises. before: is called with the rank before it joins the others.
    """
    context, port = multiprocessing.get_context("fork"), str(free_port())
    outcomes = context.SimpleQueue()

    def rank(number):
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
        torch.set_num_threads(1)
        before(number)
        try:
            world = init_world(ProcessFlags(device="cpu", timeout_minutes=minutes))
            world.gather(None)  # all have joined: a rank that ends before would keep the others from it
            outcome = work(world)
        except BaseException as error:
            outcome = (type(error), str(error))
        outcomes.put((number, outcome))
        os._exit(0)

    ranks = [context.Process(target=rank, args=(number,)) for number in range(size)]
    for process in ranks:
        process.start()
    found = dict(outcomes.get() for _ in ranks)
    for process in ranks:
        process.join()
    return [found[number] for number in range(size)]


def test_ranks_and_their_processes_share_out_work_once():
    work = list(range(11))
    shares = [work[World(rank, size=3).share(process, 2)] for rank in range(3) for process in range(2)]
    assert sorted(sum(shares, [])) == work and sorted(map(len, shares)) == [1, 2, 2, 2, 2, 2]


def fails(error):
    return lambda world: world.run_on_main(Mock(side_effect=error))


@pytest.mark.processes
def test_rank_0_works_alone_and_its_mistake_is_raised_on_every_rank():
    done = ranks_do(lambda world: (world.run_on_main(lambda: world.rank), world.run_on([0, 1], os.getpid)))
    assert done[0] == done[1] and done[0][0] == 0 and len(set(done[0][1])) == 2
    assert ranks_do(fails(UserError("no such file: æ"))) == [(UserError, "no such file: æ")] * 2
    assert ranks_do(fails(OSError(errno.EACCES, "denied", "a.csv"))) == [(UserError, "a.csv: denied")] * 2
    assert ranks_do(fails(Stopped())) == [(Stopped, "")] * 2
    own, other = ranks_do(fails(ZeroDivisionError("by 0")))
    assert own == (ZeroDivisionError, "by 0") and issubclass(other[0], RuntimeError)


@pytest.mark.processes
def test_what_rank_0_does_alone_may_take_longer_than_the_time_limit():
    def slowly():
        time.sleep(2.4)
        return "done"

    assert ranks_do(lambda world: world.run_on_main(slowly), minutes=0.02) == ["done"] * 2


@pytest.mark.processes
def test_a_folder_that_not_all_ranks_share_is_named(tmp_path, monkeypatch):
    """The working folder stands for the disk of a machine."""
    for name in "ab":
        (tmp_path / name / "folder").mkdir(parents=True)
    shared = str(tmp_path / "a" / "folder")
    assert ranks_do(lambda world: all_see(world, shared)) == [None] * 2

    def of_each(world):  # its clock is fast
        world_module.time = Mock(monotonic=lambda: 10 * time.monotonic(), sleep=time.sleep)
        os.chdir(tmp_path / "ab"[world.rank])
        return all_see(world, "folder")

    found = ranks_do(of_each)
    host = socket.gethostname()
    said = f"folder: rank 1 on {host} does not see what rank 0 on {host} writes there"
    assert all(kind is UserError and text.startswith(said) for kind, text in found), found
    assert ranks_do(lambda world: all_see(world, f"{shared}/gone"))[1][0] is UserError
    assert not list(tmp_path.glob("*/folder/*"))  # also hidden files


@pytest.mark.processes
def test_without_local_world_size_ranks_with_one_host_name_share_a_machine():
    """As srun starts them; it may deal them out to the machines in turns."""
    places = attrgetter("local_rank", "local_size", "leader")
    assert ranks_do(places, 4) == [(rank, 4, 0) for rank in range(4)]
    found = ranks_do(places, 3, before=lambda rank: setattr(socket, "gethostname", lambda: "ab"[rank % 2]))
    assert found == [(0, 2, 0), (0, 1, 1), (1, 2, 0)]


@pytest.mark.processes
def test_ranks_that_cannot_work_together_say_why():
    class LateStore(world_module.PrefixStore):
        def multi_get(self, keys):
            time.sleep(0.5)  # rank 0 has read long before, and holds the store
            return super().multi_get(keys)

    def late(rank):
        world_module.PrefixStore = LateStore if rank else world_module.PrefixStore

    def other_torch(rank):
        late(rank)
        torch.__version__ = ("2.13.0", "2.12.1+cpu")[rank]

    def other_network(rank):
        late(rank)
        os.environ["GLOO_SOCKET_IFNAME"] = "net9"

    def other_device(rank):
        late(rank)
        choose = torch.device if rank else Mock(side_effect=UserError("--device cuda: no GPU"))
        world_module.choose_device = lambda *args: choose("cuda", 0)

    host = socket.gethostname()
    for before, said in (
        (other_torch, f"torch: '2.13.0' for rank 0 on {host}, '2.12.1+cpu' for rank 1 on {host}"),
        (other_device, f"device: '--device cuda: no GPU' for rank 0 on {host}, 'cuda' for rank 1 on {host}"),
    ):
        for kind, text in ranks_do(None, before=before):
            assert kind is UserError and "same command, versions and files" in text and said in text, text
    for kind, text in ranks_do(None, before=other_network):
        assert kind is UserError and "could not meet" in text and "net9" in text
        assert "GLOO_SOCKET_IFNAME=eth0" in text and "firewall" not in text


# ---- how a mistake ends a process


ENDS = """
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.frame import errors_end_all_ranks

with errors_end_all_ranks():
    raise """


@pytest.mark.parametrize(
    "rank, error, message, code",
    [
        (None, "UserError('no column')", "no column", 2),
        ("", "UserError('no column')", "no column", 2),
        ("0", "TrainingError('not finite')", "not finite", 1),
        ("1", "TrainingError('not finite')", "not finite", 1),
    ],
)
def test_rank_0_says_what_is_wrong_and_the_others_wait_in_silence(tmp_path, rank, error, message, code):
    (tmp_path / "ends.py").write_text(ENDS + error)
    variables = {} if rank is None else {"RANK": rank}
    [process] = start_forked(tmp_path / "ends.py", [], tmp_path / "log", **variables)
    if silent := rank == "1":
        wait_until_handled(signal.SIGTERM, process.pid)
        process.terminate()  # as a launcher does as soon as rank 0 is gone
    said = "" if silent else f"error: {message}\n"
    assert (ended([process]), (tmp_path / "log").read_text()) == ([code], said)


def test_another_rank_says_it_if_no_launcher_ends_it_meanwhile(tmp_path):
    """Rank 0 may be on another machine, where nothing is wrong."""
    short = "from histocc.runtime import frame\n\nframe.JOINING_PATIENCE_SECONDS = 0.1\n"
    (tmp_path / "ends.py").write_text(short + ENDS + "UserError('no column')")
    processes = start_forked(tmp_path / "ends.py", [], tmp_path / "log", RANK="1")
    assert (ended(processes), (tmp_path / "log").read_text()) == ([2], "error: rank 1: no column\n")


def test_other_errors_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), errors_end_all_ranks():
        _ = 1 / 0

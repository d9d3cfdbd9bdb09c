"""A run that hangs is asked where its processes are: by a signal, by the doctor, and at its time limit."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from helpers import REPO, _as_script, environment, fork_server, free_port, run_inside

from histocc import doctor
from histocc.runtime import living, stack_dump, stack_request, stacks
from histocc.runtime.collectives import Collectives
from histocc.runtime.heartbeat import Heartbeat
from histocc.runtime.stack_dump import Call, Place, Summary, Wait, read_summary, summary_of_file
from histocc.runtime.stack_report import compared
from histocc.runtime.stacks import Stacks
from histocc.runtime.world import World

HOST = socket.gethostname()

JOB = '''
"""A linear map of ten numbers."""

import os
import time
from pathlib import Path

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()

import torch

from histocc.runtime.entrypoint import start
from histocc.trainer import script
from histocc.trainer.batches import Rows
from histocc.trainer.training import Training

HERE = Path(__file__).parent
here = []


class Numbers(Rows):
    fingerprint = "numbers"

    def __len__(self):
        return 16

    def batch(self, numbers, epoch):
        if torch.utils.data.get_worker_info() is not None:
            (HERE / f"loads{os.getpid()}").touch()
        return {"x": torch.ones(len(numbers), 10), "y": torch.from_numpy(numbers).float()}


class Toy:
    columns = ("loss",)
    passes = 0

    def losses(self, model, batch):
        self.passes += 1
        world = here[0]
        if self.passes == 3 and world.rank == int(os.environ["HANGS"]):
            (HERE / "hangs").touch()
            if "WAY" in os.environ:
                world.run_on_main("another way", lambda: None)
            wait_for_the_file()
        return {"loss": (model(batch["x"])[:, 0] - batch["y"]) ** 2}

    metrics = losses


def wait_for_the_file():
    while not (HERE / "go").exists():
        time.sleep(0.05)  # HERE


def run(args, world):
    here[:] = [world]
    script.train(parser, args, world, lambda: Training(torch.nn.Linear(10, 1), Toy(), Numbers()))


parser = script.make_parser("hangs.py", __doc__, num_epochs=3, batch_size=4, learning_rate=1e-3)
if __name__ == "__main__":
    start(parser, run)
'''
LINE = next(number for number, line in enumerate(JOB.splitlines(), 1) if "# HERE" in line)
FRAME = f"hangs.py:{LINE} in wait_for_the_file"


class Ranks:
    """The job on so many processes, of which rank `hangs` waits in its third step for `go`."""

    def __init__(self, folder: Path, number: int, hangs: int, *flags, **variables):
        self.folder, self.run, self.log = folder, folder / "run", folder / "log"
        (folder / "hangs.py").write_text(JOB)
        self.log.touch()
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": free_port(),
            "WORLD_SIZE": number,
            "LOCAL_WORLD_SIZE": number,
        }
        more = [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(number)]
        args = ["--save-dir", str(self.run), "--device", "cpu", *map(str, flags)]
        if number == 1:
            more = [{}]
        else:
            args.append("--distributed")
        self.processes = [
            fork_server().Process(
                target=_as_script,
                args=(
                    str(folder / "hangs.py"),
                    args,
                    str(self.log),
                    environment(
                        HANGS=str(hangs), **variables, **{name: str(value) for name, value in own.items()}
                    ),
                ),
            )
            for own in more
        ]
        for process in self.processes:
            process.start()

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait_until(self, true, seconds=60):
        until = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < until, self.said()
            time.sleep(0.05)

    def wait_until_it_hangs(self):
        self.wait_until(lambda: (self.folder / "hangs").exists())

    def go_on(self):
        (self.folder / "go").touch()
        for process in self.processes:
            process.join(60)
        assert [process.exitcode for process in self.processes] == [0] * len(self.processes), self.said()
        assert "Finished at step " in self.said()

    def file(self, rank: int) -> str:
        return (self.run / f"stacks-rank{rank}.txt").read_text(encoding="utf-8")


@pytest.fixture
def ranks(tmp_path):
    started = []

    def start(*args, **more):
        started.append(Ranks(tmp_path, *args, **more))
        return started[0]

    yield start
    for process in started[0].processes if started else []:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join()


def ask(folder, *flags):
    return run_inside(doctor.main, "--stacks", folder, *flags)


@pytest.mark.processes
def test_a_rank_that_hangs_is_named_and_the_run_goes_on(ranks):
    job = ranks(2, 1)
    job.wait_until_it_hangs()
    os.kill(job.processes[1].pid, signal.SIGUSR2)
    job.wait_until(lambda: "Stacks: " in job.said() and "the stacks of all threads" in job.said())
    words = job.said().partition("Stacks: ")[2]
    assert words.startswith("Rank 0 waits in the sum over gradients (no. "), words
    place = f"rank 1 on host {HOST} (process {job.processes[1].pid})"
    assert f"rank 1 waits in none. Look at {place}: it is in {job.folder}/{FRAME}, step 3: forward" in words
    for rank in (0, 1):
        text = job.file(rank)
        summary = summary_of_file(text)
        place_of = summary.place
        assert (summary.rank, place_of.host, place_of.process) == (rank, HOST, job.processes[rank].pid)
        assert "in wait_for_the_file\n" in text if rank else "in the sum over gradients: begun" in text
    code, words = ask(job.run)
    assert code == 0 and f"Look at {place}: it is in {job.folder}/{FRAME}, step 3: " in words
    assert not (job.run / stack_request.NAME).exists()
    job.go_on()
    assert job.said().count("Stacks: ") == 1  # the doctor has said what it asked for
    listed = json.loads((job.run / "histocc.json").read_text())["files"]
    assert {"stacks-rank0.txt", "stacks-rank1.txt"} <= listed.keys()


def answers(*waits: Wait | None) -> tuple[dict[int, Summary], tuple[Place, ...]]:
    places = tuple(Place(f"host{rank}", 100 + rank) for rank in range(len(waits)))
    call = Call("/home/a/train.py", 7, "read_rows")
    return {
        rank: Summary(rank, "doctor-1", "step 9: waiting for data", 95.2, wait, call, places)
        for rank, wait in enumerate(waits)
    }, places


def test_ranks_that_wait_are_told_apart():
    gradients, barrier = Wait("in the sum over gradients", 812, 34.2), Wait("in a barrier", 15, 30.0)
    found, places = answers(gradients, barrier, gradients)
    sentence, lines = compared(found, places)
    assert sentence == (
        "Rank 1 waits in a barrier (no. 15) for 30 s, ranks 0, 2 wait in the sum over gradients (no. 812) for"
        " 34 s. They wait for each other, since they have taken different ways through the program: compare"
        " the calls of rank 1, furthest behind, with those of the others."
    )
    assert lines[1] == (
        "rank 1, host host1, process 101: step 9: waiting for data for 95 s; waits in a barrier (no. 15) for"
        " 30 s; in /home/a/train.py:7 in read_rows"
    )
    found, places = answers(gradients, None, gradients)
    assert compared(found, places)[0] == (
        "Ranks 0, 2 wait in the sum over gradients (no. 812) for 34 s, rank 1 waits in none. Look at rank 1"
        " on host host1 (process 101): it is in /home/a/train.py:7 in read_rows, step 9: waiting for data,"
        " for 95 s."
    )
    del found[1]
    sentence, lines = compared(found, places, {1: "step 9: forward and backward pass"})
    assert "Rank 1 has not answered: look at process 101 on host host1: it is stopped, dead" in sentence
    assert lines[1].endswith("no answer; last reported activity: step 9: forward and backward pass")
    assert "all wait in the same" in compared(*answers(gradients, gradients))[0].lower()
    assert compared(*answers(None, None))[0] == "No rank waits for another one."


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"rank": 0, "wait": null}', "[" * 9999])
def test_what_is_no_answer_is_none(text):
    assert read_summary(text) is None and summary_of_file(text) is None
    whole = answers(Wait("in a barrier", 1, 0.5))[0][0]
    assert read_summary(whole.written()) == whole


def test_collectives_have_the_same_numbers_and_know_which_is_waited_for():
    own = Collectives()
    assert own.current() is None and own.last() == []
    for _ in range(50):
        with own.of("in a barrier"):
            assert own.current().name == "in a barrier"
    assert own.current() is None and [each.number for each in own.last()] == list(range(31, 51))
    with pytest.raises(ValueError), own.of("in a broadcast"), own.of("in a sum"):
        assert own.current().name == "in a sum"
        raise ValueError
    assert own.current().number == 52  # where this process gave up
    with own.of("in a barrier"):
        pass
    assert own.current() is None and own.count == 53


def two_hosts(tmp_path, backend="gloo", **more):
    """Rank 0 with the folder of the run, and rank 1 on a host that has none."""
    store = torch.distributed.HashStore()
    places, names = (Place("a", 1), Place("b", 2)), ["stacks-rank0.txt", "stacks-rank1.txt"]
    made = []
    for rank, folder in enumerate((tmp_path, tmp_path / "elsewhere")):
        heart = Heartbeat(None, rank, 2)
        heart.store = store
        world = World(rank=rank, size=2, backend=backend, store=store, heartbeat=heart, **more)
        made.append(Stacks(world, str(folder), names, places))
    return made


def wait_for(true):
    until = time.monotonic() + 30
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_rank_0_writes_for_a_host_without_the_folder(tmp_path, capsys):
    both = two_hosts(tmp_path)
    for each in both:
        each.start()
    both[1].world.note("reading")
    both[1].ask()
    wait_for(lambda: (tmp_path / "stacks-rank1.txt").exists())
    said = ""
    while "the stacks of all threads" not in said:
        said += capsys.readouterr().out
    for each in both:
        each.close()
    summaries = [stack_request.summary_in(str(tmp_path / f"stacks-rank{rank}.txt")) for rank in (0, 1)]
    assert [each.rank for each in summaries] == [0, 1] and summaries[1].activity == "reading"
    assert said.startswith("Stacks: No rank waits for another one.\n") and "rank 1, host b, process 2" in said
    assert not (tmp_path / "elsewhere").exists()


def test_two_that_are_asked_at_the_same_time_both_answer(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 2.0)
    both = two_hosts(tmp_path)
    for each in both:
        each.start()
        each.ask()
    said = ""
    until = time.monotonic() + 20
    while said.count("the stacks of all threads") < 2 and time.monotonic() < until:
        said += capsys.readouterr().out
    for each in both:
        each.close()
    assert said.count("Stacks: No rank waits for another one") == 2 and "not answered" not in said, said


def test_a_process_of_another_container_is_not_taken_for_one_here():
    """Its number means another process there, though the host may have the same name."""
    found, _ = answers(Wait("in a barrier", 1, 30.0), None)
    own = living.own_name()
    elsewhere = Place(HOST, os.getpid(), "0 pid:[1] " + " ".join(own.rsplit(" ", 2)[1:]))
    here = Place(HOST, os.getpid(), own)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        ended = Place(HOST, process.pid, f"{living.machine_of(own)} {process.pid} 1")
        process.kill()
    for place, words in (
        (elsewhere, "it is stopped, dead, out of reach"),
        (here, "it is stopped, dead, out of reach"),
        (ended, f"process {ended.process} on host {HOST} is gone"),
    ):
        sentence, _ = compared({0: found[0]}, (Place("a", 1), place))
        assert words in sentence, (place, sentence)


def test_stacks_where_no_file_can_be_opened(monkeypatch):
    def none_free(name):
        raise OSError(24, "too many open files")

    monkeypatch.setattr(os, "memfd_create", none_free)
    calls = stack_dump.calls_of(stack_dump.thread_stacks(), threading.main_thread().ident)
    assert [call.function for call in calls][:2] == [
        "thread_stacks",
        "test_stacks_where_no_file_can_be_opened",
    ]


def test_one_that_is_asked_to_end_does_not_speak_of_the_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 0.5)
    first, _ = two_hosts(tmp_path, patience=1800.0)
    first.heartbeat.since = first.world.collectives.changed = time.monotonic() - 20
    first.world.stop.signal = signal.SIGTERM  # a launcher ends all after one has failed
    assert first.at_the_end([], {}) is None
    first.heartbeat.since = first.world.collectives.changed = time.monotonic() - 1790
    assert first.at_the_end([1], {}).at_limit


def test_a_host_that_waits_for_its_device_compares_before_torch_ends_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(stacks, "ANSWER_SECONDS", 1.0)
    first, _ = two_hosts(tmp_path, backend="nccl", patience=0.5)
    with first.world.collectives.of("in a sum over all ranks"):
        first.start()
        wait_for(lambda: (tmp_path / "stacks-rank0.txt").exists())
        said = ""
        while "the stacks of all threads" not in said:
            said += capsys.readouterr().out
        first.close()
    assert (
        said.startswith("Stacks: Rank 0 waits in a sum over all ranks (no. 1)") and said.count("Stacks") == 1
    )
    assert "rank 1, host b, process 2: no answer" in said


def test_where_no_run_is(tmp_path):
    code, words = ask(tmp_path / "none")
    assert code == 2 and "no folder of that name" in words
    code, words = ask(tmp_path)
    assert code == 2 and "no run is using this folder now" in words and not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.full
def test_one_process_and_a_file_of_the_users_and_a_process_that_loads(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "stacks-rank0.txt").write_text("mine")
    job = ranks(1, 0, "--num-workers", 1)
    job.wait_until_it_hangs()
    loading = list(tmp_path.glob("loads*"))
    assert loading
    for file in loading:
        os.kill(int(file.name.removeprefix("loads")), signal.SIGUSR2)
    code, words = ask(job.run, "--json")
    found = json.loads(words)
    assert code == 0 and found["ok"] and f"{FRAME}" in found["ranks"][0]["text"]
    os.kill(job.processes[0].pid, signal.SIGUSR2)
    job.wait_until(lambda: "Stacks: " in job.said())
    assert job.file(0) == "mine" and (job.run / "stacks-rank0.1.txt").exists()
    job.go_on()
    before = (job.run / "stacks-rank0.1.txt").read_text()
    assert ask(job.run)[0] == 2 and (job.run / "stacks-rank0.1.txt").read_text() == before


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("hangs", [0, 1])
def test_the_time_limit_names_the_rank(ranks, hangs):
    job = ranks(2, hangs, "--timeout-minutes", 0.1)
    job.wait_until_it_hangs()
    waits = job.processes[1 - hangs]
    waits.join(60)
    words = job.said()
    assert waits.exitcode == 1 and words.count("error: ") == 1, words
    assert "did not get on within the time limit (--timeout-minutes), though all live" in words
    assert f"Rank {1 - hangs} waits in the sum over gradients (no. " in words
    assert f"Look at rank {hangs} on host {HOST} (process {job.processes[hangs].pid}): it is in" in words
    assert FRAME in words and "wait_for_the_file" in job.file(hangs)
    assert "Where the main thread gave up" in job.file(1 - hangs)


@pytest.mark.processes
@pytest.mark.full
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_has_not_answered(ranks, stopped):
    job = ranks(2, 1, "--timeout-minutes", 0.5)
    job.wait_until_it_hangs()
    pid = job.processes[stopped].pid
    os.kill(pid, signal.SIGSTOP)
    code, words = ask(job.run)
    assert code == 1
    assert (
        f"Rank {stopped} has not answered: process {pid} on host {HOST} is stopped (SIGSTOP); kill -CONT"
        f" {pid} wakes it" in words
    )
    os.kill(pid, signal.SIGCONT)
    code, words = ask(job.run)
    assert code == 0 and FRAME in words
    job.go_on()


@pytest.mark.processes
@pytest.mark.full
def test_a_stopped_rank_at_the_time_limit(ranks):
    job = ranks(2, 1, "--timeout-minutes", 0.1)
    job.wait_until_it_hangs()
    os.kill(job.processes[1].pid, signal.SIGSTOP)
    job.processes[0].join(60)
    words = job.said()
    assert "error: rank 1 does not answer any more" in words and "is stopped (SIGSTOP)" in words
    assert "Rank 0 waits in the sum over gradients" in words and not (job.run / "stacks-rank1.txt").exists()


@pytest.mark.processes
@pytest.mark.full
def test_two_ranks_that_have_taken_different_ways(ranks):
    job = ranks(2, 1, WAY="another")
    job.wait_until_it_hangs()
    code, words = ask(job.run)
    assert code == 0 and "They wait for each other" in words, words
    assert "ank 0 waits in the sum over gradients (no. " in words
    assert "ank 1 waits for rank 0, which works for all (no. " in words and "hangs.py:" in words


@pytest.mark.processes
@pytest.mark.full
def test_a_wait_in_torch_alone_is_told_from_its_flight_recorder(ranks):
    job = ranks(2, 1, "--reduce", "during")
    job.wait_until_it_hangs()
    code, words = ask(job.run)
    assert code == 0 and "Rank 0 waits in the sum over gradients (no. " in words and FRAME in words
    job.go_on()


@pytest.mark.processes
@pytest.mark.full
def test_a_command_without_a_folder_prints_its_own_stacks():
    code = "from histocc.runtime import signals; signals.start_listening(); import time; "
    code += "print('ready', flush=True); time.sleep(1.5); print('goes on')"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR2)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 0 and output == "goes on\n"
    assert 'File "<string>", line 1 in <module>' in said


@pytest.mark.processes
@pytest.mark.full
def test_other_commands_print_theirs_and_continue():
    code = "import sys, time; from histocc.runtime.entrypoint import run_command; "
    code += (
        "sys.exit(run_command(lambda: [print('ready', flush=True), time.sleep(1.5), print('goes on')] and 0))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGUSR2)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 0 and output == "goes on\n" and "in run_command" in said

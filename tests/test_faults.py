"""Signals, kills, damaged files and full disks, with real processes: nothing lost, nothing repeated.

`tests/run --faults [N]`: also each kind of fault at random moments, and nodes that come and go.
"""

import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from helpers import (
    DEFAULT,
    REPO,
    TRAIN_MIXER,
    all_tests,
    command,
    ended,
    environment,
    free_port,
    read_logs,
    run,
    start_forked,
    state_of,
    wait_until,
    wait_until_handled,
    write_rows,
)

pytestmark = pytest.mark.processes
SPEEDS = ("samples_per_sec", "seconds_data", "model_flops_per_sec", "mfu")
EXACT = ["--dropout", 0, "--encoder-dropout", 0, "--ngram-dropout", 0, "--float64", "--log-interval", 1]
SIGNALS = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"


class Job:
    """A small run of train_mixer.py, dropout and noise on, that is started, interrupted and continued."""

    def __init__(
        self, folder, *, epochs=4, processes=None, flags=(), launcher=(), logs=None, script=TRAIN_MIXER
    ):
        self.folder, self.processes, self.launcher, self.script = folder, processes, launcher, script
        self.logs = logs or folder.parent
        train, val = self.logs / "train.csv", self.logs / "val.csv"
        if not val.exists():
            write_rows(train, 24)
            write_rows(val, 24, 500)
        self.flags = ["--train-data", train, "--val-data", val, *DEFAULT, "--language-col", "lang"]
        self.flags += ["--dropout", 0.1, "--num-epochs", epochs, "--global-batch-size", 4]
        self.flags += ["--ngram-passes", 1]
        self.flags += ["--log-interval", 3, "--eval-interval", 5, "--save-interval", 4]
        self.flags += ["--learning-rate", 1e-3, "--save-dir", folder, *flags]

    def start(self, *more, log=None):
        self.log = self.logs / f"{log or self.folder.name}.log"
        line = command(self.script, *self.flags, *more, processes=self.processes)
        if self.launcher:
            at = line.index("--standalone")
            line[at : at + any(option.startswith("--rdzv") for option in self.launcher)] = self.launcher
        with open(self.log, "w") as output:
            streams = {"stdout": output, "stderr": subprocess.STDOUT}
            return subprocess.Popen(line, env=environment(), start_new_session=True, **streams)

    def said(self):
        return self.log.read_text(encoding="utf-8")

    def wait_for(self, process, words, seconds=240):
        wait_until(
            lambda: words in self.said(), lambda: f"never said {words!r}:\n{self.said()}", seconds, process
        )

    def start_and_wait(self, *more):
        """Starts the job, or continues with it, and waits for its next row of the log."""
        step = state_of(self.folder)["step"] if (self.folder / "last.bin").exists() else 0
        process = self.start(*more)
        self.wait_for(process, f"step {step - step % 3 + 3}/")
        return process

    def end(self, process, seconds=240):
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            kill_all(process)
            raise AssertionError(f"did not end:\n{self.said()}") from None
        return code, self.said()

    def run(self, *more, code=0):
        """To the end; the output. Forked processes, but for a job that fails."""
        return run(TRAIN_MIXER, *self.flags, *more, processes=self.processes, code=code)

    def rows(self):
        return [{name: row[name] for name in row if name not in SPEEDS} for row in read_logs(self.folder)]


def workers(process):
    """Process numbers of the ranks that a launcher has started, in order."""
    listed = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in listed.stdout.split()]


def alive(pid):
    """Whether a process runs; one that has ended and waits to be collected does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def assert_gone(pids, seconds=10):
    """No process is left, after the moment that the system needs to take one down."""
    wait_until(lambda: not any(map(alive, pids)), lambda: f"still alive among {pids}", seconds)


def kill_all(process):
    """SIGKILL for the launcher and everything it started, as when a machine loses power."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def assert_same_end(job, whole):
    """The very bits of a run that was never interrupted: weights, optimizer, schedule, log."""
    one, other = state_of(job.folder), state_of(whole.folder)
    assert one["step"] == other["step"]
    held = [[state["model"], state["optimizer"]["state"]] for state in (one, other)]
    torch.testing.assert_close(*held, rtol=0, atol=0)
    assert one["scheduler"] == other["scheduler"] and job.rows() == whole.rows()
    assert not [name for name in os.listdir(job.folder) if ".tmp" in name or name == "run.lock"]


def assert_same_losses(job, whole):
    """Every step was logged once, with the rows and the loss of a run in double precision."""
    rows, others = job.rows(), whole.rows()
    assert [row["step"] for row in rows] == [row["step"] for row in others] == list(range(len(others)))
    for row, other in zip(rows[1:], others[1:]):
        assert row["samples"] == other["samples"]
        assert abs(row["train_loss"] - other["train_loss"]) <= 1e-9 * abs(other["train_loss"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


EPOCHS = 4 if all_tests() else 1  # of six steps
OF_TWO = {"processes": 2, "epochs": EPOCHS, "flags": ["--ngrams", "none"]}


@pytest.fixture(scope="module")
def whole_of_two(folder):
    job = Job(folder / "whole_of_two", **OF_TWO)
    job.run()
    return job


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.unlink()  # not the file that it may be a link to
    path.write_bytes(content)


FAULTY = f"""
import sys
sys.path[:0] = ["{REPO}", "{REPO}/tests"]
from histocc.runtime.config import Parser, ProcessFlags
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.frame import start
import test_toy_task as toy

def work(args, world):
    class Faulty(toy.Loader):
        def at(self, epoch, first_batch):
            for batch in super().at(epoch, first_batch):
                if epoch == 1 and world.rank in RANKS:
                    FAULT
                yield batch

    toy.Loader = Faulty
    toy.train(world)

start(Parser(ProcessFlags, "faulty", ""), work, ["--device", "cpu"])
"""


def test_an_error_in_the_data_of_a_rank_is_said_once_with_the_rank_and_the_cause(tmp_path):
    """Whatever is raised, and whichever rank raises it; the others end with it."""
    started = []
    cases = (
        ("[0]", "sys.exit('row 17 is odd')", "error: row 17 is odd", 1),
        ("[1]", "sys.exit('row 17 is odd')", "error: rank 1: row 17 is odd", 1),
        ("[1]", "raise UserError('row 17 is odd')", "error: rank 1: row 17 is odd", 2),
        ("[1]", "raise TrainingError('row 17 is odd')", "error: rank 1: row 17 is odd", 1),
        ("[0, 1]", "raise UserError('row 17 is odd')", "error: row 17 is odd", 2),
        ("[1]", "raise ValueError('row 17 is odd')", "\nValueError: row 17 is odd", 1),
        ("[1]", "raise RuntimeError('socket: timed out')", "\nRuntimeError: socket: timed out", 1),
    )
    for ranks, fault, said, code in cases[:: 1 if all_tests() else 2]:
        script, log = (tmp_path / f"{len(started)}{ending}" for ending in (".py", ".log"))
        script.write_text(FAULTY.replace("RANKS", ranks).replace("FAULT", fault))
        started.append((ranks, start_forked(script, [], log, 2), log, said, code))
    for ranks, processes, log, said, code in started:
        processes[0].join(120)
        if ranks == "[0]":
            processes[1].terminate()  # as a launcher does: with rank 0 the store is gone
        codes, output = ended(processes, 120), log.read_text()
        assert codes == [code, code], output
        assert output.count("error: ") == output.count(said) == 1, output
        assert output.count("Traceback") == output.count("rank 1: Traceback") == said.startswith("\n"), output


# ---- signals and kills


def test_a_signal_saves_and_ends_all_ranks_and_a_second_ends_at_once(folder):
    """The second if the first cannot be followed: the other rank does not come, and this one waits for it."""
    flags = ["--save-interval", 1000, "--ngrams", "none"]  # only the signal has it saved
    job = Job(folder / "signals", flags=flags)
    job.log = folder / "signals.log"
    step = 0

    def start():
        job.log.write_text("")
        ranks = start_forked(TRAIN_MIXER, [*job.flags, "--distributed"], job.log, 2)
        wait_until(lambda: f"step {step - step % 3 + 3}/" in job.said(), job.said)
        return ranks

    ranks = start()
    os.kill(ranks[1].pid, signal.SIGUSR1)
    codes, step = ended(ranks), state_of(job.folder)["step"]
    assert codes == [0, 0], job.said()
    assert job.said().count(f"Stopped by SIGUSR1 at step {step} of 24") == 1, job.said()
    first, other = start()
    os.kill(other.pid, signal.SIGSTOP)
    time.sleep(1)
    for _ in range(2):
        assert first.is_alive()
        os.kill(first.pid, signal.SIGUSR1)
        first.join(1.3)
    assert first.exitcode == 128 + signal.SIGUSR1
    other.kill()
    assert state_of(job.folder)["step"] >= step  # whole and readable


@pytest.mark.full
def test_one_process_is_interrupted_in_every_way_and_the_same_command_goes_on(folder):
    whole, job, dice = Job(folder / "whole", epochs=24), Job(folder / "one", epochs=24), random.Random(1)
    whole.run()
    for name, expected in (("SIGUSR1", 0), ("SIGHUP", 0), ("SIGINT", 130), ("SIGTERM", 0)):
        process = job.start_and_wait()
        time.sleep(dice.uniform(0, 0.2))
        process.send_signal(getattr(signal, name))
        code, output = job.end(process)
        assert (
            code == expected and f"Stopped by {name} at step {state_of(job.folder)['step']} of 144" in output
        ), output
        assert "Traceback" not in output
    process = job.start_and_wait()
    time.sleep(dice.uniform(0, 0.4))
    kill_all(process)
    last = job.folder / "last.bin"
    flip_a_bit(last)
    process = job.start()
    job.wait_for(process, "Resuming from step")
    assert "WARNING: a newer checkpoint" in job.said() and "checksum" in job.said()
    kill_all(process)
    content = last.read_bytes()
    last.unlink()
    last.write_bytes(content[: len(content) // 2])
    output = job.run()
    assert "WARNING: a newer checkpoint" in output and "Resuming from step" in output
    assert_same_end(job, whole)


@pytest.mark.full
def test_two_processes_are_interrupted_in_every_way_and_the_same_command_goes_on(folder, whole_of_two):
    """One run: a signal to the launcher, a kill of the launcher, of a process; a process that is stuck."""
    job = Job(folder / "two", **OF_TWO)

    process = job.start_and_wait()
    process.send_signal(signal.SIGTERM)  # to torchrun, which passes it on
    code, output = job.end(process, 90)
    assert code != 0 and output.count("Stopped by SIGTERM at step") == 1, output

    process = job.start_and_wait()
    ranks = workers(process)
    os.kill(process.pid, signal.SIGKILL)  # the launcher alone
    process.wait()
    assert len(ranks) == 2
    assert_gone(ranks)

    process = job.start_and_wait()
    ranks = workers(process)
    os.kill(ranks[1], signal.SIGKILL)
    code, output = job.end(process)  # with the time limit it would be half an hour
    assert code != 0 and "(exitcode: -9)" in output and f"(pid: {ranks[1]})" in output, output
    assert "error: the connection to another process" in output and "trainer/loop.py" not in output
    assert_gone(ranks)

    process = job.start_and_wait("--timeout-minutes", 0.1)
    ranks = workers(process)
    os.kill(ranks[1], signal.SIGSTOP)
    job.wait_for(process, "error: rank 1 did not come within the time limit")
    kill_all(process)  # torchrun would wait 30 s for the stopped one
    assert_gone(ranks)
    assert "Resuming from step" in job.run()
    assert_same_end(job, whole_of_two)


KILLED = f"""
import os, runpy, signal, sys
sys.path.insert(0, "{REPO}")
from histocc.trainer import loop, script
place_of = script.place_of

class State(loop.State):
    def add_step(self, *step):
        super().add_step(*step)
        if self.step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)

def place(*given):
    state, *others = place_of(*given)
    state.__class__ = State
    return state, *others

script.place_of = place
sys.argv[0] = "{TRAIN_MIXER}"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("launcher", ["by hand", pytest.param("torchrun", marks=pytest.mark.full)])
def test_a_killed_process_is_replaced_and_the_result_is_that_of_a_whole_run(folder, whole_of_two, launcher):
    """In step 5, however slow the machine is: there is a checkpoint, and further steps are to come."""
    script = folder / "killed.py"
    script.write_text(KILLED)
    job = Job(folder / f"killed {launcher}", launcher=["--max-restarts=1"], script=script, **OF_TWO)
    if launcher == "torchrun":
        process = job.start()
        job.wait_for(process, "Starting training")
        first = workers(process)
        code, output = job.end(process)
        assert code == 0 and "failed (exitcode: -9)" in output and f"(pid: {first[0]})" in output
    else:
        log = folder / "by hand.log"
        ranks = start_forked(script, [*job.flags, "--distributed"], log, 2, TORCHELASTIC_RESTART_COUNT="0")
        codes, first, output = ended(ranks), [rank.pid for rank in ranks], log.read_text()
        assert codes[0] == -signal.SIGKILL and codes[1] and "the connection to another process" in output
        output = job.run()
    assert output.count("Resuming from step 4") == 1, output
    assert_gone(first)
    assert_same_end(job, whole_of_two)


@pytest.mark.full
def test_going_on_with_another_number_of_processes(folder):
    one, mixed = (Job(folder / name, flags=EXACT, epochs=2) for name in ("alone", "one_two_four"))
    one.run()
    for mixed.processes, stop in ((None, 3), (2, 6), (4, 9), (None, 12)):
        mixed.run("--max-steps", stop)
    assert_same_losses(mixed, one)
    weights, others = state_of(one.folder)["model"], state_of(mixed.folder)["model"]
    assert max(float((weights[name] - others[name]).abs().max()) for name in weights) < 1e-9
    assert state_of(one.folder)["position"]["samples"] == state_of(mixed.folder)["position"]["samples"] == 48


@pytest.mark.full
def test_a_stop_while_torch_is_imported_leaves_nothing(folder):
    job = Job(folder / "imports")
    process = job.start()
    wait_until_handled(signal.SIGUSR1, process.pid)
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGUSR1)
    code, output = job.end(process)
    assert code == 0 and "Stopped by SIGUSR1. Give the same command again" in output, output
    assert not job.folder.exists()


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounting a small disk needs root")
@pytest.mark.full
def test_a_full_disk_does_not_end_the_run_but_its_code_tells(folder):
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=30m", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        job = Job(disk / "run", epochs=1, logs=folder, flags=["--ngrams", "none"])  # nothing is saved before
        output = job.run("--timeout-minutes", 0.05, code=1)
        assert "Note: the run waits for up to 0.05 minutes" in output
        assert "WARNING: the checkpoint of step 4" in output and "Traceback" not in output
        assert "error: the last checkpoint, of step 6" in output
        assert not [name for name in os.listdir(job.folder) if name.endswith(".bin") or ".tmp" in name]
        assert [row["step"] for row in job.rows()] == [3, 5, 6]
        subprocess.run(["mount", "-o", "remount,size=400m", disk], check=True)
        assert "Finished at step 6" in job.run()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


# ---- tests/run --faults


@pytest.mark.parametrize("kind", ["SIGTERM", "SIGUSR1", "SIGINT", "kill one", "kill all", "stop one"])
def test_a_fault_at_a_random_moment(folder, kind, fault_seed):
    """Between the first import and the end; the same command afterwards ends with the very bits."""
    whole = Job(folder / "random", processes=2, epochs=12)
    if not whole.folder.exists():
        started = time.monotonic()
        whole.end(whole.start())
        (folder / "lasts").write_text(str(time.monotonic() - started))
    dice = random.Random(f"{kind} {fault_seed}")
    job = Job(folder / f"{kind} {fault_seed}", processes=2, epochs=12, launcher=[SIGNALS])
    process = job.start("--timeout-minutes", 0.2)
    moment = dice.uniform(0.5, float((folder / "lasts").read_text()))
    time.sleep(moment)
    ranks = workers(process)
    if process.poll() is None:
        if kind == "kill all":
            kill_all(process)
        elif kind.startswith("SIG"):
            process.send_signal(getattr(signal, kind))
        elif ranks:
            os.kill(dice.choice(ranks), signal.SIGKILL if kind == "kill one" else signal.SIGSTOP)
    code, _ = job.end(process, 120)
    assert_gone(ranks)  # torchrun has ended them, a stopped one too; or the system
    left = state_of(job.folder)["step"] if (job.folder / "last.bin").exists() else None
    job.run()
    assert_same_end(job, whole)
    print(f"\n{kind} after {moment:.1f} s: exit code {code}, continued from step {left}: same bits")


def test_a_node_joins_and_another_time_leaves(tmp_path, monkeypatch, fault_seed):
    """A rendezvous of one to two nodes, two agents on this machine: whoever takes part, the total batch and
    the rows of every step stay, and the losses are those of one process.
    """
    # otherwise torch 2.13's own rendezvous hangs when a node joins
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    flags = [*EXACT, "--eval-interval", 1000, "--save-interval", 20, "--max-steps", 150]
    launcher = ["--nnodes=1:2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{free_port()}"]
    launcher += ["--rdzv-id=members", "--max-restarts=3"]
    launcher += ["--rdzv-conf=last_call_timeout=1,keep_alive_interval=1"]
    whole = Job(tmp_path / "whole", flags=flags, epochs=100)
    whole.run()
    options = {"flags": flags, "epochs": 100, "processes": 1, "launcher": launcher}
    first, second = (Job(tmp_path / "run", **options) for _ in range(2))
    one = first.start("--overwrite")
    first.wait_for(one, "step 3/")
    other = second.start("--overwrite", log="joining")
    first.wait_for(one, "Nodes: 2")
    wait_until(lambda: " · loss " in first.said().partition("Nodes: 2")[2], first.said, 60, one)
    kill_all(other)
    code, output = first.end(one, 120)
    assert code == 0 and output.count("Resuming from step") == 2, output
    assert "Stopped by SIGTERM at step" in output
    assert_same_losses(first, whole)

"""What the machine refuses, in words: with real limits, each in its own process."""

import errno
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from helpers import FINETUNE, TINY, environment, write_rows
from torch.utils.data import DataLoader

from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.runtime.machine_errors import as_user_error, in_words, size_words, too_few_open_files
from histocc.runtime.world import World
from histocc.trainer.saver import Saver

STATE = {"model": {"w": torch.zeros(500_000)}}


def in_child(work, *limit):
    """What `work` returns, or (type, words) of what it raises, in a process of its own, under a limit (kind,
    number).
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # those of the parent process are not here
        try:
            if limit:
                resource.setrlimit(limit[0], (limit[1], limit[1]))
            found = work()
        except BaseException as error:
            found = type(as_user_error(error)), str(as_user_error(error))
        os.write(writer, pickle.dumps(found))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        found = pickle.load(file)
    os.waitpid(child, 0)
    return found


def virtual_memory() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def test_no_space_on_the_device(tmp_path):
    """A folder with room for 1 MB and 20 files, where the tests may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "tmpfs", tmp_path]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        file = str(tmp_path / "x.bin")
        with pytest.raises(Exception) as found, atomic_write(file) as opened:
            torch.save(STATE, opened)
        assert type(as_user_error(found.value)) is TrainingError
        assert in_words(found.value, file, 2_000_000) == (
            f"{file}: no space left on the device, 2.0 MB needed, 1.0 MB free; make room, or choose another"
            " folder"
        )
        with pytest.raises(OSError) as found:
            for number in range(30):
                (tmp_path / str(number)).touch()
        assert "no file can be added (df -i)" in in_words(found.value)
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize(
    "work", [lambda: torch.zeros(10**9), lambda: bytearray(10**9), lambda: np.ones(10**9)]
)
def test_out_of_memory(work):
    kind, text = in_child(work, resource.RLIMIT_AS, virtual_memory() + 10**8)
    assert kind is TrainingError
    assert re.match(r"out of memory \(.*the process may have [\d.]+ [MG]B: ulimit -v\)", text), text


def test_too_many_open_files():
    kind, text = in_child(lambda: [open(os.devnull) for _ in range(99)], resource.RLIMIT_NOFILE, 40)
    assert kind is TrainingError
    assert "too many open files: this process may open 40 (ulimit -n); ulimit -n 4096" in text


class Share(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {str(name): torch.zeros(300) for name in range(6)}


@pytest.mark.parametrize("workers, prefetch", [(4, 4), (1, 8)])
def test_as_many_open_files_as_are_said_to_be_needed_are_enough(workers, prefetch):
    def load():
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        # raises the limit to what it takes to be enough
        assert too_few_open_files(workers, 6 * prefetch) == ""
        count = 0
        for _ in DataLoader(Share(), batch_size=None, num_workers=workers, prefetch_factor=prefetch):
            if count < 3:
                time.sleep(0.1)  # all that they can have ready is on its way
            count += 1
        return count

    assert in_child(load) == 40


OPEN_FILES = "too many open files"
NO_SHARED_MEMORY = "/dev/shm is full"


@pytest.mark.parametrize(
    "text, kind, words",
    [
        ("received 0 items of ancdata", TrainingError, OPEN_FILES),
        (
            "unable to open shared memory object </torch_1_2_3>: Too many open files",
            TrainingError,
            OPEN_FILES,
        ),
        (
            "unable to write to file </torch_12>: No space left on device (28)",
            TrainingError,
            NO_SHARED_MEMORY,
        ),
        ("DataLoader worker (pid 3) is killed by signal: Bus error. ", TrainingError, NO_SHARED_MEMORY),
        (
            "DataLoader worker (pid 3) is killed by signal: Killed. ",
            TrainingError,
            "a process that loads data",
        ),
        ("can't start new thread", TrainingError, "no more processes or threads can be started"),
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of"
            " which 3 MiB is free.",
            TrainingError,
            "out of memory (20.00 MiB more were asked for, of 79.11 GiB that the GPU has)",
        ),
        ("Caught OSError in DataLoader worker process 0.\nInput/output error", TrainingError, "output error"),
        ("Connection reset by peer", None, "Connection reset by peer"),
    ],
)
def test_errors_of_torch_are_known_by_their_text(text, kind, words):
    error = RuntimeError(text)
    found = as_user_error(error)
    assert (found and type(found)) == kind and words in in_words(error)


@pytest.mark.parametrize(
    "kind, numbers",
    [
        (TrainingError, [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENOMEM]),
        (UserError, [errno.EACCES, errno.EISDIR, errno.ENAMETOOLONG]),
        (None, [errno.ECONNRESET, errno.EPIPE, errno.ENOENT]),
    ],
)
def test_errors_of_the_system_are_known_by_their_number(kind, numbers):
    for number in numbers:
        error = OSError(number, os.strerror(number), "a folder/name")
        found = as_user_error(error)
        assert (found and type(found)) == kind and "a folder/name: " in in_words(error)
        assert found is None or "a folder/name: " in str(found) and found.said_by_all


def test_sizes_in_words():
    sizes = {0: "0 bytes", 1500: "1.5 kB", 35_489_375: "35 MB", 9.96e9: "10.0 GB", 2e13: "20,000 GB"}
    assert {count: size_words(count) for count in sizes} == sizes


def test_a_save_beyond_the_limit_of_files(tmp_path):
    def save_one():
        said = []
        files = OwnFiles(str(tmp_path))
        save = Saver(files, 3, World(), lambda step, position: {**STATE, "step": step}, said.append)
        return save(4, ["4.bin", "last.bin"], {}), said

    failed, said = in_child(save_one, resource.RLIMIT_FSIZE, 1_000_000)
    assert failed == (
        f"{tmp_path}/last.bin: the file is too large: one may have 1.0 MB at most (ulimit -f), 2.0 MB needed;"
        " ulimit -f unlimited, before the command"
    )
    assert said == [
        f"WARNING: the checkpoint of step 4 could not be saved: {failed}. Training continues, and "
        "the next save is tried all the same."
    ]


@pytest.mark.processes
@pytest.mark.full
def test_a_run_that_may_open_too_few_files(tmp_path):
    line = [sys.executable, "-W", "ignore", FINETUNE, "--dataset", write_rows(tmp_path / "rows.csv", 40)]
    line += [*TINY, "--save-path", tmp_path / "run", "--num-workers", 8]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -n 64; exec "$@"', "run", *map(str, line)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "error: --num-workers 8: up to " in done.stderr
    assert "this process may open 64 (ulimit -n)" in done.stderr

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

from histocc.runtime import outputs
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.machine_errors import (
    as_user_error,
    in_words,
    is_out_of_memory,
    size_words,
    too_few_open_files,
)
from histocc.runtime.outputs import OwnFiles
from histocc.runtime.world import World
from histocc.trainer.saver import Saver


def in_child(work, *limit):
    """(type, text, the same in words, whether memory was short) of what `work` raises in a process of its
    own, under a limit (kind, number).
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found = "nothing was raised"
        torch.set_num_threads(1)  # those of the parent process are not here
        try:
            if limit:
                resource.setrlimit(limit[0], (limit[1], limit[1]))
            found = work()
        except BaseException as error:
            user_error = as_user_error(error)
            words = in_words(error, "run/last.bin", 3_000_000)
            found = type(user_error), str(user_error), words, is_out_of_memory(error)
        os.write(writer, pickle.dumps(found))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        found = pickle.load(file)
    os.waitpid(child, 0)
    return found


def save(path):
    with open(path, "wb") as file:
        torch.save({"model": {"w": torch.zeros(500_000)}}, file)


def virtual_memory() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


@pytest.fixture
def small_disk(tmp_path):
    """A folder with room for 1 MB and 20 files, where the tests may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "tmpfs", folder]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_file_that_is_too_large(tmp_path):
    kind, text, words, _ = in_child(lambda: save(tmp_path / "x.bin"), resource.RLIMIT_FSIZE, 1_000_000)
    assert kind is TrainingError and "enforce fail" not in text
    assert (
        words == "run/last.bin: the file is too large: one may have 1.0 MB at most (ulimit -f), 3.0 MB "
        "needed; ulimit -f unlimited, before "
        "the command"
    )


def test_no_space_on_the_device(small_disk):
    kind, text, words, _ = in_child(lambda: save("/dev/full"))
    assert kind is TrainingError and text.startswith("no space left on the device")
    assert "run/last.bin: no space left on the device, 3.0 MB needed, " in words
    state = {"model": {"w": torch.zeros(500_000)}}
    with pytest.raises(Exception) as found:
        outputs.write_atomic(str(small_disk / "x.bin"), lambda file: torch.save(state, file))
    assert (
        in_words(found.value, str(small_disk / "x.bin"), 2_000_000)
        == f"{small_disk}/x.bin: no space left on the device, 2.0 MB needed, 1.0 MB free; make room, or"
        " choose "
        "another folder"
    )
    with pytest.raises(OSError) as found:
        for number in range(30):
            (small_disk / str(number)).touch()
    assert "no file can be added (df -i)" in in_words(found.value)


@pytest.mark.parametrize(
    "work", [lambda: torch.zeros(10**9), lambda: bytearray(10**9), lambda: np.ones(10**9)]
)
def test_out_of_memory(work):
    kind, text, _, of_memory = in_child(work, resource.RLIMIT_AS, virtual_memory() + 10**8)
    assert kind is TrainingError and of_memory
    assert re.match(
        r"out of memory \(.*the process may have \d+ MB: ulimit -v\)|out of memory \(.* GB: " r"ulimit -v\)",
        text,
    )


def test_too_many_open_files():
    def open_many():
        return len([open(os.devnull) for _ in range(99)])

    kind, text, *_ = in_child(open_many, resource.RLIMIT_NOFILE, 40)
    assert kind is TrainingError
    assert "too many open files: this process may open 40 (ulimit -n); ulimit -n 4096" in text


def test_open_files_of_processes_that_load_data():
    def soft(workers, tensors):
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
        return too_few_open_files(workers, tensors), resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    said, limit = in_child(lambda: soft(8, 12))
    assert said == "" and 64 < limit <= 512  # the limit itself is raised as far as is allowed
    said, limit = in_child(lambda: soft(8, 100))
    assert (
        re.match("--num-workers 8: up to [89][0-9]{2} open files are needed", said)
        and "this process may open 64 (ulimit -n); ulimit -n 4096" in said
    )


class Share(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {str(name): torch.zeros(300) for name in range(6)}


@pytest.mark.parametrize("workers, prefetch", [(2, 2), (4, 4), (1, 8)])
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


@pytest.mark.parametrize(
    "text, kind, words",
    [
        ("received 0 items of ancdata", TrainingError, "too many open files"),
        (
            "unable to open shared memory object </torch_1_2_3> in read-write mode: Too many open files (24)",
            TrainingError,
            "too many open files",
        ),
        (
            "unable to write to file </torch_12>: No space left on device (28)",
            TrainingError,
            "/dev/shm is full",
        ),
        (
            (
                "DataLoader worker (pid 3) is killed by signal: Bus error. It is possible that dataloader's"
                " workers are out of shared memory. "
            ),
            TrainingError,
            "/dev/shm is full",
        ),
        (
            "DataLoader worker (pid 3) is killed by signal: Killed. ",
            TrainingError,
            "a process that loads data",
        ),
        ("can't start new thread", TrainingError, "no more processes or threads can be started"),
        (
            (
                "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.11 GiB of"
                " which 3 MiB is free."
            ),
            TrainingError,
            "out of memory (20.00 MiB more were asked for, of 79.11 GiB that the GPU has)",
        ),
        (
            (
                "Caught OSError in DataLoader worker process 0.\nOriginal Traceback (most recent call"
                " last):\nOSError: [Errno 5] Input/output error"
            ),
            TrainingError,
            "input/output error",
        ),
        ("Connection reset by peer", None, "Connection reset by peer"),
        ("mat1 and mat2 shapes cannot be multiplied", None, "mat1 and mat2"),
    ],
)
def test_errors_of_torch_are_known_by_their_text(text, kind, words):
    error = RuntimeError(text)
    found = as_user_error(error)
    assert (found and type(found)) == kind and words in in_words(error) and words in str(found or words)


@pytest.mark.parametrize(
    "number, kind",
    [
        (errno.ENOSPC, TrainingError),
        (errno.EDQUOT, TrainingError),
        (errno.EROFS, TrainingError),
        (errno.EIO, TrainingError),
        (errno.EMFILE, TrainingError),
        (errno.ENOMEM, TrainingError),
        (errno.EACCES, UserError),
        (errno.EISDIR, UserError),
        (errno.ENAMETOOLONG, UserError),
        (errno.ECONNRESET, None),
        (errno.EPIPE, None),
        (errno.ENOENT, None),
    ],
)
def test_errors_of_the_system_are_known_by_their_number(number, kind):
    found = as_user_error(OSError(number, os.strerror(number), "a folder/name"))
    assert (found and type(found)) == kind
    assert found is None or "a folder/name: " in str(found) and found.said_by_all
    assert "a folder/name: " in in_words(OSError(number, os.strerror(number), "a folder/name"))


def test_what_has_words_already_keeps_them():
    for error in (UserError("a"), TrainingError("b")):
        assert as_user_error(error) is error
    assert (
        as_user_error(KeyError("c")) is None
        and as_user_error(PermissionError(errno.EPERM, "of a process")) is None
    )
    try:
        try:
            raise OSError(errno.ENOSPC, "of another file")
        except OSError:
            raise RuntimeError("not of a writer")  # noqa: B904 (as a library does)
    except RuntimeError as error:
        assert as_user_error(error) is None
    assert [size_words(count) for count in (0, 999, 1500, 35_489_375, 9.96e9, 2e13)] == [
        "0 bytes",
        "999 bytes",
        "1.5 kB",
        "35 MB",
        "10.0 GB",
        "20,000 GB",
    ]


def test_a_save_beyond_the_limit_of_files(tmp_path):
    def save_one():
        said = []
        save = Saver(
            OwnFiles(str(tmp_path)),
            3,
            World(),
            lambda step, position: {"model": {"w": torch.zeros(500_000)}, "step": step},
            said.append,
        )
        save(4, ["4.bin", "last.bin"], {})
        return save.finish(), said

    failed, said = in_child(save_one, resource.RLIMIT_FSIZE, 1_000_000)
    assert (
        failed == f"{tmp_path}/last.bin: the file is too large: one may have 1.0 MB at most (ulimit "
        "-f), 2.0 MB needed; ulimit -f unlimited, before "
        "the command"
    )
    assert said == [
        f"WARNING: the checkpoint of step 4 could not be saved: {failed}. Training continues, and "
        "the next save is tried all the same."
    ]


@pytest.mark.processes
@pytest.mark.full
def test_a_run_that_may_open_too_few_files(tmp_path):
    line = [
        sys.executable,
        "-W",
        "ignore",
        FINETUNE,
        "--dataset",
        write_rows(tmp_path / "rows.csv", 40),
        *TINY,
        "--save-path",
        tmp_path / "run",
        "--num-workers",
        8,
    ]
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

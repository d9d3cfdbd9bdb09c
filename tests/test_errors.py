"""What the machine refuses, in words: with real limits, each in its own process."""

import errno
import os
import pickle
import resource
import shutil
import subprocess
import time

import pytest
import torch
from torch.utils.data import DataLoader

from histocc.runtime.checkpoint import Saver
from histocc.runtime.errors import TrainingError, UserError, allow_open_files, as_user_error, in_words
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.runtime.world import World

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
            result = work()
        except BaseException as error:
            result = type(as_user_error(error)), str(as_user_error(error))
        os.write(writer, pickle.dumps(result))
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        result = pickle.load(file)
    os.waitpid(child, 0)
    return result


def test_no_space_on_the_device(tmp_path):
    """A folder with room for 1 MB, where the tests may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a file system can be mounted by root alone")
    try:
        file = str(tmp_path / "x.bin")
        with pytest.raises(Exception) as raised, atomic_write(file) as opened:
            torch.save(STATE, opened)
        assert type(as_user_error(raised.value)) is TrainingError
        assert in_words(raised.value, file, 2_000_000).startswith(
            f"{file}: no space left on the device, 2.0 MB needed, 1.0 MB free; make room"
        )
    finally:
        subprocess.run(["umount", "-l", tmp_path], check=True)


@pytest.mark.parametrize("work", [lambda: torch.zeros(10**9), lambda: bytearray(10**9)])
def test_out_of_memory(work):
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    kind, text = in_child(work, resource.RLIMIT_AS, used + 10**8)
    assert kind is TrainingError and text.startswith("out of memory")


def test_too_many_open_files():
    kind, text = in_child(lambda: [open(os.devnull) for _ in range(99)], resource.RLIMIT_NOFILE, 40)
    assert kind is TrainingError and "too many open files; ulimit -n 4096" in text


class Share(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {str(name): torch.zeros(300) for name in range(6)}


def test_processes_that_load_data_have_as_many_open_files_as_the_system_lets_them():
    def load():
        resource.setrlimit(resource.RLIMIT_NOFILE, (16, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        allow_open_files()
        count = 0
        for _ in DataLoader(Share(), batch_size=None, num_workers=4, prefetch_factor=4):
            if count < 3:
                time.sleep(0.1)  # all that they can have ready is on its way
            count += 1
        return count

    assert in_child(load) == 40


@pytest.mark.parametrize(
    "text, known, words",
    [
        ("received 0 items of ancdata", True, "too many open files"),
        ("unable to open shared memory object </torch_1>: Too many open files", True, "too many open files"),
        ("unable to write to file </torch_12>: No space left on device (28)", True, "/dev/shm is full"),
        ("can't start new thread", True, "no more processes or threads can be started"),
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 79.11 GiB",
            True,
            "out of memory (20.00 MiB more were asked for)",
        ),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", True, "out of memory"),
        ("Caught OSError in DataLoader worker process 0.\nInput/output error", True, "output error"),
        ("Connection reset by peer", False, "Connection reset by peer"),
    ],
)
def test_errors_of_torch_are_known_by_their_text(text, known, words):
    error = RuntimeError(text)
    assert isinstance(as_user_error(error), TrainingError) == known and words in in_words(error)


@pytest.mark.parametrize(
    "kind, numbers",
    [
        (TrainingError, [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENOMEM]),
        (UserError, [errno.EACCES, errno.EISDIR, errno.ENAMETOOLONG]),
        (type(None), [errno.ECONNRESET, errno.EPIPE, errno.ENOENT]),
    ],
)
def test_errors_of_the_system_are_known_by_their_number(kind, numbers):
    for number in numbers:
        error = OSError(number, os.strerror(number), "a folder/name")
        known = as_user_error(error)
        assert type(known) is kind and "a folder/name: " in in_words(error)
        assert known is None or "a folder/name: " in str(known) and known.said_by_all


def test_a_save_beyond_the_limit_of_files(tmp_path):
    def save_one():
        lines = []
        files = OwnFiles(str(tmp_path))
        save = Saver(files, 3, World(), lambda step, position: {**STATE, "step": step}, lines.append)
        return save(4, ["4.bin", "last.bin"], {}), lines

    failed, lines = in_child(save_one, resource.RLIMIT_FSIZE, 1_000_000)
    assert failed.startswith(f"{tmp_path}/last.bin: the file is too large, 2.0 MB needed; raise ulimit -f")
    assert lines == [
        f"WARNING: the checkpoint of step 4 could not be saved: {failed}. Training continues, and "
        "the next save is tried all the same."
    ]

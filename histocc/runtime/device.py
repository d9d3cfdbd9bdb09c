"""Which device a process has, how fast it is, how long something took on it, what compiles for it; and
torch's settings, which a call from Python leaves as they were.
"""

import contextlib
import os
import shutil
import socket
import time
from collections import deque
from collections.abc import Generator
from typing import Any

import torch
from torch import nn

from histocc.runtime.call_arguments import is_text, shown
from histocc.runtime.errors import UserError, is_out_of_memory
from histocc.runtime.products import linear

LARGEST_MATRIX = {"cpu": 2048, "cuda": 8192}  # rows of one that `matmul_rate` multiplies
MATMUL_SECONDS = 0.25
WITHOUT_FLOAT64 = ("mps",)


def choose_device(name: str, local_rank: int, local_size: int) -> torch.device:
    """The device of this process. `name`: auto, cpu, cuda or another accelerator that torch finds here.
    Raises UserError where there is none for it.

    Of several processes on a node each takes the GPU of its local rank; where each sees a single one, as with
    `srun --gpus-per-task=1`, that one: `check_one_process_per_gpu` then compares them.
    """
    if name not in ("auto", "cpu", "cuda"):
        return other_accelerator(name, local_size)
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and not gpus:
        raise UserError(
            "--device cuda, but this machine shows no CUDA device to torch "
            f"{torch.__version__}. Use --device cpu, or install torch with CUDA."
        )
    if name == "cpu" or not gpus:
        return torch.device("cpu")
    highest = max(local_rank, local_size - 1)
    if highest >= gpus and not sees_one_gpu():
        raise too_few_gpus(highest, gpus)
    place = 0 if highest >= gpus else local_rank
    torch.cuda.set_device(place)
    # cuDNN's attention plans again for every shape, and shapes change from batch to batch
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", place)


def accelerator() -> str:
    """The kind that torch finds here: cuda, xpu, mps, …; "" for none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "" if found is None else found.type


def other_accelerator(name: str, local_size: int) -> torch.device:
    """One that is neither CPU nor CUDA, for a run of one process. Raises UserError."""
    here = accelerator()
    if name != here:
        found = f"torch {torch.__version__} finds {here or 'no accelerator'} here"
        raise UserError(f"--device {name}: {found}; take --device {here or 'cpu'}, or leave it out")
    if name in WITHOUT_FLOAT64:
        raise UserError(
            f"--device {name}: it does not compute in float64, in which losses and figures are summed; take"
            " --device cpu"
        )
    if local_size > 1:
        raise UserError(
            f"--device {name}: a run has one process there; several go on CPUs and on CUDA devices"
        )
    return torch.device(name)


def synchronize(device: torch.device) -> None:
    """Waits for what the device has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def by_kind(values: dict[str, int], device: torch.device) -> int:
    """The value for this kind of device: that of GPUs for one that is not named."""
    return values[device.type if device.type in values else "cuda"]


def too_few_gpus(local_rank: int, gpus: int, said_by_all: bool = False) -> UserError:
    return UserError(
        f"LOCAL_RANK={local_rank} has no GPU: {gpus} visible here. Start at most {gpus} processes on "
        "this machine, check CUDA_VISIBLE_DEVICES, or pass --device cpu.",
        said_by_all=said_by_all,
    )


def sees_one_gpu() -> bool:
    """Whether somebody has left this process a single GPU of the machine."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return torch.cuda.device_count() == 1 and bool(visible.strip()) and "," not in visible


def check_one_process_per_gpu(store: Any, rank: int, local_rank: int, local_size: int) -> None:
    """All ranks with a GPU. store: of the job. Raises UserError where another process of this node has the
    GPU of this one."""
    own = f"{socket.gethostname()} {torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    store.set(f"gpu/{rank}", own)
    if local_size == 1 or not sees_one_gpu():
        return
    first = rank - local_rank
    others = [other for other in range(first, first + local_size) if other != rank]
    if any(store.get(f"gpu/{other}").decode() == own for other in others):
        raise too_few_gpus(local_size - 1, 1, said_by_all=True)


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = MATMUL_SECONDS) -> float:
    """The best rate at which products of square matrices of `dtype` were computed, in floating point
    operations per second, a multiplication and an addition being two; 0 where there is no memory for any.

    Takes about `seconds`: sizes double as long as the next one fits into that, and the rest goes into
    repeats of the last. It has this process's number of threads and torch's settings, and leaves the state
    of random numbers as it is.
    """
    until = time.perf_counter() + seconds
    size, best, largest = 128, 0.0, by_kind(LARGEST_MATRIX, device)
    while True:
        try:
            pair = torch.linspace(-1, 1, 2 * size * size, dtype=dtype, device=device).view(2, size, size)
            took = min(_product_seconds(pair) for _ in range(2))  # the first of a size is slow
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return best
        best = max(best, 2 * size**3 / took)
        # two products of eight times the work, and matrices to make
        if size == largest or time.perf_counter() + 24 * took > until:
            break
        size *= 2
    while time.perf_counter() < until:
        best = max(best, 2 * size**3 / _product_seconds(pair))
    return best


def _product_seconds(pair: torch.Tensor) -> float:
    """Of the product of two matrices, [2, N, N]."""
    synchronize(pair.device)
    started = time.perf_counter()
    linear(pair[0], pair[1])  # as models multiply
    synchronize(pair.device)
    return max(time.perf_counter() - started, 1e-9)


def device_of(given: str | torch.device | None) -> torch.device:
    """Raises ValueError for what is no device, UserError for one that is not there."""
    if not (given is None or is_text(given) or isinstance(given, torch.device)):
        raise ValueError(
            f"device: found {shown(given)}, expected None, 'auto', 'cpu', 'cuda', 'cuda:N' or a torch.device"
        )
    name, sign, number = str("auto" if given is None else given).partition(":")
    if (
        name not in ("auto", "cpu", "cuda", accelerator())
        or sign
        and not (name == "cuda" and number.isdecimal() or str(given) == "cpu:0")
    ):
        raise ValueError(f"device: found {str(given)!r}, expected None, 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if sign and name == "cuda" and int(number) >= max(1, torch.cuda.device_count()):
        raise UserError(f"device {given}: {torch.cuda.device_count()} GPUs are visible here")
    with settings_of_torch():
        device = choose_device(name, 0, 1)
    if device.type == "cuda" and sign:
        device = torch.device("cuda", int(number))
        torch.cuda.set_device(device)
    return device


@contextlib.contextmanager
def settings_of_torch() -> Generator[None]:
    """Afterwards torch has the settings that it had: threads, the precision of matrix products, cuDNN's
    attention. A run sets them."""
    threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


class DeviceClock:
    """How long something took on the device that works: adds up `seconds` between pairs of moments.

    On a GPU they are moments of its own queue: what the host does while the queue is not empty takes no time.
    Events are read when they are over, so nothing waits for the device but `synchronize`. device: None for
    the host's own clock.
    """

    def __init__(self, device: torch.device | None = None):
        self.seconds = 0.0
        self._on_gpu = device is not None and device.type == "cuda"
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def now(self) -> Any:
        """A moment, for `add`."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, since: Any, until: Any) -> None:
        if not self._on_gpu:
            self.seconds += until - since
            return
        self._open.append((since, until))
        self._read()

    def synchronize(self) -> None:
        """Waits until the device has done all that it was given, and reads all events."""
        if self._on_gpu:
            self.now().synchronize()
            self._read()

    def _read(self) -> None:
        while self._open and self._open[0][1].query():
            since, until = self._open.popleft()
            self.seconds += since.elapsed_time(until) / 1000


def compile_layers(model: nn.Module) -> None:
    """Each member of a ModuleList in `model` is compiled by `torch.compile` when it works for the first time.
    The model is changed in place, and state dicts keep their names.

    All layers of a kind share the result, for any number of rows and positions, so that compiling takes a
    minute instead of growing with the model.
    """
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for layer in layers:
            layer.compile(dynamic=True)  # pyright: ignore[reportUnknownMemberType]


def missing_compiler(device: torch.device) -> str | None:
    """What torch.compile lacks on `device`, in words; None where nothing does."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        return (
            None
            if shutil.which(compiler)
            else f"a C++ compiler ({compiler} is not there; apt-get install g++)"
        )
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError:
        return "the package triton (pip install triton)"
    # triton builds what starts its kernels
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["gcc", "clang", "cc"]
    return (
        None
        if any(map(shutil.which, compilers))
        else f"a C compiler ({', '.join(compilers)}: not there; apt-get install gcc)"
    )

"""The device of a process: its choice, its speed and its number formats.

The number formats are float32, float64, bfloat16 and float16. Coding also has int8. In the two half formats
weights, optimizer, loss and sums stay float32, and matrix products run in half precision (autocast).
"""

import contextlib
import os
import time
from collections.abc import Generator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from histocc.runtime.config import DEVICES
from histocc.runtime.errors import UserError

LARGEST_MATRIX = {"cpu": 2048, "cuda": 8192}  # rows of the largest matrix that `matmul_rate` multiplies
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
MIN_SCALE = 1.0  # a gradient that is not finite at this scale of the loss is not the scaler's fault
MIN_PRODUCT = 1 << 21  # multiplications below which a call of oneDNN costs more than it gains
CPU_INFO = "/proc/cpuinfo"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # the last two are ROCm's


# ---- the choice of a device


def by_kind(values: dict[str, int], device: torch.device) -> int:
    """Return the value for this kind of device. Unnamed kinds have the value of GPUs."""
    return values[device.type if device.type in values else "cuda"]


def why_no_gpu() -> str:
    """Return torch's reason for finding no GPU, followed by the variables that choose GPUs."""
    visible = "".join(f", {name}={os.environ[name]}" for name in VISIBLE if name in os.environ)
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # AssertionError: torch was built without CUDA
        return str(error).partition("\n")[0] + visible
    return "no GPU" + visible


def choose_device(name: str, local_rank: int = 0, local_size: int = 1, use: bool = True) -> torch.device:
    """Return the device of this process, from one of DEVICES and its place among the processes on this
    machine: the GPU of its local rank, or the only GPU it sees, as with `srun --gpus-per-task=1`. With `use`
    it becomes the current one. Raises UserError if there is none.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or name == "auto" and not gpus:
        return torch.device("cpu")
    if not gpus:
        raise UserError(f"--device cuda: {why_no_gpu()}; take --device cpu")
    highest = max(local_rank, local_size - 1)
    # torchrun shows all its processes the same GPUs, but srun may show each only its own GPU
    is_chosen = any(os.environ.get(name, "").strip() for name in VISIBLE)
    has_its_own = local_size > 1 == gpus and is_chosen and "TORCHELASTIC_RUN_ID" not in os.environ
    if highest >= gpus and not has_its_own:
        raise UserError(
            f"LOCAL_RANK={highest} has no GPU: {gpus} visible here. Start no more processes than GPUs on "
            "this machine, check CUDA_VISIBLE_DEVICES, or pass --device cpu."
        )
    place = 0 if highest >= gpus else local_rank
    if use:
        torch.cuda.set_device(place)
        # cuDNN's attention makes a new plan for every shape, and shapes change from batch to batch
        torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda", place)


def device_of(given: str | torch.device | None) -> torch.device:
    """Return the device named in a call from Python. Raises ValueError for a name that is not a device,
    UserError for a device that does not exist.
    """
    name, colon, number = ("auto" if given is None else str(given)).partition(":")
    if name not in DEVICES or colon and not (name == "cuda" and number.isdecimal() or str(given) == "cpu:0"):
        raise ValueError(f"device: found {given!r:.60}, expected None, 'auto', 'cpu', 'cuda' or 'cuda:N'")
    return choose_device(name, int(number or 0), use=False)


@contextlib.contextmanager
def settings_of_torch() -> Generator[None]:
    """Restore torch's settings at the end: threads, precision of matrix products, cuDNN's attention."""
    threads = torch.get_num_threads()
    products: list[Any] = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # pyright: ignore
    precisions, precision = [each.fp32_precision for each in products], ""
    with contextlib.suppress(RuntimeError):  # torch refuses to say after torch.backends.fp32_precision = …
        precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        yield
    finally:
        torch.set_num_threads(threads)
        if precision:
            torch.set_float32_matmul_precision(precision)
        for each, before in zip(products, precisions):
            each.fp32_precision = before
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


# ---- its speed


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.25) -> float:
    """Measure products of square matrices of `dtype` and return the best rate, in floating point operations
    (multiplications and additions) per second, or 0 if there is no memory for any. Sizes double as long as
    the next one fits into `seconds`.
    """
    until = time.perf_counter() + seconds
    size, best, took = 128, 0.0, 0.0
    largest = by_kind(LARGEST_MATRIX, device)
    with contextlib.suppress(torch.OutOfMemoryError):
        # the next size needs time for two products and for making its matrices
        while not best or size <= largest and time.perf_counter() + 24 * took < until:
            pair = torch.linspace(-1, 1, 2 * size * size, dtype=dtype, device=device).view(2, size, size)
            for _ in range(2):  # the first product of a size is slow
                synchronize(device)
                started = time.perf_counter()
                linear(pair[0], pair[1])  # as models multiply
                synchronize(device)
                took = max(time.perf_counter() - started, 1e-9)
                best = max(best, 2 * size**3 / took)
            size *= 2
    return best


def compile_layers(model: nn.Module) -> None:
    """Compile each member of a ModuleList in `model` in place with `torch.compile`, at its first forward
    pass. All layers of a kind share the result, so compiling takes a minute for any size of model.
    """
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for layer in layers:
            layer.compile(dynamic=True)  # pyright: ignore[reportUnknownMemberType]


# ---- its number formats


def has_bfloat16(device_type: str) -> bool:
    """Return whether a device has native bfloat16. CPUs without AVX-512 BF16 or AMX were 100 times slower."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def has_int8() -> bool:
    """Return whether the CPU sums int8 products in int32 (AVX-512 VNNI). Others sum pairs in too few bits."""
    return torch.cpu._is_vnni_supported()


class Precision:
    """A number format on a device: float32, float64, bf16, fp16, or, only for coding, int8. Raises UserError
    if the device lacks it. The `scaler` scales the loss up in fp16 and does nothing otherwise.
    """

    def __init__(self, name: str, device: torch.device | str = "cpu"):
        self.name, self.device_type = name, torch.device(device).type
        self.half = HALF.get(name)
        if name == "bf16" and self.device_type == "cuda" and not has_bfloat16("cuda"):
            raise UserError(
                f"--bf16: {torch.cuda.get_device_name()} has no bfloat16: --fp16, or leave it out"
            )
        if name == "int8" and self.device_type != "cpu":
            raise UserError(f"--int8 is for CPUs, not {self.device_type}: --bf16 or --fp16, or --device cpu")
        if name == "int8" and not has_int8():
            raise UserError("--int8: this CPU has no instructions for it (AVX-512 VNNI); leave it out")
        self.scaler = torch.amp.GradScaler(self.device_type, enabled=name == "fp16")

    @classmethod
    def of(cls, asked: Any, device: torch.device) -> "Precision":
        """Return the format whose flag was given, or with --use-amp the fastest that the device has."""
        if asked.use_amp:
            fastest = "bf16" if has_bfloat16(device.type) else "fp16" if device.type == "cuda" else "float32"
            return cls(fastest, device)
        names = ("float64", "bf16", "fp16", "int8")  # training has no int8, coding no float64
        return cls(next((name for name in names if getattr(asked, name, False)), "float32"), device)

    def use(self) -> None:
        """Set up this process: on GPUs with TF32, products of float32 matrices use it."""
        if self.device_type == "cuda":
            torch.set_float32_matmul_precision("high" if self.name == "float32" else "highest")

    def warning(self) -> str | None:
        """Return a warning if this format is slow on this device, or None."""
        slow = self.name == "fp16" or self.name == "bf16" and not has_bfloat16("cpu")
        if self.device_type == "cpu" and slow:
            return f"--{self.name} is many times slower than float32 on this CPU; leave it out"
        return None

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the weights."""
        return torch.float64 if self.name == "float64" else torch.float32

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device_type, self.half) if self.half else contextlib.nullcontext()

    def optimizer_step(self, optimizer: torch.optim.Optimizer, finite: Tensor) -> Tensor:
        """Take the step if the gradients are `finite` (bool, 0-d). Optimizers that can skip a step (torch's
        fused ones) do so without waiting for the device. Return whether the step was bad (bool, 0-d): not
        finite, although the scaler of fp16 is no longer looking for its scale.
        """
        bad = ~finite
        if self.scaler.is_enabled():
            # `get_scale` waits for the device
            bad = bad & (self.scaler.scale(torch.ones_like(bad, dtype=torch.float32)) <= MIN_SCALE)
            self.scaler.step(optimizer)
            self.scaler.update()
        elif getattr(optimizer, "_step_supports_amp_scaling", False):
            fused: Any = optimizer
            fused.found_inf, fused.grad_scale = bad.float(), None
            optimizer.step()
            del fused.found_inf, fused.grad_scale
        elif finite:
            optimizer.step()
        return bad


# ---- matrix products on CPUs
# torch multiplies float32 matrices with MKL, which uses AVX-512 only on Intel's CPUs. On other CPUs with
# AVX-512, oneDNN is twice as fast (benchmarks/LOG.md). The results are the same, up to rounding.


def has_onednn_product() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def onednn_product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `linear` in float32 or bfloat16, without a gradient."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@cache
def onednn_pays() -> bool:
    """Return whether oneDNN multiplies float32 faster than MKL: on CPUs with AVX-512 other than Intel's."""
    try:
        with open(CPU_INFO, encoding="utf-8", errors="replace") as file:
            vendors = {line.partition(":")[2].strip() for line in file if line.startswith("vendor_id")}
    except OSError:
        return False
    wide = torch.cpu._is_avx512_supported()
    return bool(vendors) and "GenuineIntel" not in vendors and wide and has_onednn_product()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `F.linear`: x [..., inputs], weight [outputs, inputs], bias [outputs] → [..., outputs]."""
    if (
        torch.compiler.is_compiling()
        or x.device.type != "cpu"
        or weight.dtype != torch.float32
        or x.dim() < 2
        or x.numel() * len(weight) < MIN_PRODUCT
    ):
        return F.linear(x, weight, bias)
    trained = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    if torch.is_autocast_enabled("cpu"):
        is_fast = torch.get_autocast_dtype("cpu") == torch.bfloat16 and has_bfloat16("cpu")
        dtype = torch.bfloat16 if trained and is_fast and has_onednn_product() else None
    else:
        dtype = torch.float32 if x.dtype == torch.float32 and onednn_pays() else None
    if dtype is None:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias, dtype)  # pyright: ignore[reportReturnType]


class _Linear(torch.autograd.Function):
    """A linear layer as one step of autograd, which computes in bfloat16 as autocast would."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        # oneDNN's fast kernels take no matrix with gaps between its rows
        x, weight = x.to(dtype).contiguous(), weight.to(dtype).contiguous()
        ctx.save_for_backward(x, weight)
        return onednn_product(x, weight, None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        rows, inputs = gradient.flatten(0, -2), x.flatten(0, -2)  # [N, outputs], [N, inputs]
        of_x = of_weight = of_bias = None
        is_half = x.dtype == torch.bfloat16
        if ctx.needs_input_grad[0]:
            of_x = rows @ weight if is_half else onednn_product(rows, weight.t())
            of_x = of_x.to(ctx.dtype).view(x.shape)
        if ctx.needs_input_grad[1]:
            of_weight = (rows.t() @ inputs).float() if is_half else onednn_product(rows.t(), inputs.t())
        if ctx.needs_input_grad[2]:
            of_bias = rows.sum(0).float()  # torch sums in float32 inside
        return of_x, of_weight, of_bias, None

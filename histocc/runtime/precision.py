"""In which number format a model computes: float32, float64, bfloat16 or float16; and int8, to code alone.

In the two half formats weights, optimizer, loss and sums stay float32, and matrix products run in half
precision (autocast). What int8 is says `histocc.model.int8`.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from histocc.runtime.errors import UserError

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
LEAST_SCALE = 1.0  # a gradient that is not finite at this scale of the loss is not the scaler's doing


def has_bfloat16(device_type: str) -> bool:
    """Whether the device computes in bfloat16 itself. A CPU without (AVX-512 BF16, AMX) was 100 times slower
    in it than in float32.
    """
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu":
        return False  # of others nothing is known
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def has_int8() -> bool:
    """Whether this CPU has instructions that multiply int8 and sum in int32 (AVX-512 VNNI). Others sum pairs
    of products in 16 bits, which do not hold them.
    """
    return torch.cpu._is_vnni_supported()


@dataclass(frozen=True)
class PrecisionSettings:
    """--float64, --bf16, --fp16 and --use-amp, of which one at most is given."""

    float64: bool = False
    bf16: bool = False
    fp16: bool = False
    use_amp: bool = False


class Precision:
    """name: float32, float64, bf16 or fp16, or, to code, int8; device: where it computes. scaler: scales the
    loss up in fp16, None elsewhere.

    Raises UserError where the device does not have the format, and names what it has.
    """

    def __init__(self, name: str, device: torch.device | str = "cpu"):
        self.name, self.device_type = name, torch.device(device).type
        self.half = HALF.get(name)
        if name == "bf16" and self.device_type == "cuda" and not has_bfloat16("cuda"):
            raise UserError(
                f"--bf16: {torch.cuda.get_device_name()} has no bfloat16; it has float32 (the default) and"
                " float16 (--fp16)"
            )
        if name == "int8" and self.device_type != "cpu":
            raise UserError(
                f"--int8 is for CPUs, and this process computes on {self.device_type}: --bf16 or --fp16,"
                " or --device cpu"
            )
        if name == "int8" and not has_int8():
            raise UserError(
                "--int8: this CPU has no instructions that multiply int8 exactly (AVX-512 VNNI); leave it out"
            )
        self.scaler = torch.amp.GradScaler(self.device_type) if name == "fp16" else None

    @classmethod
    def of(cls, asked: PrecisionSettings, device: torch.device) -> "Precision":
        """What is asked for; --use-amp takes the fastest that the device has."""
        if asked.use_amp:
            fastest = "bf16" if has_bfloat16(device.type) else "fp16" if device.type == "cuda" else "float32"
            return cls(fastest, device)
        given = next((name for name in ("float64", "bf16", "fp16") if getattr(asked, name)), "float32")
        return cls(given, device)

    def use(self) -> None:
        """Settings of this process: on GPUs that have TF32, products of float32 matrices use it."""
        if self.device_type == "cuda":
            torch.set_float32_matmul_precision("high" if self.name == "float32" else "highest")

    def warning(self) -> str | None:
        """What speaks against this format on this device."""
        if self.device_type == "cpu" and self.name == "fp16":
            return (
                "float16 is many times slower than float32 on CPUs; --bf16 is the half format for those that"
                " have it"
            )
        if self.device_type == "cpu" and self.name == "bf16" and not has_bfloat16("cpu"):
            return (
                "this CPU has no instructions for bfloat16, so that --bf16 is many times slower than float32"
                " here; leave it out"
            )
        return None

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights."""
        return torch.float64 if self.name == "float64" else torch.float32

    @property
    def matmul_dtype(self) -> torch.dtype:
        """Of what matrix products take."""
        return self.half or self.dtype

    def autocast(self) -> contextlib.AbstractContextManager:
        return torch.autocast(self.device_type, self.half) if self.half else contextlib.nullcontext()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Takes the scale of the loss out of the gradients."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def optimizer_step(self, optimizer: torch.optim.Optimizer, finite: torch.Tensor) -> torch.Tensor:
        """Takes the step where the gradients are `finite` (bool, 0-d), without waiting for the device where
        the optimizer can skip by itself (torch's fused ones).

        Returns:
            Whether the step was bad, bool, 0-d: not finite, and not because the scaler of fp16 is still
            looking for its scale.
        """
        if self.scaler is not None:
            scale = self.scaler._scale  # a tensor from the first scaled loss on
            bad = ~finite if scale is None else ~finite & (scale <= LEAST_SCALE)
            self.scaler.step(optimizer)
            self.scaler.update()
            return bad
        bad = ~finite
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            fused: Any = optimizer
            fused.found_inf, fused.grad_scale = bad.float(), None
            optimizer.step()
            del fused.found_inf, fused.grad_scale
        elif finite:
            optimizer.step()
        return bad

    def state(self) -> dict:
        """What to save, to continue with the same scale of the loss; {} where there is none."""
        return {} if self.scaler is None else self.scaler.state_dict()

    def load_state(self, state: dict | None) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)

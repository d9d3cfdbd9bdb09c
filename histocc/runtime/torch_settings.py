"""The device that a call from Python names, and torch's settings, which such a call leaves as they were."""

import contextlib
from collections.abc import Generator

import torch

from histocc.runtime.call_arguments import is_text, shown
from histocc.runtime.device import accelerator, choose_device
from histocc.runtime.errors import UserError


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

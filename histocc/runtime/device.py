"""Which device a process has."""

import os
import socket
from typing import Any

import torch

from histocc.runtime.errors import UserError


def choose_device(name: str, local_rank: int, local_size: int) -> torch.device:
    """The device of this process. `name`: auto, cpu or cuda. Raises UserError where there is none for it.

    Of several processes on a node each takes the GPU of its local rank; where each sees a single one, as with
    `srun --gpus-per-task=1`, that one: `check_one_process_per_gpu` then compares them.
    """
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

"""Micro-batches that do not fit into memory: cut in two, and what was found out kept for later ones."""

import gc
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Any]


class MemoryLimits:
    """How many samples of a width fit into the memory of this process, as far as it has been found out.

    A limit holds for micro-batches that are as wide or wider, and is never taken back.
    """

    def __init__(self):
        self.known: list[tuple[int, int]] = []  # width, samples that may fit

    def pieces(self, batch: Batch) -> list[Batch]:
        """The micro-batch in as many pieces of equal size as the limits ask for; their gradients add up to
        its own.
        """
        samples = samples_of(batch)
        if not self.known or not samples:
            return [batch]
        width = width_of(batch, samples)
        number = -(-samples // min([samples, *(most for known, most in self.known if known <= width)]))
        edges = [samples * i // number for i in range(number + 1)]
        return [_part(batch, samples, begin, end, end == samples) for begin, end in zip(edges, edges[1:])]

    def learn(self, batch: Batch) -> int:
        """From a micro-batch that does not fit. The samples that may fit, 0 where it cannot be cut."""
        samples = samples_of(batch)
        if not samples or samples < 2:
            return 0
        self.known.append((width_of(batch, samples), samples // 2))
        return samples // 2

    def state(self) -> list[dict[str, int]]:
        """For a checkpoint."""
        return [{"width": width, "samples": samples} for width, samples in self.known]

    def load(self, state: list[dict[str, int]]) -> None:
        self.known = [(limit["width"], limit["samples"]) for limit in state]


def samples_of(batch: Batch) -> int | None:
    """How many samples it has; None where its entries do not say so."""
    if isinstance(batch.get("weights"), Tensor):
        return len(batch["weights"])
    found = {len(value) for value in batch.values() if isinstance(value, Tensor) and value.dim()}
    return found.pop() if len(found) == 1 else None


def free_memory(device: torch.device) -> None:
    """Gives back what nothing uses any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def width_of(batch: Batch, samples: int) -> int:
    """Numbers of one sample in the entry that has most of them."""
    return max(
        (
            value.numel() // samples
            for value in batch.values()
            if isinstance(value, Tensor) and _has_samples(value, samples)
        ),
        default=0,
    )


def _has_samples(value: Any, samples: int) -> bool:
    is_list = isinstance(value, list) or isinstance(value, Tensor) and value.dim() > 0
    return is_list and len(value) == samples


def _part(batch: Batch, samples: int, begin: int, end: int, is_last: bool) -> Batch:
    """Samples begin … end − 1. global_count must be among the entries."""
    part = {
        name: value[begin:end] if _has_samples(value, samples) else value for name, value in batch.items()
    }
    return {**part, "last_micro_batch": is_last and batch.get("last_micro_batch", True)}

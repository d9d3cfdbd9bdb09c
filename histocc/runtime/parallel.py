"""The distribution of a model over the processes: a whole copy on each (DDP), or a share of every tensor on
each (FSDP2).

In both, the gradients of a step are averaged over the processes. Untrained weights stay whole everywhere.
"""

import contextlib
import inspect
import warnings
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from histocc.runtime.world import World

MODES = ("ddp", "fsdp")


def wrap(model: nn.Module, world: World, mode: str = "ddp") -> nn.Module:
    """Return `model` on the device of `world`. Several processes hold it according to `mode`, one of MODES.
    Keep it inside a function: a DDP object still alive when the interpreter ends can abort it.

    FSDP shares out the trained weights of each layer in place and gathers them when the layer runs. A layer
    is a member of a ModuleList. Gradients and the optimizer's state are never whole anywhere. All ranks.
    """
    model = model.to(world.device)
    if not world.backend or not any(p.requires_grad for p in model.parameters()):
        return model
    if mode == "ddp":
        newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        constants: dict[str, Any] = {"forward_sync_buffers" if newer else "broadcast_buffers": False}
        return DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **constants,
        )
    # these imports take seconds, so they come only if they are used
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    # nothing changes logits in place
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    mesh = init_device_mesh(world.device.type, (world.size,))
    frozen = {p for p in model.parameters() if not p.requires_grad}
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        for layer in layers:
            kept = frozen & set(layer.parameters())
            if len(kept) < len([*layer.parameters()]):
                fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=kept)
    fully_shard(model, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DDP, or `model` itself."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def is_sharded(model: nn.Module) -> bool:
    return hasattr(model, "set_requires_gradient_sync")


def no_sync(model: nn.Module, sync: bool) -> contextlib.AbstractContextManager[None]:
    """Do not exchange gradients while micro-batches are still to come (`sync` False). FSDP exchanges them
    anyway, since otherwise every process would hold them whole.
    """
    if isinstance(model, DistributedDataParallel) and not sync:
        return model.no_sync()
    return contextlib.nullcontext()


@contextlib.contextmanager
def unsharded(model: nn.Module) -> Generator[None]:
    """Hold all weights of a sharded model on every process. Inside, processes do not communicate, so they may
    do different work. The model must have done a forward and a backward pass before. All ranks.
    """
    units: list[Any] = [module for module in model.modules() if is_sharded(module)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(unit is not model, recurse=False)
            unit.reshard()


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Set evaluation mode without gradients, and afterwards restore the mode of every submodule."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def gather_shares(value: Any, keep: bool = True) -> Any:
    """Return nested values with whole tensors on the CPU, or None for each without `keep`. All ranks."""

    def put_together(tensor: Tensor) -> Tensor | None:
        full = full_tensor(tensor)
        if not keep:
            return None
        return full.cpu() if is_share(tensor) else full

    return tree_map_only(Tensor, put_together, value)


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Load a whole state. If the weights are shared out, each process takes its share. All ranks."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def share(parameter: Any, value: Any) -> Any:
        if not is_share(parameter) or not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        from torch.distributed.tensor import distribute_tensor

        placed = value.to(parameter.device)
        return distribute_tensor(placed, parameter.device_mesh, parameter.placements, src_data_rank=None)

    shares = {
        i: {name: share(parameters[i], value) for name, value in entry.items()}
        for i, entry in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": shares})


def is_share(x: Tensor) -> bool:
    """Return whether this process holds only a share of a tensor, as a DTensor of FSDP."""
    return hasattr(x, "full_tensor")


def full_tensor(x: Tensor) -> Tensor:
    """Return the whole of `x`, gathered if it is shared out. All ranks."""
    shared: Any = x
    return shared.full_tensor() if is_share(x) else x

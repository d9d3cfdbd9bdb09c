"""A device that is not the CPU, for machines that have none: tensors say that they are elsewhere, and their
values lie on the CPU.

As with a GPU, an operation on tensors of both places is an error, NumPy cannot see the values, and what the
host asks for by value (`item`, `tolist`, `nonzero`, a copy to the CPU) waits for the device: `waits` counts
it. Code takes the ways that it takes on every device but the CPU, with the CPU's results.

It is "cuda:0", with CUDA's autocast, GradScaler and fused optimizers, if this module is imported before torch
(`pytest -p second_device`) and there is g++: what torch asks CUDA for is then answered by cuda_keys.cpp. Else
it goes by the name of "meta", the only other device whose guard is there in all builds.
"""

import collections
import contextlib
import ctypes
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(importlib.util.find_spec("torch").origin).parent
CAN_BE_CUDA = bool(shutil.which("g++")) and not (ROOT / "lib" / "libtorch_cuda.so").exists()
IS_CUDA = CAN_BE_CUDA and "torch" not in sys.modules
if IS_CUDA:  # torch looks for CUDA when it is imported
    with tempfile.TemporaryDirectory() as folder:
        line = f"g++ -std=c++20 -shared -fPIC -Iinclude -x c++ - -o {folder}/keys.so -Llib -lc10 -ltorch_cpu"
        source = Path(__file__).with_name("cuda_keys.cpp").read_bytes()
        subprocess.run([*line.split(), f"-Wl,-rpath,{ROOT}/lib"], cwd=ROOT, input=source, check=True)
        ctypes.CDLL(f"{folder}/keys.so")

import torch
import torch.optim.optimizer as optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from histocc.runtime import world

DEVICE = torch.device("cuda", 0) if IS_CUDA else torch.device("meta")
aten = torch.ops.aten
MOVES = {aten.copy_.default, aten._to_copy.default}
# of rows, not values
TAKES_NUMBERS_FROM_THE_CPU = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
ASKS_BY_VALUE = {aten._local_scalar_dense, aten.nonzero}


class Elsewhere(torch.Tensor):
    """`here`: the CPU's tensor that holds the values."""

    @staticmethod
    def __new__(cls, here):
        places = {"strides": here.stride(), "storage_offset": here.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, here.shape, **places, dtype=here.dtype, device=DEVICE
        )
        tensor.here = here
        return tensor

    @classmethod
    def __torch_dispatch__(cls, operation, types, arguments=(), named=None):
        return run(operation, arguments, named or {})

    def tolist(self):
        waits["tolist"] += 1
        return self.here.tolist()

    def __repr__(self):
        return f"Elsewhere({self.here!r})"


waits: collections.Counter = collections.Counter()  # how often the host asked for values, by operation


def is_device(given) -> bool:
    return given is not None and torch.device(given).type == DEVICE.type


def run(operation, arguments, named):
    """The operation on the values; what comes out is where its tensors are, or where it is asked for."""
    tensors = [leaf for leaf in tree_leaves((arguments, named)) if isinstance(leaf, torch.Tensor)]
    elsewhere = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    one_device = (
        arguments[::2] if operation in TAKES_NUMBERS_FROM_THE_CPU else () if operation in MOVES else tensors
    )
    if elsewhere and any(
        isinstance(x, torch.Tensor) and x.dim() and not isinstance(x, Elsewhere) for x in one_device
    ):
        raise RuntimeError(f"{operation}: tensors of two devices")
    to_cpu = (
        operation is aten._to_copy.default
        and named.get("device") is not None
        and not is_device(named["device"])
    )
    if elsewhere and (to_cpu or operation.overloadpacket in ASKS_BY_VALUE):
        waits[operation.overloadpacket.__name__] += 1
    made_there = is_device(named.get("device"))
    if made_there:
        named = {**named, "device": "cpu"}
    arguments, named = tree_map(
        lambda leaf: leaf.here if isinstance(leaf, Elsewhere) else leaf, (arguments, named)
    )
    found = operation(*arguments, **named)
    if to_cpu or not (elsewhere or made_there):
        return found
    given = {id(tensor.here): tensor for tensor in elsewhere}  # what works in place returns what it was given

    def placed(leaf):
        if id(leaf) in given:
            return given[id(leaf)]
        return Elsewhere(leaf) if type(leaf) is torch.Tensor else leaf

    return tree_map(placed, found)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        return run(operation, arguments, named or {})


class _Tensors(TorchFunctionMode):
    """`torch.tensor` moves its values below where operations are seen."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        named = named or {}
        if function is torch.tensor and is_device(named.get("device")):
            return Elsewhere(function(*arguments, **{**named, "device": "cpu"}))
        return function(*arguments, **named)


@contextlib.contextmanager
def second_device(monkeypatch):
    """`DEVICE` works like a device, and is the one that --device cuda stands for."""
    fused = optimizer._get_fused_kernels_supported_devices
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: [*fused(), DEVICE.type])
    if IS_CUDA:
        monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_, **__: True)
        monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # `.data =` would lose `here`
    else:
        autocast, none = torch.autocast, contextlib.nullcontext()
        chosen = {True: lambda *a, **b: none, False: autocast}
        monkeypatch.setattr(torch, "autocast", lambda x, *a, **b: chosen[is_device(x)](x, *a, **b))
    choose = world.choose_device
    monkeypatch.setattr(
        world, "choose_device", lambda name, *place: DEVICE if name == "cuda" else choose(name, *place)
    )
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device=None: None)
    waits.clear()
    with _Tensors(), _Operations():
        yield

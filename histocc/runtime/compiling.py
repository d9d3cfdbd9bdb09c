"""`--compile`: the layers of a model as machine code of their own, made by `torch.compile`.

Each layer is compiled by itself and all layers of a kind share the result, for any number of rows and
positions, so that compiling takes a minute instead of growing with the model, and state dicts keep their
names.
"""

import os
import shutil

import torch
from torch import nn


def compile_layers(model: nn.Module) -> None:
    """Each member of a ModuleList in `model` is compiled when it works for the first time. The model is
    changed in place.
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

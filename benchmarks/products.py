#!/usr/bin/env python3
"""Which library's int8 products are the fastest on this CPU: ours, torch's dynamic ones, torchao's, ONNX
Runtime's; float32 and bfloat16 beside them.

    python benchmarks/products.py
    python benchmarks/products.py --sizes base --positions 512 --rounds 9

Each product is a linear layer with bias of an encoder of --sizes on --positions positions: float32 in,
float32 out, weights prepared beforehand, activations rounded on the way (per row, or per tensor where a
library knows no other way). Libraries take turns; the time is the median of --rounds. The error is the mean
difference from float32 as a share of its mean size; "alone" says whether a row gets the same next to other
rows, so that what a text gets does not depend on its batch. Libraries that are not installed are left out, by
name.
Prints a table and one JSON line.
"""

import argparse
import copy
import importlib.metadata
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO)]

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocc.model.int8 import Int8Weight
from histocc.model.layers import product
from histocc.model.mixer import model_config
from histocc.runtime.device import has_bfloat16, has_int8

Product = Callable[[Tensor], Tensor]


def ours(layer: nn.Linear) -> Product:
    weight = Int8Weight(layer.weight)
    return lambda x: weight.product(x, layer.bias)


def float32(layer: nn.Linear) -> Product:
    return lambda x: product(x, layer.weight, layer.bias)


def bfloat16(layer: nn.Linear) -> Product:
    weight, bias = layer.weight.bfloat16(), layer.bias.bfloat16()
    return lambda x: F.linear(x.bfloat16(), weight, bias).float()


def torch_dynamic(engine: str) -> Callable[[nn.Linear], Product]:
    def made(layer: nn.Linear) -> Product:
        torch.backends.quantized.engine = engine
        per_output = torch.ao.quantization.per_channel_dynamic_qconfig
        model = torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {"": per_output})

        def run(x: Tensor) -> Tensor:
            torch.backends.quantized.engine = engine
            return model(x)

        return run

    return made


def torchao(layer: nn.Linear) -> Product:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    made = nn.Sequential(copy.deepcopy(layer))
    quantize_(made, Int8DynamicActivationInt8WeightConfig())
    return made


def onnx_runtime(layer: nn.Linear) -> Product:
    import tempfile

    import onnx
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper
    from onnxruntime.quantization import QuantType, quantize_dynamic

    inputs, outputs = layer.in_features, layer.out_features
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["p"]), helper.make_node("Add", ["p", "b"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", inputs])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", outputs])],
        [
            numpy_helper.from_array(layer.weight.detach().t().contiguous().numpy(), "w"),
            numpy_helper.from_array(layer.bias.detach().numpy(), "b"),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    with tempfile.TemporaryDirectory() as folder:
        plain, small = f"{folder}/plain.onnx", f"{folder}/int8.onnx"
        onnx.save(model, plain)
        quantize_dynamic(plain, small, weight_type=QuantType.QInt8, per_channel=True)
        session = onnxruntime.InferenceSession(small, options, providers=["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"x": x.numpy()})[0])


def libraries() -> dict[str, Callable[[nn.Linear], Product]]:
    found: dict[str, Callable[[nn.Linear], Product]] = {"float32": float32}
    if has_bfloat16("cpu"):
        found["bfloat16"] = bfloat16
    if has_int8():
        found["ours"] = ours
    for engine in torch.backends.quantized.supported_engines:
        if engine not in ("none", "qnnpack"):
            found[f"torch, {engine}"] = torch_dynamic(engine)
    for name, make in (("torchao", torchao), ("onnxruntime", onnx_runtime)):
        try:
            found[f"{name} {importlib.metadata.version(name)}"] = make
        except importlib.metadata.PackageNotFoundError:
            print(f"{name}: not installed, left out")
    return found


def shapes(size: str) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of an encoder's products."""
    config = model_config(size)
    h, f = config.hidden_size, config.intermediate_size
    return {"queries, keys, values": (h, 3 * h), "feed-forward, up": (h, f), "feed-forward, down": (f, h)}


def measured(makers: dict, inputs: int, outputs: int, positions: int, rounds: int) -> dict[str, dict]:
    torch.manual_seed(1)
    layer, x = nn.Linear(inputs, outputs), torch.randn(positions, inputs)
    x *= 0.1 + 10 * torch.rand(positions, 1) ** 4  # rows differ in size, as texts do
    made = {name: make(layer) for name, make in makers.items()}
    exact, seconds, found = layer(x), {name: [] for name in made}, {}
    for i in range(rounds + 1):
        for name, run in made.items():
            run(x)
            started = time.perf_counter()
            for _ in range(5):
                run(x)
            if i:
                seconds[name].append((time.perf_counter() - started) / 5)
    scale = exact.abs().mean()
    for name, run in made.items():
        answer = run(x)
        found[name] = {
            "ms": 1000 * statistics.median(seconds[name]),
            "error": float((answer - exact).abs().mean() / scale),
            "alone": bool(
                torch.allclose(run(x[:8].clone()), answer[:8], rtol=1e-4, atol=1e-4 * float(scale))
            ),
        }
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--sizes", nargs="+", default=["small", "base"], choices=("tiny", "small", "base"))
    parser.add_argument("--positions", nargs="+", type=int, default=[64, 2048])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    makers, found = libraries(), {}
    for size in args.sizes:
        for positions in args.positions:
            for name, (inputs, outputs) in shapes(size).items():
                each = measured(makers, inputs, outputs, positions, args.rounds)
                found[f"{size}, {positions} positions, {name}"] = each
                print(f"\n{size}, {positions:,} positions, {name} ({inputs} → {outputs})")
                for library, value in each.items():
                    ratio = each["float32"]["ms"] / value["ms"]
                    alone = "" if value["alone"] else "  depends on the other rows"
                    print(
                        f"  {library:24} {value['ms']:8.3f} ms {ratio:6.2f} times float32,"
                        f" error {value['error']:.2%}{alone}",
                        flush=True,
                    )
    print(json.dumps({"threads": args.threads, "products": found}))


if __name__ == "__main__":
    main()

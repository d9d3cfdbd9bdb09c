"""What a process computes on, and in: the device, number formats, matrix products by oneDNN, compiled layers;
and on a device that is not the CPU the CPU's figures, no operation on tensors of two places, and no step that
waits for the device.
"""

import copy
import gc
import multiprocessing.queues
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import TINY, TRAIN_MIXER, read_logs, run, run_here, state_of, write_rows
from second_device import CAN_BE_CUDA, DEVICE, IS_CUDA, second_device, waits
from test_canine import NO_DROPOUT, batch, results
from test_predict import small_coder

import finetune
from histocc.formatter import PAD_IDX, hisco_blocky5
from histocc.job.model import auto_size
from histocc.model.layers import Linear
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.predict import fitting
from histocc.predict.decoders import DECODERS
from histocc.runtime import device
from histocc.runtime.device import (
    Precision,
    choose_device,
    device_of,
    has_bfloat16,
    has_onednn_product,
    settings_of_torch,
)
from histocc.runtime.errors import UserError
from histocc.runtime.parallel import gather_shares, wrap
from histocc.runtime.world import World
from histocc.trainer.config import ScriptConfig
from histocc.trainer.estimate import find_batch_size

# ---- which device


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs; returns the list of devices that were made current."""

    def machine(count):
        current = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
        return current

    return machine


def test_device_without_gpus(gpus):
    gpus(0)
    assert choose_device("auto", 3, 4) == choose_device("cpu", 3, 4) == torch.device("cpu")
    with pytest.raises(UserError, match="--device cuda: .*; take --device cpu"):
        choose_device("cuda")
    for wrong in ("xpu", "cpu:1", "cuda:x", 3):
        with pytest.raises(ValueError, match="expected None, 'auto', 'cpu', 'cuda' or 'cuda:N'"):
            device_of(wrong)


def test_local_rank_picks_the_gpu(gpus):
    current = gpus(4)
    for name in ("auto", "cuda"):
        assert [choose_device(name, rank, 4).index for rank in range(4)] == [0, 1, 2, 3]
    assert device_of("cuda:2") == torch.device("cuda", 2)  # in the process of somebody else
    assert choose_device("cpu", 7, 8) == torch.device("cpu") and current == [0, 1, 2, 3] * 2


@settings_of_torch()
def test_a_call_from_python_leaves_the_formats_of_products():
    """Also after one is chosen by `fp32_precision`, when torch refuses to name it in the older way."""
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    for chosen in (products[0].fp32_precision, "tf32"):
        products[0].fp32_precision = chosen
        before = [each.fp32_precision for each in products]
        with settings_of_torch():
            torch.set_float32_matmul_precision("highest")
        assert [each.fp32_precision for each in products] == before


@pytest.mark.parametrize("visible", ["CUDA 2", "CUDA GPU-5ebe9f43", "CUDA MIG-c7384736", "ROCR 3", "HIP 3"])
def test_one_gpu_for_each_process(gpus, monkeypatch, visible):
    """As with srun --gpus-per-task=1: each sees its own as the first, as DDP is told; torchrun shows all."""
    current, (kind, value) = gpus(1), visible.split()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(f"{kind}_VISIBLE_DEVICES", value)
    assert {choose_device("auto", rank, 4).index for rank in range(4)} == {0} and current == [0] * 4
    ddp = Mock()
    monkeypatch.setattr("histocc.runtime.parallel.DistributedDataParallel", ddp)
    monkeypatch.setattr(torch.nn.Module, "to", lambda module, device: module)
    wrap(torch.nn.Linear(1, 1), World(3, 3, 4, 4, choose_device("auto", 3, 4), "nccl"))
    wrap(torch.nn.Linear(1, 1), World(3, 3, 4, 4, backend="gloo"))
    assert [call.kwargs["device_ids"] for call in ddp.call_args_list] == [[0], None]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UserError, match="LOCAL_RANK=3 has no GPU: 1 visible here"):
        choose_device("auto", 0, 4)


def test_auto_says_on_every_device_what_it_takes_and_which_flag_takes_the_other(capsys):
    args = SimpleNamespace(ngrams="auto", freeze_encoder=False)
    sizes = [auto_size(args, World(device=torch.device(name))) for name in ("cuda", "cpu")]
    assert sizes == ["base", "ngrams"]
    said = capsys.readouterr().out.splitlines()
    assert "--model-size ngrams" in said[0] and "ngrams" in said[1]


@pytest.mark.parametrize("local_rank, local_size", [(2, 3), (0, 3), (5, 1)])
def test_more_processes_than_gpus(gpus, local_rank, local_size):
    """All processes of the machine refuse, not only the last, so that rank 0 says it."""
    current = gpus(2)
    with pytest.raises(UserError, match="2 visible.*no more processes than GPUs.*CUDA_VISIBLE_DEVICES"):
        choose_device("auto", local_rank, local_size)
    assert current == []


def test_sizes_leave_room_for_what_is_still_to_come(monkeypatch):
    held = {}
    for name, value in {
        "empty_cache": lambda: None,
        "reset_peak_memory_stats": lambda _: None,
        "max_memory_allocated": lambda _: held["bytes"],
        "memory_reserved": lambda _: 100,
        "mem_get_info": lambda _: (free, 80_000),  # as if another program used most of the card
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    world = World(device=torch.device("cuda", 0))

    def find(**more):
        return find_batch_size(lambda rows: held.update(bytes=10 * rows), 4096, world, **more)

    free = 900
    assert find() == 64 and find(still_to_come=300) == 32 and find(still_to_come=800) == 1
    free = 300
    assert find() == 32


# ---- another device than the CPU

TEXTS = ["wine merchant", "huusmand og væver", "farmer", "", "keeper of a long description " * 5, "smith"]
HERE = ("--device", "cuda")
only_as_cuda = pytest.mark.skipif(CAN_BE_CUDA and not IS_CUDA, reason="see test_with_cuda_s_keys")
TWO_EPOCHS = ["--num-epochs", 2, "--log-interval", 1, "--eval-interval", 2, "--float64"]
MODEL = ["--model-size", "tiny", "--ngrams", "none", "--dropout", 0, "--encoder-dropout", 0]


def train(rows, folder, *more):
    """On the device that the scripts choose; the epoch is two steps long."""
    data = ["--dataset", rows, "--target-cols", "hisco_1", "hisco_2", "--formatter", "hisco"]
    data += ["--language-col", "lang", *MODEL, "--batch-size", 64, "--learning-rate", 1e-3]
    run_here(finetune.main, *data, "--save-path", folder, *more)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.csv", 100)


@pytest.mark.full
@pytest.mark.processes
@pytest.mark.skipif(not CAN_BE_CUDA or IS_CUDA, reason="there is no g++, or this is that pytest")
def test_with_cuda_s_keys():
    """The tests below, in a process in which torch finds CUDA."""
    flags = ["-p", "second_device", "--all", "-rs", "-k", "the_cpu or the_device", __file__]
    output = run("pytest", *flags, timeout=900, PYTHONPATH="tests:.")
    assert "6 passed" in output and "skipped" not in output, output


@only_as_cuda
@pytest.mark.full
def test_a_run_and_one_that_goes_on_have_the_losses_of_the_cpu(rows, tmp_path, monkeypatch):
    train(rows, tmp_path / "cpu", *TWO_EPOCHS, "--device", "cpu")
    with second_device(monkeypatch):
        train(rows, tmp_path / "there", *TWO_EPOCHS, *HERE, "--max-steps", 3)
        assert waits["_to_copy"] > 0  # the weights, to save them
        train(rows, tmp_path / "there", *TWO_EPOCHS, *HERE)
    here, there = read_logs(tmp_path / "cpu"), read_logs(tmp_path / "there")
    assert [row["step"] for row in there] == [row["step"] for row in here] == [1, 2, 3, 4]
    for name in ("train_loss", "train_loss_linear", "grad_norm", "val_loss", "token_acc", "seq_acc"):
        pairs = [(row[name], other[name]) for row, other in zip(here, there) if row[name] is not None]
        assert [other for _, other in pairs] == pytest.approx([value for value, _ in pairs], rel=1e-8)
    assert here[1]["val_loss"] and here[3]["val_loss"]
    one, other = (state_of(tmp_path / run) for run in ("cpu", "there"))
    assert {type(value) for value in other["model"].values()} == {torch.Tensor}
    torch.testing.assert_close(other["model"], dict(one["model"]), rtol=0, atol=1e-6)


@only_as_cuda
@pytest.mark.full
@pytest.mark.parametrize("precision", ["--no-fp16", *["--bf16", "--fp16"] * IS_CUDA])
def test_steps_that_are_not_logged_do_not_wait_for_the_device(rows, tmp_path, monkeypatch, precision):
    """And when confidence is fitted the optimizer's moments are gone."""
    moments = []

    def fit_run(*_):
        moments.extend(len(x.state) for x in gc.get_objects() if issubclass(type(x), torch.optim.Optimizer))

    monkeypatch.setattr(fitting, "fit_run", fit_run)

    def count(epochs):
        with second_device(monkeypatch):
            train(rows, tmp_path / f"{epochs}", "--num-epochs", epochs, "--share-val", 0, precision, *HERE)
        return Counter(waits)

    assert count(1) == count(2) and moments and not any(moments)


def test_of_shares_rank_0_alone_takes_a_copy_to_the_cpu(monkeypatch):
    with second_device(monkeypatch):
        share = torch.ones(3, device=DEVICE)
        share.full_tensor = lambda: share
        assert gather_shares([share], keep=False) == [None] and not waits
        assert gather_shares([share])[0].device.type == "cpu" and waits["_to_copy"] == 1


def test_every_decoder_codes_as_on_the_cpu(monkeypatch):
    def found(device):
        coder = small_coder(device, state={"languages": ["en", "da"]}, batch_size=3)
        languages, limits = ["en", "da", "xx", "en", "en", "en"], {"da": 0.3, None: 0.5}
        return (
            {name: coder.code(TEXTS, languages, name, threshold=limits) for name in DECODERS},
            [coder.probabilities(TEXTS, ["en"] * 6, decoder) for decoder in ("flat", "full")],
            coder.embeddings(TEXTS, ["en"] * 6),
        )

    codes, probabilities, vectors = found("cpu")
    with second_device(monkeypatch):
        codes_there, probabilities_there, vectors_there = found(DEVICE)
    for decoder, texts in codes.items():
        others = codes_there[decoder]
        assert [text.codes for text in texts] == [text.codes for text in others]
        assert all(np.allclose(text.probs, other.probs, atol=1e-6) for text, other in zip(texts, others))
    assert len({len(text.codes) for text in codes["greedy"]}) > 2
    assert np.allclose(vectors, vectors_there, atol=1e-4, equal_nan=True)
    for one, other in zip(probabilities, probabilities_there):
        assert np.allclose(one, other, atol=1e-6, equal_nan=True)


# ---- number formats


@pytest.mark.full
@pytest.mark.processes
def test_half_precision_learns_the_same_and_nothing_is_half_where_it_must_not_be(tmp_path):
    flags = ["--train-data", write_rows(tmp_path / "train.csv", 12), *TINY, "--num-epochs", 2]
    flags += ["--val-data", write_rows(tmp_path / "val.csv", 6, 500), "--batch-size", 6, "--dropout", 0]
    flags += ["--learning-rate", 1e-3, "--encoder-dropout", 0, "--log-interval", 2, "--save-interval", 2]
    run(TRAIN_MIXER, *flags, "--save-dir", tmp_path / "float32")
    whole = read_logs(tmp_path / "float32")[-1]
    for name in ("bf16", "fp16"):
        output = run(TRAIN_MIXER, *flags, "--save-dir", tmp_path / name, f"--{name}")
        is_slow = name == "fp16" or not has_bfloat16("cpu")
        assert f"Precision: {name}" in output and ("many times slower" in output) == is_slow
        half = read_logs(tmp_path / name)[-1]
        assert (half["step"], half["samples"]) == (whole["step"], whole["samples"])
        assert half["val_loss"] == pytest.approx(whole["val_loss"], rel=0.01)
        assert half["val_loss"] != whole["val_loss"]
        assert half["skipped_steps"] == 0  # a scaler that looks for its scale is no bad step
        state = state_of(tmp_path / name)
        moments = [value for part in state["optimizer"]["state"].values() for value in part.values()]
        assert {value.dtype for value in (*state["model"].values(), *moments)} == {torch.float32}


def test_an_overflow_is_no_bad_step_while_fp16_looks_for_its_scale():
    weight, precision = torch.nn.Parameter(torch.ones(1)), Precision("fp16", "cpu")
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for scale, is_bad in ((2.0**16, False), (1.0, True)):
        precision.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        precision.scaler.scale(weight.sum()).backward()
        weight.grad.fill_(float("inf"))
        precision.scaler.unscale_(optimizer)
        assert bool(precision.optimizer_step(optimizer, torch.tensor(False))) == is_bad
        assert weight.item() == 1 and precision.scaler.get_scale() == scale / 2
        optimizer.zero_grad()


def test_what_the_flags_choose():
    def chosen(**flags):
        return Precision.of(ScriptConfig(**flags), torch.device("cpu"))

    assert chosen().name == "float32" and chosen(float64=True).dtype == torch.float64
    assert chosen(fp16=True).scaler.is_enabled()
    native = has_bfloat16("cpu")
    assert chosen(use_amp=True).name == ("bf16" if native else "float32") and chosen(bf16=True).name == "bf16"
    assert (chosen(bf16=True).warning() is None) == native and chosen().warning() is None


# ---- matrix products by oneDNN

needs_onednn = pytest.mark.skipif(not has_onednn_product(), reason="torch was built without oneDNN")


@pytest.fixture
def calls(monkeypatch):
    """Products of oneDNN, on any CPU, by the shape of what is multiplied."""
    found = []

    def product(x, weight, bias=None, multiply=device.onednn_product):
        found.append(tuple(x.shape))
        return multiply(x, weight, bias)

    monkeypatch.setattr(device, "onednn_pays", lambda: True)
    monkeypatch.setattr(device, "onednn_product", product)
    return found


@needs_onednn
@pytest.mark.parametrize("shape, with_bias", [((3, 100, 256), True), ((300, 256), False)])
@pytest.mark.parametrize("gap", [0, 144])  # rows of a part of what is joined: they are copied
def test_values_and_gradients_are_those_of_torch(calls, shape, with_bias, gap):
    torch.manual_seed(0)
    whole = torch.randn(*shape[:-1], shape[-1] + gap, requires_grad=True)
    weight, bias = torch.randn(128, 256, requires_grad=True), torch.randn(128, requires_grad=True)
    leaves, gradient = [whole, weight, *([bias] if with_bias else [])], torch.randn(*shape[:-1], 128)
    found, right = [
        [
            out := multiply(whole[..., :256], weight, bias if with_bias else None),
            *torch.autograd.grad(out, leaves, gradient),
        ]
        for multiply in (device.linear, F.linear)
    ]
    assert calls == [shape, (300, 128), (128, 300)]  # forward, for x, for the weight
    for one, other in zip(found, right):
        assert one.shape == other.shape and torch.allclose(one, other, rtol=1e-4, atol=1e-3)


@needs_onednn
def test_others_are_left_to_torch_and_what_needs_no_gradient_is_not_computed(calls):
    x, weight = torch.randn(300, 256), torch.randn(128, 256)
    device.linear(x[:8], weight)  # too small to gain
    device.linear(x.double(), weight.double())
    device.linear(x.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert device.linear(x, weight).dtype == torch.bfloat16
    device.linear(x.to("meta"), weight.to("meta"))
    assert not calls
    layer = Linear(256, 128).requires_grad_(False)
    layer(torch.randn(300, 256).requires_grad_()).sum().backward()
    assert len(calls) == 2 and layer.weight.grad is None


# ---- compiled layers, and what is private in torch


@pytest.mark.full
def test_compiled_layers_compute_the_same(monkeypatch):
    """Whatever the width, and with PAD after the codes of all rows; traced as a whole and run by torch's own
    kernels, since machine code takes a minute to make.
    """

    torch.manual_seed(1)
    config = model_config("tiny", **NO_DROPOUT)
    plain = Seq2SeqMixerOccCANINE(hisco_blocky5().num_classes, 7, config=config).double().train()
    compiled, layer_compile, seen = copy.deepcopy(plain), torch.nn.Module.compile, []
    monkeypatch.setattr(
        torch.nn.Module,
        "compile",
        lambda module, **flags: (seen.append(module), layer_compile(module, backend="eager", **flags)),
    )
    device.compile_layers(compiled)
    # outer layers, stack, decoder
    assert len(seen) == 4 + 3 and list(compiled.state_dict()) == list(plain.state_dict())
    torch._dynamo.utils.counters.clear()
    for width, tokens in ((16, 11), (24, 6), (40, 8)):
        ids, mask = batch([width, width // 2, width], width)
        target = torch.randint(5, 17, (3, 11))
        target[:, tokens:] = PAD_IDX
        pairs = (results(model, ids, mask, target) for model in (compiled, plain))
        for ours, theirs in zip(*pairs, strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    # one for each kind of layer, and one for fewer keys, not one for each shape
    assert 3 <= graphs <= 5, dict(torch._dynamo.utils.counters)


def test_private_names_whose_lack_nothing_else_would_tell_are_there():
    assert hasattr(torch.ops.mkldnn, "_linear_pointwise") or not torch.backends.mkldnn.is_available()
    assert hasattr(multiprocessing.queues.Queue, "_on_queue_feeder_error")
    assert torch.optim.AdamW([torch.ones(1)], fused=True)._step_supports_amp_scaling

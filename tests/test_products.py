"""Matrix products by oneDNN: the values and gradients of torch's own, and only where they are faster."""

import pytest
import torch
import torch.nn.functional as F

from histocc.model.layers import Linear
from histocc.runtime import device
from histocc.runtime.device import has_onednn_product

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
@pytest.mark.parametrize("shape", [(3, 100, 256), (300, 256)])
@pytest.mark.parametrize("with_bias", [True, False])
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
def test_what_needs_no_gradient_is_not_computed(calls):
    layer = Linear(256, 128).requires_grad_(False)
    layer(torch.randn(300, 256).requires_grad_()).sum().backward()
    assert len(calls) == 2 and layer.weight.grad is None


@needs_onednn
def test_others_are_left_to_torch(calls):
    x, weight = torch.randn(300, 256), torch.randn(128, 256)
    device.linear(x[:8], weight)  # too small to gain
    device.linear(x.double(), weight.double())
    device.linear(x.bfloat16(), weight.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert device.linear(x, weight).dtype == torch.bfloat16
    device.linear(x.to("meta"), weight.to("meta"))
    assert not calls
    device.linear(x, weight)
    assert calls == [(300, 256)]


@pytest.mark.parametrize(
    "vendor, wide", [("AuthenticAMD", True), ("AuthenticAMD", False), ("GenuineIntel", True)]
)
def test_amd_s_wide_cpus_gain(monkeypatch, tmp_path, vendor, wide):
    pays = vendor == "AuthenticAMD" and wide and has_onednn_product()
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nvendor_id\t: {vendor}\nmodel\t: 1\n")
    monkeypatch.setattr(device, "CPU_INFO", str(info))
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: wide)
    device.onednn_pays.cache_clear()
    try:
        assert device.onednn_pays() is pays
    finally:
        device.onednn_pays.cache_clear()

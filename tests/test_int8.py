"""Coding with matrix products in int8."""

import copy
import pickle

import pytest
import torch
from helpers import write_csv
from test_predict import CODES, flags, make_model, model, predict_here, read, table  # noqa: F401

from histocc.model.int8 import Int8Weight, to_int8
from histocc.occ_canine import OccCANINE
from histocc.runtime import device
from histocc.runtime.device import Precision, has_int8
from histocc.runtime.errors import UserError
from histocc.text import encode

needs_vnni = pytest.mark.skipif(not has_int8(), reason="this CPU has no instructions for int8")
TEXTS = ["wine merchant", "huusmand og væver", "farmer", "keeper of a very long description " * 3, "smith"]


@needs_vnni
@torch.no_grad()
@pytest.mark.parametrize("rows, inputs, outputs", [(200, 64, 96), (1, 8, 8), (3, 24, 5), (257, 130, 33)])
def test_a_product_is_that_of_floats_to_rounding_and_a_row_does_not_depend_on_others(rows, inputs, outputs):
    torch.manual_seed(3)
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(3, rows, inputs)
    x[0, 0] = 0
    held = Int8Weight(weight)
    found, exact = held.product(x, bias), x @ weight.t() + bias
    assert found.shape == exact.shape and torch.equal(found[0, 0], bias)
    assert float((found - exact).norm() / exact.norm()) < 0.02
    assert torch.equal(held.product(x[1, -1:], bias), found[1, -1:])
    assert torch.equal(held.product(1024 * x[1]), 1024 * held.product(x[1]))
    assert torch.equal(held[2:4].product(x, bias[2:4]), found[..., 2:4])


@needs_vnni
@torch.no_grad()
def test_every_product_of_the_model_but_those_that_answer_is_of_int8():
    plain = make_model()
    made = copy.deepcopy(plain)
    to_int8(made)
    layers = dict(made.named_modules())
    linear = {name: layer.weight for name, layer in layers.items() if isinstance(layer, torch.nn.Linear)}
    in_int8 = {name for name, weight in linear.items() if isinstance(weight, Int8Weight)}
    assert linear.keys() - in_int8 == {"decoder.head", "linear_decoder"}
    assert "decoder.decoder.layers.2.linear1" in in_int8
    assert not [name for name, _ in made.named_parameters() if "in_proj" in name or ".conv." in name]
    ids, mask = map(torch.from_numpy, encode(TEXTS, ["en"] * len(TEXTS), 128))
    target = torch.randint(5, 15, (len(TEXTS), 20))
    found = []
    for one in (plain, made):
        memory, text = one.encode(ids, mask)
        found.append((memory, text.encoded, *one(ids, mask, target)))
    assert all(0 < float((one - other).norm() / one.norm()) < 0.08 for one, other in zip(*found))


@needs_vnni
def test_a_file_in_int8_is_as_from_python(model, tmp_path):  # noqa: F811
    source = table(tmp_path / "in.csv", 60)
    predict_here(*flags(model, source, tmp_path / "out.csv", "--int8"))
    coder = pickle.loads(pickle.dumps(OccCANINE(str(model), "cpu", int8=True)))
    assert type(coder.model.encoder.pooler.dense.weight) is Int8Weight
    rows = read(tmp_path / "out.csv")
    found = coder.coder.code([row["occ1"] for row in rows], [row["lang"] for row in rows])
    codes = [[row[f"hisco_{i}"] for i in range(1, 6) if row.get(f"hisco_{i}")] for row in rows]
    assert codes == [each.codes for each in found]
    assert [row["conf"] for row in rows] == ["" if x.conf is None else f"{x.conf:.6g}" for x in found]


def test_a_cpu_without_the_instructions_refuses_it(monkeypatch):
    monkeypatch.setattr(device, "has_int8", lambda: False)
    with pytest.raises(UserError, match="this CPU has no instructions for it"):
        Precision("int8")
    with pytest.raises(UserError, match="--int8 is for CPUs"):
        Precision("int8", torch.device("cuda"))


@needs_vnni
@pytest.mark.parametrize("rows", [[], [(" ", "en")]])
def test_a_file_without_texts(model, tmp_path, rows):  # noqa: F811
    source = write_csv(tmp_path / "in.csv", ["occ1", "lang"], rows)
    predict_here(*flags(model, source, tmp_path / "out.csv", "--int8"))
    assert len(read(tmp_path / "out.csv")) == len(rows)

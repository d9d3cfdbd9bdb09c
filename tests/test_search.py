"""Search over the codes of a key: equal to the plain way."""

import pytest
import torch
from test_predict import SMALL

from histocc.formatter import BOS_IDX, BlockyFormatter, CodeError, hisco_blocky5, occ1950_blocky2
from histocc.model import search
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.model.search import CodeSearch, CodeTrie
from histocc.text import encode

HISCO = ["-3", "61110", "-1", "61115", "83110", "64100", "64101", "61120", "00001", "-2", "83190", "02100"]
KEYS = {
    "hisco": (hisco_blocky5(), HISCO),
    "occ1950": (occ1950_blocky2(), ["000", "123", "124", "905", "130", "999", "100"]),
    "general": (
        BlockyFormatter("gpf", ["x_1", "x_2"], block_size=4, allow_short=True),
        ["1", "12", "123", "1234", "1a", "b", "-1", "?", "12.3", "zz"],
    ),
    "tokens": (
        BlockyFormatter("gpf", ["x_1"], block_size=3, use_within_block_sep=True, allow_short=True),
        ["10,2", "10", "10,2,-1", "999,3", "3"],
    ),
}
TEXTS = ["farmer", "wine and spirit merchant", "", "huusmand og væver", "x" * 140, "smed"]
LANGUAGES = ["en", "en", "unk", "da", "se", "da"]


def make_model(formatter, memory_mask=True) -> Seq2SeqMixerOccCANINE:
    torch.manual_seed(5)
    model = Seq2SeqMixerOccCANINE(
        formatter.num_classes, 3, config=model_config("tiny", **SMALL), memory_mask=memory_mask
    ).double()
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            if parameter.dim() == 1:  # biases start at zero, where an error in them would not show
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.decoder.head.weight.mul_(3)
        for layer in model.decoder.decoder.layers:
            layer.multihead_attn.in_proj_weight.mul_(2)
    return model.eval()


def inputs(model):
    width = None if model.memory_mask else 128
    return [torch.from_numpy(array) for array in encode(TEXTS, LANGUAGES, width=width)]


@torch.no_grad()
def plain(model, ids, mask, codes, formatter) -> torch.Tensor:
    """Probability of each code, one after the other, with its whole sequence through the decoder."""
    memory, _ = model.encode(ids, mask)
    columns = []
    for code in codes:
        block = torch.from_numpy(formatter.encode_code(code))
        target = torch.cat([torch.tensor([BOS_IDX]), block])[None].expand(len(ids), -1)
        after = model.decode(memory, target[:, :-1], model.memory_padding_mask(mask)).softmax(-1)
        columns.append(after.gather(2, target[:, 1:, None])[..., 0].prod(1))
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("memory_mask", [True, False])
@pytest.mark.parametrize("system", KEYS)
def test_full_and_topk_equal_the_plain_search(system, memory_mask):
    formatter, codes = KEYS[system]
    model, tree = make_model(formatter, memory_mask), CodeTrie(codes, formatter)
    expected = plain(model, *inputs(model), codes, formatter)
    assert expected.log().std() > 0.5  # not all the same, or this shows nothing
    assert (CodeSearch(model, tree).full(*inputs(model)) / expected - 1).abs().max() < 1e-10
    for k in (1, 3, len(codes), len(codes) + 5):
        numbers, probabilities = CodeSearch(model, tree).topk(*inputs(model), k)
        best, order = expected.topk(min(k, len(codes)))
        assert torch.equal(numbers, order) and (probabilities / best - 1).abs().max() < 1e-10
    single = CodeSearch(model.float(), tree)
    assert (single.topk(*inputs(model), 4)[1] / expected.topk(4).values - 1).abs().max() < 1e-4
    assert (single.full(*inputs(model)) / expected - 1).abs().max() < 1e-3


def test_results_do_not_depend_on_how_rows_are_put_together(monkeypatch):
    formatter, codes = KEYS["hisco"]
    model = make_model(formatter).train()
    model.encoder.eval()
    one = CodeSearch(model, CodeTrie(codes, formatter))
    ids, mask = (torch.cat([part] * 4) for part in inputs(model))
    together, best = one.full(ids, mask), one.topk(ids, mask, 3)
    monkeypatch.setattr(search, "PREFIXES_AT_ONCE", {"cpu": 30})
    monkeypatch.setattr(search, "ROWS_AT_ONCE", {"cpu": 5})
    for width in (1, 16):
        monkeypatch.setattr(search, "OPENED_AT_ONCE", width)
        again = one.topk(ids, mask, 3)
        assert torch.equal(again[0], best[0]) and (again[1] - best[1]).abs().max() < 1e-12
    assert (one.full(ids, mask) - together).abs().max() < 1e-12
    assert torch.equal(best[0][:6], best[0][6:12])  # the same texts again
    assert model.training and not model.encoder.training and not together.requires_grad  # keeps its mode


def test_equal_probabilities_stand_in_the_order_of_the_key():
    formatter = hisco_blocky5()
    codes = ["99999", "83110", "12345", "00001", "12346"]
    model = make_model(formatter)
    with torch.no_grad():
        model.decoder.head.weight.zero_()  # every token has the same probability
        model.decoder.head.bias.zero_()
    ids, mask = inputs(model)
    numbers, probabilities = CodeSearch(model, CodeTrie(codes, formatter)).topk(ids, mask, 3)
    assert numbers.tolist() == [[0, 1, 2]] * len(ids)
    assert (probabilities.log() + 5 * torch.tensor(model.vocab_size).log()).abs().max() < 1e-6


def test_trees_that_cannot_be():
    with pytest.raises(ValueError, match="'-1' and '-1' have the same tokens"):
        CodeTrie(["61110", "-1", "-1"], hisco_blocky5())
    with pytest.raises(CodeError, match="'6111'"):
        CodeTrie(["6111"], hisco_blocky5())

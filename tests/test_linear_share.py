"""Both decoders together: `linear_share` in the search, in coding, in files and in the evaluation."""

import itertools
import json
import math

import numpy as np
import pytest
import torch
from helpers import run_here, write_csv
from test_predict import save_model
from test_search import HISCO, KEYS, SMALL, inputs, plain

from histocc.evaluate import __main__ as evaluate
from histocc.formatter import hisco_blocky5
from histocc.model import search
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.model.ngrams import hash_ngrams
from histocc.model.search import CANDIDATES, CodeSearch, CodeTrie
from histocc.predict.coder import Coder
from histocc.published import models
from histocc.text import encode

TEXTS = [
    f"{name} {'of the parish' * (i % 3 == 0)} {i}"
    for i, name in enumerate(["smed", "farmer", "huusmand", "clerk"] * 15)
]
ENGLISH = ["en"] * len(TEXTS)
IDS, MASK = map(torch.from_numpy, encode(TEXTS, ENGLISH))
FOUND, THERE, _ = hash_ngrams(IDS)
HASHES = FOUND[THERE].unique()
LIMIT = 0.9  # threshold of the linear decoder: none to several codes
FITTED = {"default": LIMIT, "by_language": {}, "source": "fitted", "at_least_one": True}
NGRAMS = {"rows": len(HASHES), "width": 16}


def make_model(formatter, codes: int, ngrams: dict | None = None) -> Seq2SeqMixerOccCANINE:
    """Both decoders have opinions, and not the same."""
    torch.manual_seed(5)
    config = model_config("tiny", **SMALL)
    model = Seq2SeqMixerOccCANINE(formatter.num_classes, codes, config=config, ngrams=ngrams)
    with torch.no_grad():
        model.decoder.head.weight.mul_(3)
        model.linear_decoder.weight.mul_(8)
        for layer in model.decoder.decoder.layers:
            layer.multihead_attn.in_proj_weight.mul_(3)
        if ngrams:
            model.ngrams.hashes.copy_(HASHES)
            model.ngrams.idf.fill_(1.0)
            model.ngrams.linear.weight.normal_()
    return model.eval()


def mixture(model, ids, mask, codes, formatter, share: float) -> torch.Tensor:
    """Log-probability of each code by both decoders, [B, codes]; the plain way."""
    with torch.no_grad():
        linear = model.classify(model.encode(ids, mask)[1]).log_softmax(1)
    scores = (1 - share) * plain(model, ids, mask, codes, formatter).log() + share * linear
    return scores - scores.logsumexp(1, keepdim=True)


class TestSearch:
    @pytest.mark.parametrize("system, ngrams", [*((system, None) for system in KEYS), ("hisco", NGRAMS)])
    @pytest.mark.parametrize("share", [pytest.param(0.3, marks=pytest.mark.full), 0.7, 1.0])
    def test_full_and_topk_equal_the_mixture_over_all_codes(self, system, ngrams, share):
        formatter, codes = KEYS[system]
        model = make_model(formatter, len(codes), ngrams).double()
        ids, mask = inputs(model)
        expected = mixture(model, ids, mask, codes, formatter, share)
        alone = CodeSearch(model, CodeTrie(codes, formatter)).full(ids, mask)
        # or this shows nothing
        assert (expected.exp() - alone / alone.sum(1, keepdim=True)).abs().max() > 0.05
        one = CodeSearch(model, CodeTrie(codes, formatter), share)
        found = one.full(ids, mask)
        assert found.dtype == torch.float64 and (found.sum(1) - 1).abs().max() < 1e-12
        assert (found.log() - expected).abs().max() < 1e-9
        for k in (1, 3, len(codes) + 5):
            numbers, probs = one.topk(ids, mask, k)
            best, order = expected.topk(min(k, len(codes)))
            assert torch.equal(numbers, order) and (probs.log() - best).abs().max() < 1e-9
        numbers, scores, logits = one.candidates(ids, mask)
        among = torch.zeros_like(expected, dtype=torch.bool)
        among.scatter_(1, logits.topk(min(search.CANDIDATES, len(codes))).indices, True)
        best, order = expected.masked_fill(~among, -math.inf).topk(numbers.shape[1])
        assert torch.equal(numbers, order)
        assert (scores.log_softmax(1) - best.log_softmax(1)).abs().max() < 1e-9

    @pytest.mark.parametrize("share", [pytest.param(0.0, marks=pytest.mark.full), 0.7])
    def test_topk_of_a_large_key(self, share, monkeypatch):
        """In groups of rows that end at different times."""
        monkeypatch.setattr(search, "ROWS_AT_ONCE", {"cpu": 7})
        codes = list(map("".join, itertools.product("0123", "0123", "0123", "012", "012")))
        model = make_model(hisco_blocky5(), len(codes))
        with torch.no_grad():
            model.decoder.head.weight.mul_(10)
            model.linear_decoder.weight.mul_(2)
        ids, mask = IDS[:20], MASK[:20]
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
            model.to(dtype)
            one = CodeSearch(model, CodeTrie(codes, hisco_blocky5()), share)
            probs = one.full(ids, mask)
            numbers, found = one.topk(ids, mask, 3)
            best, order = probs.topk(3)
            assert torch.equal(numbers, order) and ((found - best) / best).abs().max() < tolerance


def saved(folder, made, **more):
    more |= {"model": made.state_dict(), "args": {"target_cols": ["hisco_1", "hisco_2"]}}
    save_model(folder, hisco_blocky5(), HISCO, NGRAMS, **more)
    return folder


@pytest.fixture(scope="module")
def model():
    return make_model(hisco_blocky5(), len(HISCO), NGRAMS)


class TestCoding:
    def test_with_a_share(self, model, tmp_path):
        folder = saved(tmp_path / "run", model, linear_share=0.7)
        coder, without = Coder.load(str(folder)), Coder.load(str(saved(tmp_path / "without", model)))
        expected = mixture(model, IDS, MASK, HISCO, hisco_blocky5(), 0.7).exp()
        best = [[HISCO[i] for i in row] for row in expected.topk(3).indices.tolist()]
        for decoder in ("full", "topk"):
            found = coder.code(TEXTS, ENGLISH, decoder, 3)
            assert [one.codes for one in found] == best
            probs = np.array([one.probs for one in found])
            assert np.abs(probs - expected.topk(3).values.numpy()).max() < 1e-4
            assert [one.conf for one in found] == probs[:, 0].tolist()
            alone = without.code(TEXTS, ENGLISH, decoder, 3)
            assert sum(one.codes != other.codes for one, other in zip(found, alone)) > 10
        assert np.allclose(coder.probabilities(TEXTS, ENGLISH, "full"), expected, atol=1e-5)
        width = SMALL["hidden_size"] + NGRAMS["width"]
        assert coder.embeddings(TEXTS, ENGLISH).shape == (len(TEXTS), width)
        for decoder in ("greedy", "flat"):  # neither ranks the codes of the key
            assert coder.code(TEXTS, ENGLISH, decoder) == without.code(TEXTS, ENGLISH, decoder)

    def test_at_least_one(self, model, tmp_path):
        table = {"default": LIMIT, "by_language": {"da": 1.0}, "source": "fitted"}
        always = {**table, "at_least_one": True}
        folders = [saved(tmp_path / str(len(each)), model, thresholds=each) for each in (table, always)]
        languages = ["en", "da"] * (len(TEXTS) // 2)
        without, coded = (Coder.load(str(folder)).code(TEXTS, languages, "flat", 4) for folder in folders)
        best = Coder.load(str(folders[0])).code(TEXTS, languages, "flat", 1, threshold=0.0)
        assert {len(one.codes) for one in without} >= {0, 1, 2}
        probs = Coder.load(str(folders[0])).probabilities(TEXTS, languages).astype(np.float64)
        for one, other, first, row in zip(coded, without, best, probs):
            assert one.codes == (other.codes or first.codes)
            assert one.probs == pytest.approx(other.probs or first.probs, rel=1e-5)
            on = np.isin(HISCO, one.codes)
            assert one.conf == pytest.approx(np.where(on, row, 1 - row).prod(), rel=1e-3)
        given = Coder.load(str(folders[1])).code(TEXTS, languages, "flat", 4, threshold=0.9999999)
        assert min(len(one.codes) for one in given) == 1  # a given threshold is for further ones


def log_probs(model) -> tuple[np.ndarray, np.ndarray]:
    """Of TEXTS, by either decoder."""
    one = CodeSearch(model, CodeTrie(HISCO, hisco_blocky5()))
    return tuple(found.double().numpy() for found in one.log_probs(IDS, MASK))


@pytest.fixture(scope="module")
def rows(model) -> list[tuple[str, str, str]]:
    """Every second text has the code that both rank first, others that of one, or two; some stand twice."""
    written, linear = log_probs(model)
    best = [((1 - share) * written + share * linear).argsort(1)[:, ::-1] for share in (0.7, 0.0, 1.0)]
    rows = []
    for i, text in enumerate(TEXTS):
        order = best[0 if i % 2 else 1 + i // 2 % 2][i]
        rows += [(text, HISCO[order[0]], HISCO[order[1]] if i % 5 == 4 else "")] * (1 + (i % 7 == 0))
    return rows


@pytest.fixture(scope="module")
def evaluated(model, rows, tmp_path_factory):
    """(folder of the run and of val.csv, report, what was said)."""
    folder = tmp_path_factory.mktemp("both")
    saved(folder / "run", model, thresholds=FITTED)
    write_csv(folder / "val.csv", ("occ1", "hisco_1", "hisco_2"), rows)
    return folder, *run_evaluation(folder, "out", "--batch-size", 16)


def run_evaluation(folder, name, *more):
    files = ["--model", folder / "run", "--data", folder / "val.csv", "--output", folder / name]
    columns = ["--target-cols", "hisco_1", "hisco_2", "--language", "en"]
    said = run_here(evaluate.main, *files, *columns, "--device", "cpu", *more)
    return json.loads((folder / name / "report.json").read_text(encoding="utf-8")), said


def by_hand(model, rows) -> list[bool]:
    """Whether each row is right if both decoders count the same, with plain loops."""
    written, linear = log_probs(model)
    of_text = {text: i for i, text in enumerate(TEXTS)}
    with torch.no_grad():
        counts = (model.classify(model.encode(IDS, MASK)[1]).sigmoid() > LIMIT).sum(1).clip(min=1).tolist()

    def right(row) -> bool:
        i = of_text[row[0]]
        candidates = np.sort(np.argsort(-linear[i], kind="stable")[:CANDIDATES])
        order = candidates[np.argsort(-(written[i] + linear[i])[candidates], kind="stable")]
        return {HISCO[each] for each in order[: counts[i]]} == set(row[1:]) - {""}

    return [right(row) for row in rows]


class TestEvaluation:
    def test_figures_are_those_of_plain_loops(self, evaluated, model, rows):
        _, found, said = evaluated
        both, right = found["decoders"]["both"], by_hand(model, rows)
        assert list(found["decoders"]) == ["linear", "seq2seq", "both"]
        assert both["right_rows"] == sum(right) and 0.2 < both["accuracy"] < 1
        texts = {}
        for row, each in zip(rows, right):
            texts.setdefault(row[0], []).append(each)
        over_texts = float(np.mean([np.mean(each) for each in texts.values()]))
        assert both["by_digits"][-1]["over_texts"]["accuracy"][0] == pytest.approx(over_texts)
        assert f"Both decoders together: {100 * over_texts:.1f} % of texts, macro-F1 " in said

    def test_fitted_thresholds_keep_what_else_the_model_says(self, evaluated, model, tmp_path):
        (tmp_path / "val.csv").write_bytes((evaluated[0] / "val.csv").read_bytes())
        saved(tmp_path / "run", model, thresholds=FITTED, linear_share=0.2)
        found, said = run_evaluation(tmp_path, "again", "--fit-thresholds")
        state = models.load_model(str(tmp_path / "run"))[2]
        best = found["decoders"]["linear"]["thresholds"]["all"]["threshold_f1"]
        assert state["thresholds"] == FITTED | {"default": best} and "Thresholds stored in" in said
        assert f"WARNING: they are fitted on few rows ({found['data']['rows']})" in said
        assert state["linear_share"] == 0.2


def test_no_more_codes_than_any_training_row_has(model, tmp_path):
    """`at_most` of the thresholds: the most probable ones alone count, whatever the others have."""

    def codes(name, **more):
        table = {"default": 0.0, "by_language": {}, "source": "usual", "at_least_one": True, **more}
        coder = Coder.load(str(saved(tmp_path / name, model, thresholds=table)))
        return [each.codes for each in coder.code(["wine merchant", "a farmer"], ["en", "en"], "flat", k=9)]

    every = codes("every")
    assert all(len(each) > 2 for each in every)
    assert codes("one", at_most=1) == [each[:1] for each in every]
    assert codes("two", at_most=2) == [each[:2] for each in every]

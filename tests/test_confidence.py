"""How sure a model is: what is fitted, where it is kept, and that it changes no code."""

import csv
import glob
import math

import numpy as np
import pytest
import torch
from helpers import FINETUNE, TINY, run, run_inside, write_csv
from test_linear_share import TEXTS, make_model
from test_search import KEYS, inputs

from histocc import OccCANINE
from histocc.data.arrays import PreparedData
from histocc.evaluate import __main__ as evaluate
from histocc.formatter import PAD_IDX, hisco_blocky5
from histocc.job.confidence import steps_without
from histocc.model import confidence, decoding
from histocc.model.confidence import (
    GRID,
    Confidence,
    Outputs,
    Ranked,
    Ranking,
    Sequences,
    Writing,
    curve,
    features,
    log_odds,
)
from histocc.model.search import CodeSearch, CodeTrie
from histocc.predict import __main__ as predict
from histocc.predict.coder import Coder, Prefixes
from histocc.predict.config import get_args_parser
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.sample.files import write
from histocc.sample.generate import rows as sample_rows
from histocc.text import encode

WRITING = Writing([0.7, 1.9], [0.6, 1.5], [0.8, -0.3])
NOTHING = Writing([1.0, 1.0], [1.0, 0.0], [1.0, 0.0])


def some_inputs(number=24):
    ids, mask = (torch.from_numpy(array) for array in encode(TEXTS[:number], ["en"] * number))
    return ids, mask


class TestWriting:
    def test_probabilities_sum_to_one_and_nothing_fitted_changes_nothing(self):
        logits = 3 * torch.randn(4, 11, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        found = WRITING.log_softmax(logits, 5)
        assert (found.exp().sum(-1) - 1).abs().max() < 1e-12
        assert (NOTHING.log_softmax(logits, 5) - logits.log_softmax(-1)).abs().max() < 1e-12
        for place in range(11):
            one = WRITING.log_softmax(logits[:, place : place + 1], 5, place)
            assert (one - found[:, place : place + 1]).abs().max() < 1e-12
        odds = logits[:, 5, PAD_IDX] - torch.cat([logits[:, 5, :1], logits[:, 5, 2:]], 1).logsumexp(1)
        assert (found[:, 5, PAD_IDX] - (0.6 * odds + 1.5).sigmoid().log()).abs().max() < 1e-12

    @pytest.mark.parametrize("target_mask", [True, False])
    def test_sets_have_the_probability_that_is_fitted(self, target_mask):
        """What coding computes step by step, what it computes over all orders, and what the fit computes
        from its grid are the same; the codes are those without it.
        """
        formatter, writing = (
            hisco_blocky5(),
            Writing([float(GRID[12]), float(GRID[40])], [0.6, 1.5], [0.8, -0.3]),
        )
        model = make_model(formatter, 30).double()
        model.decoder.target_mask = target_mask
        ids, mask = some_inputs()
        plain_blocks, _, plain = decoding.greedy_sets(model, ids, mask, formatter)
        blocks, _, found = decoding.greedy_sets(model, ids, mask, formatter, True, writing)
        assert torch.equal(blocks, plain_blocks) and (found - plain).abs().max() > 0.01
        with torch.no_grad():
            memory, _ = model.encode(ids, mask)
            padding = model.memory_padding_mask(mask)
            distinct = decoding.distinct_blocks(blocks)
            sets = decoding.set_probs(model, memory, padding, distinct, writing)
            assert (writing.log_set(sets.log()).exp() - found).abs().max() < 1e-9
            one = ((distinct != PAD_IDX).any(-1).sum(1) == 1).nonzero()[:, 0]
            assert len(one) > 2
            codes = distinct[one][(distinct[one] != PAD_IDX).any(-1)][:, None]
            places = Sequences.of(
                torch.arange(len(one)), *decoding.code_logits(model, memory[one], padding[one], codes, 5), 5
            )
        at = places.log_prob(len(one), 12, 40, torch.tensor(writing.end, dtype=torch.float64))
        assert (writing.log_set(at).exp() - found[one]).abs().max() < 1e-9


class TestRanking:
    @pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
    @pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
    def test_topk_is_full_and_the_order_stays(self, share, temperature):
        ranking = Ranking(temperature, [0.6, -0.8])
        formatter, codes = KEYS["hisco"]
        model = make_model(formatter, len(codes)).double()
        ids, mask = inputs(model)
        tree = CodeTrie(codes, formatter)
        before, one = CodeSearch(model, tree, share), CodeSearch(model, tree, share, ranking)
        raw, found = before.full(ids, mask), one.full(ids, mask)
        assert torch.equal(raw.sort(1, descending=True).indices, found.sort(1, descending=True).indices)
        assert found.sum(1).max() <= 1 + 1e-12
        scaled = (raw.log() / temperature).log_softmax(1)
        odds = 0.6 * log_odds(scaled.max(1).values) - 0.8
        assert (found.max(1).values - odds.sigmoid()).abs().max() < 1e-9
        for k in (1, 3, len(codes)):
            numbers, probs = one.topk(ids, mask, k)
            best, order = found.topk(k)
            assert torch.equal(numbers, order) and (probs - best).abs().max() < 1e-9

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_topk_of_a_large_key_leaves_out_no_more_than_it_says(self, temperature, monkeypatch):
        monkeypatch.setattr("histocc.model.search.MAX_OPENED", 10**9)  # never by way of all codes
        codes = [
            f"{a}{b}{c}{d}{e}" for a in "0123" for b in "0123" for c in "0123" for d in "01" for e in "01"
        ]
        model = make_model(hisco_blocky5(), len(codes))
        with torch.no_grad():
            model.decoder.head.weight.mul_(10)
        for share in (0.0, 0.5):
            one = CodeSearch(model, CodeTrie(codes, hisco_blocky5()), share, Ranking(temperature, [1.0, 0.0]))
            best, order = one.full(*some_inputs()).topk(3)
            numbers, probs = one.topk(*some_inputs(), 3)
            assert torch.equal(numbers, order) and ((probs - best) / best).abs().max() < 1e-3

    def test_prefixes_hold_the_sum_of_their_codes(self):
        codes = ["12345", "12346", "12999", "20000", "-1"]
        prefixes = Prefixes(codes, hisco_blocky5())
        probs = np.array([0.5, 0.2, 0.1, 0.15, 0.05])
        for least, expected in (
            (0.4, ("12345", 0.5)),
            (0.6, ("1234", 0.7)),
            (0.75, ("12", 0.8)),
            (0.9, ("", 0.0)),
        ):
            prefix, prob = prefixes.longest("12345", probs, least)
            assert (prefix, prob) == (expected[0], pytest.approx(expected[1]))
        assert prefixes.longest("-1", probs, 0.01)[0] == "-1" and prefixes.longest("-1", probs, 0.1)[0] == ""
        assert prefixes.longest("12000", probs, 0.75)[0] == "12"  # written digit by digit, not of the key


class TestFit:
    """On answers whose probability of being right is known."""

    def test_a_ranking(self):
        draw = np.random.default_rng(1)
        scores = torch.from_numpy(2.5 * draw.normal(size=(4000, 30)))
        true = (0.7 * log_odds((scores / 2).log_softmax(1).max(1).values) + 0.5).sigmoid().numpy()
        right = torch.from_numpy(draw.random(4000) < true)
        ranked = Ranked.of(scores)
        found = confidence.fit_ranking(ranked, right, torch.ones(4000, dtype=torch.float64))
        at = int(np.abs(GRID - found.temperature).argmin())
        assert np.abs(found.log_best(ranked.log_prob(at)).exp().numpy() - true).mean() < 0.02

    def test_written_codes(self):
        draw = torch.Generator().manual_seed(2)
        logits = 2 * torch.randn(3000, 6, 8, dtype=torch.float64, generator=draw)
        logits[:, :5, PAD_IDX] = -20
        logits[:, 5, PAD_IDX] += 3
        tokens = logits.argmax(-1)
        tokens[:, 5] = PAD_IDX
        places = Sequences.of(torch.arange(3000), logits, tokens, 5)
        true = places.log_prob(3000, 20, 30, torch.tensor([1.0, 2.0], dtype=torch.float64)).exp()
        right = torch.rand(3000, dtype=torch.float64, generator=draw) < true
        found = confidence.fit_written(places, right, torch.ones(3000, dtype=torch.float64))
        at = [int(np.abs(GRID - each).argmin()) for each in found.temperatures]
        fitted = found.log_set(places.log_prob(3000, *at, torch.tensor(found.end, dtype=torch.float64))).exp()
        assert (fitted - true).abs().mean() < 0.03
        raw = places.log_prob(3000, 30, 30, torch.tensor([1.0, 0.0], dtype=torch.float64)).exp()
        assert (raw - true).abs().mean() > 0.06  # or this shows nothing

    def test_outputs(self):
        draw = torch.Generator().manual_seed(3)
        logits = 2 * torch.randn(4000, 20, dtype=torch.float64, generator=draw) - 3
        hits = torch.rand(4000, 20, dtype=torch.float64, generator=draw) < (0.5 * logits - 1).sigmoid()
        on = logits == logits.max(1, keepdim=True).values
        of_sets = features(logits, on)
        true = (of_sets @ torch.tensor([0.3, 0.4, 0.0, 0.2], dtype=torch.float64)).sigmoid()
        right = torch.rand(4000, dtype=torch.float64, generator=draw) < true
        weight = torch.ones(4000, dtype=torch.float64)
        found = confidence.fit_outputs(logits, hits, of_sets, right, weight)
        assert found.each == pytest.approx([0.5, -1.0], abs=0.1)
        assert (found.conf(of_sets) - true).abs().mean() < 0.03

    def test_texts_weigh_the_same_however_many_rows_they_have(self):
        draw = np.random.default_rng(4)
        scores, right = torch.from_numpy(draw.normal(size=(300, 5))), torch.from_numpy(draw.random(300) < 0.6)
        texts = np.arange(300).astype(np.uint64)
        once, _ = confidence.fit(None, None, (Ranked.of(scores), right), None, texts)
        again = torch.cat([torch.arange(300), torch.zeros(500, dtype=torch.int64)])
        answers = None, None, (Ranked.of(scores[again]), right[again]), None
        often, _ = confidence.fit(*answers, texts[again.numpy()])
        assert once.texts == often.texts == 300 and once.ranking is not None and often.ranking is not None
        assert once.ranking.temperature == often.ranking.temperature
        assert once.ranking.best == pytest.approx(often.ranking.best, abs=1e-5)


def test_a_share_is_kept_from_the_confidence_that_most_answers_have():
    conf = np.array([0.9, 0.8, 0.8, 0.6, 0.5, 0.4])
    right, weight = np.array([True, True, False, True, True, False]), np.ones(6)
    assert curve(conf, right, weight)[1] == (0.8, 0.5, pytest.approx(2 / 3))
    fitted = Confidence(6, curves={"topk": curve(conf, right, weight)})
    assert fitted.limit("full", 0.8) == (0.5, pytest.approx(5 / 6))
    assert fitted.limit("topk", 1.0) == (0.9, pytest.approx(1 / 6))
    assert Confidence(6, curves={"topk": curve(conf, ~right, weight)}).limit("topk", 0.9) == (math.inf, 0.0)


FLAGS = [
    *TINY[:-2],
    "--target-cols",
    "hisco_1",
    "hisco_2",
    "hisco_3",
    "--formatter",
    "hisco",
    "--language-col",
    "lang",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder with a run of few steps, and its rows."""
    folder = tmp_path_factory.mktemp("confidence")
    write(sample_rows(700, 1), str(folder / "rows.csv"))
    write(sample_rows(120, 9), str(folder / "new.csv"))
    said = run(FINETUNE, *flags(folder), "--max-steps", 2)
    assert "best.bin and last.bin: confidence is fitted on" in said, said
    return folder


def flags(folder):
    return ["--dataset", folder / "rows.csv", *FLAGS, "--share-val", 0.6, "--save-path", folder / "run"]


def coded(folder, name, *more):
    code, said = run_inside(
        predict.main,
        *("--model", folder / "run", "--input", folder / "new.csv", "--column", "occ1", "--language-column"),
        *("lang", "--system", "found", "--output", folder / name, "--device", "cpu", "--overwrite", *more),
    )
    assert code == 0, said
    with open(folder / name, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file)), said


class TestModel:
    def test_checkpoints_hold_it_and_a_finished_run_stays_as_it_is(self, trained):
        files = [trained / "run" / name for name in ("best.bin", "last.bin")]
        held = [checkpoint.load(str(file))["confidence"] for file in files]
        assert held[0] == held[1] and held[0]["texts"] >= 200
        assert set(held[0]["curves"]) == {"greedy", "flat", "both", "topk"}
        assert set(held[0]["accuracy"]) == {"greedy", "flat", "both"}
        before = [file.read_bytes() for file in files]
        said = run(FINETUNE, *flags(trained), "--max-steps", 2)
        assert "nothing" in said.lower() and before == [file.read_bytes() for file in files]

    def test_what_is_not_the_runs_own_is_neither_read_nor_written(self, trained, tmp_path):
        """A link, a file that is no checkpoint, and one on other data; beside them the run's own."""
        data = PreparedData.open(*glob.glob(str(trained / "run" / "prepared" / "*")))
        state = checkpoint.load(str(trained / "run" / "last.bin"))
        state["confidence"] = None
        names = [
            str(tmp_path / name) for name in ("own.bin", "link.bin", "text.bin", "other.bin", "gone.bin")
        ]
        checkpoint.replace(names[0], state)
        (tmp_path / "link.bin").symlink_to(names[0])
        (tmp_path / "text.bin").write_text("mine")
        state["position"] = {**state["position"], "fingerprint": "another"}
        checkpoint.replace(names[3], state)
        assert steps_without(names, data) == {2: [names[0]]}

    def test_a_report_says_whether_it_is_about_the_texts_that_were_fitted_on(self, trained, tmp_path):
        codes = [row[2] for row in sample_rows(30, 1)]
        new = [(f"nobody {i}", "en", code) for i, code in enumerate(codes)]
        write_csv(tmp_path / "new.csv", ("occ1", "lang", "hisco_1"), new)
        known = (trained / "rows.csv", ["--share-val", 0.6])
        unknown = (tmp_path / "new.csv", ["--target-cols", "hisco_1"])
        for (data, share), said_so in ((known, True), (unknown, False)):
            folder = tmp_path / str(said_so)
            code, said = run_inside(
                evaluate.main,
                *("--model", trained / "run", "--data", data, *share, "--output", folder),
                *("--device", "cpu", "--resamples", 5),
            )
            assert code == 0, said
            text = (folder / "report.md").read_text(encoding="utf-8")
            assert ("those that the run was validated on, and its confidence" in text) == said_so
            assert "as it was fitted on" in text and "| to be right in, % |" in text

    @pytest.mark.full
    @pytest.mark.processes
    def test_a_run_that_ended_before_is_fitted_and_two_processes_find_the_same(self, trained, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "rows.csv").write_bytes((trained / "rows.csv").read_bytes())
        state = checkpoint.load(str(trained / "run" / "last.bin"))
        held = state.pop("confidence")
        checkpoint.replace(str(tmp_path / "run" / "last.bin"), state)
        said = run(
            "histocc.evaluate",
            *("--model", tmp_path / "run" / "last.bin", "--data", tmp_path / "rows.csv", "--share-val", 0.6),
            *("--output", tmp_path / "report", "--device", "cpu", "--fit-confidence", "--resamples", 5),
            processes=2,
        )
        assert "confidence is fitted on" in said
        found = checkpoint.load(str(tmp_path / "run" / "last.bin"))["confidence"]
        assert found["texts"] == held["texts"]
        for name in ("written", "outputs", "ranking", "both"):
            for part, value in held[name].items():
                assert found[name][part] == pytest.approx(value, rel=1e-2, abs=1e-2), (name, part)

    @pytest.mark.parametrize("decoder", ["greedy", "flat", "both", "topk", "full"])
    def test_codes_are_the_same_and_probabilities_are_not(self, trained, decoder):
        coder, raw = (Coder.load(str(trained / "run"), raw_confidence=each) for each in (False, True))
        texts = [row[0] for row in sample_rows(60, 9)]
        found, before = (each.code(texts, ["en"] * 60, decoder) for each in (coder, raw))
        assert [each.codes for each in found] == [each.codes for each in before]
        changes = np.array([[a.conf or 0, b.conf or 0] for a, b in zip(found, before)])
        assert np.abs(changes[:, 0] - changes[:, 1]).max() > 1e-3 and ((changes >= 0) & (changes <= 1)).all()
        if decoder in ("topk", "full"):
            assert all(each.conf == each.probs[0] >= each.probs[-1] for each in found)
            assert max(sum(each.probs) for each in found) <= 1 + 1e-6

    def test_commands_and_calls_use_it(self, trained):
        texts = [row[0] for row in sample_rows(30, 9)]
        found, raw = (OccCANINE(str(trained / "run"), "cpu", raw_confidence=each) for each in (False, True))
        a, b = (each.predict(texts, "en", get_dict=True) for each in (found, raw))
        assert [row["hisco_1"] for row in a] == [row["hisco_1"] for row in b]
        assert [row["conf"] for row in a] != [row["conf"] for row in b]
        rows, _ = coded(trained, "coded.csv")
        plain, _ = coded(trained, "raw.csv", "--raw-confidence")
        assert [row["found_1"] for row in rows] == [row["found_1"] for row in plain]
        assert [row["conf"] for row in rows] != [row["conf"] for row in plain]

    def test_target_accuracy_marks_what_is_less_sure(self, trained):
        least, share = Coder.load(str(trained / "run")).confidence.limit("topk", 0.3)
        rows, said = coded(trained, "target.csv", "--decoder", "topk", "--target-accuracy", "0.3")
        assert (
            f"Rows with conf below {least:.3g} get needs_review" in said and f"on {share:.1%} of the" in said
        )
        marked = [row["needs_review"] == "1" for row in rows]
        assert marked == [float(row["conf"]) < least for row in rows] and 0 < sum(marked) < len(marked)
        state = checkpoint.load(str(trained / "run" / "last.bin"))
        state["confidence"]["curves"]["flat"] = [[0.7, 0.5, 0.8], [0.4, 1.0, 0.6]]
        checkpoint.replace(str(trained / "other.bin"), state)
        more = ("--model", trained / "other.bin", "--decoder", "flat", "--target-accuracy", "0.9")
        rows, said = coded(trained, "target.csv", *more)
        assert "Rows with conf below inf get needs_review" in said and {
            row["needs_review"] for row in rows
        } == {"1"}

    def test_columns_of_the_same_name(self, trained):
        flags = ["--model", trained / "run", "--input", trained / "new.csv", "--output", trained / "x.csv"]
        code, said = run_inside(predict.main, *flags, "--system", "prob")
        assert code == 2 and "--system prob: its columns would have the names of others" in said

    @pytest.mark.parametrize(
        "flag, value", [("--back-off", "0"), ("--target-accuracy", "0"), ("--raw-confidence", None)]
    )
    def test_what_decides_the_output_tells_it_from_others(self, trained, flag, value):
        args = ["--model", str(trained / "run"), "--input", str(trained / "new.csv"), "--output", "x.csv"]
        found = []
        for more in ([], [flag] if value is None else [flag, value]):
            asked = get_args_parser().parse_args([*args, *more])
            found.append(predict.Coding(asked, asked.input, World()).settings())
        name = flag[2:].replace("-", "_")
        assert found[0][name] != found[1][name]

    def test_back_off_writes_a_prefix_beside_the_code(self, trained):
        rows, _ = coded(trained, "prefix.csv", "--decoder", "topk", "--back-off", "0.3")
        lengths = {len(row["found_prefix"]) for row in rows}
        assert len(lengths) > 1
        for row in rows:
            assert row["found_1"].startswith(row["found_prefix"])
            assert not row["found_prefix"] or float(row["prob_prefix"]) >= min(0.3, float(row["conf"]))
            assert row["found_prefix"] == row["found_1"] or float(row["conf"]) < 0.3

    @pytest.mark.parametrize(
        "more, message",
        [
            (
                ["--target-accuracy", "0.9", "--min-prob", "0.1"],
                "--min-prob and --target-accuracy are mutually",
            ),
            (["--target-accuracy", "0.9", "--raw-confidence"], "leave --raw-confidence out"),
            (["--target-accuracy", "1.2"], "'1.2' is not a number between 0 and 1"),
        ],
    )
    def test_arguments_that_do_not_go_together(self, trained, more, message, tmp_path):
        flags = ["--model", trained / "run", "--input", trained / "rows.csv", "--output", tmp_path / "x.csv"]
        code, said = run_inside(predict.main, *flags, *more)
        assert code == 2 and message in said

    def test_fewer_than_200_texts_are_said_and_nothing_is_fitted(self, trained, tmp_path):
        write(sample_rows(100, 3), str(tmp_path / "rows.csv"))
        code, said = run_inside(
            evaluate.main,
            *("--model", trained / "run" / "last.bin", "--data", tmp_path / "rows.csv", "--output"),
            *(tmp_path / "report", "--device", "cpu", "--fit-confidence", "--resamples", 5),
        )
        assert code == 0 and "Confidence is not fitted:" in said and "it takes 200 (take more rows)" in said
        said = run(FINETUNE, *flags_of(tmp_path), "--max-steps", 1)
        assert "Confidence is not fitted:" in said and "--share-val is the share" in said
        state = checkpoint.load(str(tmp_path / "run" / "last.bin"))
        assert state.get("confidence") is None
        with pytest.raises(UserError, match="its confidence was not fitted"):
            Coder.load(str(tmp_path / "run")).confidence.limit("greedy", 0.9)

    @pytest.mark.parametrize(
        "change, message",
        [
            ({"texts": "x"}, "'x'"),
            ({"ranking": {"temperature": 0.0, "best": [1.0, 0.0]}}, "temperatures above 0"),
            ({"written": {"temperatures": [1.0]}}, "expected 2 numbers"),
            ({"outputs": {"each": [1.0, 0.0], "set": [1.0]}}, "expected 4 numbers"),
            ({"curves": {"topk": [[0.1, 2.0]]}}, "expected 3 numbers"),
        ],
    )
    def test_an_entry_that_is_not_as_it_is_written(self, trained, change, message, tmp_path):
        state = checkpoint.load(str(trained / "run" / "last.bin"))
        state["confidence"] = {**state["confidence"], **change}
        checkpoint.replace(str(tmp_path / "last.bin"), state)
        with pytest.raises(UserError, match=message):
            Coder.load(str(tmp_path / "last.bin"))

    def test_of_a_flat_decoder_alone(self):
        found = Outputs([1.0, 0.0], [1.0, 0.0, 0.0, 0.0])
        logits = torch.tensor([[2.0, -3.0, -1.0]])
        on = torch.tensor([[True, False, False]])
        alone = torch.tensor(2.0).sigmoid() * torch.tensor(3.0).sigmoid() * torch.tensor(1.0).sigmoid()
        assert found.conf(features(logits, on))[0] == pytest.approx(float(alone), abs=1e-6)


def flags_of(folder):
    return ["--dataset", folder / "rows.csv", *FLAGS, "--save-path", folder / "run"]

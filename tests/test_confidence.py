"""How sure a model is: what is fitted, where it is kept, and that it changes no code."""

import glob
import math
import re
import shlex
import shutil

import numpy as np
import pytest
import torch
from helpers import DEFAULT, read, run, run_here, words, write_csv

import finetune
from histocc import OccCANINE
from histocc.data.arrays import PreparedData
from histocc.evaluate import __main__ as evaluate
from histocc.figure import LEFT_OUT, Figure, may_have_seen, percent
from histocc.logistic import fit_logistic, logistic
from histocc.model import confidence
from histocc.model.confidence import OUTPUTS, Confidence, curve, log_odds
from histocc.predict import __main__ as predict
from histocc.predict.coder import Coder
from histocc.predict.fitting import RANKED_FILE, fit_ranked, judged_answers, unfitted
from histocc.review import __main__ as review
from histocc.runtime import checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.sample.__main__ import write_rows
from histocc.sample.generate import rows as sample_rows


def with_map(*weights, name="topk"):
    return Confidence(1, {name: list(weights)})


class TestMap:
    def test_what_changes_nothing_and_what_is_not_fitted(self):
        probs = torch.tensor([[0.7, 0.2, 0.1], [1e-9, 0.999, 0.0]], dtype=torch.float64)
        for same in (Confidence(), with_map(1.0, 0.0, 0.0, 0.0)):
            assert torch.allclose(same.mapped("topk", probs), probs, atol=2e-7)
            assert torch.allclose(same.ranked(probs), probs, atol=2e-7)

    @pytest.mark.parametrize("weights", [(0.3, 0.0, 0.0, -0.5), (2.0, 0.5, 0.0, 1.0), (0.1, 1.0, 0.0, 3.0)])
    def test_the_best_code_has_its_own_probability_and_the_order_stays(self, weights):
        draw = torch.Generator().manual_seed(1)
        probs = (3 * torch.randn(50, 30, dtype=torch.float64, generator=draw)).softmax(1)
        fitted = with_map(*weights)
        found, best = fitted.ranked(probs), probs.max(1)
        assert torch.equal(found.argsort(1, descending=True), probs.argsort(1, descending=True))
        assert torch.equal(found.gather(1, best.indices[:, None])[:, 0], fitted.mapped("topk", best.values))
        assert found.min() >= 0 and found.sum(1).max() <= 1 + 1e-9

    def test_it_is_found_again(self):
        """From answers that are right as often as a known map says, in whichever rows."""
        draw = np.random.default_rng(1)
        probs, several = draw.random(20_000), draw.random(20_000) < 0.3
        known = with_map(0.6, 0.4, -1.0, 0.3)
        true = known.mapped("topk", torch.from_numpy(probs), torch.from_numpy(several)).numpy()
        right = draw.random(20_000) < true
        weights = confidence.fit(probs, several, right, np.ones(20_000))
        found = with_map(*weights).mapped("topk", torch.from_numpy(probs), torch.from_numpy(several)).numpy()
        assert np.abs(found - true).mean() < 0.01 < 0.05 < np.abs(probs - true).mean()
        twice = np.concatenate([np.arange(20_000), np.zeros(500, dtype=np.int64)])
        weight = np.where(twice == 0, 1 / 501, 1.0)  # of a text with 501 rows
        again = confidence.fit(probs[twice], several[twice], right[twice], weight)
        assert again == pytest.approx(weights, abs=1e-6)

    @pytest.mark.parametrize("probs", [np.ones(300), np.zeros(300), np.full(300, 0.5), np.ones(1)])
    def test_answers_that_say_little_leave_it_finite(self, probs):
        for right in (np.ones(len(probs), dtype=bool), np.arange(len(probs)) % 2 == 0):
            assert np.isfinite(confidence.fit(probs, np.zeros(len(probs)), right, np.ones(len(probs)))).all()

    def test_scores_far_from_its_beginning_do_not_make_it_diverge(self):
        """Undamped steps leave the optimum for weights of thousands."""
        draw, prior = np.random.default_rng(1), {"mean": (3.0, 3.0, -2.0), "deviation": (3.0,) * 3}
        for share in (0.2, 0.4, 0.6, 0.8):
            score = draw.uniform(0.9, 1.0, 200)
            x, right = np.stack([score, score, np.ones(200)], 1), draw.random(200) < share
            weights = fit_logistic(x, right, np.ones(200), **prior)
            assert abs(logistic(x @ weights).mean() - right.mean()) < 0.01

    def test_one_that_is_off_is_not_used(self, capsys):
        x, right = np.array([[math.nan, 1.0], [0.5, 1.0]] * 5), np.arange(10) < 5
        assert fit_logistic(x, right, np.ones(10), (3.0, -2.0), (1.0, 1.0)).tolist() == [3.0, -2.0]
        assert "are not used (hits: 5, expected: nan)" in capsys.readouterr().out


def test_the_many_codes_behind_the_first_places_take_nothing_from_these():
    """Their own probabilities sum to 2; the second place is right as often as its map says."""
    first = torch.tensor([0.7, 0.2, 0.02, 0.01, 0.005])
    logits = torch.cat([first, torch.linspace(0.003, 0.001, 1000)])[None]
    fitted = Confidence(1, dict.fromkeys(OUTPUTS, [1.0, 0.0, 0.0, 0.0]), several=False)
    found = fitted.outputs(logits, torch.tensor([0.7]), 1005)
    assert found[0, :5].tolist() == pytest.approx([0.7, 0.2, 0.02, 0.01, 0.005])
    assert found.sum() <= 1 + 1e-6 and found.diff().max() <= 0
    for number in (9, 5, 2, 1):
        some = fitted.outputs(logits[:, :number], torch.tensor([0.7]), 1005)
        assert torch.allclose(some, found[:, :number])


def test_a_share_is_kept_from_the_confidence_that_most_answers_have():
    conf = np.array([0.9, 0.8, 0.8, 0.6, 0.5, 0.4])
    right, weight = np.array([True, True, False, True, True, False]), np.ones(6)
    assert curve(conf, right, weight)[1] == [0.8, 0.5, pytest.approx(2 / 3)]
    assert [point[0] for point in curve(conf, right, weight, 3)] == [0.9, 0.6, 0.4]
    fitted = Confidence(6, curves={"topk": curve(conf, right, weight)})
    assert fitted.limit("topk", 0.8) == (0.5, pytest.approx(5 / 6))
    assert fitted.limit("topk", 1.0) == (0.9, pytest.approx(1 / 6))
    assert Confidence(6, curves={"topk": curve(conf, ~right, weight)}).limit("topk", 0.9) == (math.inf, 0.0)


@pytest.mark.parametrize(
    "gains, losses, best", [(0, 0, "flat"), (1, 0, "flat"), (2, 0, "both"), (6, 4, "flat"), (8, 4, "both")]
)
def test_flat_is_taken_unless_another_is_ahead_by_a_standard_error(gains, losses, best):
    right = np.arange(40) < 20
    both = np.concatenate([right[losses:], np.ones(gains), np.zeros(losses)])
    flat = np.concatenate([right[losses:], np.zeros(gains), np.ones(losses)])
    assert confidence.most_accurate({"greedy": 0.0 * flat, "flat": 0.5 * flat, "both": 0.5 * both}) == best
    accuracy = {"flat": float(flat.mean()), "both": float(both.mean())}
    found, why = Confidence(40, accuracy=accuracy, best=best).best_decoder("mixer")
    assert found == best and ("chance" in why) == (gains > losses and best == "flat")


SHARE = 0.75
FLAGS = words("--ngram-passes 2 --target-cols hisco_1 hisco_2 hisco_3 --formatter hisco --language-col lang")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder with a run of few steps, and its rows."""
    folder = tmp_path_factory.mktemp("confidence")
    write_rows(sample_rows(320, 1), str(folder / "rows.csv"))
    write_rows(sample_rows(30, 9), str(folder / "new.csv"))
    said = run_here(finetune.main, *flags(folder), "--max-steps", 2)
    assert "last.bin: confidence is fitted on" in said, said
    return folder


def flags(folder, share=SHARE):
    given = ["--dataset", folder / "rows.csv", "--save-path", folder / "run", "--share-val", share]
    return [*given, *DEFAULT, *FLAGS]


def coded(folder, name, *more):
    said = run_here(
        predict.main,
        *("--model", folder / "run", "--input", folder / "new.csv", "--column", "occ1", "--language-column"),
        *("lang", "--system", "found", "--output", folder / name, "--device", "cpu", "--overwrite", *more),
    )
    return read(folder / name), said


@pytest.fixture(scope="module")
def ranked(trained):
    """(rows, what was said) of the first coding by a decoder that ranks all codes."""
    before = (trained / "run" / "best.bin").read_bytes()
    assert "Fitting" not in coded(trained, "flat.csv", "--decoder", "flat")[1]
    found = coded(trained, "ranked.csv", "--decoder", "full")
    assert (trained / "run" / "best.bin").read_bytes() == before
    return found


class TestModel:
    def test_checkpoints_hold_it_and_a_finished_run_stays_as_it_is(self, trained, monkeypatch):
        files = [trained / "run" / name for name in ("best.bin", "last.bin")]
        held = [checkpoint.load(str(file))["confidence"] for file in files]
        assert held[0]["texts"] == held[1]["texts"] >= 200
        assert set(held[0]["curves"]) == {"greedy", "flat", "both"}
        assert set(held[0]["accuracy"]) == {"greedy", "flat", "both"} > {held[0]["best"]}
        before = [file.read_bytes() for file in files]
        load, read_files = checkpoint.load, []
        monkeypatch.setattr(checkpoint, "load", lambda path: read_files.append(path) or load(path))
        said = run_here(finetune.main, *flags(trained), "--max-steps", 2)
        assert "nothing" in said.lower() and before == [file.read_bytes() for file in files]
        assert sorted(read_files) == list(map(str, files))  # each once
        said = run_here(finetune.main, *flags(trained), "--max-steps", 2, "--eval-only")
        assert "validation" in said and read_files[2:] == [str(files[0])]

    def test_what_is_not_the_runs_own_is_neither_read_nor_written(self, trained, tmp_path):
        """A link, a file that is no checkpoint, and one on other data; beside them the run's own."""
        data = PreparedData.open(*glob.glob(str(trained / "run" / "prepared" / "*")))
        state = checkpoint.load(str(trained / "run" / "last.bin"))
        state["confidence"] = state["figure"] = None
        names = [f"{tmp_path}/{name}.bin" for name in ("own", "link", "text", "other", "gone")]
        checkpoint.rewrite(names[0], state)
        (tmp_path / "link.bin").symlink_to(names[0])
        (tmp_path / "text.bin").write_text("mine")
        state["position"] = {**state["position"], "fingerprint": "another"}
        checkpoint.rewrite(names[3], state)
        assert [name for name in names if unfitted(name, data)] == names[:1]

    def test_a_report_says_whether_it_is_about_the_texts_that_were_fitted_on(self, trained, tmp_path):
        codes = [row[2] for row in sample_rows(30, 1)]
        new = [(f"nobody {i}", "en", code) for i, code in enumerate(codes)]
        write_csv(tmp_path / "new.csv", ("occ1", "lang", "hisco_1"), new)
        known = (trained / "rows.csv", ["--share-val", SHARE])
        unknown = (tmp_path / "new.csv", ["--target-cols", "hisco_1"])
        for (data, share), said_so in ((known, True), (unknown, False)):
            folder = tmp_path / str(said_so)
            how = ["--output", folder, "--device", "cpu"]
            run_here(evaluate.main, "--model", trained / "run", "--data", data, *share, *how)
            text = (folder / "report.md").read_text(encoding="utf-8")
            assert ("the model was validated on " in text) == said_so
            assert "are right, fitted on" in text and "## Coded automatically" in text

    def test_a_card_says_of_which_texts_its_figures_are(self, trained):
        state = checkpoint.load(str(trained / "run" / "last.bin"))
        fitted, texts = state["confidence"], len(state["validated"])
        assert f"{100 * fitted['accuracy'][fitted['best']]:.1f} % of {texts:,} texts" in str(Figure.of(state))
        held = dict(share=0.625, texts=900, share_of_rows=0.7, rows=900, source=LEFT_OUT, decoder="flat")
        begin = "62.5 % of 900 texts that the model has not seen got exactly their codes"
        said = f"{begin} (95 % interval 59.3 to 65.6; training texts, each left out of the fit"
        assert str(Figure(**held)) == f"{said})"
        assert may_have_seen({"prior": {"source": "published"}}) == "prior"
        assert str(Figure(**held, unsure="prior")) == f"{said}; whether the prior has seen them is not known)"
        assert Figure.of({"figure": held}) == Figure(**held) and Figure.of({"figure": None}) is None

    @pytest.mark.full
    @pytest.mark.processes
    def test_a_run_that_ended_before_is_fitted_and_two_processes_find_the_same(self, trained, tmp_path):
        (tmp_path / "run").mkdir()
        (tmp_path / "rows.csv").write_bytes((trained / "rows.csv").read_bytes())
        state = checkpoint.load(str(trained / "run" / "last.bin"))
        held = state.pop("confidence")
        checkpoint.rewrite(str(tmp_path / "run" / "last.bin"), state)
        said = run(
            "histocc.evaluate",
            *("--model", tmp_path / "run" / "last.bin", "--data", tmp_path / "rows.csv", "--share-val"),
            *(SHARE, "--output", tmp_path / "report", "--device", "cpu", "--fit-confidence"),
            processes=2,
        )
        assert "confidence is fitted on" in said
        found = checkpoint.load(str(tmp_path / "run" / "last.bin"))["confidence"]
        assert found["texts"] == held["texts"]
        assert found["accuracy"] == pytest.approx(held["accuracy"])
        for name, weights in held["maps"].items():
            assert found["maps"][name] == pytest.approx(weights, rel=1e-2, abs=1e-2), name

    @pytest.mark.parametrize("share", [0.0, 0.5])
    def test_topk_is_fitted_on_its_own_answers_and_batches_change_no_confidence(self, trained, share):
        """Also where the model is so sure that float32 does not tell its probability from 1."""
        coder = Coder.load(str(trained / "run"), raw_confidence=True)
        coder.linear_share, texts, languages = share, [f"farmer {i}" for i in range(40)], ["en"] * 40
        if share:
            with torch.no_grad():
                coder.model.linear_decoder.bias[coder.codes.index("61110")] += 36
        coded, found = coder.code(texts, languages, "topk", 1), []
        for one_of in (1, 4):
            given = texts, languages, [{"61110"}] * 40, np.ones(40), one_of
            found.append([answer[0] for answer in judged_answers(coder, ["topk"], *given)["topk"]])
        assert found[0] == [one.probs[0] for one in coded] and {*found[1]} <= {*found[0]}
        assert 0 < len(found[1]) < 20 and (not share or 1e-7 < 1 - max(found[0]) < 1e-6)
        coder.batch_size = 7
        other = [one.conf for one in coder.code(texts, languages, "topk", 1)]
        odds = log_odds(torch.tensor([other, found[0]]))
        assert (odds[0] - odds[1]).abs().max() < 1e-3

    def test_all_places_are_judged_where_a_text_has_one_code(self, trained):
        coder = Coder.load(str(trained / "run"), raw_confidence=True, choices=len(OUTPUTS))
        coder.thresholds = coder.thresholds._replace(at_least_one=True, at_most=1)
        found = judged_answers(coder, ["flat"], ["farmer"], ["en"], [{"61110"}], np.ones(1))
        assert [len(found[name]) for name in OUTPUTS] == [1] * len(OUTPUTS)

    @pytest.mark.parametrize("decoder", ["greedy", "flat", "both", "topk", "full"])
    def test_codes_are_the_same_and_probabilities_are_not(self, trained, ranked, decoder):
        coder, raw = (Coder.load(str(trained / "run"), raw_confidence=each) for each in (False, True))
        fit_ranked(coder, str(trained / "run" / "best.bin"), decoder, World())
        texts = [row[0] for row in sample_rows(30, 9)]
        found, before = (each.code(texts, ["en"] * 30, decoder) for each in (coder, raw))
        assert [each.codes for each in found] == [each.codes for each in before]
        changes = np.array([[a.conf or 0, b.conf or 0] for a, b in zip(found, before)])
        assert np.abs(changes[:, 0] - changes[:, 1]).max() > 1e-3 and ((changes >= 0) & (changes <= 1)).all()
        if decoder in ("topk", "full"):
            assert all(each.conf == each.probs[0] >= each.probs[-1] for each in found)
            assert max(sum(each.probs) for each in found) <= 1 + 1e-6

    def test_that_of_topk_is_fitted_once_when_it_is_asked_for(self, trained, ranked, tmp_path):
        """And says what to do where the rows of the run are gone; the checkpoint stays as it is."""
        rows, said = ranked
        assert "Fitting the confidence of topk" in said and "Expected to be right" in said
        assert {row["conf_fitted"] for row in rows} == {"1"}
        again, said = coded(trained, "ranked.csv", "--decoder", "full")
        assert "Fitting" not in said and again == rows
        gone = shutil.ignore_patterns("prepared", RANKED_FILE)
        shutil.copytree(trained / "run", tmp_path / "run", ignore=gone)
        rows, said = coded(trained, "ranked.csv", "--model", tmp_path / "run", "--decoder", "topk")
        assert "confidence of topk is not fitted; histocc evaluate CODED.csv --model " in said
        assert {row["conf_fitted"] for row in rows} == {"0"} and not (tmp_path / "run" / RANKED_FILE).exists()

    def test_target_accuracy_marks_what_is_less_sure(self, trained, ranked):
        coder = Coder.load(str(trained / "run"))
        fit_ranked(coder, str(trained / "run" / "best.bin"), "topk", World())
        least, share = coder.confidence.limit("topk", 0.3)
        rows, said = coded(trained, "target.csv", "--decoder", "topk", "--target-accuracy", "0.3")
        assert f"rows with conf below {least:.3g} get needs_review" in said
        assert f"30.0 % were right, and {percent(share)} of the texts" in said
        marked = [row["needs_review"] == "1" for row in rows]
        assert marked == [float(row["conf"]) < least for row in rows] and 0 < sum(marked) < len(marked)
        state = checkpoint.load(str(trained / "run" / "last.bin"))
        state["confidence"]["curves"]["flat"] = [[0.7, 0.5, 0.8], [0.4, 1.0, 0.6]]
        checkpoint.rewrite(str(trained / "other.bin"), state)
        more = ("--model", trained / "other.bin", "--decoder", "flat", "--target-accuracy", "0.9")
        rows, said = coded(trained, "target.csv", *more)
        assert "at no conf are 90.0 % of answers right, so every row gets needs_review" in said
        assert {row["needs_review"] for row in rows} == {"1"}

    def test_commands_and_calls_use_it(self, trained):
        texts = [row[0] for row in sample_rows(30, 9)]
        found, raw = (OccCANINE(str(trained / "run"), "cpu", raw_confidence=each) for each in (False, True))
        a, b = (each.predict(texts, "en", get_dict=True) for each in (found, raw))
        assert [row["hisco_1"] for row in a] == [row["hisco_1"] for row in b]
        assert [row["conf"] for row in a] != [row["conf"] for row in b]
        rows, usual = coded(trained, "coded.csv")
        plain, _ = coded(trained, "raw.csv", "--raw-confidence")
        assert [row["conf"] for row in rows] != [row["conf"] for row in plain]
        write_csv(trained / "other.csv", ["occ1", "lang"], [["hyvinvointiyhtymä", "fi"], ["", "en"]])
        _, said = coded(trained, "other_coded.csv", "--input", trained / "other.csv", "--system", "hisco")
        unlike = "these texts are unlike those on which the confidence was fitted: the model knows"
        assert unlike in said and unlike not in usual
        make, apply, fit = re.findall(r"  histocc (.*)", said)  # they run as they are typed
        for command in (make, apply, fit):
            module, *given = shlex.split(command)
            main = {"review": review.main, "evaluate": evaluate.main}[module]
            found = run_here(main, *given)
            if command is make:
                sheet = re.search(r"--output (\S+)", make)[1]
                rows = read(sheet)
                rows = [{**row, "decision": "61110"} for row in rows]
                write_csv(sheet, [*rows[0]], [row.values() for row in rows])
        assert "Confidence is not fitted: it takes 200 distinct texts" in found

    def test_fewer_than_200_texts_are_said_and_nothing_is_fitted(self, trained, tmp_path):
        write_rows(sample_rows(40, 3), str(tmp_path / "rows.csv"))
        how = ["--output", tmp_path / "report", "--device", "cpu", "--fit-confidence"]
        how += ["--model", trained / "run" / "last.bin", "--data", tmp_path / "rows.csv"]
        said = run_here(evaluate.main, *how)
        assert "Confidence is not fitted:" in said and "200" in said
        said = run_here(finetune.main, *flags(tmp_path, 0.1), "--max-steps", 1)
        assert "Confidence is not fitted:" in said and "train with a larger --share-val" in said
        state = checkpoint.load(str(tmp_path / "run" / "last.bin"))
        assert state.get("confidence") is None
        with pytest.raises(UserError, match="--target-accuracy: how often run is right is not known"):
            Coder.load(str(tmp_path / "run")).need_fitted("--target-accuracy", ["greedy"], "run")

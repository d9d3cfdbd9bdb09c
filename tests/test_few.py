"""Runs with few texts, learned in closed form on another model's answers: mathematics, files, coding."""

import os
import shutil
from collections import Counter, defaultdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import FINETUNE, TITLES, read, read_logs, run, run_here, write_csv
from preparing import HEADER, quiet, settings_for

import finetune
from histocc import OccCANINE, export, plot
from histocc.data.arrays import PreparedData
from histocc.data.learned import hashes_of, trained_answers
from histocc.data.prepare import prepare
from histocc.formatter import hisco_blocky5
from histocc.job import config
from histocc.job import few as job
from histocc.learn import closed_form
from histocc.learn.closed_form import Settings
from histocc.learn.few import FewTexts, Learned, judge, learn
from histocc.model.levels import Levels
from histocc.model.ngrams import PATTERNS, WORDS
from histocc.model.ridge import prior_columns
from histocc.predict import __main__ as predicting
from histocc.predict.coder import Coder
from histocc.published.models import load_model
from histocc.runtime import checkpoint
from histocc.runtime.device import settings_of_torch
from histocc.sample.__main__ import write_rows
from histocc.sample.generate import rows as sample_rows
from histocc.text import text_hashes
from histocc.watch import view

pytestmark = pytest.mark.processes
COLUMNS = ["occ1", "lang", "hisco_1"]
PLACES = ["of the parish", "in town", "retired", "journeyman", "at the mill", "and son"]


# ---- the mathematics


@pytest.fixture(scope="module")
def sixty(tmp_path_factory) -> PreparedData:
    """60 texts, some in several rows, one of them in two languages, and with two sets of codes."""
    folder = tmp_path_factory.mktemp("sixty")
    rows = [
        (f"{TITLES[i % 8][0]} {PLACES[i * 5 % 6]} {i % 11}", TITLES[(i + i % 7 % 3) % 8][1], "", "en")
        for i in range(59)
    ]
    rows += [rows[3], rows[3], rows[9], (rows[9][0], "61110", "41025", "en"), (*rows[9][:3], "da")]
    source = write_csv(folder / "data.csv", (*HEADER, "lang"), rows)
    how = settings_for(source, cols=HEADER[1:], language_col="lang")
    return PreparedData.open(prepare(how, str(folder), quiet))


def answer(texts, languages):
    """Made-up answers of a prior with 12 codes: probabilities that depend on the text."""
    seeds = [sum(map(ord, text + language)) for text, language in zip(texts, languages)]
    draws = [torch.Generator().manual_seed(seed) for seed in seeds]
    return torch.stack([(2 * torch.randn(12, generator=draw)).softmax(0) for draw in draws])


def prior_of(places, answers=answer, seen=lambda texts: np.full(len(texts), False)):
    return SimpleNamespace(answers=answers, places=lambda _: places, seen=seen)


def few_texts(data, prior=None):
    return FewTexts(data, [*PATTERNS, *WORDS], 128, prior, dtype=torch.float64)


@pytest.mark.parametrize("settings", [Settings(0.25, 0.4, 0.5), Settings(0.8, 0.8, 1.0), Settings(0.3, 0, 0)])
def test_scores_of_texts_that_are_left_out_are_those_of_fits_without_them(sixty, settings):
    """A text in two languages is left out as one."""
    codes, places = len(sixty.codes), torch.tensor([3, 0, -1, 4, *[-1] * 7, 2])
    few = few_texts(sixty, prior_of(places))
    texts, groups = few.texts, few.groups()
    assert len(texts.weight) == 60 and sorted(map(len, groups)) == [1] * 58 + [2]
    weights = sorted(texts.weight.square().tolist())
    assert weights == pytest.approx([1] * 58 + [3, 3]) and 0.6 < texts.target.max(1).values.min() < 0.7
    solved = closed_form.solve(texts, settings, groups)
    prior = torch.zeros(60, codes, dtype=torch.float64)
    for i, place in enumerate(places.tolist()):
        if place >= 0:
            prior[:, place] = texts.answers[:, i]
    phi, similar = texts.ngrams.to_dense(), prior_columns(texts.answers)
    kernel = phi @ phi.T + settings.similarity * similar @ similar.T
    assert phi.square().sum(1).min() > 0.9 and similar.square().sum(1).numpy() == pytest.approx(np.ones(60))
    left_out = []
    for group in groups:
        rest = [i for i in range(60) if i not in group.tolist()]
        matrix = kernel[rest][:, rest] + torch.diag(settings.penalty / texts.weight[rest])
        coefficients = torch.linalg.solve(matrix, texts.target[rest] - settings.share * prior[rest])
        scores = settings.share * prior[group]
        scores[:, solved.outputs] += (kernel[group][:, rest] @ coefficients)[:, solved.outputs]
        left_out.append(scores)
    expected = torch.cat(left_out)
    assert torch.allclose(solved.left_out, expected, rtol=0, atol=1e-9)
    right = texts.target[torch.cat(groups)].gather(1, expected.argmax(1, keepdim=True)).mean()
    assert 0.05 < right < 0.95


def test_nested_fits_are_those_to_the_first_texts_alone(sixty):
    prior, settings = prior_of(torch.tensor([3, 0, -1, 4, *[-1] * 7, 2])), Settings(0.3, 0.4, 0.5)
    few = few_texts(sixty, prior)
    texts = few.texts.take(torch.stack([group[0] for group in few.groups()]))
    sizes = []
    for size, scores in closed_form.nested(texts, settings, [20, 59]):
        sizes.append(size)
        some, rest = torch.arange(size), torch.arange(size, 59)
        solved = closed_form.solve(texts.take(some), settings, [*some[:, None]])
        columns = closed_form.joined_features(texts, settings).to_dense()
        others = columns[rest] @ columns[some].T @ solved.coefficients
        others += settings.share * texts.prior()[rest][:, solved.outputs]
        expected = torch.cat([solved.left_out[:, solved.outputs], others])
        assert torch.allclose(scores[:, solved.outputs], expected, rtol=0, atol=1e-9)
    assert sizes == [20, 59]


def test_settings_are_the_usual_ones_unless_others_are_clearly_ahead(sixty):
    few, codes, others = few_texts(sixty), torch.arange(12), torch.full((12,), -1)
    codes[len(sixty.codes) :] = -1
    assert closed_form.choose(few.texts) == Settings(0.8, 0.0, 0.0)
    assert closed_form.choose(few.texts.take(torch.zeros(0, dtype=torch.int64))) == Settings(0.8, 0.0, 0.0)
    knows = few_texts(sixty, prior_of(codes, lambda *_: torch.eye(12)[few.texts.target.argmax(1)]))
    assert closed_form.choose(knows.texts) == Settings(0.8, 0.4, 0.5)
    guesses = few_texts(sixty, prior_of(codes))
    assert closed_form.choose(guesses.texts)[1:] == (0.0, 0.0)
    # a prior with other codes has no share in a score
    knows.texts = knows.texts._replace(places=others)
    chosen = closed_form.choose(knows.texts)
    assert knows.texts.prior() is None and chosen.similarity > 0 == chosen.share


@pytest.mark.parametrize("ahead, threshold, source", [(1, 0.5, "usual"), (4, 0.7, "fitted")])
def test_another_threshold_needs_a_clear_lead(sixty, ahead, threshold, source):
    """With 0.7, so many texts lose a second code that is wrong."""
    few = few_texts(sixty)
    chosen = torch.arange(10, 30)  # of one code each
    codes = few.texts.target[chosen].argmax(1, keepdim=True)
    logits = torch.full((len(chosen), few.texts.target.shape[1]), -9.0).scatter(1, codes, 3.0)
    logits[:ahead].scatter_(1, (codes[:ahead] + 1) % logits.shape[1], 0.4)
    learned = Learned(Settings(0.8, 0.0, 0.0), {}, {}, logits, chosen, np.ones(len(chosen)))
    found = judge(few, learned, 2, Levels(few.data.codes, hisco_blocky5()))["thresholds"]
    assert (found["default"], found["source"]) == (threshold, source)


def test_texts_that_the_prior_has_seen_are_not_left_out(sixty):
    hashes = few_texts(sixty).data.train.text_hash
    seen = np.unique(np.asarray(hashes).view(np.int64))[::2]
    prior = prior_of(torch.arange(-1, 11).clamp(max=3), seen=lambda x: np.isin(hashes_of(x, "as-is"), seen))
    few = FewTexts(sixty, [*PATTERNS], 128, prior)
    left_out = np.asarray(hashes).view(np.int64)[few.first[torch.cat(few.groups()).numpy()]]
    assert len(few.texts.weight) == 60 and 25 < len(left_out) < 35 and not {*left_out} & {*seen}


def test_texts_with_the_same_first_column_are_left_out_together(tmp_path):
    """As a split keeps them together: otherwise the figure is that of texts known with another shop."""
    rows = [(f"{TITLES[i % 8][0]} {i % 20}", f"shop {i % 3}", TITLES[i % 8][1]) for i in range(120)]
    source = write_csv(tmp_path / "data.csv", ("occ1", "shop", "hisco_1"), rows)
    how = settings_for(source, input_col=["occ1", "shop"])
    few = few_texts(PreparedData.open(prepare(how, str(tmp_path), quiet)))
    own = few.data.train.strings(few.first)
    groups = [{own[i] for i in group} for group in few.groups()]
    firsts = [{text.partition(" ␟ ")[0] for text in group} for group in groups]
    assert sorted(map(min, firsts)) == sorted({row[0] for row in rows}) and {*map(len, firsts)} == {1}
    assert sum(map(len, groups)) == len(own) == len({row[:2] for row in rows}) > len(groups)
    assert learn(few).weight.sum() == len(own)
    prior = prior_of(torch.full((12,), -1), seen=lambda texts: np.array(texts) == own[0])
    few = few_texts(few.data, prior)
    assert len(few.groups()) == len(groups) - 1  # a text that the prior has seen cannot be left out


def test_a_text_with_several_languages_counts_once(sixty):
    few = few_texts(sixty)
    assert round(learn(few).weight.sum()) == len(np.unique(few.text_hash)) == len(few.text_hash) - 1


def agreement(rows):
    """Return the conf of each different text in the "answers" of rows (text, code)."""
    texts, codes = zip(*rows)
    columns = np.array(codes)[:, None], np.zeros(len(rows), np.uint8)
    made = SimpleNamespace(text_hash=text_hashes(list(texts)), codes=columns[0], language=columns[1])
    held = trained_answers(made)
    return dict(zip(held["keys"].tolist(), held["conf"].tolist())), len(held["keys"])


def test_the_few_texts_that_a_list_of_distinct_rows_codes_twice_say_nothing_of_the_others():
    once = [(f"text {i}", i % 7) for i in range(500)]
    twice = [(f"text {i}", 8) for i in range(20)]
    confs, texts = agreement(once + twice)
    assert texts == 500 and sorted(np.round([*confs.values()], 2)) == [0.48] * 20 + [0.93] * 480
    confs, _ = agreement(once + twice + once[20:60])  # a register: of 60 texts in two rows 40 agree
    assert 0.65 < np.median([*confs.values()]) < 0.75


# ---- a run


@pytest.fixture(scope="module")
def prior(tmp_path_factory):
    """A model of made-up rows, without a prior of its own."""
    folder = tmp_path_factory.mktemp("prior")
    write_rows([(*row[:3], "", "") for row in sample_rows(200, 5)], str(folder / "rows.csv"))
    run_here(finetune.main, *flags(folder / "rows.csv", folder / "run", "--prior", "none"))
    return folder / "run"


def flags(data, folder, *more):
    how = ["--formatter", "hisco", "--target-cols", "hisco_1", "--language-col", "lang", "--device", "cpu"]
    return ["--dataset", data, "--save-path", folder, *how, *more]


def own_rows(number=200):
    """Rows of a register: its texts, one code each; a text in four rows of which three agree."""
    rows = [row[:3] for row in sample_rows(number, 8)]
    return [*rows, *[("tinker of wales", "en", "83110")] * 3, ("tinker of wales", "en", "61110")]


@pytest.fixture(scope="module")
def trained(prior, tmp_path_factory):
    """(folder of the run, what it said), on the answers of the prior, by two processes and by one."""
    folder = tmp_path_factory.mktemp("few")
    write_csv(folder / "rows.csv", COLUMNS, own_rows())
    how = [folder / "rows.csv", folder / "run", "--prior", prior]
    return folder / "run", run(FINETUNE, *flags(*how), processes=2)


def test_a_run_writes_one_model_one_row_of_the_log_and_its_figure(trained, prior):
    folder, said = trained
    assert os.path.samefile(folder / "last.bin", folder / "best.bin")
    (row,), state = read_logs(folder), checkpoint.load(str(folder / "last.bin"))
    held, number = state["confidence"], len(state["trained"])
    accuracy = held["accuracy"]["flat"]
    assert row["step"] == 0 and row["flat_acc"] == pytest.approx(accuracy) and 0.1 < accuracy < 0.9
    assert row["train_loss"] is None and state["step"] == 0
    figure = f"{100 * accuracy:.1f} % of {held['texts']} texts that the model has not seen got exactly their"
    card = (folder / "MODEL.md").read_text(encoding="utf-8")
    assert figure in card and figure in said and "trained on top of the answers of the model" in card
    assert "on rank 0; processes waiting for it: 1" in said
    # the texts that the prior has seen say nothing of new ones
    seen = np.isin(state["trained"].numpy(), checkpoint.load(str(prior / "last.bin"))["trained"].numpy())
    assert held["texts"] == number - seen.sum() and 0 < seen.sum() < number / 2
    key, own = read(folder / "key.csv"), {row[2] for row in own_rows()}
    assert [row["system_code"] for row in key if row["source"] == "data"] == sorted(own)
    of_prior = {row["system_code"] for row in key if row["source"] == "prior"}
    assert of_prior == {*Coder.load(str(prior)).codes} - own
    assert [*state["key"].items()] == [(row["system_code"], int(row["code"])) for row in key]
    assert {path.suffix for path in folder.iterdir() if "bin" in path.name} == {".bin"}
    assert (folder / "best.bin").stat().st_size < 20e6


def test_a_finished_run_says_what_was_typed_and_which_flags_count(trained, prior, tmp_path):
    folder, _ = trained
    how = flags(folder.parent / "rows.csv", folder, "--prior", prior)
    for share in ("0.1", "0.0"):
        said = run_here(finetune.main, *how, "--share-val", share, code=2)
        assert f"--share-val was 'auto', now it is {share}" in said
    assert "for none type --prior none" in run_here(finetune.main, *how, "--lexicon", "none", code=2)
    text, _ = view(str(folder))
    assert text.splitlines()[1].startswith("figure") and "of 0" not in text
    rows = write_csv(tmp_path / "in.csv", COLUMNS[:2], [("smith", "en")])
    given = ["--model", folder, "--input", rows, "--output", tmp_path / "out.csv", "--device", "cpu"]
    said = run_here(predicting.main, *given, "--system", "found")
    assert "Thresholds of the linear decoder: none; each text gets its most probable code" in said


def test_a_run_keeps_its_learning_curve(trained):
    """The last point is the figure of the run."""
    folder, state = trained[0], checkpoint.load(str(trained[0] / "last.bin"))
    held, number = state["confidence"], len(state["trained"])
    accuracy = held["accuracy"]["flat"]
    curve, new = read(folder / "learning_curve.csv"), held["texts"]
    assert [int(row["texts"]) for row in curve] == [*(round(new * i / 10) for i in range(1, 11)), number]
    assert [int(row["measured_on"]) for row in curve] == [new] * 11
    assert float(curve[-1]["accuracy"]) == pytest.approx(accuracy, abs=1e-4)
    assert all(float(row["low"]) < float(row["accuracy"]) < float(row["high"]) for row in curve)
    (points,) = [points for of_panel in plot.panels(str(folder)).values() for points in of_panel.values()]
    assert points[-1][:2] == (number, pytest.approx(100 * accuracy, abs=0.01))


def test_one_process_learns_the_same_and_a_finished_run_stays_as_it_is(trained, prior, tmp_path):
    folder, _ = trained
    how = [folder.parent / "rows.csv", tmp_path / "run", "--prior", prior]
    with settings_of_torch():
        torch.set_num_threads(2)
        run_here(finetune.main, *flags(*how))
    one, two = (checkpoint.load(str(path / "last.bin")) for path in (tmp_path / "run", folder))
    for part in ("model", "answers"):
        assert one[part].keys() == two[part].keys()
        assert all(torch.equal(weight, two[part][name]) for name, weight in one[part].items()), part
    assert one["confidence"] == two["confidence"] and one["thresholds"] == two["thresholds"]
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    said = run_here(finetune.main, *flags(*how))
    assert "is finished: nothing to do. --overwrite starts over" in said
    said = run_here(finetune.main, *flags(*how, "--max-steps", 3), code=2)
    assert "--max-steps" in said and "closed form" in said and "--overwrite" in said
    assert "--seed was 42, now it is 7" in run_here(finetune.main, *flags(*how, "--seed", 7), code=2)
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}


def code(model, folder, rows, *more):
    source, output = write_csv(folder / "in.csv", COLUMNS[:2], rows), folder / "out.csv"
    given = ["--model", model, "--input", source, "--output", output, "--device", "cpu", "--overwrite"]
    run_here(predicting.main, *given, "--language-column", "lang", "--system", "found", *more)
    return read(output)


def test_texts_of_the_training_have_its_codes_with_the_agreement_of_their_rows(trained, tmp_path):
    rows = own_rows()
    codes = defaultdict(Counter)
    for text, _, own in rows:
        codes[" ".join(text.casefold().split())][own] += 1
    repeated = [(sum(each.values()), each) for each in codes.values() if sum(each.values()) > 1]
    pairs = sum(sum(m * (m - 1) for m in each.values()) / (n * (n - 1)) for n, each in repeated)
    agreement = (pairs + 10 * 0.93) / (len(repeated) + 10)
    new = [("tinker of cornwall", "en"), ("FARMER of no parish at all", "en")]
    coded = code(trained[0], tmp_path, [*(row[:2] for row in rows), *new])
    assert [row["source"] for row in coded] == ["trained"] * len(rows) + ["model"] * 2
    for (text, *_), row in zip(rows, coded):
        of_text = codes[" ".join(text.casefold().split())]
        most, number = max(of_text.values()), sum(of_text.values())
        assert of_text[row["found_1"]] == most
        assert float(row["conf"]) == pytest.approx(most / (number + 1 / agreement - 1), rel=1e-4)
    assert [row["found_1"] for row in coded[-6:-2]] == ["83110"] * 4 and float(coded[-3]["conf"]) < 0.76


def test_probabilities_of_a_text_with_one_code_sum_to_one_at_most(trained, tmp_path):
    texts = [row[:2] for row in (*sample_rows(60, 77), *own_rows(20))]
    rows = code(trained[0], tmp_path, texts, "--choices", 5)
    for row in rows:
        probs = [float(row[f"choice_prob_{i}"] or 0) for i in range(1, 6)]
        assert sum(probs) <= 1 + 1e-5 and probs == sorted(probs, reverse=True) and probs[0] > 0
        assert probs[0] == pytest.approx(float(row["conf"]), rel=1e-4)
        assert row["choice_1"] == row["found_1"] and len({row[f"choice_{i}"] for i in range(1, 6)}) == 5
    every = Coder.load(str(trained[0])).probabilities(*map(list, zip(*texts)))
    assert every.sum(1).max() <= 1 + 1e-5 and every.min() >= 0


@pytest.mark.parametrize("decoder", ["greedy", "topk"])
def test_other_decoders_than_the_linear_one_say_what_to_type(trained, tmp_path, decoder):
    source = write_csv(tmp_path / "in.csv", COLUMNS[:2], [("baker", "en")])
    given = ["--model", trained[0], "--input", source, "--output", tmp_path / "x.csv", "--decoder", decoder]
    said = run_here(predicting.main, *given, code=2)
    assert f"decoder {decoder}: " in said and "--seq2seq-weight 0.1" in said
    assert not (tmp_path / "x.csv").exists()


def test_the_model_holds_its_prior(trained, prior, tmp_path):
    """It codes without the files of the prior, wherever it lies, and also after an export."""
    pytest.importorskip("safetensors")
    exports = {"published": tmp_path / "a" / "model.bin", "safetensors": tmp_path / "b" / "model.safetensors"}
    shutil.copy(trained[0] / "best.bin", tmp_path / "alone.bin")
    prior.rename(prior.with_name("gone"))
    texts = [row[0] for row in (*sample_rows(50, 6), *own_rows(20))]
    try:
        for form, path in exports.items():
            run_here(export.main, tmp_path / "alone.bin", "--to", form, path)
        paths = trained[0], tmp_path / "alone.bin", *exports.values()
        found = [OccCANINE(str(path), "cpu").predict(texts, "en", get_dict=True) for path in paths]
        seen = [load_model(str(path))[2]["trained"].tolist() for path in paths]
        how = flags(trained[0].parent / "rows.csv", trained[0], "--prior", prior)
        assert "is finished" in run_here(finetune.main, *how)
    finally:
        prior.with_name("gone").rename(prior)
    assert found == found[:1] * 4 and len({row["hisco_1"] for row in found[0]}) > 10
    assert seen == seen[:1] * 4 and len(seen[0]) > 150
    other = Coder.load(str(prior)).code(texts, ["en"] * len(texts))
    assert [one.codes for one in other] != [[row["hisco_1"]] for row in found[0]]


def test_codes_of_hisco_have_the_built_in_model_as_prior_without_its_formatter(prior, tmp_path, monkeypatch):
    monkeypatch.setattr("histocc.learn.prior.BUILT_IN", str(prior))
    source = write_csv(tmp_path / "rows.csv", ["text", "class"], [(row[0], row[2]) for row in own_rows()])
    how = ["--dataset", source, "--input-col", "text", "--target-cols", "class", "--device", "cpu"]
    run_here(finetune.main, *how, "--save-path", tmp_path / "run")
    state = checkpoint.load(str(tmp_path / "run" / "best.bin"))
    assert state["formatter"]["kind"] == "gpf" and state["config"]["ridge"]["share"] > 0
    assert {row["source"] for row in read(tmp_path / "run" / "key.csv")} == {"data", "prior"}


def test_a_prior_with_other_codes_describes_texts_and_adds_none(trained, prior, tmp_path):
    names = {code: f"class {i % 5}" for i, code in enumerate(sorted({row[2] for row in own_rows()}))}
    rows = [(text, language, names[code]) for text, language, code in own_rows()]
    source = write_csv(tmp_path / "rows.csv", [*COLUMNS[:2], "own"], rows)
    how = ["--dataset", source, "--save-path", tmp_path / "run", "--target-cols", "own", "--device", "cpu"]
    said = run_here(finetune.main, *how, "--prior", prior)
    assert [*read(tmp_path / "run" / "key.csv")[0]] == ["system_code", "code"]
    state = checkpoint.load(str(tmp_path / "run" / "best.bin"))
    assert {*state["key"]} == {*names.values()} and state["config"]["ridge"]["share"] == 0
    helps = "do not help: the model learns without a prior" not in said
    assert ("prior" in state) == helps and bool(state["config"]["ridge"]["prior"]) == helps


def test_a_prior_that_has_seen_every_text_leaves_nothing_to_measure(tmp_path):
    """With codes of another system nothing says that it helps, so the model learns without it."""
    rows = [(*row, f"class {row[2][:2]}") for row in own_rows(60)]
    source = write_csv(tmp_path / "rows.csv", [*COLUMNS, "own"], rows)
    how = ["--dataset", source, "--language-col", "lang", "--device", "cpu", "--target-cols"]
    run_here(finetune.main, *how, "hisco_1", "--prior", "none", "--save-path", tmp_path / "first")
    for column, has_figure in (("hisco_1", False), ("own", True)):
        more = [column, "--prior", tmp_path / "first", "--save-path", tmp_path / column]
        said = run_here(finetune.main, *how, *more)
        assert ("It has not been evaluated." in said) != has_figure == ("do not help" in said)
        assert ("The prior was trained on " in said) or has_figure
        state, (row,) = checkpoint.load(str(tmp_path / column / "best.bin")), read_logs(tmp_path / column)
        assert bool(state.get("confidence")) == has_figure == (row["flat_acc"] is not None)
        assert ("prior" in state) != has_figure


# ---- which rows are learned


def test_rows_that_are_set_aside_by_name_are_not_learned(prior, tmp_path):
    source = write_csv(tmp_path / "rows.csv", COLUMNS, own_rows())
    said = run_here(finetune.main, *flags(source, tmp_path / "run", "--prior", prior, "--share-val", 0.2))
    [folder] = (tmp_path / "run" / "prepared").iterdir()
    data, state = PreparedData.open(str(folder)), checkpoint.load(str(tmp_path / "run" / "best.bin"))
    assert 10 < len(data.val) and len(data.val) + len(data.train) == len(own_rows())
    validated = np.unique(np.asarray(data.val.text_hash).view(np.int64))
    assert state["validated"].tolist() == validated.tolist()
    assert not {*validated.tolist()} & {*state["trained"].tolist()}
    texts = data.val.strings(np.arange(len(data.val)))
    languages = [data.languages[i] for i in data.val.language]
    coded = Coder.load(str(tmp_path / "run")).code(texts, languages)
    right = [one.codes == [data.codes[i] for i in row if i >= 0] for one, row in zip(coded, data.val.codes)]
    assert not any(one.source == "trained" for one in coded)
    (row,) = read_logs(tmp_path / "run")
    is_new = ~np.isin(data.val.text_hash.view(np.int64), state["prior"]["trained"])
    _, text, times = np.unique(data.val.text_hash[is_new], return_inverse=True, return_counts=True)
    right = np.array(right)[is_new]
    assert row["flat_acc"] == pytest.approx((right / times[text]).sum() / len(times))
    of_rows = f"; {100 * right.mean():.1f} % of their {len(right)} rows" if len(right) > len(times) else ""
    assert f"{100 * row['flat_acc']:.1f} % of {len(times)} texts that the model has not seen" in said
    assert f"{of_rows}; validation texts" in said and not is_new.all()


def test_a_text_that_languages_code_differently_gets_the_codes_of_its_own(tmp_path):
    names = ["".join(pair) for pair in zip("bdfghklmnp" * 3, "aeiouyaeiouy" * 3, "rstvrstvrstv" * 3)]
    rows = [(name, language, code) for name in names for language, code in (("da", "61110"), ("en", "83110"))]
    how = flags(write_csv(tmp_path / "rows.csv", COLUMNS, rows * 2), tmp_path / "run", "--prior", "none")
    run_here(finetune.main, *how)
    coder = Coder.load(str(tmp_path / "run"))
    coded = coder.code([row[0] for row in rows], [row[1] for row in rows])
    assert [one.codes for one in coded] == [[row[2]] for row in rows]
    assert all(one.source == "trained" and one.conf > 0.8 for one in coded)
    assert coder.code([names[0]], ["fr"])[0].source == "model"


def test_more_texts_are_learned_by_steps_and_a_tenth_is_set_aside(prior, tmp_path, monkeypatch):
    texts = {(row[0].casefold(), row[1]) for row in own_rows(60)}  # one more than closed form takes
    for module in (job, config):
        monkeypatch.setattr(module, "FEW_TEXTS", len(texts) - 1)
    source = write_csv(tmp_path / "rows.csv", COLUMNS, own_rows(60))
    said = run_here(finetune.main, *flags(source, tmp_path / "named", "--prior", prior), code=2)
    assert f"at most {len(texts) - 1} distinct texts" in said
    how = flags(source, tmp_path / "run", "--prior", "none", "--ngrams", "auto")
    said = run_here(finetune.main, *how)
    assert "Fitting the n-grams and the linear decoder" in said and "closed form" not in said
    state = checkpoint.load(str(tmp_path / "run" / "best.bin"))
    assert state["args"]["share_val"] == "auto" and not state["config"].get("ridge")
    assert 0 < len(state["validated"]) < 0.3 * len(state["trained"]) and state["kind"] == "flat"
    said = run_here(finetune.main, *how)
    assert "is finished" in said

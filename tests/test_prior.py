"""What a run in closed form makes of odd priors and odd rows, and what becomes of its model elsewhere."""

import signal

import numpy as np
import pytest
import torch
from helpers import TITLES, read, run_here, words, write_csv, write_rows
from test_initial_weights import mixer

import finetune
from histocc import OccCANINE
from histocc.learn import closed_form
from histocc.learn import few as learn_few
from histocc.learn.texts import _counted, count_ngrams
from histocc.model.int8 import Int8Weight
from histocc.predict import __main__ as predict
from histocc.predict.coder import Coder
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision, has_int8
from histocc.runtime.errors import UserError
from histocc.runtime.signals import stop_request

HISCO = ["--formatter", "hisco", "--language-col", "lang", "--device", "cpu"]
ALONE = [*HISCO, "--model-size", "ngrams"]


def learned(folder, *flags, code=0):
    return run_here(finetune.main, *ALONE, "--save-path", folder, *flags, code=code)


def coded(model, rows, output, *flags):
    """What predict says, and its rows."""
    how = ["--model", model, "--input", rows, "--output", output, "--system", "P", "--processes", 1]
    said = run_here(predict.main, *how, "--overwrite", *flags)
    return said, read(output)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, rows, other rows) with models: old, without a prior; mixer.bin, encoder.bin; on_mixer."""
    folder = tmp_path_factory.mktemp("priors")
    rows, new = write_rows(folder / "rows.csv", 60), write_rows(folder / "new.csv", 30, 1000)
    weights = mixer().state_dict()
    torch.save({"model": weights}, folder / "mixer.bin")
    encoder = {name: x for name, x in weights.items() if name.startswith("encoder.")}
    torch.save({"model": encoder}, folder / "encoder.bin")
    learned(folder / "old", "--dataset", rows, "--prior", "none")
    learned(folder / "on_mixer", "--dataset", new, "--prior", folder / "mixer.bin")
    return folder, rows, new


# ---- priors


def test_priors_that_cannot_be_one_are_named(made, tmp_path):
    folder, rows, _ = made
    flags = ["--dataset", rows, "--prior"]
    for name, flag, why in (
        ("none_there", (), "--prior"),
        ("encoder.bin", (), "only an encoder, it cannot code"),
        ("on_mixer", (), "has a prior itself"),
        ("old", ("--model-size", "tiny"), "--prior is for models without encoder"),
        ("old", ("--initial-checkpoint", folder / "old"), "--prior is for models without encoder"),
        ("old", ("--max-steps", 1), "omit --prior"),
        ("old", ("--ngrams", 8), "omit --prior"),
    ):
        said = learned(tmp_path / "run", *flags, folder / name, *flag, code=2)
        assert why in said and str(folder / name) in said or "--prior is for" in said, said
        assert name != "none_there" or "Preparing" not in said


@pytest.mark.parametrize(
    "of, name, change",
    [
        ("model", "ridge.outputs", 1 << 20),
        ("model", "ridge.places", 1 << 20),
        ("model", "ridge.columns", 1 << 30),
        ("model", "ridge.offsets", 3),
        ("answers", "codes", 1 << 20),
        ("answers", "conf", None),
        ("prior", "name", None),
        ("prior", "key", {"61110": 0}),
    ],
)
def test_numbers_that_point_nowhere_are_one_message(made, tmp_path, of, name, change):
    state = checkpoint.load(str(made[0] / "on_mixer" / "best.bin"))
    if change is None:
        del state[of][name]
    elif isinstance(change, int):
        state[of][name].view(-1)[0] = change
    else:
        state[of][name] = change
    checkpoint.rewrite(str(tmp_path / "edited.bin"), state)
    how = ["--model", tmp_path / "edited.bin", "--input", made[1], "--output", tmp_path / "coded.csv"]
    said = run_here(predict.main, *how, "--system", "P", code=2)
    assert "edited.bin: cannot be read as a checkpoint" in said


def test_a_model_in_closed_form_has_no_weights_to_start_from(made, tmp_path):
    folder, rows, _ = made
    flags = ["--dataset", rows, "--max-steps", 1, "--initial-checkpoint"]
    assert "Or name it with --prior" in learned(tmp_path / "run", *flags, folder / "old", code=2)
    assert "--prior" not in learned(tmp_path / "run", *flags, folder / "on_mixer", code=2)
    with pytest.raises(UserError, match="cannot be trained further"):
        model = OccCANINE(str(folder / "on_mixer"), device="cpu")
        assert len(model(["farmer no 1"], lang="en")) == 1
        model.finetune(rows, save_path=str(tmp_path / "python"))


@pytest.mark.full
@pytest.mark.parametrize(
    "kind, codes", [("occ1950", ("100", "970")), ("gpf", ("AAA", "BBB")), ("auto", ("x.1", "y"))]
)
def test_priors_of_other_systems_and_languages(made, tmp_path, kind, codes):
    folder, rows, new = made
    pairs = [(f"{TITLES[i % 2][0]} {i}", codes[i % 2], "xx") for i in range(12)]
    other = write_csv(tmp_path / "other.csv", ("occ1", "mine_1", "lang"), pairs)
    flags = ["--dataset", other, "--formatter", kind, "--target-cols", "mine_1"]
    flags += ["--block-size", 3] * (kind == "gpf")
    learned(tmp_path / "of_other", *flags, "--prior", "none")
    learned(tmp_path / "on_other", "--dataset", new, "--prior", tmp_path / "of_other")
    learned(tmp_path / "other_on", *flags, "--prior", folder / "old")
    for name, table in (("on_other", rows), ("other_on", other)):
        _, answers = coded(tmp_path / name, table, tmp_path / "out.csv")
        assert all(row["P_1"] for row in answers)


# ---- rows


@pytest.mark.parametrize("prior", ["none", "old"])
def test_rows_that_teach_little(made, tmp_path, prior):
    """Texts that say nothing have no code."""
    name = prior if prior == "none" else made[0] / prior
    cases = {
        "one": [("pilot", "04220", "en")],
        "code": [(f"pilot {i}", "04220", "en") for i in range(24)],
        "text": [("pilot", "04220", "en")] * 9,
        "contrary": [("pilot", code, "en") for code in ("04220", "04220", "83110")],
        "languages": [(text, code, name) for text, code in TITLES for name in ("en", "da", "xx")],
        "signs": [("-", "04220", "en"), ("?", "83110", "en")],
        "two": [("smed", "83110", "da"), ("bonde", "61110", "da")] * 30,
    }
    for case, rows in cases.items():
        table = write_csv(tmp_path / f"{case}.csv", ("occ1", "hisco_1", "lang"), [*rows, ("", "-1", "en")])
        empty = ["--empty-text", "-1"] if case == "text" else []  # these are no answer
        learned(tmp_path / case, "--dataset", table, "--prior", name, *empty)
        texts = [*rows, ("…", "", ""), ("", "", "en")]
        new = write_csv(tmp_path / "new.csv", ("occ1", "hisco_1", "lang"), texts)
        _, [*answers, unknown, empty] = coded(tmp_path / case, new, tmp_path / "out.csv")
        assert unknown["P_1"] == empty["P_1"] == ""
        assert {row["source"] for row in answers} == {"trained"}
        right = [row["P_1"] == row["hisco_1"] for row in answers]
        assert sum(right) == len(rows) - (case == "contrary")
        assert all(0 < float(row["conf"]) < 1 for row in answers)


def test_great_weights_of_texts_that_are_alike_take_double_precision():
    """In single precision the matrix of these texts has no Cholesky factor; contradictions stay near ½."""
    torch.manual_seed(1)
    count, codes = 500, torch.arange(500) % 2
    ngrams = torch.nn.functional.normalize(torch.rand(1, 40), dim=1).repeat(count, 1).to_sparse_csr()
    texts = closed_form.Texts(ngrams, torch.eye(2)[codes], torch.full((count,), 1e5))
    settings, groups = closed_form.Settings(0.08, 0.0, 0.0), [torch.arange(1)]
    with pytest.raises(closed_form.LinAlgError):
        closed_form.solve(texts, settings, groups)
    solved = closed_form.solve(texts.double(), settings, groups)
    scores = ngrams.to_dense().double() @ (ngrams.to_dense().double().T @ solved.coefficients)
    assert torch.allclose(scores, torch.full_like(scores, 0.5), rtol=0, atol=1e-3)


def test_a_run_with_weights_from_one_to_a_million(tmp_path):
    pairs = [("farmer", "61110"), ("farmer.", "83110"), ("farmer,", "61110"), ("smith", "83110")]
    weights = [("en", 10_000), ("da", 1000), ("se", 1)]
    rows = [(text, code, language, weight) for text, code in pairs for language, weight in weights]
    rows.append(("tailor", "79100", "en", 1_000_000))
    table = write_csv(tmp_path / "rows.csv", ("occ1", "hisco_1", "lang", "n"), rows)
    flags = ["--dataset", table, "--weight-col", "n", "--prior", "none", "--target-cols", "hisco_1"]
    learned(tmp_path / "single", *flags)
    learned(tmp_path / "double", *flags, "--float64")
    texts = ["old farmer", "smith and tailor", "farmers"]
    one, two = (
        Coder.load(str(tmp_path / name), raw_confidence=True).probabilities(texts, ["en"] * 3, logits=True)
        for name in ("single", "double")
    )
    assert np.abs(one - two).max() < 0.5 and np.isfinite(one).all()  # of logits, 20 for a score of 1


def test_a_list_of_titles_is_said_and_measured_on_codes_that_several_titles_have(made, tmp_path):
    goods, stuffs = ["chair", "table", "barrel", "wheel", "basket"], ["oak", "elm", "ash", "iron", "brass"]
    titles = [(f"{a} {b} maker", f"{a[:2]}{b[:3]}", "en") for a in stuffs for b in goods]
    table = write_csv(tmp_path / "titles.csv", ("occ1", "code", "lang"), titles)
    flags = ["--prior", "none", "--target-cols", "code", "--formatter", "auto"]
    said = learned(tmp_path / "run", "--dataset", table, *flags)
    assert "are a list of titles (a code book); codes with one text: 25 of 25. " in said
    assert "% of " not in said and "It has not been evaluated." in said
    changed = [(text.replace("maker", "mkaer"), code, "en") for text, code, _ in titles]
    changed = write_csv(tmp_path / "new.csv", ("occ1", "true", "lang"), changed)
    _, rows = coded(tmp_path / "run", changed, tmp_path / "out.csv")
    assert all(row["P_1"] == row["true"] for row in rows)
    assert {(row["conf_fitted"], row["needs_review"]) for row in rows} == {("0", "0")}
    both = [*titles, *((f"{a} worker", "99", "en") for a in stuffs)]
    some = write_csv(tmp_path / "some.csv", ("occ1", "code", "lang"), both)
    said = learned(tmp_path / "some", "--dataset", some, *flags)
    assert "% of 5 texts that the model has not seen" in said
    sample = [*titles[:10], *((f"{a} baker in {b}", "77", "en") for a in stuffs for b in goods)]
    some = write_csv(tmp_path / "sample.csv", ("occ1", "code", "lang"), sample)
    said = learned(tmp_path / "sample", "--dataset", some, *flags)  # ten rare codes have few of its texts
    assert "list of titles" not in said and "% of 35 texts that the model has not seen" in said
    assert "list of titles" not in learned(tmp_path / "other", "--dataset", made[1], "--prior", "none")


# ---- long texts


def test_ngrams_alone_read_whole_texts_and_a_short_column_behind_them(tmp_path):
    """The last word decides here; an encoder's texts are cut, which is said with the remedy."""
    begin = "in the year of our lord the clerk of this parish did set down with care that he was "
    rows = [(f"{name} {begin * 3}{text}", text, code, "en") for name in "abcdef" for text, code in TITLES]
    header = ("occ1", "shop", "hisco_1", "lang")
    table = write_csv(tmp_path / "long.csv", header, rows)
    behind = write_csv(tmp_path / "behind.csv", header, [(begin * 3 + x[0][0], *x[1:]) for x in rows])
    new = [(f"x {begin * 4}{row[1]}", row[1], "", "en") for row in rows[:8]]
    new = write_csv(tmp_path / "new.csv", header, new)
    for data, columns in ((table, ["occ1"]), (behind, ["occ1", "shop"])):
        flags = ["--dataset", data, "--input-col", *columns, "--prior", "none", "--overwrite"]
        said = learned(tmp_path / "run", *flags)
        assert "cut" not in said and "100.0 % of " in said, said
        said, answers = coded(tmp_path / "run", new, tmp_path / "out.csv")
        assert "cut" not in said and [row["P_1"] for row in answers] == [code for _, code in TITLES]
    vast = write_csv(tmp_path / "vast.csv", header, [("x " * 10_000, "", "", "en")])
    said, _ = coded(tmp_path / "run", vast, tmp_path / "out.csv")  # no training reads more
    assert "the 16,384 positions that the model reads, which will be cut: 1\n" in said
    small = words("--model-size tiny --ngrams none --max-steps 1 --batch-size 16")
    said = learned(tmp_path / "encoder", "--dataset", table, *small)
    longest = max(len("en[SEP]" + row[0]) for row in rows) + 2
    assert "descriptions longer than the model reads, which are cut (" in said and "limit): 48 (" in said
    assert f"--max-len {longest} reads all of them" in said
    said, _ = coded(tmp_path / "encoder", new, tmp_path / "out.csv")
    assert "texts longer than the 128 positions that the model reads, which will be cut: 8 (train" in said


def test_ngrams_are_counted_in_parts():
    counted = np.zeros(0, np.int64), np.zeros(0, np.int64)
    for part in ([[3, 1], [3]], [[7, 3], [-2]], [[]]):
        counted = _counted(counted, [np.array(each, dtype=np.int64) for each in part])
    assert counted[0].tolist() == [-2, 1, 3, 7] and counted[1].tolist() == [1, 1, 3, 1]


# ---- the model elsewhere


@pytest.mark.full
@pytest.mark.skipif(not has_int8(), reason="this CPU has no instructions for int8")
def test_it_codes_in_other_precisions(made, tmp_path):
    folder, rows, _ = made
    usual = coded(folder / "on_mixer", rows, tmp_path / "out.csv")[1]
    for flag in ("--int8", "--bf16"):
        answers = coded(folder / "on_mixer", rows, tmp_path / "out.csv", flag)[1]
        assert sum(one["P_1"] == other["P_1"] for one, other in zip(answers, usual)) > 54
    prior = Coder.load(str(folder / "on_mixer"), precision=Precision("int8")).prior
    assert prior is not None
    held = [x for part in prior.model.encoder.modules() for x in vars(part).values()]
    assert any(isinstance(x, Int8Weight) for x in held)


def test_keys_and_a_dry_run_with_a_prior(made, tmp_path):
    folder, _, new = made
    codes = [*dict.fromkeys(code for _, code in TITLES), "04220"]
    numbers = [(code, i) for i, code in enumerate(codes)]
    key = write_csv(tmp_path / "key.csv", ("system_code", "code"), numbers)
    listed = write_csv(tmp_path / "codes.csv", ["hisco_1"], [[code] for code in codes])
    flags = ["--dataset", new, "--prior", folder / "mixer.bin"]
    for name, flag in (("key", ("--key", key)), ("codes", ("--all-codes-file", listed))):
        learned(tmp_path / name, *flags, *flag)
        assert {row["system_code"] for row in read(tmp_path / name / "key.csv")} == {*codes}
    assert "learning takes about" in learned(tmp_path / "dry", *flags, "--dry-run")
    assert not (tmp_path / "dry" / "best.bin").exists()


def test_a_stop_while_it_learns_leaves_no_model(made, tmp_path, monkeypatch):
    def count(*given):
        stop_request().signal = signal.SIGTERM
        return count_ngrams(*given)

    flags = ["--dataset", made[2], "--prior", made[0] / "mixer.bin"]
    with monkeypatch.context() as patch:
        patch.setattr(learn_few, "count_ngrams", count)
        assert "Stopped by SIGTERM" in learned(tmp_path / "run", *flags)
    assert not (tmp_path / "run" / "best.bin").exists()
    learned(tmp_path / "run", *flags)
    found, whole = (checkpoint.load(str(x / "best.bin")) for x in (tmp_path / "run", made[0] / "on_mixer"))
    assert all(torch.equal(found["model"][name], whole["model"][name]) for name in whole["model"])

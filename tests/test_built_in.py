"""The lists of titles, and the model that is made of them at first use."""

import contextlib
import csv
import multiprocessing
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import all_tests, read, read_logs, run_here, words, write_csv
from test_errors import in_child

import finetune
import histocc
from histocc import OccCANINE, export, lexicon
from histocc.data.arrays import PREPARED_FORMAT
from histocc.evaluate import __main__ as evaluate
from histocc.formatter import hisco_key
from histocc.predict import __main__ as predict
from histocc.published import built_in, models
from histocc.review import __main__ as review
from histocc.runtime.errors import UserError
from histocc.sample import built_in as making
from histocc.sample.generate import read as read_list

pytestmark = pytest.mark.processes
FEW = {"farmer": "61110", "blacksmith": "83110", "baker": "77610", "tailor": "79100", "weaver": "75400"}


@pytest.mark.parametrize("language", lexicon.LEXICON_LANGUAGES)
def test_a_title_has_one_code_of_hisco_in_its_language_and_is_written_plainly(language):
    path = Path(lexicon.__file__).with_name(f"{language}.csv")
    code_of = {
        title: row["hisco"] for row in read_list("occupations.csv") for title in row[language].split("|")
    }
    with open(path, encoding="utf-8") as file:
        rows = [(title, row["hisco"]) for row in csv.DictReader(file) for title in row["titles"].split("|")]
    assert [(title, code) for title, code in rows if code_of.setdefault(title, code) != code] == []
    assert {code for _, code in rows} <= {*hisco_key()}
    odd = re.compile(r'[;"|,]|^\s|\s$|\s\s|^$')
    assert [title for title, _ in rows if odd.search(title) or title != title.lower()] == []
    assert lexicon.titles(language).items() >= code_of.items()


@pytest.mark.parametrize(
    "language, texts",
    [
        ("en", {"-1": "deceased|born 1768|8 years old|leeds|not known"}),
        ("en", {"-3": "prisoner|schoolboy aged 8|workhouse inmate|daughter"}),
        ("da", {"-1": "afdød|aarhus", "-3": "almissehjon|fattighuslem|fange"}),
        ("se", {"-1": "avliden|kalmar", "-3": "fattighushjon|rotehjon|fånge", "99920": "backstugusittare"}),
        ("nl", {"-1": "overleden|amsterdam", "-3": "armlastige|gevangene|wed."}),
        ("ge", {"-1": "verstorben|berlin", "-3": "armenhäusler|insasse des armenhauses|gefangener"}),
        ("ge", {"07310": "hebamme", "61250": "holländer"}),
        ("fr", {"-1": "décédé|paris", "-3": "détenu|indigente|vve"}),
    ],
)
def test_what_is_no_occupation_is_in_the_lists(language, texts):
    expected = {text: code for code, of_code in texts.items() for text in of_code.split("|")}
    assert lexicon.titles(language).items() >= expected.items()


SPOKEN = lexicon.LEXICON_LANGUAGES if all_tests() else ("se", "ge")
SHARE = sum(len(lexicon.titles(language)) for language in SPOKEN) / 136_000


@pytest.fixture(scope="module")
def tables():
    """The rows of the built-in model, in these languages, without those of the sample."""
    speeches = [speech for speech in making.languages() if speech.tag in SPOKEN]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(making, "SAMPLE_ROWS", 0)
        patch.setattr(making, "languages", lambda: speeches)
        return making.tables()


def test_titles_are_cut_short_as_registers_do_it_unless_two_codes_could_be_meant(tables):
    short = {
        (language, text): lexicon.titles(language)[title]
        for language in SPOKEN
        for title, texts in making.title_abbreviations(language).items()
        for text in texts
    }
    abbreviations = {
        "en": "ag lab=62105|dom serv=54010|f.w.k.=75540",
        "da": "hmd.=61115|tjenestek.=62120|jordem.=07310",
        "se": "timm.=95410|fabr.arb.=99930",
        "nl": "boerenkn.=62120",
        "ge": "schneidermstr.=79100|arb.=99910",
        "fr": "journ.=99920",
    }
    for language in SPOKEN:
        for text, code in (pair.split("=") for pair in abbreviations[language].split("|")):
            assert short[language, text] == code, (language, text)
    assert ("ge", "zimmerm.") not in short  # zimmermann, zimmermeister
    table = {row[:3] for row in tables["train.csv"]}
    towns = {("Ashby", "en", "-1"), ("fra odense", "da", "-1"), ("från kalmar", "se", "-1")}
    assert {town for town in towns if town[1] in SPOKEN} <= table
    abbreviated = {(text, language, code) for (language, text), code in short.items()}
    assert len(table & abbreviated) > 10_000 * SHARE
    assert sum(text.startswith("frånskild ") for text, *_, code in table if code[0] != "-") > 100


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A built-in model of few titles, made by processes that are forked from this one, and their number."""
    monkeypatch.setenv(built_in.CACHE, str(tmp_path / "cache"))
    others = {f"q{letter}{letter}zzler": "83110" for letter in "abcdefghijklmno"}
    others["qpqzzler"] = "77610"  # which no text like it has
    monkeypatch.setattr(lexicon, "titles", lambda language: others | FEW if language == "en" else {})
    making.title_abbreviations.cache_clear()
    monkeypatch.setattr(making, "SAMPLE_ROWS", 400)
    monkeypatch.setattr(making, "LEFT_OUT_OF", 5)
    made = []

    @contextlib.contextmanager
    def started(line, **_):
        fork = multiprocessing.get_context("fork").Process
        processes = [fork(target=making.main, args=line[-1:]) for _ in "ab"]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            made.append(process.exitcode)
        yield SimpleNamespace(returncode=max(made))

    monkeypatch.setattr(built_in.subprocess, "Popen", started)
    return made


def test_is_made_once_by_two_processes_at_once_and_codes(small, tmp_path):
    texts = ["Blacksmith", "baker", "qpqzzler", "qacyzzler"]
    write_csv(tmp_path / "my.csv", ["occ1", "lang"], [[text, "en"] for text in texts])
    codes = ["83110", "77610", "77610", "83110"]
    for name, times in (("one", 1), ("two", 0)):
        given = ("--model", "built-in", "--input", tmp_path / "my.csv", "--output", tmp_path / f"{name}.csv")
        said = run_here(predict.main, *given, "--processes", 1)
        assert said.count("The built-in model is made once") == times
        coded = read(tmp_path / f"{name}.csv")
        assert [row["hisco_1"] for row in coded] == codes
        assert [row["source"] for row in coded] == ["list", "list", "list", "model"]
        assert all(0 < float(row["conf"]) < 1 for row in coded)
    assert small == [0, 0]
    losses = ["best.bin", "prepared"] if all_tests() else ["prepared"]  # to what cleans caches
    for lost in losses:
        [path] = (tmp_path / "cache").glob(f"*/{lost}")
        path.unlink() if path.is_file() else shutil.rmtree(path)
        said = run_here(predict.main, *given, "--processes", 1, "--overwrite", "--explain")
        assert "The built-in model is made once" in said
        assert [row["hisco_1"] for row in read(tmp_path / "two.csv")] == codes
    assert small == [0, 0] * (1 + len(losses))
    [folder] = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert {path.name for path in folder.glob("*.bin")} == {"best.bin"}
    card = (folder / "MODEL.md").read_text()
    assert "Files: data/train.csv, data/val.csv" in card and folder.name not in card
    assert "flat_acc" in (log := read_logs(folder)[-1]) and not {"seq_acc", "token_acc"} & set(log)
    model = OccCANINE("built-in")
    assert model.predict(["tailor"], lang="en")["hisco_1"].tolist() == ["79100"]
    assert model.model_type == "flat"
    table, sheet, final = (tmp_path / f"{name}.csv" for name in ("my", "sheet", "final"))
    run_here(review.main, "make", table, "--key", "hisco", "--output", sheet)
    sheet.write_text(re.sub(r"(.*baker.*),,t-", r"\1,77610,t-", sheet.read_text()))
    said = run_here(review.main, "apply", sheet, "--to", table, "--key", "hisco", "--output", final, "--fill")
    assert "first guesses come from the built-in model" in said
    assert [row["hisco_1"] for row in read(final)] == codes


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
def test_what_is_fitted_to_it_goes_into_a_folder_of_the_users(small, monkeypatch, tmp_path):
    """And nothing else that a command does changes the model that all projects share."""
    monkeypatch.chdir(tmp_path)
    texts = [f"{title} {a}{b}y" for a in "bcdfgh" for b in "aeiouklmnp" for title in FEW]
    rows = [[text, "en", FEW[text.split()[0]] if i % 3 else "83110"] for i, text in enumerate(texts)]
    write_csv(tmp_path / "coded.csv", ["occ1", "lang", "hisco_1"], rows)
    write_csv(tmp_path / "my.csv", ["occ1", "lang"], [["baker", "en"]])
    outline = models.outline("built-in")
    code = ("--input", "my.csv", "--overwrite", "--processes", 1, "--output")
    run_here(predict.main, *code, "before.csv")
    assert outline and models.outline("built-in") is None
    (_, formatter, state), (_, expected, made) = outline, models.load_model("built-in")
    assert formatter.to_dict() == expected.to_dict() and {*state["key"]} >= {*made["key"]}
    assert {"unk", *state["languages"]} >= {*made["languages"]} and state["kind"] == made["kind"]
    assert all(
        made[part][name] == value for part in ("config", "args") for name, value in state[part].items()
    )
    before = contents(tmp_path / "cache")
    given = ("--data", "coded.csv", "--target-cols", "hisco_1", "--processes", 1, "--model")
    run_here(evaluate.main, *given, "built-in")
    assert "exist; --overwrite" in run_here(evaluate.main, *given, "built-in", "--fit-confidence", code=2)
    [file] = (tmp_path / "cache").glob("*/best.bin")
    for model in ("built-in", file.parent):
        fit = ("--fit-confidence", "--fit-thresholds", "--output", tmp_path / f"fitted {Path(model).name}")
        said = run_here(evaluate.main, *given, model, *fit)
        assert f"{model} is unchanged: use --model {fit[-1]}" in said
        run_here(predict.main, *code, "after.csv", "--model", fit[-1])
        assert read("before.csv")[0]["conf"] != read("after.csv")[0]["conf"]
        assert read("before.csv")[0]["hisco_1"] == read("after.csv")[0]["hisco_1"]
    said = run_here(predict.main, *code, "why.csv", "--explain")
    assert "Computing the vectors" in said and read("why.csv")[0]["similar_text_1"] == "baker"
    with pytest.raises(UserError, match="name a folder for what is fitted"):
        evaluate.evaluate("built-in", "coded.csv", fit_confidence=True)
    write_csv(tmp_path / "odd.csv", ["occ1", "lang"], [["hyvinvointiyhtymä", "en"]] * 3)
    said = run_here(predict.main, *code, "odd_coded.csv", "--input", "odd.csv")
    assert re.search(r"histocc evaluate \S+ --model built-in .*--fit-confidence --output ", said)
    assert contents(tmp_path / "cache") == before


def test_another_constant_is_another_model_and_other_data(tmp_path):
    def names():  # of the copy, with torch from here
        for name in [name for name in sys.modules if name.partition(".")[0] == "histocc"]:
            del sys.modules[name]
        sys.path.insert(0, str(tmp_path))
        from histocc.data import arrays
        from histocc.published import built_in

        assert built_in.__file__.startswith(str(tmp_path))
        return built_in.path(), arrays.PREPARED_FORMAT

    copied = Path(shutil.copytree(Path(histocc.__file__).parent, tmp_path / "histocc"))
    own = built_in.path(), PREPARED_FORMAT
    assert in_child(names) == own
    changes = ("sample/built_in.py", "THRESHOLD = ", False), ("data/records.py", "MAX_WEIGHT = ", True)
    for file, constant, of_data in changes:
        text = (copied / file).read_text()
        assert text.count(f"\n{constant}") == 1
        (copied / file).write_text(text.replace(f"\n{constant}", f"\n{constant}1e-9 + "))
        path, data = in_child(names)
        assert path != own[0] and (data != PREPARED_FORMAT) == of_data
        (copied / file).write_text(text)


def test_names_are_checked_before_it_is_made(monkeypatch, tmp_path):
    monkeypatch.setenv(built_in.CACHE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    header = ["occ1", "lang", "hisco_1"]
    write_csv(tmp_path / "my.csv", header[:2], [["baker", "en"]])
    write_csv(tmp_path / "coded.csv", header, [["baker", "en", "77610"]])
    write_csv(tmp_path / "wrong.csv", header, [["baker", "en", "999"]])
    for given, what in {
        f"--output {'a' * 245}.csv": "a name has at most 240 bytes",
        "--column job": "has no column 'job'",
        "--language-column sprog": "has no column 'sprog'",
        "--language xx": "does not know the language 'xx'",
        "--threshold xx=0.5": "does not know the language 'xx'",
        "--known none.csv": "none.csv: no such file",
        "--known my.csv": "a column of codes (hisco_1)",
        "--known wrong.csv": "'999' is not a code of hisco",
        "--descriptions none.csv": "none.csv: no such file",
        "--input coded.csv": "several columns 'hisco_1'",
        "--decoder greedy": "this model has only the linear decoder",
    }.items():
        said = run_here(predict.main, *words("--input my.csv --output out.csv"), *words(given), code=2)
        assert what in said, said
    for given, what in {
        "--output my.csv": "is not a folder",
        "--data none.csv": "none.csv: no such file",
        "--target-cols hisco_1 c3": "has no column 'c3'",
        "--language-col sprog": "has no column 'sprog'",
        "--by decade": "has no column 'decade'",
    }.items():
        said = run_here(evaluate.main, *words("--model built-in --data coded.csv"), *words(given), code=2)
        assert what in said, said
    assert export.main(["built-in", "--to", "published", "my.csv/model.bin"]) == 2
    review_it = ("serve", "my.csv", "--key", "hisco", "--descriptions", "none.csv", "--no-browser")
    assert "none.csv: no such file" in run_here(review.main, *review_it, code=2)
    assert {path.name for path in tmp_path.iterdir()} == {"my.csv", "coded.csv", "wrong.csv"}


def test_titles_of_a_code_that_are_alike_are_left_out_together(tables):
    def pairs(title, language, code, *_):
        return {(language, code, end) for end in making.ends(title)}

    sample = read_list("occupations.csv")
    usual = {
        pair
        for row in sample
        for name in lexicon.LEXICON_LANGUAGES
        for title in row[name].split("|")
        for pair in pairs(title, name, row["hisco"])
    }
    kept = [pairs(*row) for row in tables["train.csv"] if row[0] in lexicon.titles(row[1])]
    kept = {pair for each in kept if each.isdisjoint(usual) for pair in each}
    left_out = [pairs(*row) for row in tables["val.csv"] if not row[3]]
    assert 200 < sum(bool(row[3]) for row in tables["val.csv"]) < 300  # or several codes would never be right
    assert 1_500 * SHARE < len(left_out) < 3_000 * SHARE and not any(
        each & usual or each <= kept for each in left_out
    )


def test_without_a_folder_for_it_one_message_says_what_to_do(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv(built_in.CACHE, str(tmp_path / "cache"))
    write_csv(tmp_path / "my.csv", ["occ1", "lang"], [["baker", "en"]])
    given = ("--model", "built-in", "--input", tmp_path / "my.csv", "--output", tmp_path / "out.csv")
    said = run_here(predict.main, *given, code=2)
    assert "cannot be the save folder" in said and "HISTOCC_CACHE names another folder" in said
    write_csv(tmp_path / "coded.csv", ["occ1", "lang", "hisco_1"], [["baker", "en", "77610"]])
    given = ("--dataset", tmp_path / "coded.csv", "--device", "cpu", "--save-path", tmp_path / "run")
    said = run_here(finetune.main, *given, code=2)
    assert "HISTOCC_CACHE names another folder" in said and "--prior none learns without it" in said


def test_runs_with_few_texts_stand_on_it_by_default_and_hold_it(small, tmp_path):
    """HISCO, and other codes in its languages; then they code without it."""
    rows = [
        [f"{title} {i}", "en", code, f"class {code[:2]}"] for i in range(8) for title, code in FEW.items()
    ]
    write_csv(tmp_path / "data.csv", ["occ1", "lang", "hisco_1", "own"], rows)
    write_csv(tmp_path / "my.csv", ["occ1", "lang"], [["qabzzler", "en"], ["baker 3", "en"]])
    given = ("--dataset", tmp_path / "data.csv", "--device", "cpu", "--save-path")
    said = run_here(finetune.main, *given, tmp_path / "hisco")
    assert said.count("The built-in model is made once") == 1 and "on top of the answers of built-in" in said
    assert "trained on top of the answers of the model built-in" in (tmp_path / "hisco/MODEL.md").read_text()
    said = run_here(finetune.main, *given, tmp_path / "own", "--target-cols", "own", "--dry-run")
    assert "learning takes about" in said and small == [0, 0]
    said = run_here(finetune.main, *given, tmp_path / "none", "--prior", "none")
    assert "built-in" not in said and {*read(tmp_path / "none/key.csv")[0]} == {"system_code", "code"}
    code = ("--input", tmp_path / "my.csv", "--overwrite", "--processes", 1, "--output", tmp_path / "out.csv")
    run_here(predict.main, "--model", tmp_path / "hisco", *code)
    coded = read(tmp_path / "out.csv")
    assert [row["hisco_1"] for row in coded] == ["83110", "77610"]
    assert [row["source"] for row in coded] == ["model", "trained"]
    shutil.rmtree(tmp_path / "cache")
    run_here(predict.main, "--model", tmp_path / "hisco", *code)
    assert read(tmp_path / "out.csv") == coded and not (tmp_path / "cache").exists()
    assert "is finished" in run_here(finetune.main, *given, tmp_path / "hisco")
    assert not (tmp_path / "cache").exists()

"""Evaluation: the same figures as training, on any number of processes; nothing vanishes in silence."""

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import DEFAULT, REPO, TITLES, read, read_logs, run_here, words, write_csv
from test_predict import CODES, make_model

import finetune
import train_mixer
from histocc import __version__, plot, watch
from histocc.data.split import split_values
from histocc.evaluate import __main__ as evaluate
from histocc.evaluate import compare
from histocc.evaluate import report as report_of
from histocc.evaluate.report import Report, card_figures
from histocc.export import main as export
from histocc.figure import Figure
from histocc.formatter import hisco_classes
from histocc.model.confidence import calibration_error
from histocc.predict.coder import Coder
from histocc.predict.decoders import DECODERS
from histocc.runtime.errors import UserError
from histocc.text import text_hashes

HEADER = ("occ1", "hisco_1", "hisco_2", "lang")
TEXTS = [f"{TITLES[i % 8][0]} of {('leeds', 'york')[i % 2]}" for i in range(40)]
FIRST = [TITLES[i % 8 if i % 5 else (i + 1) % 8][1] for i in range(40)]
SECOND = [TITLES[(i + 3) % 8][1] if i % 7 == 6 else "" for i in range(40)]
VALIDATION = list(zip(TEXTS, FIRST, SECOND, ["en", "da"] * 20))
VALIDATION += [VALIDATION[3]] * 6 + [(VALIDATION[4][0].upper(), *VALIDATION[4][1:])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder with run/, first/ and val.csv, whose rows repeat texts; the models code some of them."""
    folder = tmp_path_factory.mktemp("evaluate")
    rows = [
        (f"{title} of {('leeds', 'york', 'hull')[i % 3]} {i}", code, "", ("en", "da")[i % 2])
        for i, (title, code) in enumerate(TITLES * 8)
    ]
    train = write_csv(folder / "train.csv", HEADER, rows)
    val = write_csv(folder / "val.csv", HEADER, VALIDATION)
    flags = ["--train-data", train, "--val-data", val, *DEFAULT, "--language-col", "lang", "--batch-size", 16]
    flags += ["--augmentation-prob", 0, "--empty-blocks", "first", "--ngram-passes"]
    for name, passes in (("first", 1), ("run", 2)):
        run_here(train_mixer.main, *flags, passes, "--max-steps", 1, "--save-dir", folder / name)
    return folder


NUMBERED = [f"{TITLES[i % 8][0]} of {('leeds', 'york')[i % 2]} {i // 16}" for i in range(400)]
CODED = [TITLES[(i + (i // 16 % 5 == 0)) % 8][1] for i in range(400)]  # one in five is a code nobody can know
SOURCES = [("Lund", "Åbo")[i % 64 > 15] for i in range(400)]
ROWS_OF_SOURCES = ["occ1", "hisco_1", "lang", "source"], list(zip(NUMBERED, CODED, ["en"] * 400, SOURCES))


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    """(folder with data.csv and run/, the report on its test part, what was said); a source is in it."""
    folder = tmp_path_factory.mktemp("tested")
    data = write_csv(folder / "data.csv", *ROWS_OF_SOURCES)
    flags = ["--dataset", data, "--device", "cpu", "--share-test", 0.3, "--leave-out", "source=Lund"]
    # with both decoders
    run_here(finetune.main, *flags, "--seq2seq-weight", 0.1, "--save-path", folder / "run")
    shutil.copy(folder / "run" / "MODEL.md", folder / "before.md")
    return folder, *evaluated(folder, folder / "run" / "evaluation", data=data)


REAL = Path(os.environ.get("HISTOCC_REAL_DATA") or REPO.parent / "shared" / "data") / "occupations_en.csv"


def files(trained, output, *flags, data=None) -> list:
    given = ["--model", trained / "run", "--data", data or trained / "val.csv", "--output", output]
    return [*given, "--device", "cpu", *flags]


def evaluated(trained, output, *flags, data=None):
    """The report of one process, and what was said."""
    said = run_here(evaluate.main, *files(trained, output, *flags, data=data))
    return json.loads((output / "report.json").read_text(encoding="utf-8")), said


def refused(*flags):
    return run_here(evaluate.main, "--device", "cpu", *flags, code=2)


@pytest.fixture(scope="module")
def report(trained):
    return evaluated(trained, trained / "evaluation", "--batch-size", 16)[0]


class TestFigures:
    @pytest.mark.parametrize("decoder, name", [("seq2seq", "seq_acc"), ("linear", "flat_acc")])
    def test_are_those_of_training_counted_row_by_row(self, trained, report, decoder, name):
        step = report["model"]["step"]
        values = [row[name] for row in read_logs(trained / "run") if row["step"] == step]
        [value] = [value for value in values if value is not None]
        found, rows = report["decoders"][decoder], report["data"]["rows"]
        assert rows == 47 and found["right_rows"] / rows == pytest.approx(value, abs=1e-12)
        assert found["by_digits"][-1]["over_rows"]["accuracy"] == pytest.approx(value, abs=1e-12)
        groups = found["by_language"].values(), found["by_codes"].values(), found["calibration"]["bins"]
        assert [sum(each["rows"] for each in parts) for parts in groups] == [rows] * 3
        assert sum(each["rows"] for each in found["confusions"]) == rows - found["right_rows"]
        assert 0.2 < found["accuracy"] < 0.9  # else half of this shows nothing

    @pytest.mark.parametrize("decoder, name", [("greedy", "seq2seq"), ("flat", "linear"), ("both", "both")])
    def test_they_are_those_of_coding(self, trained, report, decoder, name):
        coder = Coder.load(str(trained / "run"))
        coded = coder.code([row[0] for row in VALIDATION], [row[3] for row in VALIDATION], decoder)
        right = [set(one.codes) == {*row[1:3]} - {""} for one, row in zip(coded, VALIDATION)]
        found = report["decoders"][name]
        assert found["right_rows"] == sum(right)
        several = [is_right for is_right, row in zip(right, VALIDATION) if row[2]]
        assert found["by_codes"]["2"]["rows"] == len(several)
        assert found["by_codes"]["2"]["over_rows"]["accuracy"] == pytest.approx(np.mean(several))
        error = calibration_error(np.array([one.conf for one in coded]), np.array(right), np.ones(len(right)))
        assert found["calibration"]["expected_calibration_error"] == pytest.approx(error, abs=1e-6)

    def test_fewer_digits_are_easier_and_texts_differ_by_more_than_case(self, report):
        for found in report["decoders"].values():
            accuracies = [each["over_rows"]["accuracy"] for each in found["by_digits"]]
            assert accuracies == sorted(accuracies, reverse=True)
            assert [each["digits"] for each in found["by_digits"]] == [1, 2, 3, 4, 5]
        assert report["data"]["texts"] == len({text.lower() for text, *_ in VALIDATION})
        found = report["decoders"]["linear"]["by_digits"][-1]
        assert found["over_rows"]["accuracy"] != found["over_texts"]["accuracy"][0]

    def test_the_text_holds_them(self, trained, report):
        text = (trained / "evaluation" / "report.md").read_text(encoding="utf-8")
        assert f" Made by histocc {__version__}, torch {torch.__version__}, python 3." in text
        assert text.splitlines()[2] == f"**{Figure.of(report)}.**"
        sections = re.findall("^## (.*)$", text, re.M)
        first = ["Coded automatically", "Levels and groups", "Codes that cost most rows"]
        assert sections == [*first, "Confusions that cost most rows", "Decoders", "How it is counted"]
        assert "| precision, % | recall, % |" in text  # some rows have two codes
        levels = report["decoders"][report["model"]["decoder"]]["by_digits"]
        for each in levels:
            value, low, high = (f"{100 * x:.1f}" for x in each["over_texts"]["accuracy"])
            assert re.search(rf"\| digits: {each['digits']} \|[ \d|]+ {value} \({low}–{high}\) \|", text)


class TestCall:
    def test_it_is_what_the_command_writes(self, trained, report, capsys):
        called = evaluate.evaluate(trained / "run", trained / "val.csv", device="cpu")
        assert capsys.readouterr().out == "" and not (trained / "run" / "evaluation").exists()
        assert called.keys() == report.keys() and called["data"] == report["data"]
        assert called["decoders"]["linear"]["accuracy"] == report["decoders"]["linear"]["accuracy"]
        assert called._repr_markdown_().startswith("# Evaluation\n")
        with pytest.raises(UserError, match="color"):
            evaluate.evaluate("nowhere", "x.csv", color="red")
        with pytest.raises(UserError, match="found Mock, expected the name of a file"):
            evaluate.evaluate(trained / "run", Mock(columns=["occ1"]))

    @pytest.mark.parametrize("has_pandas", [True, False])
    def test_tables_hold_the_figures(self, trained, report, has_pandas, monkeypatch):
        if not has_pandas:
            monkeypatch.setitem(sys.modules, "pandas", None)
        elif importlib.util.find_spec("pandas") is None:
            pytest.skip("pandas is not installed")
        read, found = Report(trained / "evaluation"), report["decoders"]["linear"]

        def rows_of(*arguments):
            table = read.table(*arguments)
            return table.to_dict("records") if has_pandas else table

        for row, each in zip(rows_of("digits", "linear"), found["by_digits"], strict=True):
            assert [row["digits"], row["rows"]] == [each["digits"], each["rows"]]
            assert [row["accuracy"], row["low"], row["high"]] == each["over_texts"]["accuracy"]
        languages = {row["language"]: row["texts"] for row in rows_of("language", "linear")}
        assert languages == {name: each["texts"] for name, each in found["by_language"].items()}
        assert rows_of("confusions") == report["decoders"][report["model"]["decoder"]]["confusions"]
        decoder = Coder.load(str(trained / "run")).best_decoder
        assert report["model"]["decoder"] == DECODERS[decoder].in_report != "both"  # the last of the report


@pytest.mark.skipif(not REAL.exists(), reason="needs English descriptions with codes")
def test_a_report_is_two_screens(tmp_path):
    rows = [(row["occ1"], f"{row['hisco_1']:>05}", row["lang"]) for row in read(REAL)]
    rows, names = list(dict.fromkeys(rows)), ("occ1", "hisco_1", "lang")
    data = write_csv(tmp_path / "data.csv", names, rows[700:1900])
    test = write_csv(tmp_path / "test.csv", names, rows[:700])
    given = ["--dataset", data, "--prior", "none", "--device", "cpu", "--save-path", tmp_path / "run"]
    run_here(finetune.main, *given)
    evaluated(tmp_path, tmp_path / "out", data=test)
    lines = (tmp_path / "out" / "report.md").read_text("utf-8").splitlines()
    assert len(lines) <= 80 and max(map(len, lines)) < 400
    assert not [line for line in lines if line.startswith("|") and "precision" in line]


class TestOfATest:
    """The report on the test part of `tested`."""

    def test_the_decoder_that_codes_is_first_and_each_code_has_a_line(self, tested):
        folder, report, said = tested
        first, text = next(iter(report["decoders"])), (folder / "run/evaluation/report.md").read_text("utf-8")
        assert first == report["model"]["decoder"] == "linear"
        assert said.index("Linear decoder") < said.index("Seq2seq") and ", macro-F1 " in said
        assert text.index("- Linear") < text.index("- Seq2seq") < text.index("- Both")
        assert "precision" not in text  # each row has one code
        table, figures = read(folder / "run" / "evaluation" / "by_code.csv"), report["decoders"]["linear"]
        assert {row["code"] for row in table} == {code for _, code in TITLES}
        assert sum(int(row["rows"]) for row in table) == report["data"]["rows"]
        assert {row["code"]: row["title"] for row in table}["83110"] == hisco_classes()["title"]["83110"]
        assert [row["code"] for row in table] == [row["code"] for row in figures["by_code"]]
        assert figures["first_five"]["over_texts"] >= figures["by_digits"][-1]["over_texts"]["accuracy"][0]
        assert "| hisclass |" in text and "HISCAM is off by" in text
        assert figures["coverage"][-1][1] == 1

    def test_the_card_of_the_run_says_what_it_is_and_how_good(self, tested, tmp_path):
        """It has the figures of validation until those of the test are there, and an export has it, too."""
        folder, report, said = tested
        card, before = ((folder / name).read_text("utf-8") for name in ("run/MODEL.md", "before.md"))
        texts = report["decoders"]["linear"]["by_digits"][-1]["over_texts"]["accuracy"]
        sentence = str(Figure.of(report))
        assert sentence.startswith(f"{100 * texts[0]:.1f} % of ") and sentence.endswith("; test texts)")
        assert card.count(sentence) == 2  # also in the methods paragraph
        assert "This figure is now the figure of the run" in said
        assert sentence in said and sentence in " ".join(watch.view(str(folder / "run"))[0].split())
        assert before.count("validation texts).") == 2 and "validation texts)." not in card
        asked = f"`python finetune.py --dataset {folder / 'data.csv'} --seq2seq-weight 0.1"
        asked += f" --save-path {folder / 'run'} --device cpu --share-test 0.3 --leave-out source=Lund`"
        facts = f"histocc (version {__version__})", "seed 42", "8 HISCO codes"
        facts += (Coder.load(str(folder / "run")).data_fingerprint,)
        assert asked in card and all(fact in text for fact in facts for text in (card, before))
        assert "for validation, " in card and "None" not in card and "not fitted" in card
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(tmp_path)
            run_here(export, folder / "run", "--to", "published", "a.bin")
            assert (tmp_path / "MODEL.md").read_text("utf-8") == card
            (tmp_path / "MODEL.md").write_text("mine")
            said = run_here(export, folder / "run", "--to", "published", "b.bin")
            assert "MODEL.md existed and was kept" in said
            run_here(export, "a.bin", "--to", "safetensors", "c/d.safetensors")
        again = (tmp_path / "c" / "MODEL.md").read_text("utf-8")
        assert again.count(sentence) == 2 and "8 HISCO codes" in again
        assert "## Training" not in again and "None" not in again

    def test_its_plots(self, tested, tmp_path):
        """One evaluation and two together: as PNG and SVG, with the figure, and no panel of one group."""
        pytest.importorskip("matplotlib")
        place, report = str(tested[0] / "run" / "evaluation"), tested[1]
        assert plot.main([place]) == 0 and {"evaluation.png", "evaluation.svg"} <= {*os.listdir(place)}
        assert plot.main([place, place, "--output", str(tmp_path / "two.svg")]) == 0
        assert (tmp_path / "two.png").read_bytes().startswith(b"\x89PNG")
        drawn = plot.evaluation(place)
        title = " ".join(drawn.get_suptitle().split())
        assert title == f"run: {Figure(**report['figure'])}"
        axes = {each.get_xlabel() or each.get_ylabel(): each for each in drawn.axes}
        figures = next(iter(report["decoders"].values()))
        groups = ["accuracy, %"] * (len(figures["by_language"]) > 1)
        first = ["coded automatically, % of texts", "right, %", "confidence, %", "level, digits"]
        assert [*axes] == [*first, *groups]
        levels = figures["by_digits"]
        shown = [text.get_text() for text in axes["level, digits"].texts]
        assert shown[:5] == [f"{100 * each['over_texts']['accuracy'][0]:.1f}" for each in levels]

    def test_groups_of_rows(self, tested, tmp_path):
        folder, before, _ = tested
        columns = ("source", "frequency", "codes", "code", "digits", "rows")
        rows = [(*row, *row[3:] * 5) for row in ROWS_OF_SOURCES[1]]
        data = write_csv(tmp_path / "data.csv", (*ROWS_OF_SOURCES[0], *columns[1:]), rows)
        report, _ = evaluated(folder, tmp_path / "by", "--by", *columns, "lang", data=data)
        figures = report["decoders"]["linear"]
        rows = {name: each["rows"] for name, each in figures["by_column source"].items()}
        # names of columns and of the report's own groups share no place
        assert all(figures[f"by_column {name}"] == figures["by_column source"] for name in columns)
        assert {*before["decoders"]["linear"]} == {name for name in figures if "by_column" not in name}
        assert len(Report(tmp_path / "by").table("column rows")) == 2
        with pytest.raises(ValueError, match="expected one of figure, .*, language, .*column rows"):
            Report(tmp_path / "by").table("town")
        assert "| column source: Lund |" in Report(tmp_path / "by")._repr_markdown_()
        lund = sum(row[3] == "Lund" for row in ROWS_OF_SOURCES[1])
        assert rows == {"Lund": lund, "Åbo": before["data"]["rows"] - lund}
        known = report["decoders"]["linear"]["by_training"]
        assert list(known) == ["text new, codes seen"]
        assert set(report["decoders"]["linear"]["by_major_group"]) == {code[0] for _, code in TITLES}
        assert {"en"} == set(report["decoders"]["linear"]["by_column lang"])
        whole, _ = evaluated(folder, tmp_path / "all", "--share-val", 1, data=folder / "data.csv")
        known = whole["decoders"]["linear"]["by_training"]
        number = known["text new, codes seen"]["rows"]  # those of validation are new, too
        assert before["data"]["rows"] < number == 400 - known["text seen"]["rows"] == whole["figure"]["rows"]
        given = files(folder, tmp_path / "no", "--by", "town", data=folder / "data.csv")
        assert "no column 'town'" in refused(*given)


class TestCompare:
    def test_two_reports_on_other_rows_are_compared_on_the_common_ones(self, trained, report, tmp_path):
        data = write_csv(tmp_path / "data.csv", HEADER, [*VALIDATION[:30], ("baker", "79100", "", "en")])
        common = ["--model", trained / "first", "--data", data, "--output", tmp_path / "first"]
        run_here(evaluate.main, "--device", "cpu", *common)
        said = run_here(compare.main, tmp_path / "first", trained / "evaluation")
        found = compare.compare(tmp_path / "first", trained / "evaluation")
        assert found["models"] == ["first", "run"] and found["left_out"] == [1, 0]
        assert found["lines"][0]["texts"] == report["data"]["texts"] and found["is_new"]
        assert f"{found['lines'][0]['texts']} texts that neither has learned from" in said
        same = compare.compare(trained / "evaluation", trained / "evaluation")
        whole = same["lines"][0]
        right = report["decoders"][report["model"]["decoder"]]["by_digits"][-1]
        assert whole["right"] == pytest.approx([right["over_texts"]["accuracy"][0]] * 2)
        assert same["rows"] == pytest.approx([right["over_rows"]["accuracy"]] * 2)
        assert whole["difference"][0] == 0


class TestBaseline:
    def test_the_report_says_what_the_model_adds(self, trained, tmp_path):
        pytest.importorskip("sklearn")
        found, said = evaluated(trained, tmp_path / "out", "--baseline")
        svm, both = found["baseline"], found["decoders"]["both"]
        assert svm["rows"] == svm["rows_of_training"] == 64
        shares = [100 * x["by_digits"][-1]["over_texts"]["accuracy"][0] for x in (svm, both)]
        text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
        for name, share in zip(("Baseline: .*", "Both .*"), shares):
            assert re.search(f"{name} {share:.1f} % of texts", said)
        assert f"(64 of 64 training rows, {svm['seconds']:.0f} s): {shares[0]:.1f} %" in text

    def test_what_is_not_there_is_said_before_anything_is_done(self, trained, tmp_path, monkeypatch):
        content = torch.load(trained / "run" / "best.bin", weights_only=True)
        torch.save(content, tmp_path / "alone.bin")
        common = ["--data", trained / "val.csv", "--output", tmp_path / "out", "--baseline"]
        if importlib.util.find_spec("sklearn"):
            said = refused("--model", tmp_path / "alone.bin", *common)
            assert "does not hold the training rows" in said and "--prepare-only" in said
        monkeypatch.setitem(sys.modules, "sklearn", None)
        assert "histocc[baseline]" in refused("--model", trained / "run", *common)
        assert not (tmp_path / "out").exists()


class TestRows:
    def test_codes_outside_the_key_are_counted(self, trained, report, tmp_path):
        more = [("pilot", "04220", ""), ("pilot and tailor", "79100", "04220"), ("", "79100", "")]
        more = [(*row, "en") for row in [*more, ("nobody", "", ""), ("odd", "x", "")]]
        data = write_csv(tmp_path / "more.csv", HEADER, [*VALIDATION, *more])
        before = open(data, "rb").read(), os.stat(data).st_mtime_ns
        other, said = evaluated(trained, tmp_path / "out", data=data)
        assert before == (open(data, "rb").read(), os.stat(data).st_mtime_ns)
        once = dict.fromkeys(["empty text", "first code missing", "code does not fit"], 1)
        assert other["data"]["rejected"] == {"code outside the key": 2, **once}
        assert "Codes that the model does not know: 2 rows" in said and other["data"]["rows"] == 47
        assert "× code outside the key" not in said and "Rejected: 1 × empty text" in said
        text = (tmp_path / "out" / "report.md").read_text("utf-8")
        share = 100 * other["decoders"][other["model"]["decoder"]]["right_rows"] / 49
        sentence = f"With codes that the model does not know counted as wrong, {share:.1f} % of rows are"
        assert sentence in text and card_figures(other)[0] == f"{sentence} right."
        for name, found in other["decoders"].items():
            assert found["right_rows"] == report["decoders"][name]["right_rows"]
            assert found["accuracy_with_rows_outside_key"] == pytest.approx(found["right_rows"] / 49)
        rejected = read(tmp_path / "out" / "rejected_rows.csv")
        assert [row["line"] for row in rejected] == ["49", "50", "51", "52", "53"]

    def test_an_unknown_language_is_coded_as_unk(self, trained, tmp_path):
        rows = [(text, one, two, "xx" if lang == "da" else lang) for text, one, two, lang in VALIDATION]
        hidden = [(text, one, two, "" if lang == "da" else lang) for text, one, two, lang in VALIDATION]
        unknown, said = evaluated(trained, tmp_path / "a", data=write_csv(tmp_path / "a.csv", HEADER, rows))
        plain, _ = evaluated(trained, tmp_path / "b", data=write_csv(tmp_path / "b.csv", HEADER, hidden))
        count = sum(row[3] == "xx" for row in rows)
        assert unknown["data"]["unknown_languages"] == {"xx": count}
        assert plain["data"]["unknown_languages"] == {}
        assert f"'xx' is not one of the model's: {count} rows" in said
        for name, found in unknown["decoders"].items():
            assert found["accuracy"] == plain["decoders"][name]["accuracy"]
        assert set(unknown["decoders"]["linear"]["by_language"]) == {"en", "xx"}

    def test_the_texts_that_training_set_aside(self, trained, tmp_path):
        """None that were trained on: they are refused, left out beside others, or asked for."""
        common = ["--model", trained / "run", "--data", trained / "train.csv", "--output", tmp_path / "none"]
        for part in ("", "that --share-val 0.5 takes"):
            said = refused(*common, *(["--share-val", 0.5] if part else []))
            assert f"trained on all texts of {trained / 'train.csv'} {part}".strip() in said
        with pytest.raises(UserError, match="trained on all texts"):
            evaluate.evaluate(trained / "run", trained / "train.csv", share_val=0.5, device="cpu")
        others = [f"unknown {i}" for i in range(30)]
        rows = [row.values() for row in read(trained / "train.csv")]
        rows += [(text, "99990" if i else "79100", "", "en") for i, text in enumerate(others)]
        more = write_csv(tmp_path / "more.csv", HEADER, rows)
        found, said = evaluated(trained, tmp_path / "more", "--share-val", 0.8, data=more)
        facts, part = found["data"], int((split_values(text_hashes(others[1:])) < 0.8).sum())
        assert facts["rows_outside_key"] == part
        assert f"Codes that the model does not know: {part} rows" in said
        for each in found["decoders"].values():
            share = each["right_rows"] / (facts["rows"] + part)
            assert each["accuracy_with_rows_outside_key"] == pytest.approx(share)
        whole, said = evaluated(trained, tmp_path / "all", "--share-val", 1, data=trained / "train.csv")
        assert whole["data"]["rows"] == whole["data"]["texts_trained_on"] == 64
        text = (tmp_path / "all" / "report.md").read_text(encoding="utf-8")
        for shown in (said, text):
            assert "The model was trained on all of these texts, so they measure nothing." in shown
            assert "Figures may be too good: the model was trained on 64 of 64 texts evaluated" in shown
        for each in whole["decoders"]["linear"]["by_language"].values():
            assert each["texts_trained_on"] == each["texts"]
        assert "--share-val: '0'" in refused(*common, "--share-val", 0)
        assert "--share-val takes 0 of 64" in refused(*common, "--share-val", 1e-9)

    def test_the_test_part_of_a_training(self, tested, tmp_path):
        """Its texts alone, by the checkpoint alone, wherever its rows are; another table counts whole."""
        folder, report, said = tested
        facts = report["data"]
        assert facts["test_part"] and 100 < facts["rows"] == 400 - facts["other_part_rows"] < 240
        assert facts["texts_trained_on"] == 0 == facts["texts_validated_on"]
        assert "They are the test part of the training" in said
        assert f"Not evaluated: {facts['other_part_rows']} rows whose texts are not in the test part" in said
        whole, _ = evaluated(folder, tmp_path / "all", "--share-val", 1, data=folder / "data.csv")
        assert whole["data"]["rows"] == 400 and not whole["data"]["test_part"]
        (tmp_path / "run").mkdir()
        for name in ("best.bin", "histocc.json", "MODEL.md"):
            shutil.copy(folder / "run" / name, tmp_path / "run")
        (names, rows), other = ROWS_OF_SOURCES, [(f"{x[0]} here", *x[1:]) for x in ROWS_OF_SOURCES[1]]
        without_source = write_csv(tmp_path / "b.csv", names[:3], [row[:3] for row in rows[::-1]], ";")
        found, _ = evaluated(tmp_path, tmp_path / "b", data=without_source)
        figures, before = (each["decoders"]["linear"]["by_digits"] for each in (found, report))
        assert found["data"]["rows"] == facts["rows"] and figures[-1]["texts"] == before[-1]["texts"]
        assert figures[-1]["over_rows"]["accuracy"] == before[-1]["over_rows"]["accuracy"]
        assert found["decoders"]["linear"].keys() == report["decoders"]["linear"].keys()  # the same groups
        first, card = ((path / "MODEL.md").read_text("utf-8") for path in (folder / "run", tmp_path / "run"))
        for word in ("Rows", "Languages", "Files"):
            assert re.findall(f"^- {word}: .*$", first, re.M)[0] in card
        mixed = [*rows[200:250], *other]
        data = write_csv(tmp_path / "c.csv", names, mixed)
        found, said = evaluated(tmp_path, tmp_path / "c", "--by", "source", data=data)
        seen = found["data"]["texts_trained_on"]
        left_out = found["data"]["learned_rows"]
        assert found["data"]["rows"] == 450 - left_out and 10 < left_out < 50 and seen == 0
        assert f"Not evaluated: {left_out} rows whose texts the model was trained on" in said
        assert not found["data"]["test_part"] and "too good: the model was validated on " in said
        by_source = found["decoders"]["linear"]["by_column source"].values()
        assert sum(each["rows"] for each in by_source) == 450 - left_out

    def test_weights_and_dittos_are_those_of_the_training(self, tested, tmp_path):
        state = torch.load(tested[0] / "run" / "best.bin", weights_only=True)
        state["args"] |= {"weight_col": "n", "ditto": True, "fill_down": ["hisco_1", "no"]}
        del state["checksum"]
        (tmp_path / "run").mkdir()
        torch.save(state, tmp_path / "run" / "best.bin")
        rows = [("a new text", "79100", "en", 3), ("do.", "", "en", 4)]
        data = write_csv(tmp_path / "data.csv", ("occ1", "hisco_1", "lang", "n"), rows)
        facts = evaluated(tmp_path, tmp_path / "out", data=data)[0]["data"]
        assert (facts["rows"], facts["texts"]) == (7, 1)
        bare = write_csv(tmp_path / "bare.csv", ("occ1", "hisco_1", "lang"), [row[:3] for row in rows])
        assert evaluated(tmp_path, tmp_path / "bare", data=bare)[0]["data"]["rows"] == 2

    def test_other_columns(self, trained, report, tmp_path):
        data = write_csv(tmp_path / "other.csv", ("title", "a", "b", "tongue"), VALIDATION)
        flags = ["--input-col", "title", "--target-cols", "a", "b", "--language-col", "tongue"]
        found, _ = evaluated(trained, tmp_path / "out", *flags, data=data)
        assert found["decoders"]["both"]["accuracy"] == report["decoders"]["both"]["accuracy"]
        swapped = [(text, two or one, one if two else "", lang) for text, one, two, lang in VALIDATION]
        data = write_csv(tmp_path / "swapped.csv", HEADER, swapped)
        found, _ = evaluated(trained, tmp_path / "swapped", data=data)
        for each in found["decoders"].values():  # codes have no order: where they are right, their class is
            assert each["by_class"]["hisclass"]["over_rows"]["accuracy"] >= each["accuracy"] - 1e-9


class TestRefused:
    def test_a_report_that_is_there(self, trained, report, tmp_path):
        common = ["--model", trained / "run", "--data", trained / "val.csv"]
        before = os.stat(trained / "evaluation" / "report.md").st_mtime_ns
        assert "exist; --overwrite replaces them" in refused(*common, "--output", trained / "evaluation")
        assert "holds a run" in refused(*common, "--output", trained / "run", "--overwrite")
        assert before == os.stat(trained / "evaluation" / "report.md").st_mtime_ns
        evaluated(trained, tmp_path / "out")
        first = os.stat(tmp_path / "out" / "report.json").st_mtime_ns
        evaluated(trained, tmp_path / "out", "--overwrite")
        assert os.stat(tmp_path / "out" / "report.json").st_mtime_ns > first

    def test_not_one_that_a_killed_process_left(self, trained, tmp_path, monkeypatch):
        """The file that makes a report whole is written last."""
        folder, write = tmp_path / "out", report_of.atomic_write
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(report_of, "atomic_write", lambda x: 1 / 0 if x.endswith(".json") else write(x))
            evaluate.main(list(map(str, files(trained, folder))))
        (folder / "report.json.tmp1").touch()
        assert {"report.md", "rejected_rows.csv", "by_code.csv"} < {path.name for path in folder.iterdir()}
        evaluated(trained, folder)
        assert not [path for path in folder.iterdir() if ".tmp" in path.name]
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "report.md").write_text("my notes")
        assert "report.md exists; --overwrite" in refused(*files(trained, tmp_path / "mine"))

    def test_columns_that_are_not_there(self, trained, tmp_path):
        common = ["--model", trained / "run", "--data", trained / "val.csv", "--output", tmp_path / "out"]
        rows = [(text, code, lang) for text, code, _, lang in VALIDATION]
        alone = write_csv(tmp_path / "alone.csv", ("occ1", "hisco_1", "lang"), rows)
        assert "codes from hisco_1 (" in evaluated(trained, tmp_path / "alone", data=alone)[1]
        several = [*common[:2], "--data", alone, trained / "val.csv", "--output", tmp_path / "several"]
        assert "alone.csv: has no column 'hisco_2'" in refused(*several)  # in any order
        assert "'title'" in refused(*common, "--input-col", "title")
        assert "'c3'" in refused(*common, "--target-cols", "hisco_1", "c3")
        assert "mutually exclusive" in refused(*common, "--language", "en", "--language-col", "lang")
        assert "the model writes at most 5" in refused(*common, "--target-cols", *"abcdef")
        assert "no such file" in refused(*common[:2], "--data", tmp_path / "none.csv", *common[4:]).lower()
        assert not (tmp_path / "out").exists()

    def test_a_model_of_other_codes(self, trained, tmp_path):
        data = write_csv(tmp_path / "other.csv", HEADER, [("pilot", "04220", "", "en")] * 3)
        said = refused("--model", trained / "run", "--data", data, "--output", tmp_path / "out")
        assert "3 × code outside the key" in said


def test_a_published_model_with_a_key_of_its_own(tmp_path):
    folder = tmp_path / "mixer"
    folder.mkdir()
    torch.save({"model": make_model(memory_mask=False).state_dict()}, folder / "pytorch_model.bin")
    (folder / "config.json").write_text('{"num_attention_heads": 2, "num_hash_buckets": 256}')
    numbers, rows = zip(CODES, range(7)), [(f"smed {i}", CODES[i % 7]) for i in range(9)]
    key = write_csv(tmp_path / "key.csv", ("system_code", "code"), numbers)
    data = write_csv(tmp_path / "data.csv", ("occ1", "hisco_1"), rows)
    common = ["--model", folder, "--data", data, *words("--target-cols hisco_1 --formatter hisco")]
    assert "its key (0) differ" in refused(*common)
    run_here(evaluate.main, "--device", "cpu", *common, "--key", key)
    assert json.loads((folder / "evaluation" / "report.json").read_text())["model"]["codes"] == 7

"""Coding a file: what comes out, through interruptions and on several processes; and what is refused."""

import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
import unittest.mock
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import TINY, all_tests, read, run, run_here, start_forked, wait_until, write_csv, write_rows

import finetune
from histocc import export
from histocc.evaluate.__main__ import evaluate
from histocc.formatter import ANSWER, CLASSES, PAD_IDX, hisco_blocky5, hisco_classes, occ1950_blocky2
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.model.ngrams import PATTERNS, hash_ngrams
from histocc.occ_canine import OccCANINE
from histocc.predict import __main__ as predict
from histocc.predict import coding
from histocc.predict.coder import Coded, Coder
from histocc.predict.decoders import DECODERS
from histocc.published import models
from histocc.review.sheet import CodedFile, pair_of
from histocc.runtime import checkpoint, log
from histocc.runtime.device import Precision, settings_of_torch
from histocc.runtime.files import OwnFiles
from histocc.text import encode

SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 128, "num_hash_buckets": 256}
CODES = ["-1", "22222", "22233", "33333", "33344", "44444", "55555"]
HEADER = ["id", "occ1", "lang", "note"]


def make_model(memory_mask: bool = True, formatter=None, ngrams=None) -> Seq2SeqMixerOccCANINE:
    """Writes none to five codes, depending on the text."""
    torch.manual_seed(11)
    tokens = (formatter or hisco_blocky5()).num_classes
    how = {"config": model_config("tiny", **SMALL), "memory_mask": memory_mask, "ngrams": ngrams}
    model = Seq2SeqMixerOccCANINE(tokens, len(CODES), **how).eval()
    with torch.no_grad():
        model.decoder.head.weight.mul_(3)
        model.decoder.head.bias[PAD_IDX] += 2
        model.decoder.head.bias[7] += 1
        model.decoder.head.bias[10:14] += 3
        model.linear_decoder.weight.mul_(8)
        for layer in model.decoder.decoder.layers:
            layer.multihead_attn.in_proj_weight.mul_(3)
    return model


def save_model(folder, formatter, codes: list[str], ngrams: dict | None = None, **more) -> str:
    """A checkpoint as training writes it, of random weights."""
    folder.mkdir(exist_ok=True)
    made = make_model(formatter=formatter, ngrams=ngrams)
    config = {"ngrams": ngrams, **made.config.to_dict(), "max_len": 128, "decoder_dim_feedforward": 64}
    config |= {"memory_mask": True, "target_mask": True, "text": "as-is"}
    state = {"model": made.state_dict(), "config": config, "formatter": formatter.to_dict()}
    state |= {"key": {code: i for i, code in enumerate(codes)}, "system": formatter.kind}
    state |= {"languages": ["unk", "en", "da"], "format": checkpoint.FORMAT, "kept_codes": 0}
    state |= {"args": {}, "rng": {}, "position": {}, "step": 1}
    checkpoint.save(OwnFiles(str(folder)), ["last.bin"], state | more)
    return str(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("run"), hisco_blocky5(), CODES)


def columns(codes: int, *names: str) -> list[str]:
    return [f"{name}_{i}" for i in range(1, codes + 1) for name in names]


def table(path, n: int, distinct: int = 10**6) -> str:
    """Rows of many kinds; every eighth stands alone, the others repeat `distinct` ones."""
    rows = []
    for i in range(n):
        j = i if i % 8 == 0 else i % distinct
        first = ("", "smed", "fisker og\nhusmand", 'a "quoted" one')[j % 4]
        text = f"{first} {'abcdefghij'[j % 10] * (j % 7)} {j}" if j % 11 else " "
        rows.append((i, text, ("en", "da", " en", "xx", "")[j % 5], ("Å", "NA", "", " 007 ")[i % 4]))
    return write_csv(path, HEADER, rows)


def predict_here(*args) -> str:
    """With one thread, as the processes that `start` starts: sums over several threads round otherwise."""
    with settings_of_torch():
        torch.set_num_threads(1)
        return run_here(predict.main, *args, "--device", "cpu")


def flags(model, source, output, *more) -> list:
    given = ["--model", model, "--input", source, "--column", "occ1", "--language-column", "lang"]
    return [*given, "--output", output, *more]


def refused(*arguments) -> str:
    return run_here(predict.main, *arguments, "--device", "cpu", code=2)


def small_coder(device="cpu", **options) -> Coder:
    state = {"languages": ["unk"], "config": {"max_len": 128, "text": "as-is"}}
    state["key"] = {code: i for i, code in enumerate(CODES)}
    return Coder(make_model().to(device), hisco_blocky5(), state | options.pop("state", {}), **options)


def test_the_output_is_the_input_and_the_codes(model, tmp_path):
    source, header = table(tmp_path / "in.csv", 60), ["hisco", "en_hisco_text"]
    key = write_csv(tmp_path / "key.csv", header, [(code, f"what {code} is") for code in CODES[:-1]])
    more = ["--descriptions", key, "--min_prob", "1e-5", "--batch_size", "7"]
    output = predict_here(*flags(model, source, tmp_path / "out.csv", *more))
    before, rows = read(source), read(tmp_path / "out.csv")
    most = max(sum(bool(row.get(f"hisco_{i}")) for i in range(1, 6)) for row in rows)
    codes, words = columns(most, "hisco", "title", "prob"), columns(most, "desc")
    assert list(rows[0]) == [*HEADER, *codes, *ANSWER, *words]
    assert [{name: row[name] for name in HEADER} for row in rows] == before
    coder = Coder.load(model)
    given = ([row[name] for row in before[::-1]] for name in ("occ1", "lang"))
    coded = coder.code(*given)[::-1]  # whatever their order, and all at once
    assert len({len(one.codes) for one in coded}) >= 3  # or this shows little
    marks = set(), set()
    for row, one in zip(rows, coded):
        count, conf = len(one.codes), row["conf"]
        assert [row[f"hisco_{i}"] for i in range(1, most + 1) if row[f"hisco_{i}"]] == one.codes
        probs = [float(row[f"prob_{i}"]) for i in range(1, count + 1)]
        assert probs == pytest.approx(one.probs, rel=1e-4)
        words = [f"what {code} is" if code in CODES[:-1] else "" for code in one.codes]
        assert [row[f"desc_{i}"] for i in range(1, count + 1)] == words
        expected = "" if one.conf is None else pytest.approx(one.conf, rel=1e-4)
        assert (float(conf) if conf else "") == expected
        outside = not set(one.codes) <= set(coder.codes)
        marks[outside].add(bool(one.codes) and one.conf >= 1e-5)
        assert row["needs_review"] == str(int(not one.codes or one.conf < 1e-5 or outside))
    assert marks[1] == {True} and len(marks[0]) > 1  # an invented code that is sure enough, and all others
    for said in (f"60 rows of {source}", "(empty: 6, unknown: 0)", "24 rows: xx (12), none (12)"):
        assert said in output
    assert sorted(os.listdir(tmp_path)) == ["in.csv", "key.csv", "out.csv"]


def test_who_must_look_at_an_answer():
    held = {"args": SimpleNamespace(level=None), "system": "hisco", "key": {*CODES}, "min_conf": 0.5}
    held |= {"cells_beside": lambda _: {}, "is_fitted": True, "columns": columns(2, "hisco", "prob")}

    def marked(codes, conf, source="model", is_ditto=False):
        line = json.dumps(Coded(codes, [0.9] * len(codes), conf, source=source))
        return coding.Coding.cells.__wrapped__(SimpleNamespace(**held), line, is_ditto)[-1]

    assert marked(["22222"], 0.5) == marked(["22223"], 1.0, "known") == "0"
    doubtful = [marked(["22222"], 0.4999), marked(["22222"], math.nan), marked([], None)]
    doubtful += [marked(["22222", "22223"], 0.9), marked(["22222"], 0.9, is_ditto=True)]  # one is invented
    assert doubtful == ["1"] * 5


@pytest.mark.parametrize("fitted", [False, True])
def test_rows_below_one_half_need_review_and_how_many_are_right_is_said(tmp_path, fitted):
    source, maps = table(tmp_path / "in.csv", 60), {name: [0.5, 0.0, 0.0, 0.3] for name in ("topk", "output")}
    more = {"confidence": {"texts": 300, "maps": maps, "curves": {}}} if fitted else {}
    model = save_model(tmp_path / "run", hisco_blocky5(), CODES, **more)
    other = save_model(tmp_path / "other", hisco_blocky5(), CODES, source="published", **more)
    found, said = {}, ""
    for name, path, more in [("0", model, ["--min-prob", 0]), ("published", other, []), ("usual", model, [])]:
        said = predict_here(*flags(path, source, tmp_path / f"{name}.csv", "--decoder", "topk", *more))
        found[name] = read(tmp_path / f"{name}.csv")
    assert found["0"] == found["published"]
    assert {row["needs_review"] for row in found["0"] if row["hisco_1"]} == {"0"}
    marked = [not row["hisco_1"] or float(row["conf"]) < 0.5 for row in found["usual"]]
    assert [row["needs_review"] == "1" for row in found["usual"]] == marked and 6 < sum(marked) < 60
    right = sum(float(row["conf"]) for row in found["usual"] if row["hisco_1"])
    assert f"; marked for review: {sum(marked)} (" in said
    assert (f"Expected to be right in their first code: about {right:.0f} of 60 rows; " in said) == fitted


def test_a_text_of_which_no_ngram_of_letters_is_known_and_a_missing_one_have_no_code(tmp_path):
    ids = torch.from_numpy(encode(["smed ? - ... (1843)"], ["en"])[0])
    hashed, exist, _ = hash_ngrams(ids)
    hashes = hashed[exist].unique()  # of the language, too
    ngrams = {"rows": len(hashes), "width": 8, "patterns": list(PATTERNS)}
    model = save_model(tmp_path / "run", hisco_blocky5(), CODES, ngrams)
    state = checkpoint.load(os.path.join(model, "last.bin"))
    state["model"]["ngrams.hashes"] = hashes
    state["model"]["ngrams.idf"] = torch.ones(len(hashes))
    checkpoint.rewrite(os.path.join(model, "last.bin"), state)
    missing, program = ["NA", " nan ", "<NA>", "null"], OccCANINE(model, device="cpu")
    texts = ["smed", "SMED 1843", "-", "?", "...", "1843", "農夫", "農夫? 1843", *missing]
    for decoder in ("greedy", "flat", "both", "topk", "full"):
        coded = program.coder.code(texts, ["en"] * len(texts), decoder, threshold=0.0)
        assert coded[0].conf is not None and coded[1].conf is not None
        assert coded[2:] == [Coded([], [], None)] * 10
        assert decoder == "greedy" or coded[0].codes and coded[1].codes
    source = write_csv(tmp_path / "in.csv", ["occ1", "lang"], [(text, "en") for text in texts])
    said = predict_here(*flags(model, source, tmp_path / "out.csv", "--decoder", "topk", "--min-prob", 0))
    assert "10 without a code (empty: 4, unknown: 6)" in said
    codes = [(row["hisco_1"], row["conf"], row["needs_review"]) for row in read(tmp_path / "out.csv")]
    assert codes[2:] == [("", "", "1")] * 10 and codes[0][2] == codes[1][2] == "0"
    for kind in ("flat", "full"):
        probs = np.isnan(program.predict(texts, "en", what="probs", prediction_type=kind))
        assert probs.all(1).tolist() == probs.any(1).tolist() == [False] * 2 + [True] * 10
    empty = [None, math.nan, np.float32("nan"), type("NAType", (), {})(), np.array(["NA"])[0], "smed"]
    answers = [row["hisco_1"] for row in program.predict(empty, "en", prediction_type="topk", get_dict=True)]
    assert answers[:5] == [None] * 5 and answers[5] == codes[0][0]


def test_titles_and_classes_of_hisco_codes(model, tmp_path):
    classes = hisco_classes()
    assert {name: len(of) for name, of in classes.items()} == dict.fromkeys(["title", *CLASSES], 1919)
    assert [of["01110"] for of in classes.values()] == ["Chemist, General", "2", "1", "5", "85.58"]
    assert classes["title"]["99920"] == "Day-Labourer"
    assert not any(map(re.compile("[a-z][A-Z]").search, classes["title"].values()))
    source = table(tmp_path / "in.csv", 30)
    common = flags(model, source, tmp_path / "out.csv", "--decoder", "topk", "--k", 7, "--overwrite")
    predict_here(*common, "--classes", "hiscam", "hisclass")
    rows, names = read(tmp_path / "out.csv"), ["title", "hiscam", "hisclass"]
    codes = columns(7, "hisco", "title", "prob")
    assert list(rows[0]) == [*HEADER, *codes, *ANSWER, *columns(7, "hiscam", "hisclass")]
    for row in rows:
        for i, name in [(i, name) for i in range(1, 8) for name in names]:
            assert row[f"{name}_{i}"] == classes[name].get(row[f"hisco_{i}"], "")
    predict_here(*common, "--no-titles")
    assert read(tmp_path / "out.csv") == [
        {name: cell for name, cell in row.items() if not name.startswith(tuple(names))} for row in rows
    ]
    codes = ["111", "222", "333", "444", "555", "666", "777"]
    other = flags(save_model(tmp_path / "other", occ1950_blocky2(), codes), source, tmp_path / "o.csv")
    assert "this model writes occ1950" in refused(*other, "--classes", "socpo")
    predict_here(*other)
    assert "title_1" not in read(tmp_path / "o.csv")[0]


@pytest.mark.parametrize("decoder", ["flat", "both", "greedy"])
def test_choices_are_the_most_probable_codes_and_the_page_shows_them(model, tmp_path, decoder):
    source, output = table(tmp_path / "in.csv", 40), tmp_path / "out.csv"
    for name, more in (("plain.csv", []), ("out.csv", ["--choices", 3])):
        predict_here(*flags(model, source, tmp_path / name, "--decoder", decoder, "--k", 1, *more))
    rows, coder = read(output), Coder.load(model)
    plain = [{name: row[name] for name in row if not name.startswith("choice")} for row in rows]
    assert plain == read(tmp_path / "plain.csv")
    coded = [row for row in rows if row["conf"]]
    probs = coder.probabilities([row["occ1"] for row in coded], [row["lang"] for row in coded])
    for row, of_codes in zip(coded, probs):
        shown = {row[f"choice_{i}"]: float(row[f"choice_prob_{i}"]) for i in (1, 2, 3)}
        if decoder == "both":
            assert row["choice_1"] == row["hisco_1"] and list(shown.values()) == sorted(shown.values())[::-1]
        else:
            best = {coder.codes[i]: of_codes[i] for i in (-of_codes).argsort(kind="stable")[:3]}
            assert list(shown) == list(best)
            assert list(shown.values()) == pytest.approx([*best.values()], rel=1e-4)
    texts = CodedFile(str(output)).texts
    for row in coded:
        text = texts[pair_of(row["occ1"], row["lang"])]
        own = [row["hisco_1"]] * (row["hisco_1"] not in ("", *(row[f"choice_{i}"] for i in (1, 2, 3))))
        assert text.codes == [*(row[f"choice_{i}"] for i in (1, 2, 3)), *own]
        assert text.answer == [row["hisco_1"]] * bool(row["hisco_1"])
        assert text.probs[0] == row["choice_prob_1"]
    again = flags(model, output, tmp_path / "again.csv", "--decoder", decoder, "--k", 1)
    predict_here(*again, "--overwrite-columns")
    assert read(tmp_path / "again.csv") == read(tmp_path / "plain.csv")
    if decoder == "greedy":  # a model without a linear decoder
        written = {**checkpoint.load(os.path.join(model, "last.bin")), "kind": "seq2seq"}
        checkpoint.save(OwnFiles(str(tmp_path)), ["best.bin"], written)
        said = refused(*flags(tmp_path / "best.bin", source, tmp_path / "no.csv", "--choices", 3))
        assert "--choices: this model has no linear decoder; use --decoder topk --k 3" in said


@pytest.mark.parametrize(
    "accuracy, ngrams, decoder, why",
    [
        ({"greedy": 0.5, "flat": 0.625}, False, "flat", "300 texts .*: greedy 50.0 %, flat 62.5 %"),
        ({"greedy": 0.7, "flat": 0.625}, True, "greedy", "greedy 70.0 %, flat 62.5 %"),
        (None, False, "greedy", "does not say.*"),
        (None, True, "flat", "does not say.*"),
    ],
)
def test_the_decoder_that_was_right_more_often_is_the_default(tmp_path, accuracy, ngrams, decoder, why):
    held = {"confidence": {"texts": 300, "accuracy": accuracy}} if accuracy else {}
    size, source = {"rows": 8, "width": 4} if ngrams else None, table(tmp_path / "in.csv", 20)
    model = save_model(tmp_path / "run", hisco_blocky5(), CODES, size, **held)
    said = predict_here(*flags(model, source, tmp_path / "auto.csv"))
    assert re.search(rf"^Decoder: {decoder} \(.*{why}\)$", said, re.M), said
    said = predict_here(*flags(model, source, tmp_path / "named.csv", "--decoder", decoder))
    assert "Decoder:" not in said
    limited = flags(model, source, tmp_path / "limited.csv", "--threshold", "0.3")
    said = predict_here(*limited) if decoder == "flat" else refused(*limited)
    assert ("linear decoder: 0.3" if decoder == "flat" else "auto chose greedy here (") in said
    assert (tmp_path / "auto.csv").read_bytes() == (tmp_path / "named.csv").read_bytes()
    texts = [row["occ1"] for row in read(source)]
    rows = OccCANINE(model, device="cpu").predict(texts, get_dict=True)
    assert rows == OccCANINE(model, device="cpu").predict(texts, prediction_type=decoder, get_dict=True)


@pytest.mark.parametrize(
    "args, header, said",
    [
        ({"language_col": "sprog"}, ["occ1", "lang", "sprog"], "languages are read from column 'sprog'"),
        ({"language_col": "sprog"}, ["occ1", "lang"], "languages are read from column 'lang'"),
        ({"language": "Danish"}, ["occ1"], "all texts are read as da, the language of the training"),
        ({}, ["occ1"], "no languages are read: give their column as --language-col"),
    ],
)
def test_languages_are_read_as_in_the_training(tmp_path, args, header, said):
    trained = save_model(tmp_path / "run", hisco_blocky5(), CODES, args=args)
    source = write_csv(tmp_path / "in.csv", header, [["smed", "en", "da"][: len(header)]])
    given = ["--model", trained, "--input", source, "--decoder", "flat", "--output"]
    assert said in predict_here(*given, tmp_path / "out.csv")
    language = {"sprog": "da", "lang": "en"}.get(header[-1], "da" if args else "unk")
    said = predict_here(*given, tmp_path / "named.csv", "--language", language, "--min-prob", "1")
    assert f"review serve {tmp_path / 'named.csv'} --language {language}\n" in said
    predict_here(*given, tmp_path / "named.csv", "--language", language, "--overwrite")
    assert (tmp_path / "named.csv").read_bytes() == (tmp_path / "out.csv").read_bytes()


def test_a_known_text_of_the_language_comes_before_that_of_any():
    held = SimpleNamespace(known={("smed", "da"): ["22222"], ("smed", ""): ["33333"]}, levels=[])
    found = [coding.Coding.look_up(held, " Smed", language)[0] for language in ("da", "Danish", "en", "")]
    assert [one.codes for one in found] == [["22222"], ["22222"], ["33333"], ["33333"]]


def test_known_texts_have_their_codes(model, tmp_path, monkeypatch):
    monkeypatch.setattr(coding, "PIECE", 24)
    source = table(tmp_path / "in.csv", 300, distinct=30)
    before = read(source)
    text, language, other = before[1]["occ1"], before[1]["lang"], before[3]["occ1"]
    header = ["occ1", "lang", "hisco_1", "hisco_2", "hisco_3"]
    given = [
        (text, "Danish", "22222", "", ""),
        # of several rows of a text the last counts
        (f"  {text.upper()} ", "DA", "–1", '="1110"', "４４４4\u200b4"),
        (other, "xyz", "33333", "", ""),  # in another language
        ("nowhere", "da", "33333", "NA", ""),
        ("without a code", "da", "", "", ""),
        ("NA", "da", "33333", "", ""),
        tuple(header),  # of files that were joined
    ]
    known, common = write_csv(tmp_path / "known.csv", header, given), ["--decoder", "flat", "--k", 2]
    predict_here(*flags(model, source, tmp_path / "alone.csv", *common))
    said = predict_here(*flags(model, source, tmp_path / "out.csv", *common, "--known", known))
    assert f"{known}: 3 known texts" in said and f"of which the last counts (1): '  {text.upper()} '" in said
    counts = [0, 0]
    for row, model_row in zip(read(tmp_path / "out.csv"), read(tmp_path / "alone.csv"), strict=True):
        is_known = (row["occ1"], row["lang"]) == (text, language)
        counts[is_known] += 1
        assert row.pop("source") == ("known" if is_known else "model")
        if is_known:
            assert (row["hisco_1"], row["hisco_2"], row["hisco_3"]) == ("-1", "01110", "44444")  # beyond --k
            assert [row[name] for name in ("prob_1", "prob_3", "conf")] == ["1"] * 3
            assert row["conf_fitted"] == row["needs_review"] == "0"
        else:
            assert (row.pop("hisco_3"), row.pop("prob_3"), row.pop("title_3")) == ("", "", "")
            assert row == model_row
    assert counts[0] and counts[1] > 1 and f"{counts[1]} with known codes" in said
    # in a file of review, other rows have the model's answers
    given[0] = (text, "Danish", "22222", "22222", "")  # a code that is listed twice is one
    deciders = zip(given, ["Ann", "model", "guess", "model", "", ""])
    write_csv(known, [*header, "decided_by"], [(*row, name) for row, name in deciders])
    said = predict_here(*flags(model, source, tmp_path / "decided.csv", *common, "--known", known))
    assert f"{known}: 1 known text\n" in said and f"{counts[1]} with known codes" in said
    coded = (row for row in read(tmp_path / "decided.csv") if row["source"] == "known")
    assert {(row["hisco_1"], row["hisco_2"]) for row in coded} == {("22222", "")}
    # in a table that no model has coded, a blank says that its code was there before
    write_csv(known, [*header, "decided_by"], [(*row, "") for row in given[:1]])
    said = predict_here(*flags(model, source, tmp_path / "before.csv", *common, "--known", known))
    assert f"{known}: 1 known text\n" in said
    bad = flags(model, source, tmp_path / "x.csv", "--known")
    lacking = write_csv(tmp_path / "lacking.csv", ["occ1", "code"], [("smed", "22222")])
    said = refused(*bad, lacking)
    assert "a column of codes (hisco_1); it has 'occ1', 'code'" in said
    wrong = [("a", "da", "22222", "99998"), ("b", "da", "01110", ""), ("c", "da", "x", "")]
    said = refused(*bad, write_csv(tmp_path / "wrong.csv", header[:4], wrong))
    assert "line 2: '99998' is not a code of hisco" in said and "line 4: 'x' is not a code of hisco" in said
    assert "line 3" not in said and not (tmp_path / "x.csv").exists()
    (tmp_path / "open.csv").write_text('occ1,hisco_1\n"smed,22222\n"a" b,22222\n')
    said = refused(*bad, tmp_path / "open.csv")  # the flags of the input do not describe it
    assert "open.csv, line 2" in said and "quotation mark" in said and "--no-quotes" not in said


def test_a_text_that_a_person_decided_to_have_no_code_is_known(tmp_path):
    model = save_model(tmp_path / "run", hisco_blocky5(["hisco_1"]), CODES)
    texts = ["smed", "enke", "bager"]
    given = [*zip(texts, ["da", "", "da"], ["", "", ""], ["Ann", "Bo", ""]), ("smed", "", "22222", "Bo")]
    known = write_csv(tmp_path / "final.csv", ["occ1", "lang", "hisco_1", "decided_by"], given)
    source = write_csv(tmp_path / "in.csv", ["occ1", "lang"], [(text, "da") for text in texts])
    said = predict_here(*flags(model, source, tmp_path / "out.csv", "--known", known))
    assert "final.csv: 3 known texts\n" in said and "2 with known codes" in said
    rows = [[row[name] for name in ("hisco_1", "source", "conf")] for row in read(tmp_path / "out.csv")]
    assert rows[:2] == [["", "known", "1"]] * 2 and rows[2][0] and rows[2][1] == "model"
    assert [row["needs_review"] for row in read(tmp_path / "out.csv")[:2]] == ["0", "0"]


def test_decisions_count_next_to_an_empty_column_of_the_training(tmp_path):
    model = save_model(tmp_path / "run", hisco_blocky5(["Code"]), CODES)
    header = ["occ1", "lang", "Code", "hisco_1", "decided_by"]
    known = write_csv(tmp_path / "final.csv", header, [("smed", "da", "", "22222", "Ann")])
    source = write_csv(tmp_path / "in.csv", ["occ1", "lang"], [("smed", "da")])
    said = predict_here(*flags(model, source, tmp_path / "out.csv", "--known", known))
    assert "final.csv: 1 known text\n" in said and read(tmp_path / "out.csv")[0]["hisco_1"] == "22222"


@pytest.mark.full
def test_names_are_codes_in_every_command(tmp_path):
    names = ["Fruit juice", "R&D", "bread & rolls", "rice, pasta", "Καφές", "0110"]
    words, header = ["juice", "lab", "loaf", "noodle", "coffee", "soldier"], ["occ1", "CODE_1", "CODE_2"]
    rows = [(f"{word} {i}", name, "") for i in range(12) for word, name in zip(words, names)]
    rows += [(f"loaf with coffee {i}", "bread & rolls", "Καφές") for i in range(12)]
    data, folder = write_csv(tmp_path / "data.csv", header, rows), tmp_path / "run"
    columns = ["--target-cols", *header[1:], "--share-val", 0, "--device", "cpu", "--seq2seq-weight", 0.1]
    said = run_here(finetune.main, "--dataset", data, *columns, "--save-path", folder)
    assert "Codes: 6 classes of 3 to 13 characters (classes, columns CODE_1, CODE_2)" in said
    run_here(export.main, folder, tmp_path / "a.bin", "--to", "published")
    known = write_csv(tmp_path / "known.csv", header[:2], [("juice 1", "110"), ("lab 1", "bread & rolls")])
    for decoder in ("flat", "greedy"):
        for model, output in ((folder, "own.csv"), (tmp_path / "a.bin", "exported.csv")):
            source = write_csv(tmp_path / "in.csv", header[:1], [row[:1] for row in rows])
            more = ["--decoder", decoder, "--known", known, "--overwrite"]
            predict_here("--model", model, "--input", source, "--output", tmp_path / output, *more)
        coded = read(tmp_path / "own.csv")
        assert coded == read(tmp_path / "exported.csv")
        assert {row["CODE_1"] for row in coded} == set(names)
        assert (coded[6]["CODE_1"], coded[7]["CODE_1"]) == ("0110", "bread & rolls")  # known
        assert [row["CODE_1"] for row in coded[12:72]] == [row[1] for row in rows[12:72]]
    others = write_csv(tmp_path / "others.csv", header, [*rows, ("x", "Fruit juices", ""), ("y", "110", "")])
    report = evaluate(folder, others, share_val=1, device="cpu")
    assert report["data"]["rows"] == 85 and report["data"]["rows_outside_key"] == 1
    assert [each["digits"] for each in report["decoders"]["linear"]["by_digits"]] == [13]  # compared whole
    more = ["--initial-checkpoint", folder, "--save-path", tmp_path / "tuned", "--max-steps", 1]
    said = run_here(finetune.main, "--dataset", others, *columns, *more)
    assert "(classes, columns CODE_1, CODE_2), the first 6 from the initial checkpoint" in said
    assert "other blocks" not in said
    assert models.load_model(str(tmp_path / "tuned"))[1].codes == (*sorted(names), "Fruit juices")


@pytest.mark.parametrize(
    "size", [TINY, ["--model-size", "ngrams", "--device", "cpu"]], ids=["tiny", "ngrams"]
)
def test_similar_texts_of_the_training(tmp_path, size):
    data, folder = write_rows(tmp_path / "data.csv", 60), tmp_path / "run"
    common = ["--dataset", data, "--target-cols", "hisco_1", "hisco_2", "--language-col", "lang"]
    run_here(finetune.main, *common, *size, "--max-steps", 2, "--batch-size", 16, "--save-path", folder)
    known = read(data)
    texts = [*((row["occ1"], row["lang"]) for row in known), (" ", "en")]
    source = write_csv(tmp_path / "in.csv", ["occ1", "lang"], texts)
    said = predict_here(*flags(folder, source, tmp_path / "out.csv", "--explain"))
    assert re.search(r"Computing the vectors of training texts: \d+", said)
    rows, in_training = read(tmp_path / "out.csv"), 0
    names = [f"similar_{name}_{i}" for i in (1, 2, 3) for name in ("text", "codes")]
    assert list(rows[0])[-9:] == [*ANSWER, *names]
    codes = {row["occ1"]: "&".join(filter(None, (row["hisco_1"], row["hisco_2"]))) for row in known}
    for row in rows[:-1]:
        texts = [row[f"similar_text_{i}"] for i in (1, 2, 3)]
        assert len(set(texts)) == 3
        assert [row[f"similar_codes_{i}"] for i in (1, 2, 3)] == [codes[text] for text in texts]
        in_training += row["occ1"] == texts[0]  # nothing is nearer than the text itself
    assert 40 < in_training < 60 and [rows[-1][name] for name in names] == [""] * 6
    first = (folder / "training_vectors.bin").stat().st_mtime_ns
    said = predict_here(*flags(folder, source, tmp_path / "again.csv", "--explain"))
    assert "Computing" not in said and first == (folder / "training_vectors.bin").stat().st_mtime_ns
    assert (tmp_path / "again.csv").read_bytes() == (tmp_path / "out.csv").read_bytes()
    for name in ("key.csv", "logs.csv", "best.bin", "training_vectors.bin"):
        said = refused(*flags(folder, source, folder / name, "--overwrite"))
        assert "inputs are never written to" in said, said
    (folder / "prepared").rename(tmp_path / "moved")
    said = refused(*flags(folder, source, tmp_path / "x.csv", "--explain"))
    assert "--explain" in said


def test_the_linear_decoder_answers_with_the_codes_above_the_threshold_of_a_language(model, tmp_path):
    source, counts = table(tmp_path / "in.csv", 20), set()
    more = ["--threshold", "en=0.9", "0.4", "--decoder", "flat", "--k", 3, "--system", "mine"]
    predict_here(*flags(model, source, tmp_path / "out.csv", *more))
    loaded = models.load_model(model)[0]
    for row in (row for row in read(tmp_path / "out.csv") if row["occ1"].strip()):
        language = row["lang"].strip() if row["lang"].strip() in ("en", "da") else "unk"
        ids, mask = map(torch.from_numpy, encode([row["occ1"].strip()], [language]))
        with torch.no_grad():
            probs = loaded.classify(loaded.encode(ids, mask)[1]).sigmoid()[0].tolist()
        order = sorted(range(7), key=lambda i: -probs[i])[:3]
        best = {CODES[i]: probs[i] for i in order if probs[i] > (0.9 if language == "en" else 0.4)}
        assert [row[f"mine_{i}"] for i in (1, 2, 3) if row[f"mine_{i}"]] == [*best]
        found = [float(row[f"prob_{i}"]) for i in range(1, len(best) + 1)]
        assert found == pytest.approx([*best.values()], rel=1e-3)
        of_set = math.prod(p if code in best else 1 - p for code, p in zip(CODES, probs))
        assert float(row["conf"]) == pytest.approx(of_set, rel=1e-3)
        counts.add(len(best))
    assert len(counts) > 1


NEW_DECODER = """
from histocc.predict import decoders
decoders.DECODERS["second"] = decoders.Decoder("the second best code", {"tree"}, confidence_of="topk")
from histocc.predict import __main__ as predict, coder
def second(self, *texts, k, **settings):
    for one in self._topk(*texts, k=k + 1, **settings):
        yield coder.Coded(one.codes[1:], one.probs[1:], one.probs[1])
coder.Coder._second = second
predict.main()
"""


def test_a_new_decoder_is_an_entry_and_a_method(model, tmp_path):
    source, script = table(tmp_path / "in.csv", 30), tmp_path / "new.py"
    script.write_text(NEW_DECODER)
    more = flags(model, source, tmp_path / "new.csv", "--decoder", "second", "--k", 1, "--device", "cpu")
    run(script, *more)
    predict_here(*flags(model, source, tmp_path / "topk.csv", "--decoder", "topk", "--k", 2))
    found, best = read(tmp_path / "new.csv"), read(tmp_path / "topk.csv")
    assert [row["hisco_1"] for row in found] == [row["hisco_2"] for row in best] and best[1]["hisco_2"]


@pytest.mark.parametrize("decoder", DECODERS)
def test_a_text_gets_the_same_in_any_batch_and_once(decoder):
    texts = [f"{'x' * length} smed {length}" for length in (5, 90, 17, 40, 8, 60, 33, 5, 100, 21, 70)]
    batches = []

    def check():
        batches.append(1)
        coder.batch_size = 1  # as another thread may; it counts from the next call on

    coder = small_coder(batch_size=4, precision=Precision("float64"), check=check)
    together = coder.code(texts * 9, ["unk"] * len(texts) * 9, decoder)
    assert len(batches) == 3 and together[: len(texts)] * 9 == together
    half = small_coder(precision=Precision("bf16")).code(texts, ["unk"] * len(texts), decoder)
    differences = []
    for text, found, rounded in zip(texts, together, half):
        [alone] = coder.code([text], ["unk"], decoder)
        assert found.codes == alone.codes and found.probs == pytest.approx(alone.probs, abs=1e-10)
        assert found.conf == pytest.approx(alone.conf, abs=1e-10)
        differences += [abs(found.conf - rounded.conf) / found.conf] if found.codes == rounded.codes else []
    assert len(differences) > 5 and 1e-5 < max(differences) < 0.5


@pytest.mark.processes
@pytest.mark.full
def test_processes_and_interruptions_change_nothing(model, tmp_path):
    texts = enumerate(read(table(tmp_path / "t", 5_000)))
    rows = [[*row.values(), "22222" * (i % 9 == 0)] for i, row in texts]
    source, missing = write_csv(tmp_path / "in.csv", [*HEADER, "hisco_1"], rows), "--only-missing"
    predict_here(*flags(model, source, tmp_path / "one.csv", missing))
    whole = (tmp_path / "one.csv").read_bytes()
    assert whole.count(b"\n") > 5_000

    again, parts = flags(model, source, tmp_path / "again.csv", missing), tmp_path / "again.csv.parts"
    (tmp_path / "log").touch()
    [interrupted] = start_forked("histocc.predict", [*again, "--device", "cpu"], tmp_path / "log")
    wait_until((parts / "000000.part").exists)
    interrupted.terminate()
    interrupted.join(60)
    assert interrupted.exitcode == 0 and "Stopped by SIGTERM" in (tmp_path / "log").read_text()
    there = sorted(path.name for path in parts.glob("*.part"))
    assert there and len(there) < 3 and not (tmp_path / "again.csv").exists()
    assert "other settings (decoder" in refused(*again, "--decoder", "flat")
    assert "resuming" in run("histocc.predict", *again, "--device", "cpu", processes=2)
    assert (tmp_path / "again.csv").read_bytes() == whole and not parts.exists()
    two = flags(model, source, tmp_path / "two.csv", "--device", "cpu", missing)
    assert "2 processes" in run("histocc.predict", *two, processes=2)
    assert (tmp_path / "two.csv").read_bytes() == whole


def is_killed_at(number, folder, work) -> bool:
    """Runs `work` in a fork that dies before a file operation below a folder, by its number."""
    numbers = itertools.count(1)

    def look(event, given):
        below = event.startswith(("open", "os.")) and str(folder) in str(given[:2])
        if (below or event == "fcntl.flock") and next(numbers) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        sys.addaudithook(look)
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] == signal.SIGKILL


@pytest.mark.processes
def test_after_a_kill_at_any_file_operation_the_same_command_finishes(model, tmp_path, monkeypatch):
    monkeypatch.setattr(coding, "PIECE", 20)
    source, folder, number = table(tmp_path / "in.csv", 40), tmp_path / "new", 1
    predict_here(*flags(model, source, tmp_path / "whole.csv", "--decoder", "flat"))
    asked = flags(model, source, folder / "out.csv", "--decoder", "flat")
    while is_killed_at(number, folder, lambda: predict_here(*asked)):
        predict_here(*asked)
        assert os.listdir(folder) == ["out.csv"], number
        assert (folder / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
        shutil.rmtree(folder)
        number += 1 if all_tests() else 17
    assert number > 30


def test_parts_that_are_there_are_kept_and_damaged_ones_coded_again(model, tmp_path, monkeypatch):
    monkeypatch.setattr(coding, "PIECE", 10)
    source, code_piece = table(tmp_path / "in.csv", 60), coding.Coding.code_piece
    predict_here(*flags(model, source, tmp_path / "whole.csv"))

    def fail(self, number, texts):
        failing = {"side_effect": errors.pop()} if number == 3 else {"wraps": self.coder._are_known}
        with unittest.mock.patch.object(self.coder, "_are_known", **failing):
            code_piece(self, number, texts)

    asked, parts = flags(model, source, tmp_path / "out.csv"), tmp_path / "out.csv.parts"
    errors = [torch.OutOfMemoryError("CUDA out of memory"), OSError(28, "No space left on device")]
    with monkeypatch.context() as patch:
        patch.setattr(coding.Coding, "code_piece", fail)
        for message in ("no space left", "out of memory with --batch-size 256"):
            assert message in run_here(predict.main, *asked, "--device", "cpu", code=1)
    assert not (tmp_path / "out.csv").exists()
    names = [f"00000{i}.part" for i in range(3)]
    assert sorted(os.listdir(parts)) == [*names, "settings.json"]
    os.replace(parts / names[0], parts / "x")  # swapped
    os.replace(parts / names[1], parts / names[0])
    os.replace(parts / "x", parts / names[1])
    content = (parts / names[2]).read_bytes()
    (parts / names[2]).write_bytes(content[:-2] + b"x" + content[-1:])
    (parts / "thesis.csv").write_text("mine")
    assert "resuming" in predict_here(*asked)
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()
    assert os.listdir(parts) == ["thesis.csv"]


def test_a_model_that_was_trained_again_finishes_nothing(model, tmp_path, monkeypatch):
    source, run_folder = table(tmp_path / "in.csv", 9), shutil.copytree(model, tmp_path / "run")
    known = write_csv(tmp_path / "known.csv", ["occ1", "hisco_1"], [("smed", "22222")])
    asked = flags(run_folder, source, tmp_path / "out.csv", "--known", known)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(coding.Coding, "join", lambda _: 1 / 0)  # all pieces are there
        predict.main([str(each) for each in [*asked, "--device", "cpu"]])
    write_csv(known, ["occ1", "hisco_1"], [("smed", "33333")])
    trained = {**checkpoint.load(str(run_folder / "last.bin")), "step": 2}
    checkpoint.save(OwnFiles(str(run_folder)), ["last.bin"], trained)
    assert "unfinished output with other settings (known, model differ)" in refused(*asked)


def test_a_folder_of_somebody_else_is_left_alone(model, tmp_path):
    """Names alone are no proof: only a settings file as it was written makes the folder one of parts."""
    source, parts = table(tmp_path / "in.csv", 9), tmp_path / "out.csv.parts"
    for name in ("thesis.csv", "000001.part", "settings.json", "input"):
        parts.mkdir()
        (parts / name).write_text("mine")
        said = refused(*flags(model, source, tmp_path / "out.csv", "--overwrite"))
        assert f"holds {name}" in said and (parts / name).read_text() == "mine"
        parts.rename(tmp_path / f"not {name}")


def test_an_input_that_changes_meanwhile_is_said(model, tmp_path, monkeypatch):
    source, code_piece = table(tmp_path / "in.csv", 9), coding.Coding.code_piece

    def rewrite(self, *rest):
        before = open(source, encoding="utf-8").read()  # as long, and in a column that is not read
        open(source, "w", encoding="utf-8").write(before.replace(",NA", ",AN"))
        code_piece(self, *rest)

    monkeypatch.setattr(coding.Coding, "code_piece", rewrite)
    said = refused(*flags(model, source, tmp_path / "out.csv"))
    assert "in.csv changed while" in said and "--overwrite" in said
    assert not (tmp_path / "out.csv").exists()


def test_progress_is_shown(model, tmp_path, monkeypatch):
    monkeypatch.setattr(log, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(coding, "PIECE", 20)
    source = table(tmp_path / "in.csv", 100)
    said = predict_here(*flags(model, source, tmp_path / "out.csv", "--decoder", "flat", "--batch-size", 4))
    texts = re.findall(r"coding: (\d+) of 9\d texts, [\d,.]+/s", said)
    assert texts == sorted(texts, key=int) and int(texts[0]) < 5 and int(texts[-1]) > 80
    said = predict_here(*flags(model, source, tmp_path / "out.csv", "--overwrite", "--non-verbose"))
    assert "texts" not in said

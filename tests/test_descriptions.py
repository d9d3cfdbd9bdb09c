"""Descriptions of codes behind training texts: which texts, which words, and only in training."""

import numpy as np
import pytest
from helpers import TINY, run_inside, write_csv, write_rows

import finetune
from histocc.data import dataset
from histocc.data import prepare as prep
from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings
from histocc.data.dataset import RowEncoding, TextChanges, TextRows
from histocc.formatter import make_formatter
from histocc.runtime.errors import UserError
from histocc.trainer.batches import BatchPlan, MicroBatches

HISCO = make_formatter("hisco", ["hisco_1"])
ROWS = [
    ("bonde", "61110", "da"),
    ("farmer", "61110", "en"),
    ("smed", "83110", "da"),
    ("baker", "77610", "en"),
]
ROWS += [("none", "-1", "en")]
TEXTS = [("61110", "General farmer", "en"), ("61110", "Landmand", "da"), ("83110", "Blacksmith", "en")]
TEXTS += [("77610", "", "en"), ("99999", "Else", "en")]


def arguments(path, **more):
    usual = {"include_descriptions": True, "descriptions_file": str(path), "description_prob": 1.0}
    return dataset.DescriptionFlags(**usual | more)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    path = write_csv(folder / "data.csv", ("occ1", "hisco_1", "lang"), ROWS)
    settings = PrepareSettings([path], HISCO.to_dict(), HISCO.target_cols, share_val=0.0, language_col="lang")
    return PreparedData.open(prep.prepare(settings, str(folder), lambda *_: None))


@pytest.fixture
def file(tmp_path):
    return write_csv(tmp_path / "texts.csv", ("hisco", "description", "lang"), TEXTS)


def shown(data, args, epoch=0, seed=5):
    """Text of each row of the file, with what was put to it."""
    rows, codes = np.arange(len(data.train)), data.train.codes[:, 0]
    read = (*data.train.texts(rows), codes, data.train.language.astype(np.int64))
    flat, offsets = dataset.load_descriptions(args, data, HISCO, seed).apply(*read, rows, epoch)
    return ["".join(map(chr, flat[a:b])) for a, b in zip(offsets, offsets[1:])]


def test_each_code_and_language_gets_its_own(data, file):
    assert shown(data, arguments(file, descriptions_lang_col="lang")) == [
        "bonde [DESC: Landmand]",
        "farmer [DESC: General farmer]",
        "smed [DESC: Blacksmith]",
        "baker",
        "none",
    ]
    # without languages: the first of its code
    assert shown(data, arguments(file))[0] == "bonde [DESC: General farmer]"
    assert dataset.load_descriptions(arguments(file), data, HISCO, 1).codes == 2


@pytest.mark.parametrize(
    "template, text",
    [
        ("{desc}: {occ}", "Blacksmith: smed"),
        ("{desc}", "Blacksmith"),
        ("a{occ}b{desc}c{occ}", "asmedbBlacksmithcsmed"),
    ],
)
def test_templates(data, file, template, text):
    found = shown(data, arguments(file, description_template=template))
    assert found[2] == text and found[3] == ("bakerbaker" if template.count("{occ}") == 2 else "baker")


def test_some_texts_get_it_by_seed_epoch_and_row(data, file):
    args = arguments(file, description_prob=0.5)

    def which(seed: int = 5) -> list[tuple]:
        return [tuple("DESC" in text for text in shown(data, args, epoch, seed)) for epoch in range(40)]

    first = which()
    assert len(set(first)) > 4 and first == which() != which(seed=6)
    assert 0.3 < np.mean([row[:3] for row in first]) < 0.7 and not any(any(row[3:]) for row in first)


def test_batches_show_them(data, file):
    found = dataset.load_descriptions(arguments(file), data, HISCO, 5)
    texts = TextRows(data.train, data, RowEncoding(HISCO), TextChanges(descriptions=found))
    [batch] = MicroBatches(texts, BatchPlan(5, 5), 0, 1)[0, 0]
    pairs = zip(batch["input_ids"], batch["attention_mask"])
    texts = sorted("".join(map(chr, ids[mask].tolist()[1:-1])) for ids, mask in pairs)
    assert texts[1:4] == [
        "da[SEP]smed [DESC: Blacksmith]",
        "en[SEP]baker",
        "en[SEP]farmer [DESC: General farmer]",
    ]
    assert texts[::4] == ["da[SEP]bonde [DESC: General farmer]", "en[SEP]none"]


def test_usual_names_of_columns_and_those_that_are_not(tmp_path, data):
    path = write_csv(tmp_path / "key.csv", ("en_hisco_text", "hisco", "code"), [("Smiths", "83110", "1")])
    assert dataset.find_columns(arguments(path)) == ["hisco", "en_hisco_text"]
    path = write_csv(tmp_path / "other.csv", ("nr", "words"), [("83110", "Smiths")])
    with pytest.raises(UserError, match=r"needs a column of codes \(system_code, hisco, code\) and one of"):
        dataset.find_columns(arguments(path))
    names = {"descriptions_code_col": "nr", "descriptions_text_col": "words"}
    named = arguments(path, **names)
    assert shown(data, named)[2] == "smed [DESC: Smiths]"
    with pytest.raises(UserError, match="has no column 'l'"):
        dataset.find_columns(arguments(path, **names, descriptions_lang_col="l"))
    write_csv(path, ("nr", "words"), [("11111", "Else")])
    with pytest.raises(UserError, match="none of the 4 codes of the data stands in column 'nr'"):
        dataset.load_descriptions(named, data, HISCO, 1)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--include-descriptions"], "--include-descriptions needs --descriptions-file"),
        (["--descriptions-file", "x.csv"], "--descriptions-file needs --include-descriptions"),
        (["--include-descriptions", "--descriptions-file", "none.csv"], "none.csv: no such file"),
        (["--description-template", "{occ}"], "must hold {desc}"),
        (["--description-prob", "2"], "--description-prob: '2' is not a number between 0 and 1"),
    ],
)
def test_flags_that_do_not_fit(tmp_path, flags, words):
    files = ["--dataset", write_rows(tmp_path / "d.csv", 20), "--save-path", tmp_path / "run"]
    columns = ["--target-cols", "hisco_1", "--formatter", "hisco"]
    code, output = run_inside(finetune.main, *files, *columns, *TINY, *flags)
    assert code == 2 and words in output and not (tmp_path / "run").exists()


def test_without_the_flag_there_is_nothing(data):
    parser = finetune.get_args_parser()
    args = parser.parse_args(["--dataset", "x.csv"])
    assert list(args.problems()) == [] and dataset.load_descriptions(args, data, HISCO, 1) is None

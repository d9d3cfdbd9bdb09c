"""Batches: what is in them, and that processes that load them change nothing; descriptions of codes."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import fork_server, write_csv
from preparing import quiet, settings_for

import finetune
from histocc.data import descriptions as desc
from histocc.data import prepare as prep
from histocc.data.arrays import PreparedData
from histocc.data.dataset import RowEncoding, TextRows
from histocc.data.noise import Augmenter
from histocc.formatter import make_formatter
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.text import padded_width
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches

HISCO = make_formatter("hisco", ["code_1", "code_2"])
ROWS = [
    (f"{'farmer and smith of ' * (i % 4)}place {i}", ("61110", "83110", "-1")[i % 3], ("", "1110")[i % 2])
    + (("en", "da", "")[i % 3],)
    for i in range(23)
]
NOISE = {"num_transformations": 3, "augmentation_prob": 0.9, "unk_lang_prob": 0.5, "words": ["gammel", "ung"]}


def prepared(folder, rows, val=None) -> PreparedData:
    header = ("occ1", "code_1", "code_2", "lang")
    parts = enumerate([rows, val or rows[:1]])
    files = [write_csv(Path(folder) / f"{i}.csv", header, some) for i, some in parts]
    settings = settings_for(files[0], cols=header[1:3], val_files=files[1:], language_col="lang")
    return PreparedData.open(prep.prepare(settings, str(folder), quiet))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("data"), ROWS, val=ROWS[:7])


@pytest.fixture
def batches(data):
    """Makes one rank's micro-batches of the training rows, shuffled and noisy unless told otherwise."""

    def make(total, processes=1, micro=0, rank=0, noise=NOISE, groups=1, **options):
        plan = BatchPlan(len(data.train), total, processes, micro, groups, 1)
        seed = options.pop("shuffle_seed", 11)
        augmenter = Augmenter(5, **noise) if noise else None
        rows = TextRows(data.train, data, RowEncoding(HISCO, **options), augmenter)
        return MicroBatches(rows, plan, rank, seed)

    return make


def epoch_of(dataset: MicroBatches, epoch: int = 0, first_batch: int = 0) -> list[dict]:
    return list(BatchLoader(dataset).at(epoch, first_batch))


NAMES = ("input_ids", "attention_mask", "targets_seq2seq", "targets_linear", "weights")


def rows_in(batch: dict) -> list[tuple]:
    """Rows that count, as plain Python: (visible ids, tokens, codes)."""
    return [
        (tuple(ids[mask].tolist()), tuple(tokens.tolist()), tuple(codes.tolist()))
        for ids, mask, tokens, codes, weight in zip(*map(batch.__getitem__, NAMES))
        if weight
    ]


def text_of(ids) -> str:
    """LANG[SEP]DESCRIPTION of one row."""
    return "".join(map(chr, ids[1:-1]))


# ---- what is in a batch


def test_keys_shapes_and_types(batches):
    dataset = batches(8)
    [batch] = dataset[0, 0]
    width = batch["input_ids"].shape[1]
    expected = {
        "input_ids": ((8, width), torch.int64),
        "attention_mask": ((8, width), torch.bool),
        "targets_seq2seq": ((8, 27), torch.int64),
        "targets_linear": ((8, 2), torch.int64),
        "weights": ((8,), torch.float32),
        "rows": ((8,), torch.int64),
    }
    tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
    assert {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()} == expected
    assert batch.keys() - tensors.keys() == {"global_count", "last_micro_batch"}
    assert sorted(row for part in epoch_of(dataset) for row in part["rows"].tolist()) == list(range(23))
    assert width == padded_width(int(batch["attention_mask"].sum(1).max()) - 2) and len(dataset) == 3
    sizes = [(len(batch["weights"]), batch["global_count"]) for batch in epoch_of(dataset)]
    assert sizes == [(8, 8), (8, 8), (7, 7)]


def test_widths(batches):
    narrow, wide = (epoch_of(batches(4, fixed_width=width)) for width in (None, 128))
    assert [sorted(rows_in(batch)) for batch in narrow] == [sorted(rows_in(batch)) for batch in wide]
    assert len({batch["input_ids"].shape[1] for batch in narrow}) > 1
    assert {batch["input_ids"].shape[1] for batch in wide} == {128}
    for batch in epoch_of(batches(4, noise=None, max_len=20)):  # longer descriptions are cut
        assert batch["attention_mask"].sum(1).max() <= 20 and batch["input_ids"].shape[1] <= 20
        assert all(ids[-1] == 0xE001 for ids, _, _ in rows_in(batch))
    # micro-batches of similar length: the noise has changed the lengths when the cut is made
    whole, cut = (batches(12, noise=noise, groups=groups) for noise, groups in ((NOISE, 1), (NOISE, 3)))
    for index in ((0, 0), (1, 1)):
        [one], parts = whole[index], cut[index]
        assert len(parts) == 3
        assert sorted(rows_in(one)) == sorted(row for part in parts for row in rows_in(part))
        widths = [part["input_ids"].shape[1] for part in parts]
        assert widths == [padded_width(int(part["attention_mask"].sum(1).max()) - 2) for part in parts]
        assert widths == sorted(widths)
        assert [part["last_micro_batch"] for part in parts] == [False, False, True]


# ---- order and noise


def test_rows_are_texts_and_codes_as_the_file_has_them(batches, data):
    label_of, found = {}, rows_in(batches(23, noise=None)[0, 0][0])
    for text, *codes, language in ROWS:
        codes = [code.zfill(5) if code == "1110" else code for code in codes if code]
        label_of[f"{language or 'unk'}[SEP]{text}"] = "&".join(codes)
    assert sorted(text_of(ids) for ids, _, _ in found) == sorted(label_of)
    for ids, tokens, numbers in found:
        label = label_of[text_of(ids)]
        assert "&".join(data.codes[number] for number in numbers if number >= 0) == label
        assert list(tokens) == HISCO.transform_label(label).tolist()


def test_epochs_differ_in_order_and_noise_which_leaves_the_codes_alone(batches):
    def texts(epoch: int, **options) -> list[str]:
        return [text_of(ids) for ids, _, _ in rows_in(batches(23, **options)[epoch, 0][0])]

    first, second = (texts(epoch, noise=None) for epoch in range(2))
    assert sorted(first) == sorted(second) and first != second
    assert len(set(texts(0)) - set(texts(1))) > 10
    noisy, quiet = (rows_in(batches(23, noise=noise)[0, 0][0]) for noise in (NOISE, None))
    assert sorted(row[1:] for row in noisy) == sorted(row[1:] for row in quiet)
    for probability, languages in ((1.0, {"unk"}), (0.0, {"unk", "en", "da"})):
        hidden = texts(0, noise={"num_transformations": 0, "unk_lang_prob": probability})
        assert {text.split("[SEP]")[0] for text in hidden} == languages
        assert sorted(text.split("[SEP]")[1] for text in hidden) == sorted(row[0] for row in ROWS)


@pytest.mark.parametrize("persistent, device", [(False, "cpu"), (True, "cpu"), (False, "cuda")])
def test_workers_change_nothing_and_loading_draws_no_random_numbers(batches, persistent, device):
    """For a GPU they are not forked from the process that uses it."""
    fork_server()  # of other tests: it must be the one that is started
    plain, options = BatchLoader(batches(6, micro=2)), {"num_workers": 2, "prefetch_factor": 2}
    world = World(device=torch.device(device))
    workers = BatchLoader(batches(6, micro=2), world, persistent_workers=persistent, **options)
    context = workers.loader.multiprocessing_context
    assert (context and context.get_start_method()) == (None if device == "cpu" else "forkserver")
    for epoch, first_batch in ((0, 0), (1, 0), (1, 2)):
        next(iter(workers.at(0, 1)))  # broken off: leaves nothing behind
        for batch, other in zip(plain.at(epoch, first_batch), workers.at(epoch, first_batch), strict=True):
            torch.testing.assert_close(batch, other, rtol=0, atol=0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    epoch_of(batches(6))
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]


def test_workers_are_sent_paths_and_not_arrays(data):
    sent, rows = pickle.dumps(data.train), np.array([22, 0, 5, 5])
    copy = pickle.loads(sent)
    assert len(sent) < 1000 and len(copy) == 23 and (copy.codes == data.train.codes).all()
    flat, offsets = copy.texts(rows)
    texts = [ROWS[i][0] for i in rows]
    assert ["".join(map(chr, flat[a:b])) for a, b in zip(offsets, offsets[1:])] == texts == copy.strings(rows)
    assert copy.texts(rows[:0])[1].tolist() == [0] and copy.strings(rows[:0]) == []


# ---- descriptions of codes

DESCRIBED = [("bonde", "61110", "", "da"), ("farmer", "61110", "", "en"), ("smed", "83110", "", "da")]
DESCRIBED += [("baker", "77610", "", "en"), ("none", "-1", "", "en")]
WORDS = [("61110", "General farmer", "en"), ("61110", "Landmand", "DA"), ("83110", "Blacksmith", "en")]
WORDS += [("77610", "", "en"), ("99999", "Else", "en")]


def arguments(path, **more):
    usual = {"include_descriptions": True, "descriptions_file": str(path), "description_prob": 1.0}
    return desc.DescriptionFlags(**usual | more)


@pytest.fixture(scope="module")
def described(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("described"), DESCRIBED)


@pytest.fixture
def file(tmp_path):
    return write_csv(tmp_path / "texts.csv", ("hisco", "description", "lang"), WORDS)


def shown(data, args, epoch=0, seed=5):
    """Text of each row of the file, with what was put to it."""
    descriptions = desc.load_descriptions(args, data, HISCO, seed)
    rows = TextRows(data.train, data, RowEncoding(HISCO), descriptions=descriptions)
    batch = rows.batch(np.arange(len(data.train)), epoch)
    characters = set(rows.characters().tolist())
    assert characters >= set(batch["input_ids"].unique().tolist())
    pairs = zip(batch["input_ids"], batch["attention_mask"])
    return [text_of(ids[mask].tolist()).partition("[SEP]")[2] for ids, mask in pairs]


def test_each_code_and_language_gets_its_own_description(described, file):
    found = shown(described, arguments(file, descriptions_lang_col="lang"))
    assert found[:2] == ["bonde [DESC: Landmand]", "farmer [DESC: General farmer]"]
    assert found[2:] == ["smed [DESC: Blacksmith]", "baker", "none"]
    # without languages: the first of its code
    assert shown(described, arguments(file))[0] == "bonde [DESC: General farmer]"
    assert desc.load_descriptions(arguments(file), described, HISCO, 1).codes == 2
    for template, text in (("{desc}: {occ}", "Blacksmith: smed"), ("{desc}", "Blacksmith")):
        found = shown(described, arguments(file, description_template=template))
        assert found[2] == text and found[3] == "baker"


def test_some_texts_get_it_by_seed_epoch_and_row(described, file):
    args = arguments(file, description_prob=0.5)

    def which(seed: int = 5) -> list[tuple]:
        return [tuple("DESC" in text for text in shown(described, args, epoch, seed)) for epoch in range(40)]

    first = which()
    assert len(set(first)) > 4 and first == which() != which(seed=6)
    assert 0.3 < np.mean([row[:3] for row in first]) < 0.7 and not any(any(row[3:]) for row in first)
    args = finetune.get_args_parser().parse_args(["--dataset", "x.csv"])
    assert list(args.problems()) == [] and desc.load_descriptions(args, described, HISCO, 1) is None


def test_usual_names_of_columns_and_those_that_are_not(tmp_path, described):
    path = write_csv(tmp_path / "key.csv", ("en_hisco_text", "hisco", "code"), [("Smiths", "83110", "1")])
    assert desc.find_columns(arguments(path)) == ["hisco", "en_hisco_text"]
    path = write_csv(tmp_path / "other.csv", ("nr", "words"), [("83110", "Smiths")])
    said = r"needs a column of codes \(system_code, hisco, code\) and a column of"
    with pytest.raises(UserError, match=said):
        desc.find_columns(arguments(path))
    names = {"descriptions_code_col": "nr", "descriptions_text_col": "words"}
    named = arguments(path, **names)
    assert shown(described, named)[2] == "smed [DESC: Smiths]"
    with pytest.raises(UserError, match="has no column 'l'"):
        desc.find_columns(arguments(path, **names, descriptions_lang_col="l"))
    write_csv(path, ("nr", "words"), [("11111", "Else")])
    with pytest.raises(UserError, match="none of the codes of the data .4. is in column 'nr'"):
        desc.load_descriptions(named, described, HISCO, 1)

"""Batches: what is in them, and that neither processes nor workers nor restarts change it."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import write_csv

from histocc.data import prepare as prep
from histocc.data.arrays import PreparedData
from histocc.data.dataset import RowEncoding, TextChanges, TextRows
from histocc.data.noise import Augmenter
from histocc.formatter import BlockyFormatter, make_formatter
from histocc.text import padded_width
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches

ROWS = [
    (f"{'farmer and smith of ' * (i % 4)}place {i}", ("61110", "83110", "-1")[i % 3], ("", "1110")[i % 2])
    + (("en", "da", "")[i % 3],)
    for i in range(23)
]
CODES = ["-1", "01110", "61110", "83110"]
NOISE = {"num_transformations": 3, "augmentation_prob": 0.9, "unk_lang_prob": 0.5, "words": ["gammel", "ung"]}


def prepared(folder, formatter: BlockyFormatter, train, val) -> PreparedData:
    header = ("occ1", "code_1", "code_2", "lang")
    files = [
        write_csv(folder / f"{name}.csv", header, rows) for name, rows in (("train", train), ("val", val))
    ]
    settings = prep.PrepareSettings(
        files[:1], formatter.to_dict(), formatter.target_cols, files[1:], language_col="lang"
    )
    return PreparedData.open(prep.prepare(settings, str(folder), lambda *_: None))


@pytest.fixture(scope="module")
def hisco():
    return make_formatter("hisco", ["code_1", "code_2"])


@pytest.fixture(scope="module")
def data(tmp_path_factory, hisco):
    return prepared(tmp_path_factory.mktemp("data"), hisco, ROWS, ROWS[:7])


@pytest.fixture
def batches(data, hisco):
    """Makes one rank's micro-batches of the training rows, shuffled and noisy unless told otherwise."""

    def make(total, processes=1, micro=0, rank=0, noise=NOISE, groups=1, **options):
        plan = BatchPlan(len(data.train), total, processes, micro, groups, 1)
        seed = options.pop("shuffle_seed", 11)
        changes = TextChanges(augmenter=Augmenter(5, **noise) if noise else None)
        encoding = RowEncoding(hisco, **options)
        return MicroBatches(TextRows(data.train, data, encoding, changes), plan, rank, seed)

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


def assert_same(batch: dict, other: dict) -> None:
    assert batch.keys() == other.keys()
    for name, value in batch.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]


def written(row: tuple) -> tuple[str, str]:
    """A row of the file as (input, label)."""
    text, first, second, language = row
    return f"{language or 'unk'}[SEP]{text}", "&".join(
        code.zfill(5) if code == "1110" else code for code in (first, second) if code
    )


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
    assert (batch["global_count"], batch["last_micro_batch"]) == (8, True)
    assert batch["weights"].tolist() == [1.0] * 8
    assert sorted(row for part in epoch_of(dataset) for row in part["rows"].tolist()) == list(range(23))
    assert width == padded_width(int(batch["attention_mask"].sum(1).max()) - 2) and len(dataset) == 3
    sizes = [(len(batch["weights"]), batch["global_count"]) for batch in epoch_of(dataset)]
    assert sizes == [(8, 8), (8, 8), (7, 7)]


def test_rows_are_those_of_the_file(batches, hisco):
    found = [row for batch in epoch_of(batches(5, noise=None, shuffle_seed=None)) for row in rows_in(batch)]
    assert sorted(text_of(ids) for ids, _, _ in found) == sorted(written(row)[0] for row in ROWS)
    labels = dict(map(written, ROWS))
    for ids, tokens, codes in found:
        label = labels[text_of(ids)]
        assert list(tokens) == hisco.transform_label(label).tolist()
        assert [CODES[code] for code in codes if code >= 0] == label.split("&") and len(codes) == 2


COMMAS = {"block_size": 3, "use_within_block_sep": True, "allow_short": True}


@pytest.mark.parametrize(
    "kind, options, rows",
    [
        ("hisco", {}, [("61110", "-3"), ("-1", ""), ("01110", "99999")]),
        ("occ1950", {}, [("100", "999"), ("050", ""), ("7", "")]),
        ("gpf", {"block_size": 4, "allow_short": True}, [("a", "1b.2"), ("zZ9!", ""), ("-1", "?")]),
        ("gpf", COMMAS, [("10,-2,a", "5"), ("999", "")]),
    ],
)
def test_targets_are_the_labels_as_tokens(tmp_path, kind, options, rows):
    formatter = make_formatter(kind, ["code_1", "code_2"], **options)
    train = [("smith", *codes, "en") for codes in rows]
    data = prepared(tmp_path, formatter, train, train[:1])
    texts = TextRows(data.train, data, RowEncoding(formatter))
    [batch] = epoch_of(MicroBatches(texts, BatchPlan(len(rows), 9), 0))  # of equal length: in order
    for tokens, codes in zip(batch["targets_seq2seq"], rows):
        label = "&".join(formatter.repair(code)[0] for code in codes if code)
        assert tokens.tolist() == formatter.transform_label(label).tolist()


def test_rank_without_rows_gets_one_of_weight_0(batches):
    """23 rows on four ranks in batches of 11: the last batch is one row."""
    ranks = [batches(11, 4, rank=rank) for rank in range(4)]
    assert [[batch["weights"].tolist() for batch in epoch_of(dataset)] for dataset in ranks] == [
        [[1, 1, 1], [1, 1, 1], [1]],
        [[1, 1, 1], [1, 1, 1], [0]],
        [[1, 1, 1], [1, 1, 1], [0]],
        [[1, 1], [1, 1], [0]],
    ]
    for dataset in ranks:
        [empty] = dataset[0, 2]
        assert empty["global_count"] == 1 and empty["last_micro_batch"] is True
        assert empty["attention_mask"].any() and empty["targets_seq2seq"].shape == (1, 27)


@pytest.mark.parametrize(
    "total, processes, micro", [(23, 1, 5), (10, 3, 2), (22, 4, 1), (7, 4, 3), (5, 2, 1)]
)
def test_weights_and_counts_of_a_step(batches, total, processes, micro):
    ranks = [epoch_of(batches(total, processes, micro, rank)) for rank in range(processes)]
    assert len(set(map(len, ranks))) == 1  # ranks meet in every backward pass
    weight = 0.0
    for parts in zip(*ranks):
        weight += sum(float(part["weights"].sum()) for part in parts)
        assert len({(part["global_count"], part["last_micro_batch"]) for part in parts}) == 1
        assert max(len(part["weights"]) for part in parts) <= micro
        if parts[0]["last_micro_batch"]:
            assert weight == parts[0]["global_count"]
            weight = 0.0
    assert parts[0]["last_micro_batch"]


def test_widths(batches):
    narrow, wide = (epoch_of(batches(4, fixed_width=width)) for width in (None, 128))
    assert [sorted(rows_in(batch)) for batch in narrow] == [sorted(rows_in(batch)) for batch in wide]
    assert len({batch["input_ids"].shape[1] for batch in narrow}) > 1
    assert {batch["input_ids"].shape[1] for batch in wide} == {128}
    for batch in epoch_of(batches(4, noise=None, max_len=20)):  # longer descriptions are cut
        assert batch["attention_mask"].sum(1).max() <= 20 and batch["input_ids"].shape[1] <= 20
        assert all(ids[-1] == 0xE001 for ids, _, _ in rows_in(batch))


# ---- order and noise


def union(batches, total, processes=1, micro=0, epoch=0) -> list[Counter]:
    """Rows of each global batch of an epoch, whichever rank and micro-batch holds them."""
    found: list[Counter] = []
    for rank in range(processes):
        number = 0
        for batch in epoch_of(batches(total, processes, micro, rank), epoch):
            found.extend([Counter()] * (number + 1 - len(found)))
            found[number] = found[number] + Counter(rows_in(batch))
            number += batch["last_micro_batch"]
    return found


@pytest.mark.parametrize("epoch", [0, 3])
def test_rows_and_noise_do_not_depend_on_processes_or_micro_batches(batches, epoch):
    one = union(batches, 10, epoch=epoch)
    assert [batch.total() for batch in one] == [10, 10, 3]
    for processes, micro in ((1, 3), (2, 0), (3, 2), (4, 1), (16, 0)):
        assert union(batches, 10, processes, micro, epoch) == one
    assert sum(union(batches, 4, 2, epoch=epoch), Counter()) == sum(one, Counter())  # nor on the total batch


def test_epochs_differ_in_order_and_noise(batches):
    def texts(epoch: int, **options) -> list[str]:
        return [text_of(ids) for ids, _, _ in rows_in(batches(23, **options)[epoch, 0][0])]

    first, second = (texts(epoch, noise=None) for epoch in range(2))
    assert sorted(first) == sorted(second) == sorted(written(row)[0] for row in ROWS) and first != second
    assert len(set(texts(0)) - set(texts(1))) > 10


def test_hidden_language(batches):
    for probability, languages in ((1.0, {"unk"}), (0.0, {"unk", "en", "da"})):
        dataset = batches(23, noise={"num_transformations": 0, "unk_lang_prob": probability})
        found = [text_of(ids).split("[SEP]") for ids, _, _ in rows_in(dataset[0, 0][0])]
        assert {language for language, _ in found} == languages
        assert sorted(text for _, text in found) == sorted(row[0] for row in ROWS)


def test_noise_leaves_the_codes_alone(batches):
    noisy, quiet = (rows_in(batches(23, noise=noise)[0, 0][0]) for noise in (NOISE, None))
    assert sorted(row[1:] for row in noisy) == sorted(row[1:] for row in quiet)
    assert sorted(row[0] for row in noisy) != sorted(row[0] for row in quiet)


def test_validation_has_each_row_once_and_is_always_the_same(data, hisco):
    rows = TextRows(data.val, data, RowEncoding(hisco))
    for processes in (1, 2, 4):
        plan = BatchPlan(len(data.val), 3 * processes, processes, 3)
        ranks = [epoch_of(MicroBatches(rows, plan, rank)) for rank in range(processes)]
        texts = [text_of(ids) for rank in ranks for batch in rank for ids, _, _ in rows_in(batch)]
        assert sorted(texts) == sorted(written(row)[0] for row in ROWS[:7]) and len(set(map(len, ranks))) == 1
        for batch, again in zip(ranks[0], epoch_of(MicroBatches(rows, plan, 0), epoch=2), strict=True):
            assert_same(batch, again)


def test_micro_batches_of_similar_length_are_the_rows_of_one_batch(batches):
    """The noise has changed the lengths when the cut is made."""
    whole, cut = (batches(12, noise=noise, groups=groups) for noise, groups in ((NOISE, 1), (NOISE, 3)))
    for index in ((0, 0), (1, 1)):
        [one], parts = whole[index], cut[index]
        assert len(parts) == 3
        assert sorted(rows_in(one)) == sorted(row for part in parts for row in rows_in(part))
        widths = [part["input_ids"].shape[1] for part in parts]
        assert widths == [padded_width(int(part["attention_mask"].sum(1).max()) - 2) for part in parts]
        assert widths == sorted(widths)
        assert sum(part["input_ids"].numel() for part in parts) < one["input_ids"].numel()
        assert [part["last_micro_batch"] for part in parts] == [False, False, True]


# ---- loaders


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing_and_loading_draws_no_random_numbers(batches, persistent):
    plain, options = BatchLoader(batches(6, micro=2)), {"num_workers": 2, "prefetch_factor": 2}
    workers = BatchLoader(batches(6, micro=2), persistent_workers=persistent, **options)
    for epoch, first_batch in ((0, 0), (1, 0), (1, 2)):
        next(iter(workers.at(0, 1)))  # broken off: leaves nothing behind
        for batch, other in zip(plain.at(epoch, first_batch), workers.at(epoch, first_batch), strict=True):
            assert_same(batch, other)
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

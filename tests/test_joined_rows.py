"""Rows with one code joined into rows with two, and the losses for them: in arrays, batches and runs."""

import json
import shlex
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import (
    FINETUNE,
    TINY,
    TITLES,
    TRAIN_MIXER,
    greatest_difference,
    read_logs,
    run,
    run_inside,
    write_csv,
    write_rows,
)

import finetune
from histocc.data import prepare as prep
from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings
from histocc.data.dataset import AND, JoinedRows, RowEncoding, TextChanges, TextRows
from histocc.data.noise import Augmenter
from histocc.formatter import make_formatter
from histocc.text import LANGUAGES
from histocc.trainer.batches import BatchLoader, BatchPlan, MicroBatches

HISCO = make_formatter("hisco", ["code_1", "code_2"])
CODES = ("61110", "83110", "95410")
WORDS = ("smith", "baker", "tailor")
ROWS = [
    (
        f"{WORDS[i % 3]}{i}",
        CODES[i % 3],
        CODES[(i + 1) % 3] if i % 4 == 3 else "",
        ["en", "da", "gr", "xx", "en"][i % 5],
    )
    for i in range(48)
]
ROWS += [("alone", "61110", "", "nl"), ("solo", "61110", "", "fr"), ("seul", "61110", "", "fr")]
ROWS += [("x" * 100, "83110", "", "en")]


def prepared(folder, rows=ROWS, formatter=HISCO, clean_text="as-is"):
    path = write_csv(folder / "data.csv", ("occ1", "code_1", "code_2", "lang"), rows)
    more = {"share_val": 0.0, "language_col": "lang", "clean_text": clean_text}
    settings = PrepareSettings([path], formatter.to_dict(), formatter.target_cols, **more)
    return PreparedData.open(prep.prepare(settings, str(folder), lambda *_: None))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("joined"))


def labels(data, codes):
    return [tuple(data.codes[code] for code in row if code >= 0) for row in codes]


def joined(data, probability=1.0, epoch=0, seed=3, rows=None, **options):
    """(text, codes, language) of training rows after joining."""
    rows = np.arange(len(data.train)) if rows is None else rows
    language = data.train.language[rows].astype(np.int64)
    flat, offsets, codes = JoinedRows(data, seed, probability, **options).apply(
        *data.train.texts(rows), data.train.codes[rows].astype(np.int64), language, rows, epoch
    )
    assert flat.dtype == np.uint32 and offsets.dtype == codes.dtype == np.int64 and offsets[-1] == len(flat)
    texts = ["".join(map(chr, flat[a:b])) for a, b in zip(offsets, offsets[1:])]
    return list(zip(texts, labels(data, codes), [data.languages[number] for number in language]))


def as_read(data):
    return joined(data, probability=0.0)


# ---- one row and another


def test_a_joined_row_has_the_texts_and_codes_of_two_rows_of_its_language(data):
    single = {(text, language): codes[0] for text, codes, language in as_read(data) if len(codes) == 1}
    partners, changed = Counter(), 0
    for epoch in range(30):
        for before, after in zip(as_read(data), joined(data, epoch=epoch), strict=True):
            if after == before:
                continue
            changed += 1
            text, codes, language = before
            begin = f"{text} {AND.get(language, 'and')} "
            other = after[0].removeprefix(begin)
            assert after == (begin + other, (*codes, single[other, language]), language)
            assert len(codes) == 1 and after[1][0] != after[1][1]
            partners[language, other] += 1
    assert changed > 300 and {language for language, _ in partners} == {"en", "da", "gr", "xx"}
    assert len(partners) > 0.8 * sum(language in ("en", "da", "gr", "xx") for _, language in single)


def test_who_stays_alone(data):
    """Two codes already, the same code, no other row of the language, and texts that would be too long."""
    for epoch in range(20):
        after = {text: codes for text, codes, _ in joined(data, epoch=epoch)}
        assert all(after.get(text) == codes for text, codes, _ in as_read(data) if len(codes) == 2)
        assert {"alone", "solo", "seul"} <= after.keys()
        longest = max(map(len, after))
        assert longest <= 128 - 1 - len("[") - len("unk[SEP]")  # [CLS] and [SEP] are a position each
    for max_len, happens in ((128, True), (115, False)):
        rows = [row for epoch in range(20) for row in joined(data, epoch=epoch, max_len=max_len)]
        assert any("x" * 100 in text and len(text) > 100 for text, *_ in rows) is happens


def test_share_of_joined_rows(data):
    """Of the rows with one code whose partner has another one: about a third of them have the same."""

    def share(p: float) -> float:
        pairs = [pair for epoch in range(60) for pair in zip(as_read(data), joined(data, p, epoch))]
        pairs = [
            pair for pair in pairs if pair[0][2] == "en" and len(pair[0][1]) == 1 and len(pair[0][0]) < 50
        ]
        return float(np.mean([before != after for before, after in pairs]))

    assert share(0.0) == 0 and 0.55 < share(1.0) < 0.75
    assert share(0.25) == pytest.approx(0.25 * share(1.0), abs=0.03)


def test_a_row_is_joined_by_seed_epoch_and_row_alone(data):
    whole = joined(data, 0.5, epoch=2)
    rows = np.array([40, 3, 17, 3, 0])
    assert joined(data, 0.5, epoch=2, rows=rows) == [whole[row] for row in rows]
    assert joined(data, 0.5, epoch=2) == whole != joined(data, 0.5, epoch=3)
    assert joined(data, 0.5, epoch=2, seed=4) != whole
    assert joined(data, 0.5, rows=rows[:0]) == []


def test_every_language_of_the_published_models_has_its_word(tmp_path):
    rows = [(f"{name}{i}", CODES[i], "", name) for name in LANGUAGES for i in range(2)]
    data = prepared(tmp_path, rows, clean_text="ascii-lower")
    found = [row for epoch in range(12) for row in joined(data, epoch=epoch)]
    words = {language: text.split()[1] for text, _, language in found if " " in text}
    assert words == {**{name: AND[name] for name in LANGUAGES}, "gr": "kai"}


def test_what_cannot_be_joined_is_refused(data, tmp_path):
    with pytest.raises(ValueError, match="between 0 and 1"):
        JoinedRows(data, 1, 1.5)
    with pytest.raises(ValueError, match="room for one code"):
        JoinedRows(prepared(tmp_path, formatter=make_formatter("hisco", ["code_1"])), 1, 0.5)


# ---- batches

NOISE = {"num_transformations": 2, "augmentation_prob": 0.5, "unk_lang_prob": 0.3}


def batches(data, total, processes=1, rank=0, micro=0, groups=1, noise=NOISE, probability=0.6, **options):
    plan = BatchPlan(len(data.train), total, processes, micro, groups, 1)
    changes = TextChanges(JoinedRows(data, 3, probability), Augmenter(5, **noise) if noise else None)
    encoding = RowEncoding(HISCO, **options)
    return MicroBatches(TextRows(data.train, data, encoding, changes), plan, rank, 11)


NAMES = ("rows", "input_ids", "attention_mask", "targets_seq2seq", "targets_linear", "weights")


def rows_in(batch):
    return [
        (int(row), tuple(ids[mask].tolist()), tuple(tokens.tolist()), tuple(codes.tolist()))
        for row, ids, mask, tokens, codes, weight in zip(*map(batch.__getitem__, NAMES))
        if weight
    ]


def steps(data, total, processes, epoch=0, first_batch=0, **options):
    """Observations of each global batch, sorted, whichever rank and micro-batch holds them."""
    found = {}
    for rank in range(processes):
        number = first_batch
        for batch in BatchLoader(batches(data, total, processes, rank, **options)).at(epoch, first_batch):
            found.setdefault(number, []).extend(rows_in(batch))
            number += batch["last_micro_batch"]
    return [sorted(found[number]) for number in sorted(found)]


@pytest.mark.parametrize("epoch", [0, 2])
def test_batches_are_the_same_on_any_number_of_processes_and_after_a_restart(data, epoch):
    one = steps(data, 10, 1, epoch)
    assert [len(step) for step in one] == [10] * 5 + [2]
    assert sum(row[3][1] >= 0 for step in one for row in step) > 20
    for processes, more in ((2, {}), (2, {"micro": 2, "groups": 2}), (3, {"micro": 1})):
        assert steps(data, 10, processes, epoch, **more) == one
        assert steps(data, 10, processes, epoch, first_batch=3, **more) == one[3:]
    assert sorted(sum(steps(data, 7, 2, epoch), [])) == sorted(sum(one, []))  # nor on the total batch
    plain, workers = (BatchLoader(batches(data, 10, micro=3), num_workers=n).at(epoch, 1) for n in (0, 1))
    for batch, other in zip(plain, workers, strict=True):
        assert rows_in(batch) == rows_in(other)


def test_both_targets_have_both_codes(data):
    expected = {
        row: (text, codes, language) for row, (text, codes, language) in enumerate(joined(data, 0.6, epoch=1))
    }
    found = sum(steps(data, 13, 2, epoch=1, noise=None), [])
    assert len(found) == len(ROWS) == len({row for row, *_ in found})
    for row, ids, tokens, codes in found:
        text, labels_, language = expected[row]
        assert "".join(map(chr, ids[1:-1])) == f"{language}[SEP]{text}"
        assert list(tokens) == HISCO.transform_label("&".join(labels_)).tolist()
        assert tuple(data.codes[code] for code in codes if code >= 0) == labels_


def test_noise_comes_after_joining(data):
    """Words change places in every text that has two: only joined ones do, and each is one text then."""
    noise = {
        "num_transformations": 1,
        "augmentation_prob": 1.0,
        "unk_lang_prob": 0.0,
        "kinds": ("swap_words",),
    }
    moved, before = 0, dict(enumerate(joined(data, 0.6)))
    for row, ids, *_ in sum(steps(data, 13, 1, noise=noise), []):
        text = "".join(map(chr, ids[1:-1])).partition("[SEP]")[2]
        assert sorted(text.split()) == sorted(before[row][0].split())
        assert (text == before[row][0]) == (" " not in before[row][0])
        moved += text != before[row][0]
    assert moved > 10


def test_all_characters_are_known(data):
    dataset = batches(data, 52, probability=1.0, noise=None)
    loader = BatchLoader(dataset)
    seen = {int(i) for epoch in range(4) for batch in loader.at(epoch) for i in batch["input_ids"].unique()}
    assert seen <= set(dataset.rows.characters().tolist()) and set(map(ord, "και")) <= seen
    assert not set(map(ord, "και")) <= set(data.alphabet)


# ---- whole runs

FLAGS = shlex.split(
    "--language-col lang --dropout 0 --encoder-dropout 0 --float64 --num-epochs 2 --global-batch-size 12"
    " --log-interval 1 --eval-interval 2 --save-interval 2 --learning-rate 1e-3 --join-rows 0.8"
    " --many-codes-weight 2.5"
)


@pytest.mark.processes
@pytest.mark.full
def test_runs_are_the_same_on_one_and_two_processes(tmp_path):
    """25 rows in steps of 12, a model from scratch: in one process, and in two to step 4, then in one."""
    pairs = [  # where best-fit lets codes share a block
        (f"{TITLES[i % 8][0]} and {TITLES[(i + k) % 8][0]}", TITLES[i % 8][1], TITLES[(i + k) % 8][1], "en")
        for k in (1, 3)
        for i in range(8)
    ]
    val = write_csv(tmp_path / "val.csv", ("occ1", "hisco_1", "hisco_2", "lang"), pairs)
    common = ["--train-data", write_rows(tmp_path / "train.csv", 25), "--val-data", val, *TINY, *FLAGS]
    one, two = tmp_path / "one", tmp_path / "two"
    run(TRAIN_MIXER, *common, "--batch-size", 12, "--save-dir", one)
    run(TRAIN_MIXER, *common, "--batch-size", 2, "--max-steps", 4, "--save-dir", two, processes=2)
    run(TRAIN_MIXER, *common, "--batch-size", 6, "--save-dir", two)
    names = [f"{part}_loss{kind}" for part in ("train", "val") for kind in ("", "_linear", "_seq2seq")]
    assert greatest_difference(one, two, (*names, "grad_norm")) < 1e-9 and len(read_logs(one)) == 6
    assert torch.load(two / "last.bin", weights_only=True)["args"]["block_loss"] == "one-to-one"
    assert json.loads((one / "args.json").read_text())["block_loss"] is None  # as it was asked
    other = ["--batch-size", 12, "--block-loss", "best-fit", "--save-dir", one]
    assert "--block-loss was 'one-to-one', now it is 'best-fit'" in run(TRAIN_MIXER, *common, *other, code=2)


def test_what_has_nothing_to_join(tmp_path):
    flags = ["--target-cols", "hisco_1", "--formatter", "hisco", "--batch-size", "8", "--max-steps", "1"]
    flags = ["--dataset", write_rows(tmp_path / "d.csv", 60), *flags, *TINY, "--save-path", tmp_path / "run"]
    said = run(FINETUNE, *flags, "--join-rows", 0.5)
    assert "--join-rows joins nothing: the formatter takes one code per row" in said
    code, said = run_inside(finetune.main, *flags, "--join-rows", 1.5)
    assert code == 2 and "--join-rows: '1.5' is not a number between 0 and 1" in said
    code, said = run_inside(finetune.main, *flags, "--many-codes-weight", 0)
    assert code == 2 and "is not a number above 0" in said

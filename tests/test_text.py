"""A description and its language as character ids, against plain Python and the published tokenizer."""

import numpy as np
import pytest
from helpers import examples
from hypothesis import example, given
from hypothesis import strategies as st

from histocc.text import (
    LANGUAGES,
    code_points,
    encode,
    encode_batch,
    join_texts,
    language_table,
    padded_width,
)

CLS, SEP = 0xE000, 0xE001
texts = st.text(st.characters(codec="utf-8"), max_size=60) | st.text("abcæ 🙂", max_size=200)
rows = st.lists(st.tuples(texts, st.sampled_from(LANGUAGES)), min_size=1, max_size=5)


def plain(text: str, language: str, max_len: int = 128) -> list[int]:
    """Real positions of one input."""
    return ([CLS] + [ord(char) for char in f"{language}[SEP]{text}"])[: max_len - 1] + [SEP]


def check(ids, mask, expected):
    """The rows of a batch are `expected`, then zeros; the mask is true at `expected`."""
    assert ids.dtype == np.int64 and mask.dtype == bool and ids.shape == mask.shape
    for row, visible, real in zip(ids, mask, expected, strict=True):
        assert row.tolist() == real + [0] * (len(row) - len(real))
        assert visible.tolist() == [True] * len(real) + [False] * (len(row) - len(real))


def test_one_description():
    ids, mask = encode(["væver"], ["da"])
    check(ids, mask, [[0xE000, *map(ord, "da[SEP]"), ord("v"), 0xE6, ord("v"), ord("e"), ord("r"), 0xE001]])
    assert ids.shape == (1, padded_width(12))


@examples(100)
@given(rows, st.integers(16, 140))
@example([("", "en"), ("𝔊🙂", "unk"), ("x" * 300, "da")], 128)
def test_equals_plain_construction(rows, max_len):
    expected = [plain(text, language, max_len) for text, language in rows]
    ids, mask = encode(*zip(*rows), max_len)
    check(ids, mask, expected)
    assert ids.shape[1] == padded_width(max(map(len, expected)) - 2, max_len)


@examples(50)
@given(rows)
def test_rows_of_a_batch_do_not_depend_on_each_other(rows):
    ids, mask = encode(*zip(*rows), width=128)
    for i, (text, language) in enumerate(rows):
        alone, alone_mask = encode([text], [language], width=128)
        assert (alone[0] == ids[i]).all() and (alone_mask[0] == mask[i]).all()


def test_batch_takes_languages_by_their_number():
    flat, offsets = join_texts([code_points("smith"), code_points(""), code_points("smed")])
    ids, mask = encode_batch(flat, offsets, np.array([2, 0, 1]), language_table(["unk", "da", "en"]))
    check(ids, mask, [plain("smith", "en"), plain("", "unk"), plain("smed", "da")])


@pytest.mark.parametrize("extra, cut", [(-1, False), (0, False), (1, True), (50, True)])
def test_longer_descriptions_are_cut_and_end_with_sep(extra, cut):
    text = "abcdefghij" * 20
    text = text[: 128 - len("xen[SEP]x") + extra]
    ids, mask = encode([text], ["en"])
    real = ids[0, mask[0]].tolist()
    assert real[-1] == SEP and len(real) == min(128, 128 + extra)
    assert ("".join(map(chr, real[1:-1])) == "en[SEP]" + text) is not cut


def test_language_longer_than_the_input():
    ids, mask = encode(["smith", "smed"], ["x" * 40, "da"], 16)
    check(ids, mask, [[CLS] + [ord("x")] * 14 + [SEP], plain("smed", "da", 16)])


def test_published_tokenizer():
    tokenizer = pytest.importorskip("transformers").CanineTokenizer()
    rows = [
        ("wine and spirit merchant", "en"),
        ("huusmand  og væver ", "da"),
        ("", "unk"),
        ("γεωργός 𝔊🙂", "gr"),
        ("y" * 200, "se"),
    ]
    published = tokenizer(
        [f"{language}[SEP]{text}" for text, language in rows],
        padding="max_length",
        truncation=True,
        max_length=128,
        return_tensors="np",
    )
    ids, mask = encode(*zip(*rows), width=128)
    assert (ids == published["input_ids"]).all() and (mask == published["attention_mask"]).all()


def test_code_points_are_those_of_python():
    text = "aæ\ud800𝔊\0\n"
    assert code_points(text).dtype == np.uint32 and code_points(text).tolist() == list(map(ord, text))
    assert [part.tolist() for part in join_texts([])] == [[], [0]]


@pytest.mark.parametrize("max_len", [16, 50, 127, 128, 200, 512])
def test_padded_width(max_len):
    most = -(-max_len // 4) * 4
    widths = [padded_width(n, max_len) for n in range(max_len - 1)]
    for n, width in enumerate(widths):
        # a whole block, two positions beyond the text; from 128 on one more
        enough = 4 * ((n + 3) // 4) + (4 if width < 128 else 8)
        assert n + 2 <= width <= most and width % 4 == 0
        assert width >= min(enough, most), f"{n} characters need {enough} positions, not {width}"
        assert width < max(17, enough + (12 if width < 128 else 128))
    assert widths == sorted(widths) and widths[-1] == most
    assert len(set(widths)) <= 21 + max_len // 128


def test_short_texts_are_padded_little():
    assert [padded_width(n) for n in (1, 8, 20, 30, 60, 119, 126)] == [16, 16, 24, 36, 64, 128, 128]

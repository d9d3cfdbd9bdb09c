"""A description and its language as character ids, against plain Python and the published tokenizer."""

import numpy as np
import pytest
from helpers import examples
from hypothesis import example, given
from hypothesis import strategies as st

from histocc.text import (
    LANGUAGES,
    as_is,
    code_points,
    encode,
    encode_batch,
    join_texts,
    language_table,
    padded_width,
    text_hashes,
    text_key,
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


@examples(100)
@given(rows, st.integers(16, 140))
@example([("", "en"), ("𝔊🙂", "unk"), ("x" * 300, "da")], 128)
@example([("abcdefghij" * 12 + "x", "en")], 128)  # fits to the last position
@example([("smith", "x" * 40), ("smed", "da")], 16)
def test_equals_plain_construction(rows, max_len):
    expected = [plain(text, language, max_len) for text, language in rows]
    ids, mask = encode(*zip(*rows), max_len)
    check(ids, mask, expected)
    assert ids.shape[1] == padded_width(max(map(len, expected)) - 2, max_len)
    check(*encode(*zip(*rows), max_len, width=-(-max_len // 4) * 4), expected)  # whatever the width


def test_batch_takes_languages_by_their_number():
    flat, offsets = join_texts([code_points("smith"), code_points(""), code_points("smed")])
    ids, mask = encode_batch(flat, offsets, np.array([2, 0, 1]), language_table(["unk", "da", "en"]))
    check(ids, mask, [plain("smith", "en"), plain("", "unk"), plain("smed", "da")])


def test_published_tokenizer():
    tokenizer = pytest.importorskip("transformers").CanineTokenizer()
    rows = [("wine and spirit merchant", "en"), ("huusmand  og væver ", "da"), ("", "unk")]
    rows += [("γεωργός 𝔊🙂", "gr"), ("y" * 200, "se")]
    inputs = [f"{language}[SEP]{text}" for text, language in rows]
    options = {"padding": "max_length", "truncation": True, "max_length": 128, "return_tensors": "np"}
    published = tokenizer(inputs, **options)
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
    assert widths == sorted(widths) and widths[-1] == most and len(set(widths)) <= 21 + max_len // 128
    assert [padded_width(n) for n in (1, 8, 20, 30, 60, 119, 126)] == [16, 16, 24, 36, 64, 128, 128]


@examples(200)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=12))
def test_texts_have_the_same_hash_only_if_they_differ_in_case_and_blanks_alone(texts):
    texts = [text for text in (text.replace("\0", "").strip() for text in texts) if text] or ["x"]
    same = [" ".join(text.casefold().split()) for text in texts]
    hashes = text_hashes(texts)
    assert all((a == b) == (one == other) for a, one in zip(hashes, same) for b, other in zip(hashes, same))
    assert hashes.tolist() == [int(text_hashes([text])[0]) for text in texts]  # the others play no part


def test_text_key_and_the_rule_as_is():
    assert as_is(" ko\u030bva\u0301go\u0301 ") == "kővágó"
    keys = {
        text_key(text)
        for text in ("Gård  Mand", "ga\u030ard mand ", "gård\u200b ma\xadnd", "\ufeffGÅRD\tMAND")
    }
    assert keys == {"gård mand"} and text_key("gard mand") not in keys

"""Noise: reproducible per (seed, epoch, row), each kind doing what it says, at the stated rates."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers import REPO, examples
from hypothesis import given
from hypothesis import strategies as st

from histocc.data.noise import CHANGES, MAX_EDGE, Augmenter
from histocc.runtime import rng

WORDS = ["QUARRYMAN", "ærlig", "𝔊old"]
TEXTS = ["wine and spirit merchant", "huusmand og væver", "a", "", "AB", "Søren  Hjort,\tgårdmand"]
TEXTS += ["𝔊𝔬𝔩𝔡 smith 🙂", "γεωργός", " ", "ß"]


def pack(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64)
    return np.array([ord(c) for t in texts for c in t], dtype=np.uint32), offsets


def unpack(flat: np.ndarray, offsets: np.ndarray) -> list[str]:
    assert flat.dtype == np.uint32 and offsets.dtype == np.int64
    assert offsets[0] == 0 and offsets[-1] == len(flat)
    return ["".join(map(chr, flat[a:b])) for a, b in zip(offsets[:-1], offsets[1:])]


def noisy(augmenter: Augmenter, texts: list[str], rows=None, epoch: int = 0) -> list[str]:
    rows = np.arange(len(texts)) if rows is None else np.asarray(rows)
    return unpack(*augmenter.apply(*pack(texts), rows, epoch))


def drawing(kinds: tuple[str, ...], augmenter: Augmenter) -> Augmenter:
    augmenter.kinds = kinds
    return augmenter


def one_kind(kind: str, texts: list[str], seed: int = 3, **options) -> list[str]:
    """Each text after exactly one transformation of this kind."""
    return noisy(drawing((kind,), Augmenter(seed, 1, 1.0, words=WORDS, **options)), texts)


def near(share: float, probability: float, n: int) -> bool:
    """Within five standard errors of a proportion of n trials."""
    return abs(share - probability) < 5 * np.sqrt(probability * (1 - probability) / n)


# ---- the generator


def test_draws_are_splitmix64_in_streams_without_a_common_number():
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]  # splitmix64 seeded with 0
    assert rng.draw(np.zeros((1, 1), np.uint64), np.arange(3)).tolist() == [published]
    rows, numbers = np.arange(128), np.arange(64)
    streams = [rng.streams(seed, epoch, rows)[:, None] for epoch in range(8) for seed in range(8)]
    bits = np.array([rng.draw(stream, numbers) for stream in streams])
    assert len(np.unique(bits)) == bits.size
    counts = np.bincount(rng.below(rng.draw(rng.streams(5, 0, np.arange(30_000)), 2), 7), minlength=7)
    assert len(counts) == 7 and all(near(c / 30_000, 1 / 7, 30_000) for c in counts)
    extreme = np.array([0, 2**64 - 1], dtype=np.uint64)
    for n in (1, 2, 3, 10**6, 2**32 - 1):
        assert rng.below(extreme, n).tolist() == [0, n - 1]
    assert rng.chance(extreme, 1.0).all() and not rng.chance(extreme, 0.0).any()


# ---- a pure function of (seed, epoch, row)


@examples(150)
@given(st.data())
def test_noise_does_not_depend_on_the_batch_or_the_order(data):
    characters = st.one_of(st.sampled_from("aåÆ zK\t🙂γ9"), st.characters())
    texts = data.draw(st.lists(st.text(characters, max_size=12), min_size=1, max_size=8))
    rows = data.draw(st.lists(st.integers(0, 2**40), min_size=len(texts), max_size=len(texts)))
    seed, epoch = data.draw(st.integers(0, 2**63)), data.draw(st.integers(0, 1000))
    words = data.draw(st.sampled_from([(), WORDS]))
    augmenter = Augmenter(seed, data.draw(st.integers(1, 5)), 0.8, words=words)
    together = noisy(augmenter, texts, rows, epoch)
    assert [noisy(augmenter, [t], [r], epoch)[0] for t, r in zip(texts, rows)] == together
    order = data.draw(st.permutations(range(len(texts))))
    other = noisy(augmenter, [texts[i] for i in order], [rows[i] for i in order], epoch)
    assert other == [together[i] for i in order]
    # never emptied, never filled
    assert [bool(before) for before in texts] == [bool(after) for after in together]
    hidden = augmenter.hide_language(np.array(rows), epoch)
    assert [augmenter.hide_language(np.array([r]), epoch)[0] for r in rows] == hidden.tolist()


def digest() -> str:
    a, rows = Augmenter(11, 4, 0.9, 0.3, WORDS, [1, 2, 3]), np.arange(1000)
    text = repr([noisy(a, [TEXTS[r % len(TEXTS)] for r in rows], rows, e) for e in range(3)])
    return hashlib.sha256((text + repr(a.hide_language(rows, 1).tolist())).encode()).hexdigest()


@pytest.mark.processes
def test_two_processes_make_the_same_noise_now_and_in_later_versions():
    """A run that continues after an update must see the noise it would have seen."""
    command = [sys.executable, "-c", "import test_noise; print(test_noise.digest())"]
    env = {"PYTHONPATH": f"{REPO}{os.pathsep}{REPO / 'tests'}", "PYTHONHASHSEED": "1"}  # here it is another
    other = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    assert other == f"{digest()}\n"
    texts = ["wine and spirit merchant", "huusmand og væver"]
    result = noisy(Augmenter(1, 3, 1.0, words=WORDS), texts, [7, 8], 2)
    assert result == ["elfackujmbrigcðeqga åvrnzyîiiyxjxpei wine and spiqit merchant", "huusmandv ævæer og"]


# ---- each kind does what it says

LINE = "wine and spirit merchant"
MANY = 4000


def test_delete_takes_one_character_anywhere_but_the_last_visible_one():
    assert set(one_kind("delete", [LINE] * MANY)) == {LINE[:i] + LINE[i + 1 :] for i in range(len(LINE))}
    assert one_kind("delete", ["x", " ", "🙂"] * 50) == ["x", " ", "🙂"] * 50
    assert set(one_kind("delete", [" x"] * 200)) == {" x", "x"}


def test_keyboard_takes_the_key_beside():
    after = one_kind("keyboard", [LINE] * MANY)
    seen = {(old, new) for text in after for old, new in zip(LINE, text) if old != new}
    assert all(len(text) == len(LINE) and sum(a != b for a, b in zip(text, LINE)) <= 1 for text in after)
    assert {new for old, new in seen if old == "s"} == set("adewxz")
    assert {new for old, new in seen if old == "p"} == set("ol")  # no å beside an English p
    assert near(np.mean([text == LINE for text in after]), LINE.count(" ") / len(LINE), MANY)
    beside = "å:päæöø Å:PÄÆÖØ ø:lpåæ ñ:lp ß:pü W:AEQS á:aàâãäå œ:oe γ:βητυφω Γ:ΒΗΤΥΦΩ é:az 7:7 🙂:🙂 Ж:Ж"
    for letter, others in (pair.split(":") for pair in beside.split()):
        assert set(one_kind("keyboard", [letter] * 600)) == set(others)
    for letter in "æøåäöüßéèêëçñáàâãíìîïóòôõúùûýðþœ":
        assert one_kind("keyboard", [letter]) != [letter]


def test_insert_and_substitute_put_one_letter_anywhere():
    places = set()
    for text in one_kind("insert", [LINE] * MANY):
        found = [i for i in range(len(text)) if text[:i] + text[i + 1 :] == LINE]
        assert len(text) == len(LINE) + 1 and found and text[found[0]].islower()
        places.update(found if len(found) == 1 else [])  # not beside the same letter
    assert places == set(range(len(LINE) + 1))
    after = one_kind("substitute", [LINE] * MANY)
    changed = [[(i, new) for i, (old, new) in enumerate(zip(LINE, text)) if old != new] for text in after]
    assert all(len(text) == len(LINE) for text in after) and {len(c) for c in changed} == {0, 1}
    assert {c[0][0] for c in changed if c} == set(range(len(LINE)))
    assert all(c[0][1].islower() for c in changed if c)
    assert np.mean([not c for c in changed]) < 0.06  # the same letter again


@pytest.mark.parametrize("kind, text", [("insert", "x" * 40), ("substitute", "7" * 40)])
def test_new_letters_are_of_all_languages_but_mostly_a_to_z_and_suit_capitals_and_greek(kind, text):
    n = 20_000
    letters = [(set(after) - set(text) or {"x"}).pop() for after in one_kind(kind, [text] * n)]
    assert near(np.mean([letter.isascii() for letter in letters]), 234 / 266, n)
    assert set("abcdefghijklmnopqrstuvwxyzæøåäöüßéèêëçñáíóúâîôûðþ") <= set(letters)
    assert near(letters.count("q") / n, 9 / 266, n)
    capital = one_kind(kind, ["WEBER UND KRÄMER"] * 500)
    assert all(text.replace("ß", "").isupper() for text in capital) and len(set(capital)) > 200
    mixed = one_kind(kind, ["Weber"] * 500)
    assert all(text[2:].islower() for text in mixed) and len(set(mixed)) > 60
    greek = one_kind(kind, ["γεωργός"] * 300)
    assert all(0x370 <= ord(c) < 0x400 for text in greek for c in text) and len(set(greek)) > 100
    only_ascii = one_kind(kind, [text] * 500, only_ascii=True)
    assert all(text.isascii() for text in only_ascii)


def test_swaps():
    text = "abcdefg 🙂å"
    pairs = {text[:i] + text[i + 1] + text[i] + text[i + 2 :] for i in range(len(text) - 1)}
    assert set(one_kind("swap", [text] * 600)) == pairs
    assert one_kind("swap", ["a", "", "🙂"]) == ["a", "", "🙂"]
    swapped = {" og  smed\tvæver ", " smed  væver\tog "}
    assert set(one_kind("swap_words", [" smed  og\tvæver "] * 100)) == swapped
    single = ["smith", " smith ", "", "  ", "🙂"]
    assert one_kind("swap_words", single * 20) == single * 20
    # Words of neighboring texts stay where they are.
    assert set(one_kind("swap_words", ["a b", "c", "d e"] * 5)) == {"b a", "c", "e d"}


def test_insert_word_takes_the_given_words_to_every_place_by_weight():
    after = one_kind("insert_word", ["smed og"] * MANY)
    assert set(after) == {t for w in WORDS for t in (f"{w} smed og", f"smed {w} og", f"smed og {w}")}
    for word in WORDS:
        assert near(np.mean([word in text for text in after]), 1 / 3, MANY)
    assert near(np.mean([text.endswith("smed og") for text in after]), 1 / 3, MANY)
    assert set(one_kind("insert_word", ["", "  "] * 50)) == {""} | {f"   {w}" for w in WORDS}
    after = one_kind("insert_word", ["smed"] * MANY, word_weights=[0, 3, 1])
    assert not any("QUARRYMAN" in text for text in after)
    assert near(np.mean(["ærlig" in text for text in after]), 0.75, MANY)


def test_edges_keep_the_text_and_add_up_to_twenty_on_a_side():
    core = "1801 1802"  # letters cannot be mistaken for it
    after = [text.split(core) for text in one_kind("edges", [core] * MANY)]
    assert all(len(parts) == 2 for parts in after)
    left, right = np.array([[len(a), len(b)] for a, b in after]).T
    assert all((not a or a[-1] == " ") and (not b or b[0] == " ") for a, b in after)
    for which, share in (((left > 0) & (right == 0), 0.25), ((left == 0) & (right > 0), 0.25)):
        assert near(np.mean(which), share, MANY)
    for side in (left, right):
        assert set(side) == {0} | set(range(2, MAX_EDGE + 2))  # 1 to 20 and the space
    letters = "".join(a[:-1] for a, _ in after)
    assert near(letters.count(" ") / len(letters), 10 / 276, len(letters)) and set("azæß") <= set(letters)
    assert all(c == " " or c.isalpha() for c in letters)


# ---- how the settings combine


def test_rates_of_rows_transformations_kinds_and_languages():
    n, text = 20_000, "aaaaaaaaaa bbbbbbbbbb"
    for probability, times in ((0.3, 1), (0.3, 3), (1.0, 3)):
        after = noisy(drawing(("insert",), Augmenter(9, times, probability)), ["smed"] * n)
        assert {len(text) for text in after} == {4 + times} | ({4} if probability < 1 else set())
        assert probability == 1 or near(np.mean([len(text) > 4 for text in after]), probability, n)
    after = noisy(Augmenter(4, 1, 1.0, words=["WORD"]), [text] * n)
    added, word = np.array([len(t) - len(text) for t in after]), np.array(["WORD" in t for t in after])
    swapped = np.array([t == "bbbbbbbbbb aaaaaaaaaa" for t in after])
    for which in (word, swapped, added == -1, added == 1, (added > 1) & ~word):
        assert near(which.mean(), 1 / len(CHANGES), n)
    for unused in ({}, {"words": ["WORD"], "word_weights": [0]}):
        without = noisy(Augmenter(4, 1, 1.0, **unused), [text] * n)
        assert near(np.mean([len(t) < len(text) for t in without]), 1 / 7, n)
        assert not any("WORD" in t for t in without)
    rows, augmenter = np.arange(n), drawing(("insert",), Augmenter(6))
    hidden = augmenter.hide_language(rows, 3)
    altered = np.array([len(text) > 4 for text in noisy(augmenter, ["smed"] * n, rows, 3)])
    assert near(hidden.mean(), 0.25, n) and near((hidden & altered).mean(), 0.25 * 0.3, n)
    for others in (augmenter.hide_language(rows, 4), Augmenter(7).hide_language(rows, 3)):
        assert near((hidden == others).mean(), 0.625, n)  # independent


def test_input_stays_as_it_is_and_may_be_a_window():
    """Arrays are often mapped read-only, and offsets need not begin at 0."""
    (flat, offsets), texts, window = pack(TEXTS * 30), TEXTS * 30, slice(20, 40)
    rows = np.arange(len(texts))
    kept = flat.copy(), offsets.copy(), rows.copy()
    for array in (flat, offsets, rows):
        array.flags.writeable = False
    off = ({"num_transformations": 0}, {"augmentation_prob": 0}, {"augmentation_prob": 0.5})
    for options, changes in zip(off, (False, False, True)):
        augmenter = Augmenter(1, **({"augmentation_prob": 1.0} | options), words=WORDS)
        new, new_offsets = augmenter.apply(flat, offsets, rows, 0)
        after = unpack(new, new_offsets)
        assert (after != texts) is changes and not np.shares_memory(new, flat)
        assert unpack(*augmenter.apply(flat, offsets[20:41], rows[window], 0)) == after[window]
    assert all((a == b).all() for a, b in zip(kept, (flat, offsets, rows)))

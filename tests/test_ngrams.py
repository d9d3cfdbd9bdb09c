"""Hashed n-grams against the same in plain Python: what is found, how it counts, what it adds to a model."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import write_csv
from preparing import settings_for

from histocc.data import prepare as preparing
from histocc.data.arrays import PreparedData
from histocc.formatter import make_formatter
from histocc.job import ngram_fit
from histocc.job.ngram_fit import DistinctRows, TextNgrams
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.model.ngrams import NgramHasher, Ngrams
from histocc.text import encode

MASK = (1 << 64) - 1
TEXTS = [
    "farmer",
    "Farm servant",
    "wine  merchant",
    "væver",
    "smed og gårdmand",
    "a",
    "a b c",
    " blank first",
    "x" * 40,
    "servant of a farmer, ret.",
    "FARMER AND SMITH",
    "no. 12/b [SEP] here",
    "tjenestepige hos smeden",
    "漁師 と 農民",
    "\U0001f600 emoji",
    "aa aaa aaaa aaaaa",
]


def ngrams_of(text: str) -> list[tuple[str, str]]:
    """(kind, n-gram) of a description: windows of characters, words, pairs of words with one blank
    between."""
    lower = "".join(chr(ord(letter) + 32) if "A" <= letter <= "Z" else letter for letter in text)
    around, words = f" {lower} ", lower.split(" ")
    pieces = [around[i : i + size] for size in range(2, 7) for i in range(len(around) - size + 1)]
    found = [("window", piece) for piece in pieces if " " not in piece[1:-1] and piece.strip(" ")]
    found += [("word", word) for word in words if word]
    return found + [("pair", f"{one} {two}") for one, two in zip(words, words[1:]) if one and two]


def hash_of(kind: str, ngram: str) -> int:
    """Polynomial hash and its mixing in plain whole numbers, as int64."""
    value = sum((ord(letter) + 1) * pow(6364136223846793005, i, 1 << 64) for i, letter in enumerate(ngram))
    value = (value + {"window": len(ngram), "word": 100, "pair": 200}[kind]) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 31)) * 0x94D049BB133111EB & MASK
    return value - (1 << 64) if value >> 63 else value


def hashes_of(text: str, language: str = "en") -> list[int]:
    """Of language and description."""
    return sorted(hash_of(*one) for one in (*ngrams_of(language), *ngrams_of(text)))


def found_in(texts, languages=None, max_len=128, width=None) -> list[list[int]]:
    ids, _ = encode(texts, languages or ["en"] * len(texts), max_len, width)
    hashed, there, _ = NgramHasher()(torch.from_numpy(ids))
    return [sorted(row[is_there].tolist()) for row, is_there in zip(hashed, there)]


class TestHasher:
    @pytest.mark.parametrize("text", TEXTS)
    def test_it_finds_what_plain_python_finds(self, text):
        assert found_in([text]) == [hashes_of(text)]
        assert len(found_in([text])[0]) == len(ngrams_of(text)) + len(ngrams_of("en")) > len(ngrams_of("en"))

    def test_in_any_batch_padding_and_language(self):
        expected = [hashes_of(text) for text in TEXTS]
        assert found_in(TEXTS) == expected
        for width in (64, 100, 128):
            assert found_in(TEXTS, width=width) == expected
        languages = ["unk", "da", "EN", "swedish"] * 4
        assert found_in(TEXTS, languages) == [hashes_of(*each) for each in zip(TEXTS, languages)]
        assert found_in(TEXTS[::-1])[::-1] == expected

    def test_at_any_position(self):
        shifted = [found_in([f"{'q' * n} farmer"])[0] for n in range(1, 60)]
        assert all(hash_of(*one) in row for row in shifted for one in ngrams_of("farmer"))
        at = {}
        for n in (0, 1, 2, 17):
            hashed, there, _ = NgramHasher()(torch.from_numpy(encode([f"{'q' * n} smith"], ["en"])[0]))
            at[n] = (
                (hashed[0][there[0]] == hash_of("word", "smith")).sum().item(),
                hashed[0, len("?en[SEP]") + n + 1, 5].item(),
            )
        assert all(value == (1, hash_of("word", "smith")) for value in at.values())

    def test_capitals_a_to_z_count_as_small_ones_and_no_others(self):
        assert found_in(["FARMER AND SMITH"]) == found_in(["farmer and smith"])
        assert found_in(["ÅÆØ@[`{"]) != found_in(["åæø@[`{"]) and found_in(["@"]) != found_in(["`"])

    def test_different_ngrams_have_different_hashes(self):
        rng, letters = np.random.default_rng(1), list("abcdefghijklmnopqrstuvwxyzæøå.,'-")
        texts = [
            " ".join("".join(rng.choice(letters, rng.integers(1, 10))) for _ in range(rng.integers(1, 5)))
            for _ in range(3000)
        ]
        expected = {one for text in ("en", *texts) for one in ngrams_of(text)}
        found = {value for row in found_in(texts) for value in row}
        assert len(expected) > 50_000 and len(found) == len(expected)
        assert hash_of("window", "ab") != hash_of("word", "ab") and hash_of("word", "a b") != hash_of(
            "pair", "a b"
        )

    def test_a_text_that_is_cut_has_the_ngrams_of_what_is_left(self):
        text = "wine merchant and farmer of the parish"
        for max_len in (16, 17, 20, 24, 29, 32):
            kept = text[: max_len - 1 - len("?en[SEP]")]
            assert found_in([text], max_len=max_len) == [hashes_of(kept)], max_len

    def test_no_description_the_language_alone(self):
        assert found_in(["", "   ", "a"]) == [hashes_of(""), hashes_of(""), hashes_of("a")]
        assert hashes_of("") == sorted(
            hash_of(*one)
            for one in [
                ("window", "en"),
                ("window", " e"),
                ("window", "n "),
                ("window", " en"),
                ("window", "en "),
                ("window", " en "),
                ("word", "en"),
            ]
        )
        assert found_in(["farmer"], ["a language of many letters"], max_len=16) == [[]]

    def test_words_of_positions(self):
        hashed, _, word = NgramHasher()(torch.from_numpy(encode(["ab cd  e"], ["en"])[0]))
        # two blanks are behind «cd»: both of «e»
        assert (
            word[0, 8:17].tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 4]
            and word[0, :8].tolist() == [0] * 3 + [1] * 5
        )


def made(texts, classes=5, **more) -> Ngrams:
    """N-grams with a row for each that `texts` hold, weights different for each."""
    known = sorted({hash_of(*one) for text in texts for one in ngrams_of(text)})
    torch.manual_seed(3)
    ngrams = Ngrams(len(known), 8, 12, classes, **more)
    ngrams.hashes.copy_(torch.tensor(known))
    ngrams.idf.copy_(1 + torch.rand(len(known)))
    return ngrams.double()


def plain_vector(ngrams: Ngrams, found: list[tuple[str, str]]) -> torch.Tensor:
    place = {value: i for i, value in enumerate(ngrams.hashes.tolist())}
    rows = [place[hash_of(*one)] for one in found if hash_of(*one) in place]
    if not rows:
        return torch.zeros(ngrams.width, dtype=torch.float64)
    weight = ngrams.idf[rows]
    return (weight[:, None] * ngrams.table.weight[rows]).sum(0) / weight.square().sum().sqrt()


class TestVectors:
    def test_of_texts_and_words_are_those_of_plain_python(self):
        ngrams = made(TEXTS[:10]).eval()
        ids = torch.from_numpy(encode(TEXTS, ["en"] * len(TEXTS))[0])
        with torch.no_grad():
            text = ngrams(ids)[0]
            expected = torch.stack([plain_vector(ngrams, ngrams_of(one)) for one in TEXTS])
            assert (
                torch.allclose(text, expected, rtol=0, atol=1e-12) and expected[:10].norm(dim=1).min() > 0.1
            )
            farm = ngrams(torch.from_numpy(encode(["farm servant"], ["en"])[0]))[1]
            begins = (
                [one for one in ngrams_of("farm") if one != ("window", "m ")]
                + [("window", "m "), ("pair", "farm servant")],
                [one for one in ngrams_of("servant")],
            )
            # a blank belongs to the word behind it: windows that end with one are of the word before, that
            # begin with one of that behind
            for place, word in ((8, begins[0]), (14, begins[1])):
                of_word = ngrams.word_to_memory(plain_vector(ngrams, word))
                assert torch.allclose(farm[0, place], of_word, atol=1e-12)
            assert torch.equal(farm[0, 12], farm[0, 18]) and not torch.allclose(farm[0, 11], farm[0, 12])

    def test_in_any_padding_to_the_last_digits(self):
        ngrams = made(TEXTS).float().eval()
        narrow, wide = (
            torch.from_numpy(encode(TEXTS, ["en"] * len(TEXTS), width=width)[0]) for width in (60, 128)
        )
        with torch.no_grad():
            (text, memory), (text2, memory2) = ngrams(narrow), ngrams(wide)
            assert (text - text2).abs().max() < 1e-6 and (memory - memory2[:, :60]).abs().max() < 1e-6
            for i in range(len(TEXTS)):
                alone, own = ngrams(torch.from_numpy(encode(TEXTS[i : i + 1], ["en"])[0]))
                last = len(TEXTS[i]) + 9
                assert (alone[0] - text[i]).abs().max() < 1e-6 and (
                    own[0, :last] - memory[i, :last]
                ).abs().max() < 1e-6

    def test_only_cls_has_the_whole_text_too(self):
        ngrams = made(TEXTS).eval()
        ids = torch.from_numpy(encode(TEXTS[:3], ["en"] * 3)[0])
        with torch.no_grad():
            text, memory = ngrams(ids)
            first_word = memory[:, 2]  # of which [CLS] is a part
            assert torch.equal(memory[:, 1], first_word) and not torch.allclose(memory[:, 0], first_word)
            assert torch.allclose(memory[:, 0] - first_word, ngrams.text_to_memory(text))

    def test_each_word_once_is_the_same_for_attention(self):
        """Repeated positions, and one for all of them whose score has the logarithm of their number."""
        ngrams = made(TEXTS).eval()
        texts, languages = [*TEXTS, "", "farmer"], ["en"] * 17 + ["a language of many letters"]
        ids, mask = map(torch.from_numpy, encode(texts, languages, max_len=24))
        queries = torch.randn(len(texts), 5, 12, dtype=torch.float64)
        with torch.no_grad():
            text, memory = ngrams(ids)
            text_again, words, scores = ngrams.by_word(ids, mask)
            assert torch.allclose(text, text_again, rtol=0, atol=1e-12) and words.shape[1] < memory.shape[1]
            seen = (queries @ memory.mT).masked_fill(~mask[:, None], -math.inf).softmax(2) @ memory
            seen_again = (queries @ words.mT + scores[:, None]).softmax(2) @ words
            assert torch.allclose(seen, seen_again, rtol=0, atol=1e-12)

    def test_no_row_of_another_ngram_changes_anything(self):
        ngrams = made(TEXTS).eval()
        ids = torch.from_numpy(encode(["farmer", "an unknown occupation 77"], ["en"] * 2)[0])
        before = [part.clone() for part in ngrams(ids)]
        own = {value for text in ("farmer", "an unknown occupation 77") for value in hashes_of(text)}
        other = torch.tensor([value not in own for value in ngrams.hashes.tolist()])
        assert 0 < (~other).sum() < len(other) / 2
        with torch.no_grad():
            ngrams.table.weight[other] = 1e6
            ngrams.idf[other] = 1e6
        assert all(torch.equal(a, b) for a, b in zip(before, ngrams(ids)))
        with torch.no_grad():
            ngrams.table.weight[~other] += 1
        assert not torch.allclose(before[0], ngrams(ids)[0])

    @pytest.mark.parametrize(
        "text, language, max_len",
        [
            ("a", "en", 128),
            ("z", "en", 128),
            ("   ", "en", 128),
            ("", "en", 128),
            ("farmer " * 40, "en", 128),
            ("farmer", "a language of many letters", 16),
            ("qqqq", "unk", 16),
        ],
    )
    def test_a_text_without_known_ngrams_is_finite_and_trains(self, text, language, max_len):
        ngrams = made(["farmer"], dropout=0.5).train()
        ids = torch.from_numpy(encode([text, text], [language] * 2, max_len)[0])
        outputs = ngrams(ids)
        (sum(part.square().sum() for part in outputs) + ngrams.linear(outputs[0]).sum()).backward()
        assert all(part.isfinite().all() for part in outputs) and all(
            p.grad is None or p.grad.isfinite().all() for p in ngrams.parameters()
        )
        if text in ("z", "   ", "", "qqqq"):
            assert not outputs[0].any() and not outputs[1].any()

    def test_dropout_leaves_ngrams_out_in_training_alone(self):
        ngrams = made(TEXTS, dropout=0.4)
        ids = torch.from_numpy(encode(TEXTS, ["en"] * len(TEXTS))[0])
        assert not torch.equal(ngrams.train()(ids)[0], ngrams(ids)[0])
        assert torch.equal(ngrams.eval()(ids)[0], ngrams(ids)[0])

    def test_sparse_gradients_are_the_same(self):
        ngrams, ids = made(TEXTS), torch.from_numpy(encode(TEXTS, ["en"] * len(TEXTS))[0])
        found = []
        for ngrams.sparse in (False, True):
            ngrams.zero_grad()
            sum(part.square().sum() for part in ngrams(ids)).backward()
            gradient = ngrams.table.weight.grad
            found.append(gradient.to_dense() if gradient.is_sparse else gradient)
            assert gradient.is_sparse == ngrams.sparse
        assert torch.allclose(*found, atol=1e-12) and found[0].any()

    def test_add_nothing_changes_no_bit_and_learns(self):
        def model(ngrams):
            torch.manual_seed(1)
            return Seq2SeqMixerOccCANINE(
                make_formatter("hisco", ["a"]).num_classes, 5, config=model_config("tiny"), ngrams=ngrams
            )

        one, two = model(None).eval(), model({"rows": 4, "width": 8}).eval()
        two.ngrams.hashes.copy_(torch.tensor(found_in(["farmer"])[0][:4]))
        two.ngrams.idf.fill_(2.0)
        ids, mask = map(torch.from_numpy, encode(["farmer", "smith"], ["en"] * 2))
        target = torch.full((2, 6), 5)
        target[:, 0] = 2
        assert all(torch.equal(one.state_dict()[name], two.state_dict()[name]) for name in one.state_dict())
        assert not torch.equal(one(ids, mask, target)[0], two(ids, mask, target)[0])
        two.ngrams.add_nothing()
        for a, b in zip(one(ids, mask, target), two(ids, mask, target)):
            assert torch.equal(a, b)
        sum(part.square().sum() for part in two(ids, mask, target)).backward()
        assert (
            two.ngrams.linear.weight.grad.any()
            and two.ngrams.word_to_memory.weight.grad.any()
            and two.ngrams.text_to_memory.weight.grad.any()
        )


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PreparedData:
    """Texts that occur several times, some in other case, with other blanks, or with two sets of codes."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        (f"{name} {'of the parish ' * (i % 2)}nr {i % 7}", "61110" if i % 3 else "41025", "")
        for i in range(60)
        for name in ("Farmer", "wine  merchant", "væver")
    ]
    rows += [
        ("FARMER nr 1", "61110", ""),
        ("farmer  nr 1", "61110", ""),
        ("væver nr 0", "61110", "41025"),
        ("væver nr 0", "41025", "61110"),
        ("y", "61110", ""),
    ]
    source = write_csv(folder / "data.csv", ("occ1", "hisco_1", "hisco_2"), rows)
    return PreparedData.open(
        preparing.prepare(settings_for(source, cols=("hisco_1", "hisco_2")), str(folder), lambda *_: None)
    )


def texts_of(data: PreparedData) -> list[str]:
    return data.train.strings(np.arange(len(data.train)))


def frequencies(data: PreparedData) -> tuple[Counter, int]:
    """In how many distinct texts each hash occurs, and how many texts there are; of equal ones the first
    counts."""
    distinct = {}
    for text in texts_of(data):
        distinct.setdefault(" ".join(text.casefold().split()), text)
    counts = Counter(value for text in distinct.values() for value in set(hashes_of(text, "unk")))
    return counts, len(distinct)


class TestCounts:
    def test_inverse_document_frequencies(self, data):
        counts, texts = frequencies(data)
        hashes, idf = TextNgrams(data, 128).weights(1 << 18)
        assert hashes.tolist() == sorted(counts) and idf.dtype == np.float32 and texts < len(data.train) / 2
        assert idf.tolist() == pytest.approx(
            [math.log((1 + texts) / (1 + counts[value])) + 1 for value in sorted(counts)], rel=1e-6
        )

    @pytest.mark.parametrize("most", [16, 64])
    def test_the_most_frequent_are_kept(self, data, most):
        counts, texts = frequencies(data)
        hashes, idf = TextNgrams(data, 128).weights(most)
        assert len(hashes) == most < len(counts) and (np.diff(hashes) > 0).all()
        assert sorted(map(counts.get, hashes.tolist())) == sorted(counts.values())[-most:]
        assert idf.tolist() == pytest.approx(
            [math.log((1 + texts) / (1 + counts[value])) + 1 for value in hashes.tolist()], rel=1e-6
        )

    def test_they_are_those_of_the_texts_as_they_are_read(self, data):
        """Cut at max_len, in pieces of any size."""
        expected = {
            value for text in texts_of(data) for value in hashes_of(text[: 16 - 1 - len("?unk[SEP]")], "unk")
        }
        assert set(TextNgrams(data, 16).weights(1 << 18)[0].tolist()) == expected

    def test_in_chunks(self, data, monkeypatch):
        whole = TextNgrams(data, 128).weights(1 << 18)
        monkeypatch.setattr(ngram_fit, "_CHUNK", 7)
        assert all(map(np.array_equal, whole, TextNgrams(data, 128).weights(1 << 18)))

    def test_distinct_rows_and_how_often_they_occur(self, data):
        """Rows of the same text with the same set of codes are one."""
        keys = [
            (" ".join(text.casefold().split()), frozenset(codes) - {-1})
            for text, codes in zip(texts_of(data), data.train.codes.tolist())
        ]
        counts, rows = Counter(keys), DistinctRows(data.train)
        assert len(rows) == len(counts) < len(keys) and [keys[i] for i in rows.index] == list(counts)
        weight = np.sqrt([counts[key] for key in counts])
        assert rows.weight.tolist() == pytest.approx((weight / weight.mean()).tolist(), rel=1e-6)
        assert ("væver nr 0", frozenset(range(2))) in counts and counts[
            "væver nr 0", frozenset(range(2))
        ] == 2
        flat, offsets = rows.texts(np.array([3, 1]))
        texts = texts_of(data)
        assert ["".join(map(chr, flat[a:b])) for a, b in zip(offsets, offsets[1:])] == [
            texts[rows.index[3]],
            texts[rows.index[1]],
        ]

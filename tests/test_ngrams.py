"""Hashed n-grams against the same in plain Python: what is found, how it counts, what it adds to a model."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import write_csv
from preparing import HEADER, quiet, settings_for
from torch import nn

from histocc.data.arrays import PreparedData
from histocc.data.prepare import prepare
from histocc.formatter import make_formatter
from histocc.learn import ngram_fit
from histocc.learn.texts import count_ngrams
from histocc.model.mixer import Seq2SeqMixerOccCANINE, model_config
from histocc.model.ngrams import ASCII_CASE, PATTERNS, WITH_CELL, WORDS, Ngrams, hash_ngrams
from histocc.text import encode, join_columns

MASK = (1 << 64) - 1
TEXTS = (
    "farmer|Farm servant|wine  merchant|væver|smed og gårdmand|a|a b c| blank first|" + "x" * 40 + "|"
    "servant of a farmer, ret.|FARMER AND SMITH|RÄÄTÄLIN KISÄLLI|ΕΡΓΆΤΗΣ ΓΗΣ|ШЛОСЕР|no. 12/b [SEP] here|"
    "tjenestepige hos smeden|漁師 と 農民|\U0001f600 emoji|aa aaa aaaa aaaaa"
).split("|")


def ngrams_of(text: str) -> list[tuple[str, str]]:
    """(kind, n-gram) of a description: windows of characters, with an open one too, and words."""
    lower = text.lower().translate(str.maketrans("ςάέήίόύώ", "σαεηιουω"))
    around, words = f" {lower} ", lower.split(" ")
    pieces = [around[i : i + size] for size in range(2, 5) for i in range(len(around) - size + 1)]
    found = [("window", piece) for piece in pieces if " " not in piece[1:-1] and piece.strip(" ")]
    for place in (1, 2):  # that is left open
        found += [(f"open {place}", piece) for kind, piece in found if kind == "window" and len(piece) == 4]
    return found + [("word", word) for word in words if word]


def hash_of(kind: str, ngram: str) -> int:
    """Polynomial hash and its mixing in plain whole numbers, as int64."""
    name, _, place = kind.partition(" ")
    letters = [letter for letter in enumerate(ngram) if str(letter[0]) != place]
    value = sum((ord(letter) + 1) * pow(6364136223846793005, i, 1 << 64) for i, letter in letters)
    value += 100 if name == "word" else len(ngram) + 1000 * int(place or 0)
    value = value * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 31)) * 0x94D049BB133111EB & MASK
    return value - (1 << 64) if value >> 63 else value


def hashes_of(text: str, language: str = "en") -> list[int]:
    """Of language and description."""
    return sorted(hash_of(*one) for one in (*ngrams_of(language), *ngrams_of(text)))


def found_in(texts, languages=None, max_len=128, width=None) -> list[list[int]]:
    ids, _ = encode(texts, languages or ["en"] * len(texts), max_len, width)
    hashed, exist, _ = hash_ngrams(torch.from_numpy(ids))
    return [sorted(row[is_there].tolist()) for row, is_there in zip(hashed, exist)]


class TestHashes:
    def test_those_of_plain_python_in_any_batch_padding_and_language(self):
        expected = [hashes_of(text) for text in TEXTS]
        assert [found_in([text])[0] for text in TEXTS] == expected
        for width in (None, 64, 100, 128):
            assert found_in(TEXTS, width=width) == expected
        languages = (["unk", "da", "EN", "swedish"] * 5)[: len(TEXTS)]
        assert found_in(TEXTS, languages) == [hashes_of(*each) for each in zip(TEXTS, languages)]

    def test_capitals_count_as_small_letters_but_for_those_that_become_longer(self):
        texts = ["räätälin kisälli", "εργάτης γης", "мелничар", "åæø", "ſchmied", "đurađ", "œuvre"]
        assert found_in([text.upper() for text in texts]) == found_in(texts)
        assert found_in(["ſmith", "ΕΡΓΑΤΗΣ", "ᾠδή"]) == found_in(["smith", "εργάτης", "ΩΔΗ"])
        for one, other in (("straße", "STRASSE"), ("İşçi", "işçi"), ("ﬁsher", "FISHER"), ("@", "`")):
            assert found_in([one]) != found_in([other])

    def test_models_that_name_no_rule_know_the_capitals_of_ascii_alone(self):
        hashed = [hash_ngrams(encoded([x]), case=ASCII_CASE)[0] for x in "ÅåAaZz@`[{"]
        is_same = [torch.equal(*pair) for pair in zip(hashed[::2], hashed[1::2])]
        assert is_same == [False, True, True, False, False]

    def test_a_text_that_is_cut_has_the_ngrams_of_what_is_left(self):
        text = "wine merchant and farmer of the parish"
        for max_len in (16, 17, 20, 24, 29, 32):
            kept = text[: max_len - 1 - len("?en[SEP]")]
            assert found_in([text], max_len=max_len) == [hashes_of(kept)], max_len

    def test_without_a_description_those_of_the_language_alone(self):
        windows = ["en", " e", "n ", " en", "en ", " en "]
        found = [("window", one) for one in windows]
        found += [("open 1", " en "), ("open 2", " en "), ("word", "en")]
        only_language = sorted(hash_of(*one) for one in found)
        assert found_in(["", "   ", "a"]) == [only_language, only_language, hashes_of("a")]
        assert found_in(["farmer"], ["a language of many letters"], max_len=16) == [[]]

    def test_words_of_positions(self):
        _, _, word = hash_ngrams(torch.from_numpy(encode(["ab cd  e"], ["en"])[0]))
        # two blanks stand after «cd»: both of «e»
        assert word[0, :8].tolist() == [0] * 3 + [1] * 5
        assert word[0, 8:17].tolist() == [1, 1, 2, 2, 2, 3, 3, 3, 4]

    def test_words_with_whole_cells(self):
        """The whole text once, and each of its words with a further cell, whatever case and blanks are."""

        def found(*cells):
            ids = encoded(join_columns([cells[0]], [[cell] for cell in cells[1:]]))
            hashed, exist, _ = hash_ngrams(ids, [*PATTERNS, *(f"{WITH_CELL}{i}" for i in range(3))])
            return [{*hashed[0, :, i][exist[0, :, i]].tolist()} for i in (-3, -2, -1)]

        text, first, second = found("wine merchant", "The Inn", "Ribe")
        assert [len(text), len(first), len(second)] == [1, 2, 2] and not text & first and not first & second
        assert found("Wine  merchant", "the inn", "ribe") == [text, first, second]
        assert found("wine merchant", "", "Ribe") == [text, set(), second]
        other, fewer, _ = found("wine", "the inn")
        assert other != text and len(fewer) == 1 and fewer < first
        assert not found("wine merchant", "inn")[1] & first and found("wine merchant")[1:] == [set(), set()]

    def test_first_word_last_word_and_all_words_in_any_order(self):
        """One n-gram each, of the first column alone."""

        def found(text, *cells):
            ids = encoded(join_columns([text], [[cell] for cell in cells]))
            hashed, exist, _ = hash_ngrams(ids, [*PATTERNS, *WORDS])
            (first,), (last,), (every,) = (hashed[0, :, i][exist[0, :, i]].tolist() for i in (-3, -2, -1))
            return first, last, every

        first, last, every = found("wine merchant")
        assert len({first, last, every}) == 3 and found("Wine  MERCHANT", "the inn") == (first, last, every)
        other, end, again = found("merchant wine")
        assert again == every and other != first and end != last
        assert found("wine of the merchant")[:2] == (first, last)
        assert found("wine of the merchant")[2] != every
        assert found("wine")[0] == first and found("merchant")[1] == last


def made(texts, classes=5, **more) -> Ngrams:
    """N-grams with a row for each that `texts` hold, weights different for each."""
    known = sorted({hash_of(*one) for text in texts for one in ngrams_of(text)})
    torch.manual_seed(3)
    ngrams = Ngrams(len(known), 8, 12, classes, **more)
    ngrams.hashes.copy_(torch.tensor(known))
    ngrams.idf.copy_(1 + torch.rand(len(known)))
    return ngrams.double()


def plain_vector(ngrams: Ngrams, found: list[tuple[str, str]], table: torch.Tensor) -> torch.Tensor:
    place = {value: i for i, value in enumerate(ngrams.hashes.tolist())}
    rows = [place[hash_of(*one)] for one in found if hash_of(*one) in place]
    if not rows:
        return torch.zeros(table.shape[1], dtype=torch.float64)
    weight = ngrams.idf[rows]
    return (weight[:, None] * table[rows]).sum(0) / weight.square().sum().sqrt()


def encoded(texts, languages=None, **more) -> torch.Tensor:
    return torch.from_numpy(encode(texts, languages or ["en"] * len(texts), **more)[0])


class TestVectors:
    @torch.no_grad()
    def test_of_texts_and_words_are_those_of_plain_python(self):
        """In any padding; [CLS] has the whole text beside the first word, of which it is a part."""
        ngrams = made(TEXTS[:10]).eval()
        text, (memory,) = ngrams([encoded(TEXTS)])
        table = ngrams.table.weight
        expected = torch.stack([plain_vector(ngrams, ngrams_of(one), table) for one in TEXTS])
        assert torch.allclose(text, expected, rtol=0, atol=1e-12) and expected[:10].norm(dim=1).min() > 0.1
        assert torch.equal(ngrams.vectors(encoded(TEXTS))[0], text)
        wide_text, (wide,) = ngrams([encoded(TEXTS, width=128)])
        assert torch.allclose(wide_text, text, atol=1e-12)
        assert torch.allclose(wide[:, : memory.shape[1]], memory, atol=1e-12)
        assert torch.allclose(memory[:, 0] - memory[:, 1], ngrams.text_to_memory(text))
        _, (farm,) = ngrams([encoded(["farm servant"])])
        # a blank belongs to the word after it: windows that end with one are of the word before it
        for place, word in ((8, [*ngrams_of("farm"), ("pair", "farm servant")]), (14, ngrams_of("servant"))):
            of_word = ngrams.word_to_memory(plain_vector(ngrams, word, table))
            assert torch.allclose(farm[0, place], of_word, atol=1e-12)
        assert torch.equal(farm[0, 12], farm[0, 18]) and not torch.allclose(farm[0, 11], farm[0, 12])

    @torch.no_grad()
    @pytest.mark.parametrize("more, share", [([], 1), ([f"{WITH_CELL}0", f"{WITH_CELL}1"], 0.5)])
    def test_how_much_a_further_column_counts_beside_the_first(self, more, share):
        """As much in models without n-grams of whole cells."""
        (text,) = join_columns(["wine and spirit merchant"], [["inn"]])
        ids = encoded([text])
        hashed, exist, _ = hash_ngrams(ids, [*PATTERNS, *more])
        ngrams = made(["inn"], patterns=[*PATTERNS, *more]).eval()
        ngrams.hashes = hashed[exist].unique()
        ngrams.idf = 1 + torch.rand(len(ngrams.hashes)).double()
        squares, middle = ngrams.weighted(ids)[1].square().sum(2), ids[0].tolist().index(ord("␟"))
        assert squares[0, middle:].sum().item() == pytest.approx(share * squares[0, :middle].sum().item())

    @torch.no_grad()
    def test_each_word_once_is_the_same_for_attention(self):
        """Repeated positions, and one for all of them whose score has the logarithm of their number."""
        ngrams = made(TEXTS).eval()
        texts, languages = [*TEXTS, "", "farmer"], ["en"] * (len(TEXTS) + 1) + ["a language of many letters"]
        ids, mask = map(torch.from_numpy, encode(texts, languages, max_len=24))
        queries = torch.randn(len(texts), 5, 12, dtype=torch.float64)
        text, (memory,) = ngrams([ids])
        rows, weight, word = ngrams.weighted(ids)
        positions = weight.new_zeros(len(ids), int(word.max()) + 1).scatter_add(
            1, word[:, 1:], mask[:, 1:].double()
        )
        of_text = torch.arange(len(ids))[:, None, None].expand_as(rows)
        entries = [x.flatten() for x in (rows, weight, of_text, word[:, :, None].expand_as(rows))]
        text_again, words, scores = ngrams.by_word(*entries, positions)
        assert torch.allclose(text, ngrams.text_of(*entries[:3], len(ids)), rtol=0, atol=1e-12)
        assert torch.allclose(text, text_again, rtol=0, atol=1e-12) and words.shape[1] < memory.shape[1]
        seen = (queries @ memory.mT).masked_fill(~mask[:, None], -math.inf).softmax(2) @ memory
        seen_again = (queries @ words.mT + scores[:, None]).softmax(2) @ words
        assert torch.allclose(seen, seen_again, rtol=0, atol=1e-12)

    @pytest.mark.parametrize(
        "text, language, max_len, is_known",
        [
            ("z", "en", 128, False),
            ("   ", "en", 128, False),
            ("", "en", 128, False),
            ("farmer " * 40, "en", 128, True),
            ("qqqq", "a language of many letters", 16, False),
        ],
    )
    def test_a_text_without_known_ngrams_is_finite_and_trains(self, text, language, max_len, is_known):
        ngrams, ids = made(["farmer"], dropout=0.1).train(), encoded([text], [language], max_len=max_len)
        text, (memory,) = ngrams([ids])
        assert torch.equal(ngrams([ids])[0], text) != is_known  # what is left out differs
        (text.square().sum() + memory.square().sum() + ngrams.linear(text).sum()).backward()
        assert text.isfinite().all() and memory.isfinite().all() and bool(text.any()) == is_known
        assert all(p.grad is None or p.grad.isfinite().all() for p in ngrams.parameters())

    def test_zero_output_changes_no_bit_and_learns(self):
        def model(ngrams):
            torch.manual_seed(1)
            classes = make_formatter("hisco", ["a"]).num_classes
            return Seq2SeqMixerOccCANINE(classes, 5, config=model_config("tiny"), ngrams=ngrams).eval()

        one, two = model(None), model({"rows": 4, "width": 8})
        two.ngrams.hashes.copy_(torch.tensor(found_in(["farmer"])[0][:4]))
        two.ngrams.idf.fill_(2.0)
        ids, mask = map(torch.from_numpy, encode(["farmer", "smith"], ["en"] * 2))
        target = torch.full((2, 6), 5)
        assert all(torch.equal(one.state_dict()[name], two.state_dict()[name]) for name in one.state_dict())
        assert not torch.equal(one(ids, mask, target)[0], two(ids, mask, target)[0])
        two.ngrams.zero_output()
        assert all(map(torch.equal, one(ids, mask, target), two(ids, mask, target)))
        sum(part.square().sum() for part in two(ids, mask, target)).backward()
        layers = (two.ngrams.linear, two.ngrams.word_to_memory, two.ngrams.text_to_memory)
        assert all(layer.weight.grad.any() for layer in layers)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> PreparedData:
    """Texts that occur several times, some in other case, with other blanks, or with two sets of codes."""
    folder = tmp_path_factory.mktemp("data")
    rows = [
        (f"{name} {'of the parish ' * (i % 2)}nr {i % 7}", "61110" if i % 3 else "41025", "")
        for i in range(60)
        for name in ("Farmer", "wine  merchant", "væver")
    ]
    rows += [(text, "61110", "") for text in ("FARMER nr 1", "farmer  nr 1", "y")]
    rows += [("væver nr 0", "61110", "41025"), ("væver nr 0", "41025", "61110")]
    source = write_csv(folder / "data.csv", HEADER, rows)
    return PreparedData.open(prepare(settings_for(source, cols=HEADER[1:]), str(folder), quiet))


def texts_of(data: PreparedData) -> list[str]:
    return data.train.strings(np.arange(len(data.train)))


def frequencies(data: PreparedData) -> tuple[Counter, int]:
    """In how many distinct texts each hash occurs, and their number; of equal ones the first counts."""
    distinct = {}
    for text in texts_of(data):
        distinct.setdefault(" ".join(text.casefold().split()), text)
    counts = Counter(value for text in distinct.values() for value in set(hashes_of(text, "unk")))
    return counts, len(distinct)


class TestCounts:
    @pytest.mark.parametrize("most", [16, 64, 1 << 18])
    def test_the_most_frequent_are_kept_with_their_inverse_document_frequencies(self, data, most):
        counts, texts = frequencies(data)
        hashes, idf = count_ngrams(data, 128, most, PATTERNS)
        assert len(hashes) == min(most, len(counts)) and (np.diff(hashes) > 0).all()
        assert texts < len(data.train) / 2
        assert sorted(map(counts.get, hashes.tolist())) == sorted(counts.values())[-most:]
        expected = [math.log((1 + texts) / (1 + counts[value])) + 1 for value in hashes.tolist()]
        assert idf.dtype == np.float32 and idf.tolist() == pytest.approx(expected, rel=1e-6)

    def test_they_are_those_of_the_texts_as_they_are_read(self, data, monkeypatch):
        """Cut at max_len, in chunks of any size."""
        kept = 16 - 1 - len("?unk[SEP]")
        expected = {value for text in texts_of(data) for value in hashes_of(text[:kept], "unk")}
        assert set(count_ngrams(data, 16, 1 << 18, PATTERNS)[0].tolist()) == expected
        whole = count_ngrams(data, 128, 1 << 18, PATTERNS)
        monkeypatch.setattr("histocc.learn.texts.HASHED_AT_ONCE", 256)
        assert all(map(np.array_equal, whole, count_ngrams(data, 128, 1 << 18, PATTERNS)))

    def test_distinct_rows_and_how_often_they_occur(self, data):
        """Rows of the same text with the same set of codes are one."""
        keys = [
            (" ".join(text.casefold().split()), frozenset(codes) - {-1})
            for text, codes in zip(texts_of(data), data.train.codes.tolist())
        ]
        counts, rows = Counter(keys), ngram_fit.DistinctRows(data.train)
        assert len(rows) == len(counts) < len(keys) and [keys[i] for i in rows.index] == list(counts)
        weight = np.sqrt([counts[key] for key in counts])
        assert rows.weight.tolist() == pytest.approx((weight / weight.mean()).tolist(), rel=1e-6)
        assert counts["væver nr 0", frozenset(range(2))] == 2
        flat, offsets = rows.texts(np.array([3, 1]))
        texts = ["".join(map(chr, flat[a:b])) for a, b in zip(offsets, offsets[1:])]
        assert texts == [texts_of(data)[rows.index[i]] for i in (3, 1)]


def test_the_optimizer_of_the_fit_moves_rows_that_have_a_gradient():
    """By the rate, in root mean square, one that is met late further; none at all by an infinite gradient."""
    table, weight = nn.Embedding(5, 8, sparse=True), nn.Parameter(torch.arange(1.0, 9.0))
    groups = [{"params": [table.weight], "lr": 0.1}, {"params": [weight], "lr": 0.2}, {"params": [], "lr": 0}]
    optimizer = ngram_fit.FitOptimizer(groups, eps=1e-12, fused=True)
    for rows, bad, further in (([0, 3, 3], 1.0, 0.0), ([0, 3, 3], 0.0, 1.0), ([1], 0.0, math.sqrt(1.999))):
        before, optimizer.found_inf = table.weight.detach().clone(), torch.tensor(bad)
        (table(torch.tensor(rows)) @ weight).square().sum().backward()
        optimizer.step()
        moved = (table.weight - before).square().mean(1).sqrt().tolist()
        assert moved == pytest.approx([0.1 * further * (row in rows) for row in range(5)], rel=1e-4)

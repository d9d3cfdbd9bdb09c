"""Descriptions as character ids and by the rules of text; codes as tokens: against plain Python and what is
published.
"""

import itertools
import json
import pickle
import string
import sys
import unicodedata
import warnings

import numpy as np
import pytest
import torch
from helpers import examples
from hypothesis import example, given
from hypothesis import strategies as st

from histocc import formatter as forms
from histocc import text as rules
from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX, SEP_IDX, UNK_IDX, BlockyFormatter, make_formatter
from histocc.model.metrics import canonical_blocks
from histocc.runtime.errors import UserError
from histocc.text import LANGUAGES, as_is, ascii_lower, cleaner, encode, padded_width, text_hashes, text_key

# ---- ids

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
def test_ids_equal_plain_construction(rows, max_len):
    expected = [plain(text, language, max_len) for text, language in rows]
    ids, mask = encode(*zip(*rows), max_len)
    check(ids, mask, expected)
    assert ids.shape[1] == padded_width(max(map(len, expected)) - 2, max_len)
    check(*encode(*zip(*rows), max_len, width=-(-max_len // 4) * 4), expected)  # whatever the width
    flat, offsets = rules.join_texts([rules.code_points(text) for text, _ in rows])
    numbers = np.arange(len(rows))[::-1].copy()
    table = rules.language_table([language for _, language in rows][::-1])
    check(*rules.encode_batch(flat, offsets, numbers, table, max_len), expected)


def test_published_tokenizer():
    tokenizer = pytest.importorskip("transformers").CanineTokenizer()
    rows = [("wine and spirit merchant", "en"), ("huusmand  og væver ", "da"), ("", "unk")]
    rows += [("γεωργός 𝔊🙂", "gr"), ("y" * 200, "se")]
    inputs = [f"{language}[SEP]{text}" for text, language in rows]
    options = {"padding": "max_length", "truncation": True, "max_length": 128, "return_tensors": "np"}
    published = tokenizer(inputs, **options)
    ids, mask = encode(*zip(*rows), width=128)
    assert (ids == published["input_ids"]).all() and (mask == published["attention_mask"]).all()


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


# ---- text rules


def test_as_is_and_the_key_of_a_text():
    assert as_is(" ko\u030bva\u0301go\u0301 ") == cleaner("as-is")("kővágó ") == "kővágó"
    forms = ("Gård  Mand", "ga\u030ard mand ", "gård\u200b ma\xadnd", "\ufeffGÅRD\tMAND")
    assert text_key("NA") == as_is(" null ") == cleaner("ascii-lower")("\tNaN") == "" != as_is("-")
    assert {text_key(text) for text in forms} == {"gård mand"} != {text_key("gard mand")}
    with pytest.raises(UserError, match="'rot13' is not known; this version has as-is and ascii-lower"):
        cleaner("rot13")


def unidecoded(text: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of surrogates
        return pytest.importorskip("unidecode").unidecode(text.lower())


SCRIPTS = ("LATIN", "GREEK", "CYRILLIC")
OTHERS = [*range(0x80, 0xC0), *range(0x2000, 0x2800), *range(0x300, 0x370), *range(0xFF00, 0xFF5F)]


def test_letters_punctuation_and_symbols_are_as_the_package_has_them(monkeypatch):
    letters = [
        char
        for char in map(chr, range(0x80, sys.maxunicode + 1))
        if unicodedata.name(char, "").startswith(SCRIPTS) and unicodedata.category(char)[0] in "LM"
    ]
    expected = {char: unidecoded(char) for char in [*letters, *map(chr, OTHERS)]}
    monkeypatch.setitem(sys.modules, "unidecode", None)
    rules._table.cache_clear()
    assert len(letters) > 1800
    assert [char for char, text in expected.items() if ascii_lower(char) != text] == []
    with pytest.raises(UserError, match=r"'農' \(CJK UNIFIED IDEOGRAPH-8FB2\).*pip install unidecode"):
        ascii_lower("農夫")


def test_transliterated_texts():
    for text, expected in {
        "Væver og Smed": "vaever og smed",
        "STRASSENKEHRER IN GROẞ-MÜNSTER": "strassenkehrer in gross-munster",
        "  ouvrière — « lingère »": "  ouvriere -- << lingere >>",
        "γεωργός, Þjónn": "georgos, thjonn",
        "№ 3": "No.  3",
        "農夫": "Nong Fu ",
    }.items():
        assert ascii_lower(text) == cleaner("ascii-lower")(text) == expected == unidecoded(text)


@given(st.text(st.characters(max_codepoint=0x24F), max_size=60))
def test_any_western_text(text):
    assert ascii_lower(text) == unidecoded(text) and ascii_lower(text).isascii()


# ---- codes and tokens

HISCO = forms.hisco_blocky5()
OCC1950 = forms.occ1950_blocky2()
GPF = forms.construct_general_purpose_formatter(4, ["a", "b", "c"], allow_short=False)
GPF_SHORT = forms.construct_general_purpose_formatter(4, ["a", "b", "c"])
GPF_SEP = forms.construct_general_purpose_formatter(4, ["a", "b", "c"], use_within_block_sep=True)
NAMES = ["Fruit juice", "R&D", "rice, pasta", "Καφές", *map(str, range(7))]
CLASSES = make_formatter("classes", ["a", "b", "c"], codes=NAMES)
CHARACTERS = [c for c in string.ascii_letters + string.digits + string.punctuation if c not in "&,"]
TOKENS = [str(n) for n in range(-999, 1000)] + CHARACTERS
EVERY_KIND = [
    (HISCO, st.text("0123456789", min_size=5, max_size=5) | st.sampled_from(["-1", "-2", "-3"])),
    (OCC1950, st.text("0123456789", min_size=3, max_size=3)),
    (GPF, st.text(CHARACTERS, min_size=4, max_size=4)),
    (GPF_SHORT, st.text(CHARACTERS, min_size=1, max_size=4)),
    (CLASSES, st.sampled_from(NAMES)),
    (GPF_SEP, st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4).map(",".join)),
]


def test_sequences_tokens_and_sizes_as_published():
    assert (UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX, SEP_IDX) == (0, 1, 2, 3, 4)
    sequence = HISCO.transform_label("12345&-1")
    assert sequence.dtype == np.float64 and HISCO.clean_pred(sequence) == "12345&-1"
    assert sequence.tolist() == [2, 9, 10, 11, 12, 13, 7, 7, 7, 7, 7] + [1] * 15 + [3]
    assert OCC1950.transform_label("019&999").tolist() == [2, 5, 6, 14, 14, 14, 14, 3]
    assert OCC1950.transform_label("019").tolist() == [2, 5, 6, 14, 1, 1, 1, 3]
    one, minus_12 = GPF.map_char_idx["1"], GPF.map_char_idx["-12"]
    assert GPF.transform_label("1111").tolist() == [2] + [one] * 4 + [1] * 8 + [3]
    assert GPF_SHORT.transform_label("1&11").tolist() == [2, one, 3, 3, 3, one, one, 3, 3, 1, 1, 1, 1, 3]
    assert GPF_SEP.transform_label("-12,1").tolist() == [2, minus_12, one, 3, 3] + [1] * 8 + [3]
    assert HISCO.transform_label(None) is None
    with pytest.raises(ValueError, match="3 codes.*room for 2"):
        OCC1950.transform_label("111&222&333")
    kinds = (HISCO, (5, 5, 27), 18), (OCC1950, (2, 3, 8), 15), (GPF, (3, 4, 14), 2086)
    for formatter, sizes, last in kinds:
        assert (formatter.max_num_codes, formatter.block_size, formatter.max_seq_len) == sizes
        assert formatter.num_classes == [last] * sizes[2] and formatter.sep_value == "&"
        assert all(formatter.map_idx_char[number] == char for char, number in formatter.map_char_idx.items())
    assert (HISCO.map_char_idx["-3"], HISCO.map_char_idx["0"], HISCO.map_idx_char[17]) == (5, 8, "9")
    ids = GPF.map_char_idx
    first = [ids[token] for token in ("-999", "0", "999", "a", "Z", "!")]
    assert first == [5, 1004, 2003, 2004, 2055, 2056] and len(ids) == 1999 + 52 + 30
    assert HISCO.target_cols == ["hisco_1", "hisco_2", "hisco_3", "hisco_4", "hisco_5"]
    ids = [CLASSES.map_char_idx[digit] for digit in "0109"]
    assert CLASSES.transform_label("R&D&5").tolist() == [2, *ids, 1, 1, 3]  # a code is its number
    with pytest.raises(forms.CodeError, match="not among the 11 classes"):
        CLASSES.encode_code("fruit juice")
    assert CLASSES.decode_block(ids[3:] * 2) is None  # 99
    fixed = make_formatter("occ1950", ["x"], block_size=5, use_within_block_sep=True, allow_short=True)
    assert (fixed.block_size, fixed.within_block_sep, fixed.allow_short) == (3, None, False)


def test_rows_of_tables_as_published():
    pandas = pytest.importorskip("pandas")
    cases = (
        (HISCO, {"hisco_1": 1234, "hisco_2": "-1", "hisco_3": None, "hisco_4": pandas.NA, "hisco_5": " "}),
        (HISCO, {"code1": 123.0, "code2": 0, **dict.fromkeys(("code3", "code4", "code5"), float("nan"))}),
        (HISCO, {"code1": 123.0, "code2": 0}),
        (OCC1950, {"OCC1950_1": 19.0, "OCC1950_2": float("nan")}),
        (GPF_SHORT, {"a": 12.0, "b": "x1", "c": float("nan")}),
    )
    for (formatter, row), codes in zip(cases, ("01234&-1", *["03550&-3"] * 2, "019", "12&x1")):
        for label in (pandas.Series(row), pandas.DataFrame([row]), pandas.DataFrame([row, row]).iloc[1], row):
            assert formatter.clean_pred(formatter.transform_label(label)) == codes
    assert HISCO.transform_label(np.array(["12345"])[0])[1] == 9


@pytest.mark.parametrize("formatter, codes", EVERY_KIND)
def test_codes_come_back(formatter, codes):
    @examples(60)
    @given(st.lists(codes, min_size=1, max_size=formatter.max_num_codes))
    def check(row):
        sequence = formatter.transform_label("&".join(row))
        assert sequence.shape == (formatter.max_seq_len,)
        assert formatter.clean_pred(sequence) == "&".join(row)
        used = 1 + len(row) * formatter.block_size
        assert sequence[0] == BOS_IDX and sequence[-1] == EOS_IDX
        assert (sequence[used:-1] == PAD_IDX).all() and (sequence[1:used] != PAD_IDX).all()
        blocks = canonical_blocks(formatter, torch.from_numpy(sequence[None]))
        assert blocks.flatten().tolist() == sequence[1:-1].tolist()  # what is written is canonical already

    check()


@pytest.mark.parametrize(
    "formatter, codes",
    [
        (HISCO, {"1234": "length of 4", "123456": "length of 6", "1234a": "'a'", "-4": "'-'"}),
        (HISCO, {"?": "'?'", "12 45": "' '", "1234\u00b2": "\u00b2", "": "empty", "  ": "empty"}),
        (OCC1950, {"12": "length of 2", "-1": "'-'"}),
        (GPF, {"123": "length of 3", "12345": "length of 5", "12\u00e934": "\u00e9", "1,2": "','"}),
        (GPF_SHORT, {"": "empty", "12345": "length of 5"}),
        (GPF_SEP, {"1,2,3,4,5": "length of 5", "1000": "'1000'", "1,,2": "''"}),
    ],
)
def test_codes_that_do_not_fit(formatter, codes):
    for code, words in codes.items():
        with pytest.raises(forms.CodeError) as caught:
            formatter.encode_code(code)
        assert repr(code) in str(caught.value) and words in str(caught.value)


def test_repairs_and_codes_that_are_never_short():
    for formatter, cells in (
        (HISCO, {"1234": "01234", "41025.0": "41025", "1234.0": "01234", "-1.0": "-1", "−1": "-1"}),
        (HISCO, {"8-31.10": "83110", "77610,0": "77610", "0 2210": "02210"}),
        (HISCO, {"83.110": "83110", "1,110": "01110", "83'110": "83110"}),
        (HISCO, dict.fromkeys(("-1", "123", "123456", "41025.5", "12a4", "831.10", "831,100"))),
        (OCC1950, {"7": "007", "97.0": "097", "970": None, "": None}),
        (GPF, {"1234.0": None, "1": None, "8-31.10": None}),
    ):
        for cell, repaired in cells.items():
            code, kinds = formatter.repair(f" {cell}\t")
            assert (code, bool(kinds)) == (repaired or cell, repaired is not None)
    for code, use_sep in itertools.product(("-1", "-2", "-3", "?"), (False, True)):
        formatter = forms.construct_general_purpose_formatter(5, ["a"], use_within_block_sep=use_sep)
        assert formatter.decode_block(formatter.encode_code(code)) == code
    key = list(forms.hisco_key())
    assert [HISCO.decode_block(HISCO.encode_code(code)) for code in key] == key


def test_blocks_that_hold_no_code_are_dropped():
    def ids(*tokens):
        return [HISCO.map_char_idx[token] if isinstance(token, str) else token for token in tokens]

    one, pad = ids(*"12345"), [PAD_IDX] * 5
    partly, whole_with_pad = ids("1", "2", PAD_IDX, "4", "5"), ids("-1", "-1", "-1", "-1", PAD_IDX)
    assert HISCO.clean_pred([BOS_IDX, *partly, *one, *pad, *whole_with_pad, *pad, EOS_IDX]) == "12345"
    for stray in (UNK_IDX, BOS_IDX, EOS_IDX, SEP_IDX, 18, -1):
        assert HISCO.decode_block(ids("1", "2", "3", stray, "5")) is None
    assert HISCO.clean_pred([BOS_IDX, *pad * 5, EOS_IDX]) == ""
    assert HISCO.decode_block(ids("-2", "5", EOS_IDX, "-3", "0")) == "-2"  # the first token decides
    with pytest.raises(ValueError, match="tokens of a block: 5"):
        HISCO.clean_pred([2, 8, 8])
    one, two, twelve = (GPF.map_char_idx[token] for token in ("1", "2", "12"))
    for block, code in (
        ([one, EOS_IDX, two, two], "122"),  # as published, wherever the EOS stands
        ([one, PAD_IDX, two, EOS_IDX], "12"),
        ([EOS_IDX] * 4, None),
        ([PAD_IDX] * 4, None),
        ([one, UNK_IDX, two, two], None),
        ([twelve, one, one, one], "12111"),
    ):
        assert GPF.decode_block(block) == code
    assert GPF_SEP.decode_block([twelve, one, EOS_IDX, EOS_IDX]) == "12,1"


OUT_OF_RANGE = -7
SPECIAL = [UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX, SEP_IDX, OUT_OF_RANGE]


@pytest.mark.parametrize(
    "formatter, tokens, others",
    [
        (HISCO, ["1", "0", "-1", "-3"], [PAD_IDX, EOS_IDX, OUT_OF_RANGE]),
        (OCC1950, ["1", "0"], SPECIAL),
        (GPF, ["1", "2", "a"], SPECIAL),
        (GPF_SEP, ["1", "2", "12"], SPECIAL),
    ],
)
def test_canonical_rows_are_equal_exactly_when_the_codes_are(formatter, tokens, others):
    ids = [formatter.map_char_idx[token] for token in tokens] + others
    blocks = list(itertools.product(ids, repeat=formatter.block_size))  # every block of these ids
    sequences = torch.full((len(blocks), formatter.max_seq_len), PAD_IDX)
    sequences[:, 1 : 1 + formatter.block_size] = torch.tensor(blocks)
    canonical = canonical_blocks(formatter, sequences)
    assert canonical.dtype == torch.int64 and (canonical[:, 1:] == PAD_IDX).all()
    rows, codes = list(map(tuple, canonical[:, 0].tolist())), list(map(formatter.decode_block, blocks))
    pairs = set(zip(rows, codes))
    assert len(pairs) == len(set(rows)) == len(set(codes)) < len(blocks)
    assert ((PAD_IDX,) * formatter.block_size, None) in pairs
    assert all(formatter.decode_block(row) == code for row, code in pairs)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("hisco", []), "1 to 5 target columns, not 0"),
        (("hisco", ["a"] * 6), "1 to 5 target columns, not 6"),
        (("gpf", []), "at least one target column"),
        (("isco", ["x"]), "'isco'.*hisco, occ1950, classes, gpf"),
        (("gpf", ["x"], 0), "at least 1 and at most 1000, not 0"),
        (("hisco", ["x"], 5, False, False, ["1"]), "only the general-purpose formatter"),
        (("gpf", ["x"], 5, False, False, ["1", "1"]), "must differ"),
        (("gpf", ["x"], 5, False, False, ["&"]), "must differ"),
    ],
)
def test_settings_that_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_formatter(*arguments)


@pytest.mark.parametrize("formatter", [HISCO, OCC1950, GPF, GPF_SHORT, GPF_SEP, CLASSES])
def test_settings_survive_json_and_pickle(formatter):
    settings = formatter.to_dict()
    again = BlockyFormatter.from_dict(json.loads(json.dumps(settings)))
    for other in (again, pickle.loads(pickle.dumps(formatter))):
        assert other.to_dict() == settings and other.num_classes == formatter.num_classes
    with pytest.raises(ValueError, match="do not fit together"):
        BlockyFormatter.from_dict(settings | {"max_codes": -1})


@pytest.mark.parametrize(
    "codes, before, expected",
    [
        (["01.1", "01.1.1.3.1"], None, ("gpf", 10)),
        (["R54.005", "x" * 17], None, ("classes", 1)),
        (["Fruit juice"], None, ("classes", 1)),
        (["a & b", *NAMES], CLASSES, ("classes", 2)),
        (["12"], GPF_SHORT, ("gpf", 4)),  # the tokens and blocks of the initial weights stay
        (["12,-1"], GPF_SEP, ("gpf", 4)),
        (["12345"], GPF_SHORT, ("gpf", 5)),
        (["12345"], HISCO, ("gpf", 5)),
    ],
)
def test_the_formatter_follows_from_the_codes(codes, before, expected):
    formatter = forms.formatter_of_codes(codes, ["x"], 2, before and before.to_dict())
    assert (formatter.kind, formatter.block_size) == expected
    assert formatter.max_num_codes == (3 if before and before is not HISCO else 2)
    assert [formatter.decode_block(formatter.encode_code(code)) for code in codes] == codes

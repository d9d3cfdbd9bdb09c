"""Codes <-> tokens: published formats, bad codes, repairs, and the canonical form of a block."""

import csv
import itertools
import json
import os
import pickle
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st

from histocc.formatter import (
    BOS_IDX,
    EOS_IDX,
    PAD_IDX,
    SEP_IDX,
    UNK_IDX,
    BlockyFormatter,
    CodeError,
    construct_general_purpose_formatter,
    hisco_blocky5,
    make_formatter,
    occ1950_blocky2,
)

HISCO = hisco_blocky5()
OCC1950 = occ1950_blocky2()
GPF = construct_general_purpose_formatter(4, ["a", "b", "c"], allow_short=False)
GPF_SHORT = construct_general_purpose_formatter(4, ["a", "b", "c"])
GPF_SEP = construct_general_purpose_formatter(4, ["a", "b", "c"], use_within_block_sep=True)
CHARACTERS = [c for c in string.ascii_letters + string.digits + string.punctuation if c not in "&,"]
TOKENS = [str(n) for n in range(-999, 1000)] + CHARACTERS
EVERY_KIND = [
    (HISCO, st.text("0123456789", min_size=5, max_size=5) | st.sampled_from(["-1", "-2", "-3"])),
    (OCC1950, st.text("0123456789", min_size=3, max_size=3)),
    (GPF, st.text(CHARACTERS, min_size=4, max_size=4)),
    (GPF_SHORT, st.text(CHARACTERS, min_size=1, max_size=4)),
    (GPF_SEP, st.lists(st.sampled_from(TOKENS), min_size=1, max_size=4).map(",".join)),
]


def test_sequences_as_published():
    assert (UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX, SEP_IDX) == (0, 1, 2, 3, 4)
    sequence = HISCO.transform_label("12345&-1")
    assert sequence.dtype == np.float64 and HISCO.clean_pred(sequence) == "12345&-1"
    assert sequence.tolist() == [2, 9, 10, 11, 12, 13, 7, 7, 7, 7, 7] + [1] * 15 + [3]
    assert OCC1950.transform_label("019&999").tolist() == [2, 5, 6, 14, 14, 14, 14, 3]
    assert OCC1950.transform_label("019").tolist() == [2, 5, 6, 14, 1, 1, 1, 3]
    one = GPF.map_char_idx["1"]
    assert GPF.transform_label("1111").tolist() == [2] + [one] * 4 + [1] * 8 + [3]
    assert GPF_SHORT.transform_label("1&11").tolist() == [2, one, 3, 3, 3, one, one, 3, 3, 1, 1, 1, 1, 3]
    minus_12 = GPF.map_char_idx["-12"]
    assert GPF_SEP.transform_label("-12,1").tolist() == [2, minus_12, one, 3, 3] + [1] * 8 + [3]
    assert HISCO.transform_label(None) is None
    with pytest.raises(ValueError, match="3 codes.*room for 2"):
        OCC1950.transform_label("111&222&333")


def test_tokens_and_sizes_as_published():
    for formatter, sizes, last in (
        (HISCO, (5, 5, 27), 18),
        (OCC1950, (2, 3, 8), 15),
        (GPF, (3, 4, 14), 2086),
    ):
        assert (formatter.max_num_codes, formatter.block_size, formatter.max_seq_len) == sizes
        assert formatter.num_classes == [last] * sizes[2] and formatter.sep_value == "&"
    assert (HISCO.map_char_idx["-3"], HISCO.map_char_idx["0"], HISCO.map_idx_char[17]) == (5, 8, "9")
    ids = GPF.map_char_idx
    first = [ids[token] for token in ("-999", "0", "999", "a", "Z", "!")]
    assert first == [5, 1004, 2003, 2004, 2055, 2056] and len(ids) == 1999 + 52 + 30
    assert "&" not in ids and "," not in ids


@pytest.mark.parametrize("formatter, codes", EVERY_KIND)
def test_round_trip(formatter, codes):
    @examples(60)
    @given(st.lists(codes, min_size=1, max_size=formatter.max_num_codes))
    def check(row):
        sequence = formatter.transform_label("&".join(row))
        assert sequence.shape == (formatter.max_seq_len,)
        assert formatter.clean_pred(sequence) == "&".join(row)
        used = 1 + len(row) * formatter.block_size
        assert sequence[0] == BOS_IDX and sequence[-1] == EOS_IDX
        assert (sequence[used:-1] == PAD_IDX).all() and (sequence[1:used] != PAD_IDX).all()
        blocks = formatter.canonical_blocks(torch.from_numpy(sequence[None]))
        assert blocks.flatten().tolist() == sequence[1:-1].tolist()  # what is written is canonical already

    check()


@pytest.mark.parametrize(
    "formatter, codes",
    [
        (
            HISCO,
            {"1234": "4 tokens, fewer", "123456": "6 tokens, more", "1234a": "'a'", "-4": "'-'", "?": "'?'"},
        ),
        (HISCO, {"12 45": "' '", "1234\u00b2": "\u00b2", "": "empty", "  ": "empty"}),
        (OCC1950, {"12": "2 tokens", "-1": "'-'"}),
        (GPF, {"123": "3 tokens", "12345": "5 tokens", "12\u00e934": "\u00e9", "1,2": "','"}),
        (GPF_SHORT, {"": "empty", "12345": "5 tokens"}),
        (GPF_SEP, {"1,2,3,4,5": "5 tokens", "1000": "'1000'", "1,,2": "''"}),
    ],
)
def test_codes_that_do_not_fit(formatter, codes):
    for code, words in codes.items():
        with pytest.raises(CodeError) as caught:
            formatter.encode_code(code)
        assert repr(code) in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("code", ["-1", "-2", "-3", "?"])
def test_special_codes_are_never_short(code):
    for use_sep in (False, True):
        formatter = construct_general_purpose_formatter(5, ["a"], use_within_block_sep=use_sep)
        block = formatter.encode_code(code)
        assert block.dtype == np.int64 and block.shape == (5,) and formatter.decode_block(block) == code


def test_repairs():
    for formatter, cells in (
        (HISCO, {"1234": "01234", "41025.0": "41025", "1234.0": "01234", "-1.0": "-1", "−1": "-1"}),
        (HISCO, {"8-31.10": "83110", "77610,0": "77610", "0 2210": "02210"}),
        (HISCO, dict.fromkeys(("-1", "123", "123456", "41025.5", "12a4", "83.110"))),
        (OCC1950, {"7": "007", "97.0": "097", "970": None, "": None}),
        (GPF, {"1234.0": None, "1": None, "8-31.10": None}),
    ):
        for cell, repaired in cells.items():
            assert formatter.repair(f" {cell}\t") == (repaired or cell, repaired is not None)


@pytest.mark.skipif(not os.environ.get("HISTOCC_REAL_DATA"), reason="HISTOCC_REAL_DATA is not set")
def test_every_real_hisco_code_fits():
    with open(Path(os.environ["HISTOCC_REAL_DATA"]) / "hisco_key.csv", encoding="utf-8", newline="") as file:
        codes = [row["hisco"] for row in csv.DictReader(file) if row["hisco"].strip()]
    back = [HISCO.decode_block(HISCO.encode_code(HISCO.repair(code)[0])) for code in codes]
    assert len(codes) > 1900 and [int(code) for code in back] == [int(code) for code in codes]
    assert {len(code) for code in back} == {2, 5}


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
    for short in ([2, 8, 8], list(range(25))):
        with pytest.raises(ValueError, match="5 tokens"):
            HISCO.clean_pred(short)


def test_general_blocks_pass_over_what_is_no_token():
    one, two, twelve = (GPF.map_char_idx[token] for token in ("1", "2", "12"))
    for block, code in (
        ([one, EOS_IDX, two, two], "122"),  # as published, wherever the EOS stands
        ([one, PAD_IDX, two, EOS_IDX], "12"),
        ([EOS_IDX, one, two, two], "122"),
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
    canonical = formatter.canonical_blocks(sequences)
    assert canonical.dtype == torch.int64 and (canonical[:, 1:] == PAD_IDX).all()
    rows, codes = list(map(tuple, canonical[:, 0].tolist())), list(map(formatter.decode_block, blocks))
    pairs = set(zip(rows, codes))
    assert len(pairs) == len(set(rows)) == len(set(codes)) < len(blocks)
    assert ((PAD_IDX,) * formatter.block_size, None) in pairs
    assert all(formatter.decode_block(row) == code for row, code in pairs)


@pytest.mark.parametrize("formatter", [HISCO, OCC1950, GPF, GPF_SEP])
def test_canonical_form_keeps_the_code(formatter):
    ids = range(-2, max(formatter.map_idx_char) + 4)
    # see `canonical_blocks`
    wide = st.sampled_from([i for i in ids if formatter is not GPF or len(GPF.map_idx_char.get(i, "")) < 2])
    tokens = st.one_of(
        st.sampled_from(list(formatter.map_idx_char)), st.sampled_from([PAD_IDX, EOS_IDX]), wide
    )

    @examples(150)
    @given(st.lists(tokens, min_size=formatter.max_seq_len - 2, max_size=formatter.max_seq_len - 2))
    def check(ids):
        blocks = formatter.canonical_blocks(torch.tensor([[BOS_IDX, *ids]]))  # the last EOS is optional
        again = [BOS_IDX, *blocks.flatten().tolist()]
        assert formatter.clean_pred(again) == formatter.clean_pred([BOS_IDX, *ids, EOS_IDX])
        assert torch.equal(formatter.canonical_blocks(torch.tensor([again])), blocks)

    check()
    with pytest.raises(ValueError, match="too short"):
        formatter.canonical_blocks(torch.zeros(1, formatter.max_seq_len - 2))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("hisco", []), "1 to 5 target columns, not 0"),
        (("hisco", ["a"] * 6), "1 to 5 target columns, not 6"),
        (("occ1950", ["a"] * 3), "1 to 2 target columns, not 3"),
        (("gpf", []), "at least one target column"),
        (("isco", ["x"]), "'isco'.*hisco, occ1950, gpf"),
        (("gpf", ["x"], 0), "at least 1, not 0"),
        (("gpf", ["x"], 70_000), "use smaller blocks"),
        (("hisco", ["x"], 5, False, False, ["1"]), "only the general-purpose formatter"),
        (("gpf", ["x"], 5, False, False, ["1", "1"]), "must differ"),
        (("gpf", ["x"], 5, False, False, ["&"]), "must differ"),
    ],
)
def test_settings_that_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        make_formatter(*arguments)


def test_blocks_do_not_depend_on_columns_for_the_fixed_systems():
    assert hisco_blocky5(["x"]).max_num_codes == 5 and hisco_blocky5(["x"]).target_cols == ["x"]
    assert occ1950_blocky2(["x"]).max_num_codes == 2
    assert construct_general_purpose_formatter(3, ["x"]).max_num_codes == 1
    assert HISCO.target_cols == ["hisco_1", "hisco_2", "hisco_3", "hisco_4", "hisco_5"]
    assert OCC1950.target_cols == ["OCC1950_1", "OCC1950_2"]
    fixed = make_formatter("occ1950", ["x"], block_size=5, use_within_block_sep=True, allow_short=True)
    assert (fixed.block_size, fixed.within_block_sep, fixed.allow_short) == (3, None, False)


@pytest.mark.parametrize("formatter", [HISCO, OCC1950, hisco_blocky5(["x"]), GPF, GPF_SHORT, GPF_SEP])
def test_settings_survive_json_and_pickle(formatter):
    settings = formatter.to_dict()
    again = BlockyFormatter.from_dict(json.loads(json.dumps(settings)))
    for other in (again, pickle.loads(pickle.dumps(formatter))):
        assert other.to_dict() == settings and other.num_classes == formatter.num_classes
    with pytest.raises(ValueError, match="do not fit together"):
        BlockyFormatter.from_dict(settings | {"max_codes": 17})

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

from histocc import formatter as fm
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

hisco_codes = st.one_of(st.text("0123456789", min_size=5, max_size=5), st.sampled_from(["-1", "-2", "-3"]))
occ1950_codes = st.text("0123456789", min_size=3, max_size=3)
CHARACTERS = [c for c in string.ascii_letters + string.digits + string.punctuation if c not in "&,"]
gpf_codes = st.text(CHARACTERS, min_size=4, max_size=4)
short_codes = st.text(CHARACTERS, min_size=1, max_size=4)
sep_codes = st.lists(
    st.sampled_from([str(n) for n in range(-999, 1000)] + CHARACTERS), min_size=1, max_size=4
).map(",".join)
EVERY_KIND = [
    (HISCO, hisco_codes),
    (OCC1950, occ1950_codes),
    (GPF, gpf_codes),
    (GPF_SHORT, short_codes),
    (GPF_SEP, sep_codes),
]


def test_special_ids():
    assert (UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX, SEP_IDX) == (0, 1, 2, 3, 4)


def test_hisco_as_published():
    sequence = HISCO.transform_label("12345&-1")
    assert sequence.dtype == np.float64
    assert sequence.tolist() == [2, 9, 10, 11, 12, 13, 7, 7, 7, 7, 7] + [1] * 15 + [3]
    assert HISCO.clean_pred(sequence) == "12345&-1"
    assert (HISCO.map_char_idx["-3"], HISCO.map_char_idx["0"], HISCO.map_char_idx["9"]) == (5, 8, 17)
    assert HISCO.map_idx_char[17] == "9" and len(HISCO.map_idx_char) == 13
    assert (HISCO.max_num_codes, HISCO.block_size, HISCO.max_seq_len, HISCO.sep_value) == (5, 5, 27, "&")
    assert HISCO.num_classes == [18] * 27


def test_occ1950_as_published():
    assert OCC1950.transform_label("019&999").tolist() == [2, 5, 6, 14, 14, 14, 14, 3]
    assert OCC1950.transform_label("019").tolist() == [2, 5, 6, 14, 1, 1, 1, 3]
    assert (OCC1950.max_num_codes, OCC1950.block_size, OCC1950.max_seq_len) == (2, 3, 8)
    assert OCC1950.num_classes == [15] * 8


def test_general_purpose_as_published():
    ids = GPF.map_char_idx
    assert (ids["-999"], ids["0"], ids["999"], ids["a"], ids["Z"], ids["!"]) == (
        5,
        1004,
        2003,
        2004,
        2055,
        2056,
    )
    assert "&" not in ids and "," not in ids and len(ids) == 1999 + 52 + 30
    assert GPF.num_classes == [2086] * 14
    one = ids["1"]
    assert GPF.transform_label("1111").tolist() == [2] + [one] * 4 + [1] * 8 + [3]
    assert GPF_SHORT.transform_label("1&11").tolist() == [2, one, 3, 3, 3, one, one, 3, 3, 1, 1, 1, 1, 3]
    assert GPF_SEP.transform_label("-12,1").tolist() == [2, ids["-12"], one, 3, 3] + [1] * 8 + [3]


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
        assert blocks.dtype == torch.int64
        assert blocks.flatten().tolist() == sequence[1:-1].tolist()  # what is written is canonical already

    check()


def test_no_label_gives_none():
    assert HISCO.transform_label(None) is None


@pytest.mark.parametrize(
    "formatter, code, told",
    [
        (HISCO, "1234", "4 tokens"),
        (HISCO, "123456", "6 tokens"),
        (HISCO, "1234a", "'a'"),
        (HISCO, "-4", "'-'"),
        (HISCO, "?", "'?'"),
        (HISCO, "12 45", "' '"),
        (HISCO, "1234\u00b2", "\u00b2"),
        (HISCO, "", "empty"),
        (HISCO, "  ", "empty"),
        (OCC1950, "12", "2 tokens"),
        (OCC1950, "-1", "'-'"),
        (GPF, "123", "3 tokens"),
        (GPF, "12345", "5 tokens"),
        (GPF, "12\u00e934", "\u00e9"),
        (GPF, "1,2", "','"),
        (GPF_SHORT, "", "empty"),
        (GPF_SHORT, "12345", "5 tokens"),
        (GPF_SEP, "1,2,3,4,5", "5 tokens"),
        (GPF_SEP, "1000", "'1000'"),
        (GPF_SEP, "1,,2", "''"),
    ],
)
def test_code_that_does_not_fit(formatter, code, told):
    with pytest.raises(CodeError) as caught:
        formatter.encode_code(code)
    assert repr(code) in str(caught.value) and told in str(caught.value)


@pytest.mark.parametrize("code", ["-1", "-2", "-3", "?"])
def test_special_codes_are_never_short(code):
    for use_sep in (False, True):
        formatter = construct_general_purpose_formatter(5, ["a"], use_within_block_sep=use_sep)
        block = formatter.encode_code(code)
        assert block.dtype == np.int64 and block.shape == (5,)
        assert formatter.decode_block(block) == code


def test_too_many_codes():
    with pytest.raises(ValueError, match="3 codes.*room for 2"):
        OCC1950.transform_label("111&222&333")


@pytest.mark.parametrize(
    "formatter, code, repaired, changed",
    [
        (HISCO, "1234", "01234", True),
        (HISCO, " 41025 ", "41025", False),
        (HISCO, "41025.0", "41025", True),
        (HISCO, "1234.0", "01234", True),
        (HISCO, "-1.0", "-1", True),
        (HISCO, "-1", "-1", False),
        (HISCO, "123", "123", False),
        (HISCO, "123456", "123456", False),
        (HISCO, "41025.5", "41025.5", False),
        (HISCO, "12a4", "12a4", False),
        (OCC1950, "7", "007", True),
        (OCC1950, "97.0", "097", True),
        (OCC1950, "970", "970", False),
        (OCC1950, "", "", False),
        (GPF, " 1234.0\t", "1234.0", False),
        (GPF, "1", "1", False),
    ],
)
def test_repair(formatter, code, repaired, changed):
    assert formatter.repair(code) == (repaired, changed)


REAL_DATA = os.environ.get("HISTOCC_REAL_DATA")


@pytest.mark.skipif(not REAL_DATA, reason="HISTOCC_REAL_DATA is not set")
def test_every_real_hisco_code_fits():
    with open(Path(REAL_DATA) / "hisco_key.csv", newline="", encoding="utf-8") as file:
        codes = [row["hisco"] for row in csv.DictReader(file) if row["hisco"].strip()]
    assert len(codes) > 1900
    back = [HISCO.decode_block(HISCO.encode_code(HISCO.repair(code)[0])) for code in codes]
    assert [int(code) for code in back] == [int(code) for code in codes]
    assert {len(code) for code in back} == {2, 5}


def hisco_ids(*tokens):
    return [HISCO.map_char_idx[token] if isinstance(token, str) else token for token in tokens]


def test_hisco_blocks_that_hold_no_code_are_dropped():
    one, pad = HISCO.encode_code("12345").tolist(), [PAD_IDX] * 5
    partly = hisco_ids("1", "2", PAD_IDX, "4", "5")
    whole_with_pad = hisco_ids("-1", "-1", "-1", "-1", PAD_IDX)
    assert HISCO.clean_pred([BOS_IDX, *partly, *one, *pad, *whole_with_pad, *pad, EOS_IDX]) == "12345"
    for stray in (UNK_IDX, BOS_IDX, EOS_IDX, SEP_IDX, 18, -1):
        assert HISCO.decode_block(hisco_ids("1", "2", "3", stray, "5")) is None
    assert HISCO.clean_pred([BOS_IDX, *pad * 5, EOS_IDX]) == ""


def test_hisco_first_token_decides_a_whole_code():
    assert HISCO.decode_block(hisco_ids("-2", "5", EOS_IDX, "-3", "0")) == "-2"


def test_general_blocks():
    one, two, twelve = (GPF.map_char_idx[token] for token in ("1", "2", "12"))
    assert GPF.decode_block([one, EOS_IDX, two, two]) == "122"  # as published, wherever the EOS stands
    assert GPF.decode_block([one, PAD_IDX, two, EOS_IDX]) == "12"
    assert GPF.decode_block([EOS_IDX, one, two, two]) == "122"
    assert GPF.decode_block([EOS_IDX] * 4) is None
    assert GPF.decode_block([PAD_IDX] * 4) is None
    assert GPF.decode_block([one, UNK_IDX, two, two]) is None
    assert GPF.decode_block([twelve, one, one, one]) == "12111"
    assert GPF_SEP.decode_block([twelve, one, EOS_IDX, EOS_IDX]) == "12,1"


def canonical(formatter, blocks):
    """Canonical form of blocks [N, bs], each in its own sequence: int64 [N, bs]."""
    blocks = torch.tensor(blocks)
    sequences = torch.full((len(blocks), formatter.max_seq_len), PAD_IDX)
    sequences[:, 0] = BOS_IDX
    sequences[:, 1 : 1 + formatter.block_size] = blocks
    rows = formatter.canonical_blocks(sequences)
    assert (
        rows.shape == (len(blocks), formatter.max_num_codes, formatter.block_size)
        and (rows[:, 1:] == PAD_IDX).all()
    )
    return rows[:, 0]


OUT_OF_RANGE = -7
FEW_IDS = [
    (HISCO, ["1", "0", "-1", "-3"], [PAD_IDX, EOS_IDX, OUT_OF_RANGE]),
    (OCC1950, ["1", "0"], [UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX, SEP_IDX, OUT_OF_RANGE]),
    (GPF, ["1", "2", "a"], [UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX, SEP_IDX, OUT_OF_RANGE]),
    (GPF_SEP, ["1", "2", "12"], [UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX, SEP_IDX, OUT_OF_RANGE]),
]


@pytest.mark.parametrize("formatter, tokens, others", FEW_IDS)
def test_canonical_rows_are_equal_exactly_when_the_codes_are(formatter, tokens, others):
    ids = [formatter.map_char_idx[token] for token in tokens] + others
    blocks = list(itertools.product(ids, repeat=formatter.block_size))  # every block of these ids
    rows = list(map(tuple, canonical(formatter, blocks).tolist()))
    codes = list(map(formatter.decode_block, blocks))
    pairs = set(zip(rows, codes))
    assert len(pairs) == len(set(rows)) == len(set(codes)) < len(blocks)
    assert ((PAD_IDX,) * formatter.block_size, None) in pairs
    assert all(formatter.decode_block(row) == code for row, code in pairs)


@pytest.mark.parametrize("formatter", [HISCO, OCC1950, GPF, GPF_SEP])
def test_canonical_form_keeps_the_code(formatter):
    ids = range(-2, max(formatter.map_idx_char) + 4)
    # see `canonical_blocks`
    wide = st.sampled_from([i for i in ids if formatter is not GPF or len(GPF.map_idx_char.get(i, "")) < 2])
    mostly_codes = st.one_of(
        st.sampled_from(list(formatter.map_idx_char)), st.sampled_from([PAD_IDX, EOS_IDX]), wide
    )

    @examples(150)
    @given(st.lists(mostly_codes, min_size=formatter.max_seq_len - 2, max_size=formatter.max_seq_len - 2))
    def check(ids):
        sequence = [BOS_IDX, *ids, EOS_IDX]
        blocks = formatter.canonical_blocks(torch.tensor([sequence]))
        assert formatter.clean_pred([BOS_IDX, *blocks.flatten().tolist()]) == formatter.clean_pred(sequence)
        again = formatter.canonical_blocks(torch.cat([torch.tensor([[BOS_IDX]]), blocks.flatten(1)], 1))
        assert torch.equal(again, blocks)

    check()


def test_canonical_blocks_of_a_batch():
    rows = np.stack(
        [HISCO.transform_label(label) for label in ("12345&-1", "-3", "00000&11111&22222&33333&44444")]
    )
    blocks = HISCO.canonical_blocks(torch.from_numpy(rows))
    assert blocks.shape == (3, 5, 5)
    # the last EOS is optional
    assert torch.equal(blocks, HISCO.canonical_blocks(torch.from_numpy(rows[:, :-1])))
    with pytest.raises(ValueError, match="too short"):
        HISCO.canonical_blocks(torch.from_numpy(rows[:, :-2]))


@pytest.mark.parametrize("ids", [[2, 8, 8], list(range(25))])
def test_sequence_of_wrong_length(ids):
    with pytest.raises(ValueError, match="5 tokens"):
        HISCO.clean_pred(ids)


@pytest.mark.parametrize(
    "kind, count, words",
    [
        ("hisco", 0, "1 to 5 target columns, not 0"),
        ("hisco", 6, "1 to 5 target columns, not 6"),
        ("occ1950", 0, "1 to 2"),
        ("occ1950", 3, "1 to 2 target columns, not 3"),
        ("gpf", 0, "at least one target column"),
    ],
)
def test_number_of_target_columns(kind, count, words):
    with pytest.raises(ValueError, match=words):
        make_formatter(kind, [f"c{i}" for i in range(count)])


def test_blocks_do_not_depend_on_columns_for_the_fixed_systems():
    assert hisco_blocky5(["x"]).max_num_codes == 5 and hisco_blocky5(["x"]).target_cols == ["x"]
    assert occ1950_blocky2(["x"]).max_num_codes == 2
    assert construct_general_purpose_formatter(3, ["x"]).max_num_codes == 1
    assert HISCO.target_cols == ["hisco_1", "hisco_2", "hisco_3", "hisco_4", "hisco_5"]
    assert OCC1950.target_cols == ["OCC1950_1", "OCC1950_2"]
    fixed = make_formatter("occ1950", ["x"], block_size=5, use_within_block_sep=True, allow_short=True)
    assert (fixed.block_size, fixed.within_block_sep, fixed.allow_short) == (3, None, False)


def test_unknown_kind_and_block_size():
    with pytest.raises(ValueError, match="'isco'.*hisco, occ1950, gpf"):
        make_formatter("isco", ["x"])
    with pytest.raises(ValueError, match="at least 1, not 0"):
        make_formatter("gpf", ["x"], block_size=0)


@pytest.mark.parametrize("formatter", [HISCO, OCC1950, hisco_blocky5(["x"]), GPF, GPF_SHORT, GPF_SEP])
def test_settings_survive_json(formatter):
    settings_ = formatter.to_dict()
    again = BlockyFormatter.from_dict(json.loads(json.dumps(settings_)))
    assert again.to_dict() == settings_
    assert (again.kind, again.max_seq_len, again.num_classes) == (
        formatter.kind,
        formatter.max_seq_len,
        formatter.num_classes,
    )
    assert set(settings_) == {
        "kind",
        "block_size",
        "max_codes",
        "sep_value",
        "within_block_sep",
        "target_cols",
        "allow_short",
    }


def test_contradictory_settings():
    with pytest.raises(ValueError, match="do not fit together"):
        BlockyFormatter.from_dict(HISCO.to_dict() | {"max_codes": 4})


def test_formatter_can_be_sent_to_another_process():
    again = pickle.loads(pickle.dumps(GPF_SEP))
    assert again.transform_label("1,2").tolist() == GPF_SEP.transform_label("1,2").tolist()
    assert fm.BlockyFormatter is type(again)

"""The conversion between codes of a classification and token sequences of the seq2seq decoder.

A sequence is BOS, ``max_num_codes`` blocks of ``block_size`` tokens, EOS. Each block holds a code or PAD.
HISCO, OCC1950 and general systems ("gpf") share one class (Dahl, Johansen, Vedel, 2024, arXiv 2402.13604).
Codes that gpf has no tokens for, such as names with blanks, are written as numbers ("classes").
"""

import contextlib
import csv
import numbers
import re
import string
import unicodedata
from collections.abc import Container, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np

UNK_IDX, PAD_IDX, BOS_IDX, EOS_IDX, SEP_IDX, FIRST_TOKEN_IDX = range(6)  # tokens of codes start at the last
MAX_BLOCK_SIZE = 1000
MAX_WRITTEN = 16  # most characters of a code to write one by one, if no formatter is named
SEP_VALUE = "&"  # between two codes in text form
WITHIN_BLOCK_SEP = ","  # between two tokens of one code, where wanted
NO_WORK = frozenset({"-1", "-2", "-3"})  # no title, not working, no work title
NEVER_SHORT = NO_WORK | {"?"}  # and a missing code

# "08311", ="08311", =T("08311"), =08311, '08311: forms that spreadsheets keep as text
_GUARD = re.compile(
    r"""(?is)(?:=\s*T?\s*\(?\s*)?["“”„]([^"“”„]*)["“”]\s*\)?"""
    r"""|(?:['‘’](?=[-+=@"]|\w*\d)|=\s*(?=-?\d))(.*?)['’]?"""
)
_DASH = re.compile("^[\u2010-\u2015\u2212\ufe63](?=[0-9])")  # minus signs of word processors
GROUPED = re.compile(r"[0-9]{1,3}([.,'‘’]|[^\S\n\r\t])[0-9]{3}(?:\1[0-9]{3})*")  # 83'110


class _System(NamedTuple):
    tokens: list[str]  # in order of their ids
    whole_codes: tuple[str, ...] = ()  # one token that fills its block
    block_size: int | None = None  # None: the user's choice
    max_codes: int | None = None  # None: as many as target columns
    zeros_back_from: int | None = None  # least number of digits to which leading zeros are restored
    default_cols: tuple[str, ...] = ()


_PUNCTUATION = [c for c in string.punctuation if c not in (SEP_VALUE, WITHIN_BLOCK_SEP)]
_HISCO_COLS = ("hisco_1", "hisco_2", "hisco_3", "hisco_4", "hisco_5")
_SYSTEMS = {
    "hisco": _System([str(n) for n in range(-3, 10)], ("-1", "-2", "-3"), 5, 5, 4, _HISCO_COLS),
    "occ1950": _System(list(string.digits), (), 3, 2, 1, ("OCC1950_1", "OCC1950_2")),
    "classes": _System(list(string.digits)),
    "gpf": _System([*(str(n) for n in range(-999, 1000)), *string.ascii_letters, *_PUNCTUATION]),
}


@cache
def hisco_key() -> tuple[str, ...]:
    """Return the 1,919 HISCO codes in the order of the linear outputs of the published models."""
    with files("histocc").joinpath("hisco_key.csv").open(encoding="utf-8") as file:
        return tuple(row["system_code"] for row in csv.DictReader(file))


CLASSES = ("hisclass", "hisclass_5", "socpo", "hiscam")
OF_LEVEL = ("level_code", "level", "level_conf")  # columns of answers at a level
OF_DRAWS = rf"draw_\d+|expected_hiscam|prob_({'|'.join(CLASSES)})_\d+"  # columns of draws
# numeric columns of predict
PROBABILITIES = r"((choice_)?prob|prob_\w+)_\d+|(level_)?conf"
NUMBER_CLASSES = "hisclass", "hisclass_5", "hiscam"  # classes that are numbers
NUMBERS = rf"{PROBABILITIES}|conf_fitted|needs_review|expected_hiscam|({'|'.join(NUMBER_CLASSES)})_\d+"
ANSWER = "conf", "conf_fitted", "needs_review"  # columns after the codes
_WORDS = "|".join(["title", "desc", *CLASSES, "choice(_prob|_title|_desc)?", "similar_(text|codes)"])
_NUMBERED = rf"({_WORDS})_\d+|{OF_DRAWS}"
BESIDE_CODES = rf"{_NUMBERED}|source|level(_code|_conf)?"  # more columns of an answer
DEEPEST = "auto"  # the deepest level, in digits or parts, that is confident enough


@cache
def hisco_classes() -> dict[str, dict[str, str]]:
    """Return {"title" or a name in CLASSES: value of each code from the sources in NOTICE, or ""}."""
    with files("histocc").joinpath("hisco_classes.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = {name: name for name in ("title", *CLASSES)} | {"hiscam": "hiscam_u1"}
    return {name: {row["hisco"]: row[column] for row in rows} for name, column in columns.items()}


def coded_columns(header: Sequence[str], first: int) -> range:
    """Return the places of the columns that predict wrote: from the first code to needs_review, where
    earlier versions ended, and numbered columns after it. Columns elsewhere are the user's own.
    """
    end = header.index(ANSWER[-1]) + 1
    while end < len(header) and re.fullmatch(_NUMBERED, header[end]):
        end += 1
    return range(first, end)


class CodeError(ValueError):
    """An error for a code that does not fit the formatter."""


class BlockyFormatter:
    """The conversion of codes to token sequences and back, for one classification. Attributes have their
    published names. Raises ValueError for arguments out of range.

    Args:
        kind: "hisco" (five blocks of five), "occ1950" (two blocks of three), "gpf" (a block per column) or
            "classes" (a block per column). A block of classes is the decimal number of a code in `codes`.
        target_cols: columns of codes. None: the usual names (only hisco and occ1950).
        block_size: tokens per code. This and the next three are only for gpf.
        use_within_block_sep: codes are tokens separated by commas ("10,2,-1"), not characters.
        allow_short: accept codes with fewer tokens than the block. The rest is EOS.
        chars: the tokens in the order of their ids (default: -999 … 999, letters and punctuation).
        max_codes: number of blocks of gpf and classes. None: one per column.
        codes: codes of classes, in the order of their numbers. None: any code fits, none can be written yet.
    """

    def __init__(
        self,
        kind: str,
        target_cols: Sequence[str] | None = None,
        block_size: int = 5,
        use_within_block_sep: bool = False,
        allow_short: bool = False,
        chars: Sequence[str | int] | None = None,
        max_codes: int | None = None,
        codes: Sequence[str] | None = None,
    ):
        if kind not in _SYSTEMS:
            raise ValueError(f"unknown formatter {kind!r}: choose one of {', '.join(_SYSTEMS)}")
        self.kind, system, general = kind, _SYSTEMS[kind], kind == "gpf"
        self.target_cols = list(map(str, system.default_cols if target_cols is None else target_cols))
        count, most = len(self.target_cols), system.max_codes
        if count < 1 or most is not None and count > most:
            allowed = "at least one target column" if most is None else f"1 to {most} target columns"
            raise ValueError(f"formatter {kind} takes {allowed}, not {count}: {self.target_cols}")
        if not 1 <= block_size <= MAX_BLOCK_SIZE:
            raise ValueError(f"block size must be at least 1 and at most {MAX_BLOCK_SIZE}, not {block_size}")
        if chars is not None and not general:
            raise ValueError("only the general-purpose formatter takes its own tokens")
        self.codes = None if codes is None else tuple(map(str, codes))
        if kind == "classes":
            block_size = len(str(max(1, len(self.codes or ())) - 1))
        self._numbers = {code: i for i, code in enumerate(self.codes or ())}
        self.max_num_codes = most or max(1, max_codes or count)
        self.block_size = system.block_size or int(block_size)
        self.max_seq_len = self.max_num_codes * self.block_size + 2  # with BOS and EOS
        self.sep_value = SEP_VALUE
        self.within_block_sep = WITHIN_BLOCK_SEP if general and use_within_block_sep else None
        self.allow_short = bool(allow_short) and general
        self.chars = None if chars is None else tuple(map(str, chars))
        tokens = system.tokens if self.chars is None else self.chars
        if not tokens or len(set(tokens)) < len(tokens) or any(not t or SEP_VALUE in t for t in tokens):
            raise ValueError(f"tokens must differ, not be empty and not hold {SEP_VALUE!r}: {tokens!r:.200}")
        self.map_char_idx = {token: i for i, token in enumerate(tokens, start=FIRST_TOKEN_IDX)}
        self.map_idx_char = {i: token for token, i in self.map_char_idx.items()}
        self.num_classes = [max(self.map_idx_char) + 1] * self.max_seq_len
        self._whole = frozenset(self.map_char_idx[code] for code in system.whole_codes)
        # for each id: is it a token, is it a whole code? The last entry is for all ids out of range
        ids = range(max(self.map_idx_char) + 2)
        self.id_kinds = [np.array([i in some for i in ids]) for some in (self.map_idx_char, self._whole)]

    def repair(self, cell: str, key: Container[str] = ()) -> tuple[str, list[str]]:
        """Return the code in a cell without the changes that spreadsheets and other programs make, and the
        kinds of these changes (NOTES in data/rows.py). Blanks around it do not count. A code of `key`
        stays. In gpf, where any sign has a meaning, only signs that belong to no system's codes change.
        """
        if (code := cell.strip()) in key:
            return code, []
        code, kinds = plain_code(code)
        grouped = self.kind != "gpf" and GROUPED.fullmatch(code)
        if grouped and (grouped[1] not in "., " or self.kind == "hisco" and len(code) in (5, 6)):
            code = re.sub("[^0-9]", "", code)  # 83'110, or 83,110, which can only be this HISCO code
            kinds.append("codes_grouped")
        plain = code
        if self.kind == "hisco":
            code = re.sub(r"^([0-9])-([0-9]{2})\.([0-9]{2})$", r"\1\2\3", code)  # 8-31.10, as in the book
            if re.fullmatch(r"[0-9](\s?[0-9]){3,4}", code):  # 8 3110
                code = "".join(code.split())
        if shortest := _SYSTEMS[self.kind].zeros_back_from:
            code = re.sub(r"^(-?[0-9]+)[.,]0+$", r"\1", code)  # 41025.0 or 41025,0
            if re.fullmatch(r"[0-9]+", code) and len(code) >= shortest:  # 1234
                code = code.zfill(self.block_size)
        if code != plain:
            of_zeros = re.fullmatch(r"-?[0-9]+(\.0+)?", plain)
            kinds.append("zeros_restored" if of_zeros else "codes_rewritten")
        return code, kinds

    def encode_code(self, code: str) -> np.ndarray:
        """Return the tokens of one code, unchanged (see ``repair``), int64 [block_size]. Raises CodeError for
        codes that do not fit. In gpf, codes may be short with ``allow_short``. -1, -2, -3 and ? always may.
        """
        if not code.strip():
            raise CodeError(f"code {code!r} is empty")
        if self.map_char_idx.get(code) in self._whole:
            return np.full(self.block_size, self.map_char_idx[code], dtype=np.int64)
        if self.kind == "classes":
            if self.codes is None:
                return np.full(self.block_size, EOS_IDX, dtype=np.int64)
            if code not in self._numbers:
                raise CodeError(f"code {code!r} is not among the {len(self.codes):,} classes")
            code = str(self._numbers[code]).zfill(self.block_size)
        tokens = list(code) if self.within_block_sep is None else code.split(self.within_block_sep)
        for token in tokens:
            if token not in self.map_char_idx:
                hint = "" if self.within_block_sep is None else " between its commas"
                raise CodeError(f"code {code!r} has {token!r}{hint}, which is not part of {self.system_name}")
        count, size = len(tokens), self.block_size
        may_be_short = self.kind == "gpf" and (self.allow_short or code in NEVER_SHORT)
        if count > size or count < size and not may_be_short:
            raise CodeError(f"code {code!r} has a length of {count}, but {self.system_name} have {size}")
        block = np.full(size, EOS_IDX, dtype=np.int64)
        block[:count] = [self.map_char_idx[token] for token in tokens]
        return block

    @property
    def system_name(self) -> str:
        """The name of its codes, for messages."""
        return {"hisco": "HISCO codes", "occ1950": "OCC1950 codes"}.get(self.kind, f"codes of {self.kind}")

    def fills_up(self, code: str) -> bool:
        """Return whether a code is shorter than its block, and not one of NEVER_SHORT."""
        return self.allow_short and code not in NEVER_SHORT and EOS_IDX in self.encode_code(code)

    def transform_label(self, label: Any) -> np.ndarray | None:
        """Return float64 [max_seq_len] for codes joined with ``sep_value`` ("12345&-1") or for a row of a
        table (Series, DataFrame, dict), where code1 … hold numbers of ``hisco_key``. None stays None. Raises
        ValueError for too many codes or codes that do not fit.
        """
        if label is None:
            return None
        if isinstance(label, str):
            codes = split_codes(label, self._numbers)
        else:
            is_numbered = "code1" in label and self.target_cols == list(_HISCO_COLS)
            numbered = [name for i in range(self.max_num_codes) if (name := f"code{i + 1}") in label]
            cells = [label[name] for name in (numbered if is_numbered else self.target_cols)]
            cells = [cell.item() if hasattr(cell, "item") else cell for cell in cells]
            cells = [cell for cell in cells if not is_missing(cell) and str(cell).strip()]
            texts = [str(x).removesuffix(".0") if isinstance(x, float) else str(x) for x in cells]
            codes = [hisco_key()[int(text)] if is_numbered else self.repair(text)[0] for text in texts]
        if len(codes) > self.max_num_codes:
            raise ValueError(f"{label!r} holds {len(codes)} codes; there is room for {self.max_num_codes}")
        sequence = np.full(self.max_seq_len, PAD_IDX, dtype=np.float64)
        sequence[0], sequence[-1] = BOS_IDX, EOS_IDX
        sequence[1 : 1 + len(codes) * self.block_size] = np.concatenate(list(map(self.encode_code, codes)))
        return sequence

    def decode_block(self, ids: Sequence[int]) -> str | None:
        """Return the code in one block of token ids, or None. Raises ValueError for another number of ids.
        gpf skips PAD, BOS, EOS and SEP anywhere, as published. In other systems a block with PAD holds no
        code, and a first token of -1, -2 or -3 is the whole code.
        """
        ids = [int(i) for i in ids]
        if len(ids) != self.block_size:
            raise ValueError(f"tokens of a block: {self.block_size}, not {len(ids)}")
        if self.kind == "gpf":
            ids = [i for i in ids if i not in (PAD_IDX, BOS_IDX, EOS_IDX, SEP_IDX)]
        elif ids[0] in self._whole and PAD_IDX not in ids:
            return self.map_idx_char[ids[0]]
        if not ids or any(i not in self.map_idx_char for i in ids):
            return None
        code = (self.within_block_sep or "").join(self.map_idx_char[i] for i in ids)
        if self.codes is None:
            return code
        return self.codes[int(code)] if int(code) < len(self.codes) else None

    def clean_pred(self, ids: Sequence[int]) -> str:
        """Join the codes of ids, BOS first, with ``sep_value``. Raises ValueError if blocks are missing."""
        size = self.block_size
        blocks = (ids[start : start + size] for start in range(1, 1 + self.max_num_codes * size, size))
        return self.sep_value.join(code for code in map(self.decode_block, blocks) if code is not None)

    def to_dict(self) -> dict:
        """Return the settings as plain types."""
        names = ("kind", "block_size", "sep_value", "within_block_sep", "allow_short")
        settings = {name: getattr(self, name) for name in names}
        settings |= {"max_codes": self.max_num_codes, "target_cols": list(self.target_cols)}
        lists = {"chars": self.chars, "codes": self.codes}
        return settings | {name: list(value) for name, value in lists.items() if value is not None}

    @classmethod
    def from_dict(cls, settings: dict) -> "BlockyFormatter":
        """Return the formatter that ``to_dict`` described. Raises ValueError for contradictory settings."""
        names = ("kind", "target_cols", "block_size", "within_block_sep", "allow_short")
        more = {name: settings.get(name) for name in ("chars", "max_codes", "codes")}
        formatter = cls(*(settings[name] for name in names), **more)
        if formatter.to_dict() != settings | {"max_codes": more["max_codes"] or formatter.max_num_codes}:
            raise ValueError(f"formatter settings do not fit together: {settings}")
        return formatter


def cut(code: str, digits: int, separator: str | None = None) -> str:
    """Return a code's first `digits` tokens, characters or separated parts. −1, −2, −3, ? stay whole."""
    if code in NEVER_SHORT:
        return code
    return code[:digits] if separator is None else separator.join(code.split(separator)[:digits])


def levels_of(codes: Sequence[str], separator: str | None, asked: list[str]) -> tuple[str | None, list[int]]:
    """Return the separator between the parts of a code (None: characters), and the numbers of parts at which
    accuracy is counted, the whole code last. Without `asked` (--levels), dotted codes of a key have levels at
    the dots, and numbers of one length have a level at each digit.
    """
    codes, numbers = [code for code in codes if code not in NEVER_SHORT], [x for x in asked if x.isdecimal()]
    separator = next((each for each in asked if not each.isdecimal()), separator)
    dotted = sum(bool(re.fullmatch(r"\w+(\.\w+)+", code)) for code in codes)
    if not asked and separator is None and 2 * dotted > len(codes):
        separator = "."
    sizes = {len(code if separator is None else code.split(separator)) for code in codes} or {1}
    has_levels = separator is not None or len(sizes) == 1 and all(map(str.isdecimal, codes))
    parts = map(int, numbers) if numbers else range(1, max(sizes)) if has_levels else ()
    return separator, [*(number for number in parts if 0 < number < max(sizes)), max(sizes)]


def split_codes(text: str, known: Container[str]) -> list[str]:
    """Return the codes joined by `SEP_VALUE` in a text. Codes in `known` may contain that sign."""
    parts, codes = text.split(SEP_VALUE), []
    while parts:
        starts = (SEP_VALUE.join(parts[:end]).strip() for end in range(len(parts), 0, -1))
        code = next((start for start in starts if start in known), parts[0].strip())
        codes.append(code)
        parts = parts[1 + code.count(SEP_VALUE) :]
    return codes


def plain_code(cell: str) -> tuple[str, list[str]]:
    """Return a code without characters that belong to no system's codes, and the kinds of changes: invisible
    characters, full width and digits of other scripts, guards of spreadsheets, minus signs.
    """
    code = cell.strip()
    if code.isascii() and code.isalnum():
        return code, []
    visible = "".join(sign for sign in code if unicodedata.category(sign) != "Cf").strip()
    usual = {sign: unicodedata.normalize("NFKC", sign) for sign in visible if "！" <= sign <= "～"}
    usual |= {sign: str(unicodedata.decimal(sign)) for sign in visible if sign.isdecimal()}
    bare = narrow = "".join(usual.get(sign, sign) for sign in visible)
    while guard := _GUARD.fullmatch(bare):
        bare = (guard[1] or guard[2] or "").strip()
    forms = [code, visible, narrow, bare, _DASH.sub("-", bare)]
    kinds = ("codes_invisible", "codes_wide", "codes_unguarded", "codes_rewritten")
    return forms[-1], [kind for kind, old, new in zip(kinds, forms, forms[1:]) if old != new]


def in_key(code: str, key: Container[str]) -> str:
    """Return the code of the key from which a spreadsheet made this number: 0110 for 110, 110.0 and 110,0,
    -3 for -3.0, and 83110 for 83,110 unless 83 and 110 are codes. Any other text stays, as does a code of
    the key.
    """
    if code in key:
        return code
    numbers = [number[1]] if (number := re.fullmatch(r"(-?[0-9]+)([.,]0+)?", code)) else []
    if (grouped := GROUPED.fullmatch(code)) and not all(part in key for part in code.split(grouped[1])):
        numbers.append(code.replace(grouped[1], ""))
    filled = (number.zfill(length) for number in numbers for length in range(len(number), MAX_WRITTEN + 1))
    return next((code for code in filled if code in key), code)


def formatter_of_codes(
    codes: Sequence[str], target_cols: Sequence[str], max_codes: int, before: dict | None = None
) -> BlockyFormatter:
    """Return a formatter that can write all these codes: gpf if they are short and made of its tokens,
    otherwise classes. before: settings (`to_dict`) of the formatter of the initial weights, or None. If it is
    gpf and can write all codes, its tokens and blocks stay.
    """
    longest = max(map(len, codes), default=1)
    ways = [{"block_size": longest, "allow_short": True}] if longest <= MAX_WRITTEN else []
    if before and before["kind"] in ("gpf", "classes"):
        max_codes = max(max_codes, before["max_codes"])
    if before and before["kind"] == "gpf":
        kept = {name: before[name] for name in ("block_size", "allow_short")}
        separated = before["within_block_sep"] is not None
        ways.insert(0, kept | {"use_within_block_sep": separated, "chars": before.get("chars")})
    for way in ways:
        formatter = BlockyFormatter("gpf", target_cols, max_codes=max_codes, **way)
        with contextlib.suppress(CodeError):
            for code in codes:
                formatter.encode_code(code)
            return formatter
    return BlockyFormatter("classes", target_cols, max_codes=max_codes, codes=codes)


def classes_in_words(codes: Sequence[str]) -> str:
    """Return the number of codes and their lengths in words: "669 classes of 2 to 9 characters"."""
    lengths = sorted({len(code) for code in codes}) or [0]
    size = " to ".join(map(str, dict.fromkeys((lengths[0], lengths[-1]))))
    return f"{len(codes):,} class{'es' * (len(codes) != 1)} of {size} character{'s' * (size != '1')}"


def is_missing(value: Any) -> bool:
    """Return whether a value is None or pandas' NaN."""
    is_nan = isinstance(value, numbers.Real) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")


def name_of_code(code: Any) -> str:
    """Return a code of a published key as text, "" if it means no code."""
    text = str(code).strip()
    return "" if text.lower() in ("nan", "none", "null") else text


make_formatter = BlockyFormatter
# The following are names of the published package.
hisco_blocky5 = partial(BlockyFormatter, "hisco")
occ1950_blocky2 = partial(BlockyFormatter, "occ1950")


def construct_general_purpose_formatter(
    block_size: int,
    target_cols: Sequence[str],
    use_within_block_sep: bool = False,
    allow_short: bool = True,
    chars: Sequence[str | int] | None = None,
) -> BlockyFormatter:
    """Return a formatter of any system. Codes may be shorter than a block, as published."""
    return BlockyFormatter("gpf", target_cols, block_size, use_within_block_sep, allow_short, chars)


class BlockyHISCOFormatter(BlockyFormatter):
    def __init__(self):
        super().__init__("hisco")


class BlockyOCC1950Formatter(BlockyFormatter):
    """The formatter "occ1950" with one code or two. Raises ValueError for another number."""

    def __init__(self, max_num_codes: int = 2):
        super().__init__("occ1950", [f"OCC1950_{i + 1}" for i in range(max_num_codes)])
        self.max_num_codes, self.max_seq_len = max_num_codes, max_num_codes * self.block_size + 2
        self.num_classes = self.num_classes[: self.max_seq_len]


occ1950_blocky1 = partial(BlockyOCC1950Formatter, 1)


def construct_finetune_formatter(
    block_size: int, target_cols: Sequence[str], chars: Sequence[str | int] | None = None
) -> BlockyFormatter:
    """Return a general-purpose formatter of `chars`, by default digits and the hyphen. Short codes are filled
    with EOS. The published PAD lost them when they were read back.
    """
    tokens = [*string.digits, "-"] if chars is None else list(chars)
    columns = [target_cols] if isinstance(target_cols, str) else list(target_cols)
    return BlockyFormatter("gpf", columns, block_size, allow_short=True, chars=tokens)

"""The content of rows: codes and languages from cells, keys, and findings on unusual rows."""

import csv
import functools
import io
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from histocc.data.binary import Missing
from histocc.data.tables import column_problems, read_chunks, table_format
from histocc.formatter import NO_WORK, BlockyFormatter, CodeError, hisco_key, in_key, name_of_code, plain_code
from histocc.runtime.errors import UserError, raise_if_any
from histocc.text import MISSING_TEXTS, UNKNOWN_LANGUAGE, text_key

EXAMPLES = 5  # rows shown of each kind
SHOWN_CHARACTERS = 60  # characters of a value in an example
MAX_REASON = 300  # characters
MAX_LANGUAGES = 255
MOST_LEN = 2048  # largest --max-len

# Kinds of findings that leave a row unchanged or repair it, and their descriptions.
NOTES = {
    "zeros_restored": "codes repaired (a lost leading zero, or a decimal as in 110.0)",
    "codes_rewritten": "codes rewritten (8-31.10 or 8 3110 as 83110, 77610,0 as 77610, −1 as -1)",
    "codes_unguarded": 'codes freed of what spreadsheets put around them (="08311" or \'08311 as 08311)',
    "codes_invisible": "codes with invisible characters, which were removed",
    "codes_wide": "codes written in full width or in digits of other scripts",
    "codes_grouped": "codes with a thousands separator, which was removed (83'110 as 83110)",
    "codes_recoded": "codes replaced, as --recode says",
    "codes_unknown": "codes outside the 1,919 of HISCO (--key hisco rejects them, --recode replaces them)",
    "missing_words": "cells such as NA or null in the columns of codes, read as no code",
    "missing_declared": "values that the file declares as missing, or errors in a sheet, read as no code",
    "language_missing": "rows without a language, coded as unk",
    "languages_renamed": "rows whose language has another name in the models, which was used",
    "texts_composed": "descriptions with letters of several characters composed, or invisible ones removed",
    "texts_empty": "rows without a description, kept with the code of --empty-text",
    "dittos": "descriptions that only repeat the row above (do., ditto, 〃), left so by --ditto none",
    "dittos_filled": "descriptions such as do. or ditto that got the text of the row above",
    "texts_of_lines": "descriptions with several lines of text",
    "texts_cut": "descriptions longer than the model reads, which are cut",
    "missing_code_used": "rows without a first code, which got the code of --missing-code",
    "codes_repeated": "codes repeated within a row, counted once",
    "codes_short": "codes shorter than the block, filled up",
    "letters_broken": "descriptions with letters broken by a wrong encoding before (such as Ã¦ or ã¦ for æ)"
    " or escapes (&oslash;, \\u00f8, =C3=B8, %C3%A5), which --repair-text may repair",
    "letters_repaired": "descriptions whose broken letters or escapes were repaired, as --repair-text says",
}
WITH_VALUES = (*(kind for kind in NOTES if kind.startswith("codes_")), "languages_renamed", "dittos")
DOES_NOT_FIT, OUTSIDE_KEY = "code does not fit", "code outside the key"


def row_writer(file) -> Callable[[Sequence], None]:
    """Return a writer of CSV rows. Python's leaves lone carriage returns unquoted, where readers cut."""
    usual = csv.writer(file, lineterminator="\n")
    quoted = csv.writer(file, lineterminator="\n", quoting=csv.QUOTE_ALL)
    return lambda row: (
        quoted if any("\r" in cell for cell in row if isinstance(cell, str)) else usual
    ).writerow(row)


def csv_text(rows: Iterable[Sequence]) -> bytes:
    """Return rows of CSV, as `row_writer` writes them, in UTF-8."""
    rows, out = list(rows), io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    if "\r" in out.getvalue():  # rare. Checking each cell takes as long as writing it
        out = io.StringIO()
        for row in rows:
            row_writer(out)(row)
    return out.getvalue().encode()


_RISKY = ("=", "+", "-", "@", "\t", "\r", "'")
NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")


def escape_formula(cell: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula: with an apostrophe unless it is a number."""
    is_risky = isinstance(cell, str) and cell.startswith(_RISKY) and not NUMBER.fullmatch(cell)
    return "'" + cell if is_risky else cell


def folded(cells: Iterable[str]) -> list[str]:
    """Return column names without case, blanks, quotation marks and byte order marks."""
    return ["".join(cell.replace('"', "").replace("\ufeff", "").casefold().split()) for cell in cells]


def unescape(cell: str) -> str:
    """Return the cell from which `escape_formula` made this one."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(_RISKY) else cell


class Findings:
    """The unusual rows of files, by kind. Rejected rows are listed in `folder`/rejected_rows.csv."""

    def __init__(self, folder: str):
        self.kinds: dict[str, dict] = {}  # kind, action (error, rejected or noted), rows, first: examples
        path = os.path.join(folder, "rejected_rows.csv")
        self.file = open(path, "w", encoding="utf-8", newline="", errors="backslashreplace")
        self.write_row = row_writer(self.file)
        self.write_row(["file", "line", "column", "value", "reason"])

    def reject(
        self, kind: str, path: str, line: int, column: str, value: str, reason: str, stops: bool = False
    ) -> None:
        """Record an unused row. stops: the data is unusable until the user decides."""
        self.write_row(list(map(escape_formula, (path, line, column, value, reason[:MAX_REASON]))))
        action, shown = ("error", f"column {column!r}: {reason}") if stops else ("rejected", reason)
        self._count(kind, action, path, line, value, shown)

    def note(self, kind: str, path: str, lines: Iterable[int], values: Iterable[str]) -> None:
        """Record the lines and cells of used rows, changed or unchanged."""
        for line, value in zip(lines, values):
            self._count(kind, "noted", path, line, value, NOTES[kind])

    def _count(self, kind: str, action: str, path: str, line: int, value: str, reason: str) -> None:
        known = self.kinds.setdefault(kind, {"kind": kind, "action": action, "rows": 0, "first": []})
        known["rows"] += 1
        if kind == "missing_declared":
            known.setdefault("values", Counter())[value] += 1
        if len(known["first"]) < EXAMPLES:
            shown = {"value": value[:SHOWN_CHARACTERS], "reason": reason[:MAX_REASON]}
            known["first"].append({"file": path, "line": int(line), **shown})

    def problems(self, *actions: str) -> list[dict]:
        """Return the kinds with one of the actions, the worst first."""
        found = [kind for kind in self.kinds.values() if kind["action"] in actions]
        return sorted(found, key=lambda kind: (actions.index(kind["action"]), -kind["rows"]))


# ---- cells → numbers. Each distinct cell is checked once

# In a column of codes these count as no code, unless the key has them.
MISSING_WORDS = MISSING_TEXTS | {"none", ".", "-"}
# An empty cell, one of MISSING_WORDS, a cell with no code of the key, and a value declared as missing
BLANK, WORD, UNFIT, DECLARED = -1, -2, -3, -4
_CODE = re.compile(r"[A-Za-z]{0,3}-?\d[\w.-]*")  # looks like a code
# What a spreadsheet makes of codes: dates and powers of ten
_CHANGED = re.compile(r"\d{4}-\d\d-\d\d( .*)?|\d{1,2}-[A-Z][a-z]{2}|[A-Z][a-z]{2}-\d\d|\d([.,]\d+)?[Ee]\+\d+")
# Between codes: a sign, a line break, a tab, a word for "and", two blanks, or one between numbers
_BETWEEN = r"(?i)\s*?([^\w\s.'’-]|[\n\t])\s*|\s+(and|und|u\.|og|och|en|et|[yeiuo])\s+"
_BETWEEN += r"|(  )|(?<=\d)( )(?=-?\w*\d)"


def code_of_cell(cell: str, formatter: BlockyFormatter, key: Container[str] = ()) -> str:
    """Return the code in a cell, repaired as in training data, with the leading zeros that it has in the key.
    Blank cells, words such as NA or null that are not in the key, and values that the file declares as
    missing give "", except -1, -2 and -3 of HISCO or of the key.
    """
    code = in_key(formatter.repair(cell, key)[0], key)
    if isinstance(cell, Missing):
        return code if code in NO_WORK and (formatter.kind == "hisco" or code in key) else ""
    return "" if code.casefold() in MISSING_WORDS and code not in key else code


@functools.lru_cache(1024)
def splitter(separators: str) -> Callable[[str], list[str]]:
    r"""Return a function that splits a cell at the signs and words of --code-separator (\n: line break)."""
    parts = re.findall(r"[^\W\d_]{2,}|[uU]\.|\\[nt]| {2,}|.", separators, re.DOTALL)
    words = [part.replace(" ", "[ \xa0]") for part in parts if part[1:]]
    words = [rf"\b{re.escape(part)}(?!\w)" if part[0].isalpha() else part for part in words]
    signs = [re.escape(part) for part in parts if not part[1:]]
    cut = re.compile("|".join([*words, *signs]), re.IGNORECASE).split
    return lambda cell: [cell] if isinstance(cell, Missing) else cut(cell)


def separators_of(cell: str, is_code: Callable[[str], object]) -> str:
    """Return the --code-separator that separates the codes of a cell, or "" if it does not hold several."""
    found = re.findall(_BETWEEN, cell.replace("\xa0", " "))
    signs = dict.fromkeys("".join(groups).casefold() for groups in found)
    for separators in (joined(signs), *signs) if signs else ():
        parts = [part.strip() for part in splitter(separators)(cell) if part.strip()]
        if len(parts) > 1 and all(map(is_code, parts)):
            return joined([separators])
    return ""


def joined(separators: Iterable[str]) -> str:
    """Return signs and words, each once, in the form of --code-separator."""
    unique = dict.fromkeys(separators)
    text = (" " if any(part.isalpha() for part in unique) else "").join(unique)
    return text.replace("\n", r"\n").replace("\t", r"\t")


class Unfit(ValueError):
    """An error for a cell that holds no code. `args`: DOES_NOT_FIT or OUTSIDE_KEY, a message."""


@dataclass(eq=False, repr=False)
class CodeBook(dict):
    """The numbers of cells: `book[cell]` checks a cell when it first occurs.

    A number ≥ 0 is the provisional number of a code, in order of first occurrence. BLANK, WORD and DECLARED
    mean no code, UNFIT a cell in `faults`. `noted` has the cells of the kinds in NOTES. by_number: codes, if
    cells hold their numbers. zeros: code → the code with the leading zeros that it has lost. declared: codes
    that count even if the file declares them as missing.
    """

    formatter: BlockyFormatter
    fixed: frozenset[str] | None  # the codes of a key
    by_number: list[str] | None
    recode: dict[str, str]
    zeros: dict[str, str]
    declared: Container[str]
    codes: dict[str, int] = field(default_factory=dict)  # code → provisional number
    faults: dict[str, tuple[str, str]] = field(default_factory=dict)  # cell → `args` of its Unfit
    noted: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def __missing__(self, cell: str) -> int:
        try:
            return self.setdefault(cell, self._check(cell))
        except Unfit as unfit:  # not kept: a wrong column may hold millions
            self.faults[cell] = unfit.args
            return UNFIT

    def _check(self, cell: str) -> int:
        """Return the number of a new cell. Raises Unfit."""
        code, kinds = self.formatter.repair(cell, self.fixed or ())
        if not code:
            return BLANK
        if isinstance(cell, Missing) and (self.by_number is not None or code not in self.declared):
            return DECLARED
        if self.by_number is not None:
            plain, kinds = plain_code(cell)
            number = re.sub(r"\.0+$", "", plain)
            if number.casefold() in MISSING_WORDS:
                return WORD
            if not number.isdecimal() or len(number) > 12 or int(number) >= len(self.by_number):
                what = f"{cell!r} is not a number of the key, 0 … {len(self.by_number) - 1}"
                raise Unfit(DOES_NOT_FIT, what)
            code = self.by_number[int(number)]
        elif code.casefold() in MISSING_WORDS and code not in (self.fixed or ()):
            return WORD
        if code in self.recode:
            code = self.recode[code]
            kinds.append("codes_recoded")
        if (filled := self.zeros.get(code) or in_key(code, self.fixed or (code,))) != code:
            kinds.append("zeros_restored" if re.fullmatch(r"-?[0-9]+([.,]0+)?", code) else "codes_grouped")
            code = filled
        number = self.of_code(code, cell)
        if self.formatter.kind == "hisco" and self.fixed is None and code not in hisco_key():
            kinds.append("codes_unknown")
        if self.formatter.fills_up(code):
            kinds.append("codes_short")
        for kind in kinds:
            self.noted[kind].add(cell)
        return number

    def of_code(self, code: str, cell: str = "") -> int:
        """Return the number of a code. cell: its text in the file, for hints. Raises Unfit."""
        try:
            self.formatter.encode_code(code)
            if self.fixed is None or code in self.fixed:
                return self.codes.setdefault(code, len(self.codes))
            kind, what = OUTSIDE_KEY, f"code {code!r} is not among the codes of the key"
        except CodeError as error:
            kind, what = DOES_NOT_FIT, str(error)
        if signs := separators_of(plain_code(cell)[0], lambda part: self[part] >= 0):
            what = f"{cell.strip()!r} holds several codes: add --code-separator '{signs}'"
        elif kind == DOES_NOT_FIT and re.search(r"\d[.,]\d|\de[+-]?\d|^\d{4}-\d\d-\d\d", cell, re.IGNORECASE):
            what += " (changed by a spreadsheet? Its number format for codes is Text, or without decimals)"
        raise Unfit(kind, what)


# ---- the codes of a whole table


def read_together(
    counts: Counter[str], known: Collection[str], recode: dict[str, str], any_code: bool, joins: bool
) -> tuple[dict[str, str], dict[str, str], list[str]]:
    """Return code → its replacement, code → its repaired form (see `lost_zeros`), and notes, judging from all
    codes of a table. counts: rows of each code, to which the rows of repaired codes are added. known: codes
    of a key. recode: the user's replacements. any_code: whether they belong to no known system. joins:
    whether other spellings of a code are replaced with the code. Otherwise a note lists them.
    """
    zeros, notes = lost_zeros(counts, known, recode) if any_code else ({}, [])
    for code, number in zeros.items():
        counts[number] += counts.pop(code, 0)
    if any_code and (note := several_in_one(counts)):
        notes.append(note)
    if any_code and (changed := list(filter(_CHANGED.fullmatch, counts))):
        what = f"codes like dates or powers of ten, such as {changed[0]!r}: {len(changed):,}"
        notes.append(f"{what}; did a spreadsheet change them? Its number format for codes is Text")
    joined = other_spellings(counts, known)
    if joins:
        recode = joined | {old: joined.get(new, new) for old, new in recode.items()}
    elif joined:
        shown = ", ".join(f"{code} for {first}" for code, first in [*joined.items()][:EXAMPLES])
        more = f"{' …' * (len(joined) > EXAMPLES)}; join them with --recode spellings"
        notes.append(f"other spellings of codes, it seems ({len(joined):,}): {shown}{more}")
    return recode, {code: recode.get(number, number) for code, number in zeros.items()}, notes


def lost_zeros(
    codes: dict[str, int], key: Collection[str], recoded: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Return code → its repaired form, and notes on codes that the user does not recode. Forms are in `codes`
    or the key. A form has leading zeros if the number is shorter than most, unless most codes begin with
    one of its length. It has lost decimals or thousands separators if almost all numbers with the sign are
    like 110.0 and 110,0, or like 83,110 for 83110. Codes of the key stay. codes: code → its rows.
    """
    known, whole, notes = {*codes, *key}, {}, []
    for sign in (sign for sign in "., " if sign not in "".join(key)):
        of_sign = {code for code in codes if sign in code}
        others = known.difference(of_sign)
        forms = {code: re.sub(r"^(-?[0-9]+)[.,]0+$", r"\1", in_key(code, others)) for code in of_sign}
        odd = [code for code, form in forms.items() if code == form]
        is_few = 5 * sum(codes[code] for code in odd) <= sum(codes[code] for code in of_sign)
        if is_few and all(re.fullmatch("-?[0-9]+[.,][0-9]+", code) for code in odd):
            whole |= {code: form for code, form in forms.items() if code != form}
            known = others.union(whole.values())
            if odd := sorted({*odd}.difference(recoded)):
                what = f"codes with decimals, where all other numbers are whole ({len(odd):,})"
                notes.append(f"{what}: {', '.join(odd[:EXAMPLES])}; replace one with --recode {odd[0]}=CODE")
    numbers = [code for code in known if re.fullmatch("[0-9]+", code)]
    lengths = Counter(map(len, numbers)) or {0: 0}
    length = max(lengths, key=lambda length: (lengths[length], length))
    most = [code for code in numbers if len(code) == length]
    levels = {n for n in range(1, length) if 2 * sum(code[:n] in known for code in most) > len(most)}
    short = {code for code in numbers if len(code) < length and len(code) not in levels}.difference(key)
    zeros = {code: code.zfill(length) for code in short if code.zfill(length) in known}
    zeros |= {code: zeros.get(number, number) for code, number in whole.items()}
    rest = sorted(short.difference(zeros, recoded))
    if not rest or 5 * len(rest) > len(most):
        return zeros, notes
    what = f"codes shorter than the other {len(most):,} with {length} digits ({len(rest):,})"
    more = " …" * (len(rest) > EXAMPLES)
    recode = ",".join(f"{code}={code.zfill(length)}" for code in rest[:EXAMPLES])
    remedy = f"if they have lost leading zeros, restore them with --recode {recode}{more} or --key KEY.csv"
    remedy += "; codes of HISCO need --formatter hisco"
    return zeros, [*notes, f"{what}: {', '.join(rest[:EXAMPLES])}{more}; {remedy}"]


def other_spellings(counts: dict[str, int], known: Collection[str]) -> dict[str, str]:
    """Return spelling → code for other spellings of a code in `known` or of a more frequent code. Spellings
    differ in case, blanks and invisible characters, or one has no punctuation between letters and digits.
    11.1 and 1.11 are different codes. Two codes in `known` are never spellings of each other.
    """
    of_bare: dict[str, dict[str, list[str]]] = {}  # without punctuation → without case and blanks → codes
    for code in {*counts, *known}:
        same = text_key(code).replace(" ", "")
        bare = re.sub(r"(?<=\w)[^\w]+(?=\w)", "", same)
        of_bare.setdefault(bare, {}).setdefault(same, []).append(code)
    joined: dict[str, str] = {}
    for bare, forms in of_bare.items():
        groups = [sum(forms.values(), [])] if len(forms) == 2 and bare in forms else forms.values()
        for group in groups:
            first = min(group, key=lambda code: (code not in known, -counts.get(code, 0), code))
            joined |= {code: first for code in group if code != first and code not in known}
    return dict(sorted(joined.items()))


def several_in_one(codes: Collection[str]) -> str:
    """Return a note on codes that look like several in one cell, or "" if there are none."""
    alone = [(code, separators_of(code, lambda part: in_key(part, codes) in codes)) for code in codes]
    seem = [(code, separators_of(code, _CODE.fullmatch)) for code in codes if _CODE.match(code)]
    seem = [(code, signs) for code, signs in seem if signs[:1] in {*";&,/|+#\\"} or signs[:1].isalpha()]
    found = {code: signs for code, signs in alone + seem * (2 * len(seem) >= len(codes)) if signs}
    if not found:
        return ""
    what = f"codes that look like several in one cell, such as {next(iter(found))!r}: {len(found):,}"
    return f"{what}; separate them with --code-separator '{joined(found.values())}'"


# Other names of the published models' languages: ISO 639, English names, and native names.
_LANGUAGES_LISTED = (
    "en english eng; da danish dan dansk dk; se sv swedish swe svenska; nl dutch nld dut; ca catalan cat;"
    "fr french fra fre français; no nb nn norwegian nor nob nno norsk; is icelandic isl ice;"
    "pt portuguese por; ge de german deu ger deutsch; es spanish spa español; it italian ita italiano;"
    f"gr el greek ell gre; {UNKNOWN_LANGUAGE} unknown und"
)
_LANGUAGES = {name: others for name, *others in map(str.split, _LANGUAGES_LISTED.split(";"))}
_LANGUAGES_BY_NAME = {other: name for name, others in _LANGUAGES.items() for other in others}


def language_name(cell: str) -> str:
    """Return the language that a cell names in any case or region: "SV", "sv-SE" and "Swedish" are "se"."""
    name = re.sub(r"^([a-z]{2,3})[-_][a-z]{2}$", r"\1", cell.strip().casefold())
    return _LANGUAGES_BY_NAME.get(name, name)


def english_name(language: str) -> str:
    """Return the English name of a language of the published models. Other names stay."""
    return next((x.capitalize() for x in _LANGUAGES.get(language, []) if len(x) > 4), language)


class Languages(dict):
    """The number of the language of each cell. 0 is `unk`. renamed: cells with other names of languages."""

    def __init__(self, column: str | None, max_length: int):
        super().__init__()
        self.column, self.max_length, self.names = column, max_length, [UNKNOWN_LANGUAGE]
        self.renamed: set[str] = set()

    def __missing__(self, cell: str) -> int:
        name = language_name(cell) or UNKNOWN_LANGUAGE
        if name not in self.names:
            self.names.append(name)
        if len(name) > self.max_length or len(self.names) > MAX_LANGUAGES:
            what = f"{name[:30]!r} as one of {len(self.names):,} different values"
            raise UserError(f"column {self.column!r} holds {what}; is it the language?")
        if cell.strip() not in ("", name):
            self.renamed.add(cell)
        return self.setdefault(cell, self.names.index(name))


# ---- small tables used with the rows: keys of codes, frequencies of words


def hold_numbers(columns: list[str]) -> bool:
    """Return True for the columns code1, code2 …, which hold numbers of a key, not codes."""
    return all(re.fullmatch(r"code\d+", name) for name in columns)


def read_columns(path: str, columns: list[str]) -> list[list[str]]:
    """Return the cells of some columns, row by row, without blanks around them. Raises UserError."""
    raise_if_any(column_problems(path, table_format(path).names, columns))
    rows = []
    for chunk in read_chunks(path, columns):
        if chunk.faults:
            line, _, reason = chunk.faults[0]
            raise UserError(f"{path}, line {line}: {reason}")
        rows += [
            ["" if isinstance(cell, Missing) and cell not in NO_WORK else cell.strip() for cell in row]
            for row in zip(*chunk.columns)
        ]
    return [row for row in rows if folded(row) != folded(columns)]  # repeated where files were joined


def key_reader(path: str | None) -> Callable[[], list[str]] | None:
    """Return a function that reads the codes of a key file on demand, or None without a file."""
    return None if path is None else functools.partial(read_key, path)


def read_key(path: str) -> list[str]:
    """Return the codes of a key file in the order of their numbers: columns `code` (0, 1, 2 …) and
    `system_code` or `hisco`. A number with an empty code has "", as the published trainer writes for rows
    without a code. The path "hisco", in any case, is the HISCO key unless that file exists. Raises UserError.
    """
    if path.lower() == "hisco" and not os.path.exists(path):
        return list(hisco_key())
    header = table_format(path).names
    name = next((column for column in ("system_code", "hisco") if column in header), None)
    if name is None or "code" not in header:
        what = f"a key file has the columns 'code' and 'system_code' (or 'hisco'), not {header!r:.300}"
        raise UserError(f"{path}: {what}")
    rows = [[plain_code(unescape(cell))[0] for cell in row] for row in read_columns(path, [name, "code"])]
    rows = [row for row in rows if row[0] or row[1].isdecimal()]
    numbered = {number: name_of_code(code) for code, number in rows}
    if not any(numbered.values()):
        raise UserError(f"{path}: column {name!r} holds no code")
    if lacking := [i for i in range(len(rows)) if str(i) not in numbered]:
        what = f"column 'code' must number the codes 0, 1, 2 …, each once; {lacking[0]} is missing"
        raise UserError(f"{path}: {what}")
    codes = [numbered[str(i)] for i in range(len(rows))]
    code, times = Counter(filter(None, codes)).most_common(1)[0]
    if times > 1:
        raise UserError(f"{path}: code {code!r} is listed {times} times")
    return codes


def read_words(path: str) -> dict[str, int]:
    """Return words and how often they occur, from the columns word, freq. Raises UserError."""
    words: Counter[str] = Counter()
    for word, count in read_columns(path, ["word", "freq"]) or [("", "")]:
        if not word or not count.isdecimal() or len(count) > 18:
            raise UserError(f"{path}: needs rows of a word and a whole number, not {[word, count]!r}")
        words[word] += int(count)
    return dict(words)

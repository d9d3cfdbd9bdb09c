"""The small tables beside the rows: keys of codes, frequencies of words, and which columns of a file hold
codes.
"""

import functools
import os
import re
from collections.abc import Callable

from histocc.data.findings import row_writer
from histocc.data.tables import column_problems, read_chunks, read_header
from histocc.formatter import hisco_key
from histocc.runtime.errors import UserError

MOST_WORDS = 50_000  # of the training texts, the most frequent ones, for word insertion


def find_target_columns(
    header: list[str], naming: str = "hisco", has_key: bool = False, formatter: str | None = None
) -> list[tuple[str, list[str]]]:
    """The families of target columns that `header` has, as (formatter, columns), the first choice first.

    Families: code1 … code5 (only with a key file, whose numbers they hold), `naming`_1 … _5, OCC1950_1/2;
    those of `formatter` come before the others.
    """
    families = [(formatter or "hisco", [f"code{i}" for i in range(1, 6)])] if has_key else []
    families += [
        ("hisco" if naming == "hisco" else "gpf", [f"{naming}_{i}" for i in range(1, 6)]),
        ("occ1950", ["OCC1950_1", "OCC1950_2"]),
    ]
    found = [
        (kind, [name for name in names if name in header]) for kind, names in families if names[0] in header
    ]
    return sorted(found, key=lambda family: family[0] != formatter)


def hold_numbers(columns: list[str]) -> bool:
    """True for the columns code1, code2 …: they hold numbers of a key, not codes."""
    return all(re.fullmatch(r"code\d+", name) for name in columns)


def read_columns(path: str, columns: list[str]) -> list[list[str]]:
    """The cells of some columns, row by row, without blanks around them. Raises UserError, also for a row too
    short.
    """
    problems = column_problems(path, read_header(path)[0], columns)
    if problems:
        raise UserError("\n".join(problems))
    rows = []
    for chunk in read_chunks(path, columns):
        if chunk.faults:
            line, _, reason = chunk.faults[0]
            raise UserError(f"{path}, line {line}: {reason}")
        rows += [[cell.strip() for cell in row] for row in zip(*chunk.columns)]
    return rows


def key_reader(path: str | None) -> Callable[[], list[str]] | None:
    """What reads the codes of a key file when they are needed; None without a file."""
    return None if path is None else functools.partial(read_key, path)


def read_key(path: str) -> list[str]:
    """Codes of a key file, in the order of their numbers: columns `code` (0, 1, 2 …) and `system_code` or
    `hisco`.

    Rows without a code are passed over; the path "hisco", where there is no such file, is the HISCO key.
    Raises UserError where a code is listed twice, or the numbers are not 0 … n−1, each once.
    """
    if path == "hisco" and not os.path.exists(path):
        return list(hisco_key())
    header, _ = read_header(path)
    name = next((column for column in ("system_code", "hisco") if column in header), None)
    if name is None or "code" not in header:
        raise UserError(
            f"{path}: a key file has the columns 'code' and 'system_code' (or 'hisco'); "
            f"this one has {', '.join(map(repr, header))}"
        )
    numbered: dict[int, str] = {}
    for code, number in read_columns(path, [name, "code"]):
        if not code:
            continue
        if not number.isdecimal() or len(number) > 12 or int(number) in numbered:
            raise UserError(
                f"{path}: column 'code' must number the codes 0, 1, 2 …, each once; code {code!r} has"
                f" {number!r}"
            )
        numbered[int(number)] = code
    if sorted(numbered) != list(range(len(numbered))) or not numbered:
        raise UserError(
            f"{path}: column 'code' must number the codes 0 … {max(len(numbered) - 1, 0)} without a gap"
        )
    codes = [numbered[i] for i in range(len(numbered))]
    twice = (
        next((code for code in codes if codes.count(code) > 1), None)
        if len(set(codes)) < len(codes)
        else None
    )
    if twice is not None:
        raise UserError(f"{path}: code {twice!r} stands there more than once")
    return codes


def read_words(path: str) -> dict[str, int]:
    """Words and how often they occur: columns word, freq. Raises UserError."""
    rows = read_columns(path, ["word", "freq"])
    bad = next((row for row in rows if not row[0] or not row[1].isdecimal() or len(row[1]) > 18), None)
    if bad or not rows:
        raise UserError(
            f"{path}: needs rows of a word and a whole number" + (f"; one is {bad!r}" if bad else "")
        )
    words: dict[str, int] = {}
    for word, count in rows:
        words[word] = words.get(word, 0) + int(count)
    return words


def write_words(path: str, words: dict[str, int]) -> None:
    """`words.csv`: columns word, freq; the most frequent words first."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        write = row_writer(file)
        for row in [
            ("word", "freq"),
            *sorted(words.items(), key=lambda item: (-item[1], item[0]))[:MOST_WORDS],
        ]:
            write(row)


def write_key(path: str, codes: list[str]) -> None:
    """`key.csv`: columns system_code, code (the number of the linear output)."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        write = row_writer(file)
        for row in [("system_code", "code"), *((code, i) for i, code in enumerate(codes))]:
            write(row)

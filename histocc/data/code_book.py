"""Cells of the columns of codes and languages → numbers, each distinct cell checked once, however many rows
hold it.
"""

import re

from histocc.formatter import EOS_IDX, NEVER_SHORT, BlockyFormatter, CodeError
from histocc.runtime.errors import UserError
from histocc.text import UNKNOWN_LANGUAGE

# What statistical programs write for a missing value. In a column of codes they count as no code, unless the
# key has them.
MISSING_WORDS = frozenset({"NA", "N/A", "NaN", "nan", "null", "NULL", "None", "<NA>"})
BLANK = -1  # an empty cell
WORD = -2  # one of MISSING_WORDS; lower values number the cells that do not fit
REPAIRED = 1 << 40  # added to the number of a cell that was repaired
SHORT = 1 << 41  # added to that of a code that does not fill its block
MOST_LANGUAGES = 255
MOST_FAULTS = 100_000  # kept at once: more distinct cells that do not fit are those of a wrong column


class CodeBook(dict):
    """Cell → number: `book[cell]` checks a cell when it is met for the first time.

    A number ≥ 0 is the provisional number of a code, in the order in which codes were met, plus REPAIRED
    where the cell was repaired and SHORT where it is filled up; BLANK and WORD are no code; `fault` explains
    lower ones.
    """

    def __init__(
        self,
        formatter: BlockyFormatter,
        fixed_codes: list[str] | None = None,
        by_number: list[str] | None = None,
    ):
        super().__init__()
        self.formatter, self.by_number = formatter, by_number  # by_number: cells hold numbers of these codes
        self.fixed = None if fixed_codes is None else frozenset(fixed_codes)
        self.codes: dict[str, int] = {}  # code → provisional number
        self.faults: list[tuple[str, str]] = []  # (kind, message)

    def __missing__(self, cell: str) -> int:
        number = self[cell] = self._check(cell)
        return number

    def _check(self, cell: str) -> int:
        code, repaired = self.formatter.repair(cell)
        if not code:
            return BLANK
        if self.by_number is not None:
            number = re.sub(r"\.0+$", "", cell.strip())
            if number in MISSING_WORDS:
                return WORD
            if not number.isdecimal() or len(number) > 12 or int(number) >= len(self.by_number):
                return self._fault(
                    "label", f"{cell!r} is not a number of the key, 0 … {len(self.by_number) - 1}"
                )
            code, repaired = self.by_number[int(number)], False
        if code in MISSING_WORDS and (self.fixed is None or code not in self.fixed):
            return WORD
        number = self.of_code(code)
        if number < 0:
            return number
        short = (
            self.formatter.allow_short
            and code not in NEVER_SHORT
            and EOS_IDX in self.formatter.encode_code(code)
        )
        return number + REPAIRED * repaired + SHORT * short

    def of_code(self, code: str) -> int:
        """Number of a code, or of the fault that it has."""
        try:
            self.formatter.encode_code(code)
        except CodeError as error:
            return self._fault("label", str(error))
        if self.fixed is not None and code not in self.fixed:
            return self._fault(
                "outside key", f"code {code!r} is not among the {len(self.fixed)} codes of the key"
            )
        return self.codes.setdefault(code, len(self.codes))

    def _fault(self, kind: str, message: str) -> int:
        self.faults.append((kind, message))
        return WORD - len(self.faults)

    def fault(self, number: int) -> tuple[str, str]:
        """(kind, message) of a number below WORD: kind "label" does not fit the formatter, "outside key" not
        the key.
        """
        return self.faults[WORD - number - 1]

    def forget_faults(self) -> None:
        """Between chunks of rows: keeps memory small where nearly every cell is another one that does not
        fit.
        """
        if len(self.faults) > MOST_FAULTS:
            for cell in [cell for cell, number in self.items() if number < WORD]:
                del self[cell]
            self.faults.clear()


class Languages(dict):
    """Cell of the language column → its number; 0 is `unk`."""

    def __init__(self, column: str | None, longest: int):
        super().__init__()
        self.column, self.longest, self.names = column, longest, [UNKNOWN_LANGUAGE]

    def __missing__(self, cell: str) -> int:
        name = cell.strip() or UNKNOWN_LANGUAGE
        if len(name) > self.longest:
            raise UserError(
                f"column {self.column!r} holds {name[:30] + '…'!r}, of {len(name)} characters; is it the"
                " language?"
            )
        if name not in self.names:
            self.names.append(name)
            if len(self.names) > MOST_LANGUAGES:
                raise UserError(
                    f"column {self.column!r} holds more than {MOST_LANGUAGES} different values; is it the"
                    " language?"
                )
        number = self[cell] = self.names.index(name)
        return number

"""Cells of the columns of codes → numbers, each distinct cell checked once, however many rows hold it."""

import re

from histocc.formatter import BlockyFormatter, CodeError

# What statistical programs write for a missing value. In a column of codes they count as no code, unless they are one.
MISSING_WORDS = frozenset({"NA", "N/A", "NaN", "nan", "null", "NULL", "None", "<NA>"})
BLANK = -1                   # a cell without a code; lower values number the cells that do not fit


class CodeBook:
    """Cells of target columns → provisional code numbers, each distinct cell checked once."""

    def __init__(self, formatter: BlockyFormatter, fixed_codes: list[str] | None, numbered: bool):
        self.formatter = formatter
        self.by_number = fixed_codes if numbered else None
        self.fixed = None if fixed_codes is None else frozenset(fixed_codes)
        self.codes: dict[str, int] = {}              # code → provisional number
        self.cells: dict[str, int] = {}              # cell → provisional number, BLANK, or a fault below it
        self.faults: list[tuple[str, str]] = []      # (kind, message)
        self.repaired_cells: set[str] = set()

    def number(self, cell: str) -> int:
        found = self.cells.get(cell)
        if found is None:
            found = self.cells[cell] = self._check(cell)
        return found

    def _check(self, cell: str) -> int:
        code, repaired = self.formatter.repair(cell)
        if not code:
            return BLANK
        if self.by_number is not None:
            number = re.sub(r"\.0+$", "", cell.strip())
            if number in MISSING_WORDS:
                return BLANK
            if not number.isdecimal() or int(number) >= len(self.by_number):
                return self._fault("label", f"{cell!r} is not a number of the key, 0 … {len(self.by_number) - 1}")
            code, repaired = self.by_number[int(number)], False
        number = self.of_code(code)
        if repaired and number >= 0:
            self.repaired_cells.add(cell)
        return number

    def of_code(self, code: str) -> int:
        """Number of a code, or of the fault that it has."""
        try:
            self.formatter.encode_code(code)
        except CodeError as error:
            if code in MISSING_WORDS:
                return BLANK
            return self._fault("label", str(error))
        if self.fixed is not None and code not in self.fixed:
            return self._fault("outside key", f"code {code!r} is not among the {len(self.fixed)} codes of the key")
        return self.codes.setdefault(code, len(self.codes))

    def _fault(self, kind: str, message: str) -> int:
        self.faults.append((kind, message))
        return BLANK - len(self.faults)

    def fault(self, number: int) -> tuple[str, str]:
        return self.faults[BLANK - number - 1]

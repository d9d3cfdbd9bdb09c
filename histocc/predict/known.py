"""The texts of `--known`, whose certain codes replace the model's."""

import functools
import re

from histocc.data.records import DECIDED, Table
from histocc.data.rows import code_of_cell, language_name
from histocc.data.tables import table_format
from histocc.formatter import hisco_key
from histocc.predict.coder import Coder
from histocc.predict.config import PredictConfig
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.log import counted
from histocc.text import text_key

Known = dict[tuple[str, str], list[str]]  # codes by `text_key` and `language_name`, "" for any language


def read_known(
    args: PredictConfig, coder: Coder, system: str, input_cols: list[str]
) -> tuple[Known, list[str]]:
    """Return (codes of the known texts, notes on them). A text counts for any language if the row or the
    input has none. Columns of codes are named as in training, or as in the output. Raises UserError.
    """
    path, formatter = str(args.known), coder.formatter
    header = table_format(path, texts=input_cols).names
    written = [name for name in header if re.fullmatch(rf"{re.escape(system)}_\d+", name)]
    names = [name for name in formatter.target_cols if name in header]
    is_reviewed = {f"{system}_1", DECIDED} <= {*header}  # decisions, next to the columns of the training
    names = written if is_reviewed or {*names} <= {*written} else names  # perhaps more than in training
    if not {*input_cols} <= {*header} or not names:
        columns = " and ".join(map(repr, input_cols))
        needs = f"needs a column {columns} (--input-col) and a column of codes ({system}_1)"
        raise UserError(f"--known {path}: {needs}; it has {', '.join(map(repr, header))}")
    language = args.language_col or ("lang" if args.language else None)
    language = language if language in header else None
    key = {*coder.codes, *(hisco_key() if formatter.kind == "hisco" else [])}
    known, several, wrong = {}, {}, []
    how = None, None, False, None, [*input_cols, *filter(None, [language])]
    repair = args.repair_text or coder.repair_text
    table = Table(path, how, input_cols, names, language="", language_col=language, repair=repair)
    table.read_code = functools.partial(code_of_cell, formatter=formatter, key=key)
    for row in table:
        place = text_key(row.text), language_name(row.language)
        codes = list(dict.fromkeys(row.codes))
        if row.is_guess or not (place[0] and (codes or row.decider)):  # a person may decide on no code
            continue
        unknown = [code for code in codes if code not in key]
        wrong += [f"line {row.line}: {code!r} is not a code of {system}" for code in unknown]
        if set(known.get(place, codes)) != set(codes):
            several[place] = row.text
        known[place] = codes
    table.raise_faults()
    raise_if_any(wrong, f"--known {path}", 5)
    notes = [f"{path}: {counted(len(known), 'known text')}"]
    if dittos := table.about_dittos():
        notes.append(f"{path}: texts such as {dittos}")
    if several:
        what = f"texts with different codes in several rows, of which the last counts ({len(several):,})"
        notes.append(f"{path}: {what}: {', '.join(map(repr, list(several.values())[:3]))}")
    return known, notes

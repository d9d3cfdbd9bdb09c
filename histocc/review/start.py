"""The start screen of the page: the tables of one folder, the columns of one of them, and who decides.

A request names a table as in the list. Any other name is refused, such as a path or a link elsewhere.
"""

import contextlib
import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from histocc import lexicon
from histocc.data.binary import composed, unique_names
from histocc.data.rows import english_name, language_name
from histocc.data.tables import TABLE_NAME, read_chunks, table_format
from histocc.review.search import word_lists
from histocc.review.sheet import DECISION, ID, UNDO, read_sheet
from histocc.runtime.errors import UserError, as_user_error
from histocc.runtime.files import kind_of, save_path_problems
from histocc.text import LANGUAGES, text_key

SHOWN_ROWS, CELL_END = 5, 200  # shown rows of a table and characters of a cell
SUFFIX = ".decisions.csv"  # of a table's file of decisions
# Names of columns, in several languages
_TEXT = re.compile(
    r"occ|job|trade|prof|beruf|stand$|erwerb|yrke|syssel|stilling|erhverv|beroep|m[ée]tier", re.I
)
_LANGUAGE = re.compile("lang|sprache|språk|sprak|sprog|taal|idioma", re.I)
_SAVED = re.compile(r"\.final\d*\.\w+$")  # tables saved by the page
# flags of review that the screen may set, besides the table
FLAGS = ("input_col", "language", "language_col", "sheet", "key", "target_cols", "classes", "show", "by")
Progress = Callable[[str, float | None], None]  # (activity, share that is done, if known)


class Start:
    """The tables of a folder, one of which is opened. Several threads may call it.

    args: the flags of review, with a folder or a table. open_table: opens a table with flags.
    """

    def __init__(self, args: Any, open_table: Callable[[str, dict[str, Any], Progress], None]):
        self.args, path = args, args.files[0]
        if kind_of(path) not in ("a folder", "a file"):
            what = "no table, folder or action of review has this name"
            raise UserError(f"{path}: {what} (histocc review --help lists them)")
        self.folder, self.table = (path, "") if os.path.isdir(path) else os.path.split(path)
        self.open_table, self.lock = open_table, threading.Lock()
        self.state: dict[str, Any] = {}  # doing and share, then error or ready
        if self.table:
            self._path(self.table)

    def tables(self) -> list[str]:
        """Return the names of the tables. Those that the page has saved come last. The hidden files that
        spreadsheet programs make for an open workbook are left out.
        """
        root, found = os.path.realpath(self.folder), []
        tables = filter(TABLE_NAME.fullmatch, os.listdir(root))
        for name in sorted(tables, key=lambda name: (bool(_SAVED.search(name)), name.casefold())):
            table, decisions = (os.path.realpath(os.path.join(root, name + end)) for end in ("", SUFFIX))
            is_inside = os.path.dirname(table) == os.path.dirname(decisions) == root and os.path.isfile(table)
            if is_inside and not name.startswith((".", "~$")) and not name.endswith(SUFFIX):
                found.append(name)
        return found

    def _path(self, name: Any) -> str:
        if name not in self.tables():
            raise UserError(f"{name!s:.200}: is not a table in the folder {self.folder or '.'}")
        path = os.path.normpath(os.path.join(self.folder, name))
        return os.path.join(".", path) if path.startswith("-") else path  # not to be taken for a flag

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the reply to a request of the screen. Raises UserError, OSError, or others for a bad one."""
        if "table" in asked:
            return self._look(self._path(asked["table"]), asked.get("sheet") or None)
        if "start" in asked:
            chosen, path = asked["start"], self._path(asked["start"]["table"])
            flags = {name: chosen[name] for name in FLAGS if chosen.get(name)}
            if flags.get("key") not in (None, "hisco"):
                flags["key"] = self._path(flags["key"])
            by = chosen.get("by") or ""
            flags["by"] = " ".join(by.split()) if isinstance(by, str) else by
            with self.lock:
                if self.state and "error" not in self.state:
                    raise UserError("a table was opened in another window: reload this page")
                self._report("reading the table", None)
            threading.Thread(target=self._start, args=[path, flags], daemon=True).start()
        if "start" in asked or "state" in asked:
            return self.state
        folder = os.path.realpath(self.folder)
        shown = {"folder": folder, "problem": "".join(save_path_problems(os.path.join(folder, SUFFIX)))}
        first = [language_name(self.args.language)] if self.args.language else []
        names = sorted({*first, *LANGUAGES[:-1]}, key=english_name)
        languages = [(name, english_name(name), name in lexicon.LEXICON_LANGUAGES) for name in names]
        tables = self.tables()
        given = [name for name in tables if not _SAVED.search(name)]
        shown |= {"tables": tables, "table": self.table or (given[0] if len(given) == 1 else "")}
        return shown | {"languages": languages, "language": "".join(first)}

    def _report(self, doing: str, share: float | None) -> None:
        self.state = {"doing": doing, "share": share}

    def _start(self, path: str, flags: dict[str, Any]) -> None:
        try:
            self.open_table(path, flags, self._report)
            self.state = {"ready": True}
        except Exception as error:
            known = as_user_error(error)
            self.state = {"error": str(known or repr(error))}
            if known is None:
                raise

    def _look(self, path: str, sheet: str | None) -> dict[str, Any]:
        """Return the first rows of a table, and the probable content of its columns."""
        how = replace(self.args, sheet=sheet or self.args.sheet).how(())
        table = table_format(path, *how)
        sheets = table.binary.sheets if table.binary else ()
        if sheets:
            found = max((each for each in sheets if how[3] in (None, each.name)), key=lambda each: each.rows)
            # the names are in the first row that fills half of the columns, whatever is above
            top = [[name for name in map(composed, row) if name] for row in found.top]
            texts = next((row for row in top if 2 * len(row) > max(map(len, top))), [])
            how = replace(self.args, sheet=found.name).how(texts)
            table = table_format(path, *how)
        chunk, header = next(read_chunks(path, None, *how), None), unique_names(table.names)
        columns = chunk.columns if chunk else [[] for _ in header]
        decided: dict[str, dict[str, str]] = {}  # the last line of each text
        with contextlib.suppress(UserError, OSError):
            names = [DECISION, ID, "by", "language"]
            read_sheet(path + SUFFIX, names, lambda _, row: decided.__setitem__(row[ID], row))
        made = [row for row in decided.values() if row[DECISION] not in ("", UNDO)]
        by = {row["by"] for row in made}
        languages = {language_name(row["language"]) for row in made}
        column = next(filter(None, map(_if_language, header, columns)), "")
        cells = columns[header.index(column)] if column else []
        if len(languages) == 1 and not languages & {*map(language_name, cells)}:
            column = ""  # one language for all texts, or none
        return {
            "columns": header,
            "rows": [[cell[:CELL_END] for cell in row] for row in zip(*(x[:SHOWN_ROWS] for x in columns))],
            "notes": table.notes,
            "sheets": [each.name for each in sheets],
            "sheet": how[3],
            "text": max(zip(map(_looks_like_text, header, columns), header), default=("",))[-1],
            "language": column,
            "spoken": "".join(languages) if len(languages) == 1 and not column else "",
            "decided": sum(row[DECISION] != "skip" for row in made),
            "decisions": os.path.basename(path) + SUFFIX,
            "coded": {"prob_1", "conf", "needs_review"} <= {*table.names},
            "by": "".join(by) if len(by) == 1 else "",
        }


def _looks_like_text(name: str, cells: list[str]) -> tuple[bool, bool, int, int]:
    """Return how much a column looks like occupations, from its name, known titles and distinct words."""
    words = {text_key(cell) for cell in cells if re.search(r"[^\W\d_]{2}", cell)}
    are_words = bool(name) and 2 * len(words) > len({*cells})
    return are_words, bool(_TEXT.search(name)), sum(map(word_lists().__contains__, words)), len(words)


def _if_language(name: str, cells: list[str]) -> str:
    """Return the name of a column if it seems to hold languages, else ""."""
    found = {*map(language_name, cells)} - {""}
    return name if _LANGUAGE.search(name) or len(found) > 1 and found <= {*LANGUAGES} else ""

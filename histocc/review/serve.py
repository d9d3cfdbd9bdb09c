"""A page on this machine on which a person decides on texts one by one.

Each decision is a line of the decisions file, a sheet that `review apply` takes. It is on disk before the
page shows the next text. The coded file is only read.
"""

import contextlib
import errno
import hmac
import json
import os
import re
import secrets
import signal
import sys
import threading
import time
import webbrowser
from codecs import BOM_UTF8
from collections.abc import Callable, Generator, Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from io import FileIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from histocc.data.records import is_name
from histocc.data.rows import csv_text, escape_formula
from histocc.formatter import split_codes
from histocc.review import sheet
from histocc.review.search import Search, word_lists
from histocc.review.sheet import CodedFile, Codes, Decision, Sheets, cell_of, confidence, most_wrong_first
from histocc.runtime.errors import UserError, in_words
from histocc.runtime.files import atomic_copy, atomic_write, naming, sync_folder, take_lock
from histocc.runtime.log import counted
from histocc.text import text_key

if TYPE_CHECKING:
    from histocc.review.learn import Guesses

HOST = "127.0.0.1"
DECISION_COLUMNS = ["text", "language", "rows", sheet.DECISION, "unsure", "note", "by", sheet.ID]
RESERVED_SECONDS = 600.0  # for so long a text that one window shows is not offered in another
MAX_BODY, MAX_QUERY = 1 << 16, 400  # bytes of a request, characters of a search and a filter
ORDERS = ("learn", "rows", "file")
MIN_DECISIONS = 10  # decisions needed before guesses are shown
DRAW_EVERY = 10  # one of so many texts is drawn at random
OPEN = "Open {} in a browser on this machine. Ctrl-C ends."
ELSEWHERE = "The terminal of review serve says:\n\n" + OPEN.format(f"http://{HOST}:PORT/TOKEN/") + "\n"
CHANGED = "was changed by another program; start histocc review again"


class Conflict(Exception):
    """An error: somebody has decided on the text since the page showed it."""


class Decisions:
    """The texts of a file, the decisions on them, and the file to which decisions are appended. Several
    threads may call it. Raises UserError if the decisions file is invalid, or belongs to another coded file.

    order: `learn` (texts that teach most come first), `rows` (those with most expected mistakes) or `file`
    (as in the file). flags: flags of `os`, to open the decisions file with.
    """

    def __init__(self, coded: CodedFile, codes: Codes, path: str, order: str = "learn", flags: int = 0):
        self.coded, self.codes, self.path, self.order = coded, codes, path, order
        from histocc.review.learn import Learner  # loads torch, which takes seconds

        self.lock = threading.Lock()
        self.texts = most_wrong_first(coded.texts.values())
        if order == "file":
            self.texts = [text for text in coded.texts.values() if not text.decided]
        self.place = {text.id: i for i, text in enumerate(self.texts)}
        self.made: dict[int, Decision] = {}  # the latest one last
        self.rows = sum(text.rows for text in coded.texts.values())
        self.rows_open = sum(text.rows for text in self.texts)
        self.doubt = sum(text.doubt for text in self.texts)
        self.reserved: dict[str, tuple[int, float]] = {}  # window → (the text that it shows, since when)
        self.folded = [(text.text.casefold(), text.language.casefold()) for text in self.texts]
        self.languages = {language for _, language in self.folded}
        self.search = Search(codes, word_lists() if coded.system == "hisco" else {})
        decided = [text for text in coded.texts.values() if text.decided]
        self.learner = Learner([*self.texts, *decided], codes.codes)
        self.known: dict[int, tuple[str, ...]] = {}  # codes of decided texts, by place in the file
        for place, text in enumerate(decided, len(self.texts)):
            self._know(place, tuple(text.answer))
        self.has_changed = threading.Event()
        self.flags = flags | os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
        self.guesses: Guesses | None = None
        self.taught: dict[int, tuple[str, ...] | None] = {}  # the decisions that guesses were learned from
        self.size = self._open()
        self.notes = self.sheets.unused
        if decided and not self.texts:
            what = f"all have codes already, or a name in column {coded.header[coded.decided]}"
            self.notes.append(f"{coded.path}: no text is open: {what}")

    @contextlib.contextmanager
    def _held(self) -> Generator[FileIO]:
        """Open the file while no other server writes to it. Create it at first only. Raises OSError."""
        with naming(self.path), open(os.open(self.path, self.flags, 0o666), "r+b", buffering=0) as file:
            self.flags &= ~os.O_CREAT
            if not take_lock(file):
                raise OSError(errno.EBUSY, CHANGED)
            yield file

    def _open(self) -> int:
        """Read the existing decisions and return the size of the file."""
        header = BOM_UTF8 + csv_text([DECISION_COLUMNS])
        content = Path(self.path).read_bytes() if os.path.exists(self.path) else b""
        if not header.startswith(content) and content.splitlines()[0] != header.rstrip():
            self._adopt()
        with self._held() as file:
            file.seek(0)
            content = file.readall()
            if header.startswith(content):  # new, or cut by a crash of the machine
                file.write(header[len(content) :])
                sync_folder(self.path)
            elif re.search(rb"-[0-9a-f]{16}\Z", content):  # an editor has removed the last line break
                file.write(b"\n")
            else:  # a crash of the machine may have left half a line
                file.truncate(content.rfind(b"\n") + 1)
            size = file.seek(0, os.SEEK_END)
        self.sheets = Sheets([self.path], self.coded, self.codes)
        for key, made in self.sheets.by_text.items():
            if (text_id := self.coded.texts[key].id) in self.place:
                self._set(self.place[text_id], made)
        return size

    def _adopt(self) -> None:
        """Convert decisions that another program has saved. Its version stays as FILE.before. Raises
        UserError if the file holds no decisions on these texts.
        """
        rows, names = [DECISION_COLUMNS], DECISION_COLUMNS
        sheet.read_sheet(self.path, names, lambda _, row: rows.append([row[name] for name in names]))
        Sheets([self.path], self.coded, self.codes)
        atomic_copy(self.path, f"{self.path}.before")
        with atomic_write(os.path.realpath(self.path)) as file:  # keeps the row on one line
            file.write(BOM_UTF8 + csv_text([" ".join(cell.split()) for cell in row] for row in rows))

    def _set(self, place: int, made: Decision | None) -> None:
        """Count a decision. None: it was withdrawn."""
        self.made.pop(place, None)
        if made:
            self.made[place] = made
        self._know(place, (made and made.codes) or ())
        self.has_changed.set()

    def _know(self, place: int, codes: tuple[str, ...]) -> None:
        self.known.pop(place, None)
        if codes:
            self.known[place] = codes
        self.search.decide(self.learner.texts[place].pair, codes)

    def _seen(self, place: int) -> str:
        """Return the decision on a text as written in the file, "" for none."""
        return cell_of(self.made[place].codes) if place in self.made else ""

    def learn(self) -> None:
        """Renew the guesses after new decisions, in a thread, at most half of the time."""
        while self.has_changed.wait():
            self.has_changed.clear()
            with self.lock:
                decisions = {place: made.codes for place, made in self.made.items()}
            started = time.monotonic()
            guesses = self.learner.learn(decisions)
            with self.lock:
                self.guesses, self.taught = guesses if guesses.taught >= MIN_DECISIONS else None, decisions
            time.sleep(time.monotonic() - started)

    def _asked(self) -> Iterator[int]:
        """Yield the texts in the order in which they are offered."""
        if self.order == "learn" and self.guesses:
            if len(self.made) % DRAW_EVERY == DRAW_EVERY - 1:
                yield from self.learner.draws
            yield from self.guesses.order
        yield from range(len(self.texts))

    def decide(self, text_id: str, decision: list[str] | str, seen: str, *remarks: Any) -> str:
        """Append a decision (codes, none, skip or undo), sync it to disk and return it as written in the
        file. seen: the decision when the page showed the text. remarks: unsure, note and by of `Decision`.

        Raises Conflict if somebody else has decided since, KeyError or ValueError without such a text or
        decision, and OSError. In these cases nothing is written.
        """
        with self.lock:
            place = self.place[text_id]
            text, before = self.texts[place], self.made.get(place)
            if not isinstance(decision, list) and decision not in ("none", "skip", sheet.UNDO):
                raise ValueError(f"{decision!r} is neither a list of codes nor none, skip or {sheet.UNDO}")
            cell = cell_of(tuple(dict.fromkeys(decision))) if isinstance(decision, list) else decision
            codes = None if cell == sheet.UNDO else self.codes.decision(cell, text, len(self.coded.codes))
            cell = cell if cell == sheet.UNDO else cell_of(codes)  # replaces a title by its code
            made = Decision(codes, "", *remarks)
            is_noted = before and (before.unsure, before.note) != (made.unsure, made.note)
            if cell == (self._seen(place) or sheet.UNDO) and not is_noted:
                return cell  # a repeated request, or the same decision in two windows
            if seen != self._seen(place):
                raise Conflict
            # keeps the row on one line: blanks do not count
            cells = [" ".join(value.split()) for value in (text.text, text.language)]
            cells += [f"{text.rows:.10g}", cell, "?" * made.unsure, made.note, made.by]
            cells.append(f"{sheet.CHOSEN}-{text.id}")
            self._append(csv_text([[escape_formula(each) for each in cells]]))
            self._set(place, None if cell == sheet.UNDO else made)
            return cell

    def _append(self, line: bytes) -> None:
        with self._held() as file:
            if file.seek(0, os.SEEK_END) != self.size:
                raise OSError(errno.EBUSY, CHANGED)
            try:
                while line:  # a nearly full disk takes a part
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(self.size)
                raise
            self.size = file.tell()

    def next(self, window: str, only: str = "") -> dict[str, Any]:
        """Return the first open text that no other window shows, else an unsure text. only: its words."""
        with self.lock:
            fitting = self._fitting(only.casefold().split())
            fits = None if fitting is None else (len(fitting - self.made.keys()), len(fitting))
            others = [shown for other, shown in self.reserved.items() if other != window]
            elsewhere = {place for place, since in others if time.monotonic() - since < RESERVED_SECONDS}
            unsure = (place for place, made in self.made.items() if made.unsure)
            for place in chain((place for place in self._asked() if place not in self.made), unsure):
                if place not in elsewhere and (fitting is None or place in fitting):
                    return self._shown(place, window) | {"fits": fits}
            self.reserved.pop(window, None)
            shown = {"text": None, "elsewhere": len(elsewhere - self.made.keys()), "fits": fits}
            return shown | self._progress()

    def leave(self, window: str) -> None:
        """Offer the text of a window that was closed."""
        with self.lock:
            self.reserved.pop(window, None)

    def _fitting(self, words: list[str]) -> set[int] | None:
        """Return the texts with all of these words, or None without words. A word may name their language."""
        fitting = [*range(len(self.texts))]
        for word in words:
            if word in self.languages:
                fitting = [place for place in fitting if self.folded[place][1] == word]
            else:
                fitting = [place for place in fitting if word in self.folded[place][0]]
        return {*fitting} if words else None

    def find(self, query: str) -> list[tuple[str, str, str]]:
        """Return (code, title, the other title or text that matched, or "") for the search."""
        with self.lock:
            found = [(code, self.codes.words.get(code, ""), fits) for code, fits in self.search.find(query)]
        return [(code, title, fits * (text_key(fits) != text_key(title))) for code, title, fits in found]

    def show(self, text_id: str, window: str) -> dict[str, Any]:
        """Return one text, decided or not. Raises KeyError."""
        with self.lock:
            return self._shown(self.place[text_id], window)

    def _shown(self, place: int, window: str) -> dict[str, Any]:
        text = self.texts[place]
        self.reserved[window] = place, time.monotonic()
        nearest = self.learner.nearest(place, [*self.known])
        near = [(self.learner.texts[other].text, self.known[other]) for other in nearest]
        known = self.codes.codes
        near = near or [(other, [*filter(None, split_codes(codes, known))]) for other, codes in text.similar]
        offered: dict[str, dict[str, Any]] = {}  # by code
        # no guess learned from a decision that was withdrawn or may be replaced
        guesses = self.guesses if self.taught.get(place) is None else None
        guessed = self.learner.codes_of(guesses, place) if guesses else []
        model = [*zip(text.codes, [*text.probs, *[""] * sheet.OFFERED])]
        for code, prob in chain(model if not text.probs else [], guessed, model):
            offered.setdefault(code, {"prob": prob})
        for code in (code for _, codes in near for code in codes):
            offered.setdefault(code, {"prob": "", "near": True})
        made = self.made.get(place, Decision(None, ""))
        for code in (*self.search.like(text.pair[0], sheet.OFFERED), *(made.codes or ())):
            offered.setdefault(code, {"prob": ""})
        words = self.codes.words
        choices = [{"code": code, "title": words.get(code, "")} | more for code, more in offered.items()]
        choices.sort(key=lambda choice: choice["code"] not in (made.codes or ()))
        shown = {"id": text.id, "text": text.text, "language": text.language, "rows": text.rows}
        likely_first = sorted(choices[: sheet.OFFERED], key=lambda choice: -confidence(str(choice["prob"])))
        shown |= {"choices": likely_first, "seen": self._seen(place)}
        shown["near"] = [{"text": other, "codes": codes} for other, codes in near]
        shown["about"] = [(self.coded.header[i], cell) for i, cell in zip(self.coded.show, text.shown)]
        shown |= {"unsure": made.unsure, "note": made.note, "varies": text.varies}
        return {"text": shown} | self._progress()

    def _progress(self) -> dict[str, Any]:
        settled = [self.texts[place] for place, made in self.made.items() if made.codes is not None]
        rows, right = max(self.rows, 1), self.guesses.right if self.guesses else (None, None, None)
        if not self.guesses and self.coded.unfitted == "":
            right = None, 1 - (self.doubt - sum(text.doubt for text in settled)) / rows, None
        return {
            "file": os.path.basename(self.coded.path),
            "left": len(self.texts) - len(self.made),
            "decided": len(settled),
            "skipped": len(self.made) - len(settled),
            "unsure": sum(made.unsure for made in self.made.values()),
            "texts": len(self.texts),
            "settled": 1 - (self.rows_open - sum(text.rows for text in settled)) / rows,
            "accuracy": right[1],
            "interval": right[::2] if self.guesses else None,
            "unfitted": self.coded.unfitted,
            "notes": [*self.coded.unread, *self.notes],
        }


# ---- the page


class Handler(BaseHTTPRequestHandler):
    """The replies to a browser on this machine that has the address with the token."""

    protocol_version = "HTTP/1.1"
    timeout = 60.0
    server: "Server"

    def is_allowed(self) -> bool:
        """Return whether the request is from our page: any site can send requests to this machine."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        token = self.path.split("/")[1] if self.path.startswith("/") else ""
        return (
            host.rpartition(":")[0] in (HOST, "localhost")
            and origin in (None, f"http://{host}")
            and hmac.compare_digest(token.encode(), self.server.token.encode())
        )

    def do_GET(self) -> None:
        name = self.path.removeprefix(f"/{self.server.token}/").partition("?")[0]
        decisions = self.server.decisions
        if not self.is_allowed() or name not in ("", "key.json") or name and not decisions:
            return self.refuse()
        if name:
            codes = decisions.codes
            key = [[code, codes.words.get(code, "")] for code in sorted(codes.codes)]
            return self.reply(HTTPStatus.OK, key)
        nonce = secrets.token_urlsafe(16)
        names = "page.html" if decisions else "start.html", "shared.css"
        page, shared = (files("histocc.review").joinpath(name).read_text("utf-8") for name in names)
        policy = f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src data:"
        policy += "; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        page = page.replace("SHARED", shared).replace("NONCE", nonce)
        self.send(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8", policy)

    def do_POST(self) -> None:
        size = self.headers.get("Content-Length", "")
        if not self.is_allowed() or self.path != f"/{self.server.token}/api":
            return self.refuse()
        if not size.isdecimal() or len(size) > 9 or int(size) > MAX_BODY:
            self.close_connection = True  # an unread body may follow
            return self.reply(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": "the request is too long"})
        decisions = self.server.decisions
        try:
            asked = json.loads(self.rfile.read(int(size)))
            if not decisions and ("export" in asked or "window" in asked):
                raise ValueError("no table is open yet: reload the page")
            if "export" in asked:
                return self.reply(HTTPStatus.OK, {"exported": self.server.export()})
            if "window" not in asked and self.server.start:
                return self.reply(HTTPStatus.OK, self.server.start.answer(asked))
            window, text_id = str(asked["window"]), asked.get("id")
            if len(str(asked.get("find", "")) + str(asked.get("only", ""))) > MAX_QUERY:
                raise ValueError(f"the search and the filter take {MAX_QUERY} characters")
            if "leave" in asked:
                return self.reply(HTTPStatus.OK, decisions.leave(window))
            if "find" in asked:
                return self.reply(HTTPStatus.OK, decisions.find(str(asked["find"])))
            saved, only = "", str(asked.get("only", ""))
            if "answer" in asked:
                note = " ".join(str(asked.get("note", "")).split())
                remarks = bool(asked.get("unsure")), note, str(asked.get("by") or self.server.by)
                if not is_name(remarks[-1]) or not isinstance(asked.get("by") or "", str):
                    raise ValueError(f"{remarks[-1]!r:.60} is not a valid name: open ?by=NAME")
                saved = decisions.decide(text_id, asked["answer"], asked["seen"], *remarks)
            shown = decisions.show(text_id, window) if asked.get("stay") else decisions.next(window, only)
            by = str(asked.get("by") or self.server.by)
            self.reply(HTTPStatus.OK, shown | {"saved": saved, "by": by})
        except Conflict:
            self.reply(HTTPStatus.CONFLICT, decisions.show(text_id, window))
        except OSError as error:
            self.reply(HTTPStatus.INSUFFICIENT_STORAGE, {"error": in_words(error)})
        except (UserError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            lacks = f"the request lacks {error}, or the table has no such text: reload the page"
            self.reply(HTTPStatus.BAD_REQUEST, {"error": lacks if type(error) is KeyError else str(error)})

    def reply(self, status: HTTPStatus, content: Any) -> None:
        self.send(status, json.dumps(content).encode(), "application/json")

    def refuse(self) -> None:
        self.close_connection = True
        self.send(HTTPStatus.FORBIDDEN, ELSEWHERE.encode(), "text/plain; charset=utf-8")

    def send(self, status: HTTPStatus, content: bytes, kind: str, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
        for name, value in (headers | {"Content-Security-Policy": policy}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = os.name != "nt"  # Windows would share a port with another program

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the browser has closed the connection
            super().handle_error(request, client_address)

    def __init__(self, port: int):
        self.token = secrets.token_urlsafe(16)
        self.decisions: Any = None  # `Decisions`, once a table is open
        self.start: Any = None  # `Start`, if the page lets a table be chosen
        try:
            super().__init__((HOST, port), Handler)
        except OSError:
            super().__init__((HOST, 0), Handler)  # any free port
            print(f"Port {port} is in use; using {self.server_port} instead.")

    def open(self, decisions: Decisions, by: str, export: Callable[[], str]) -> None:
        """Show the texts of a table. by: who decides if the page does not say it. export: writes the coded
        table and returns a report.
        """
        self.by, self.export, self.decisions = by, export, decisions
        threading.Thread(target=decisions.learn, daemon=True).start()


def serve(server: Server, said: str, with_browser: bool, say_next: Callable[[], None]) -> NoReturn:
    """Serve the page until Ctrl-C or SIGTERM, then end the process. said: the first line to print."""
    address = f"http://{HOST}:{server.server_port}/{server.token}/"
    with server:
        print(f"{said}; served by process {os.getpid()}")
        for line in server.decisions.notes if server.decisions else ():
            print(f"Note: {line}")
        print(OPEN.format(address), flush=True)
        # without a screen a browser would open in this terminal
        has_screen = sys.platform in ("win32", "darwin") or {"DISPLAY", "WAYLAND_DISPLAY"} & {*os.environ}
        if with_browser and has_screen:
            threading.Thread(target=webbrowser.open, args=[address], daemon=True).start()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            if server.decisions:
                print(f"{counted(len(server.decisions.made), 'text')} decided.")
    say_next()
    sys.stdout.flush()
    os._exit(0)  # a normal exit would interrupt a learning thread, and torch would abort

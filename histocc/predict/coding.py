"""The coding of a table: which columns it gets, the answers to its distinct texts, and the output."""

import contextlib
import functools
import itertools
import json
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from histocc.data.binary import SHEET_ROWS
from histocc.data.config import column_flags, text_columns, text_flags
from histocc.data.descriptions import read_descriptions
from histocc.data.records import DECIDED, KNOWN, Records, Table
from histocc.data.rows import MOST_LEN, code_of_cell, language_name
from histocc.data.tables import TABLE_NAME, Path, column_problems, files_of, table_format, unique_names
from histocc.data.written import check_names, ending_of, table_writer, write_rows_of
from histocc.figure import NOT_EVALUATED, Figure, percent
from histocc.formatter import ANSWER, BESIDE_CODES, NUMBERS, OF_LEVEL, coded_columns, hisco_classes, hisco_key
from histocc.predict.coder import SIMILAR_TEXTS, Coded, Coder
from histocc.predict.config import PredictConfig
from histocc.predict.decoders import BY_THRESHOLD, DECODERS, MEASURED, in_series
from histocc.predict.draws import Draws
from histocc.predict.fitting import fit_ranked
from histocc.predict.known import read_known
from histocc.published import models
from histocc.runtime import files
from histocc.runtime.config import declarations, flag_of
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.forked import Forked
from histocc.runtime.log import Stage, at_step, counted
from histocc.runtime.world import World
from histocc.text import AS_IS, LANGUAGE_SEPARATOR, UNKNOWN_LANGUAGE, text_key

MIN_CONF = 0.5  # rows with a lower conf need review, for models that histocc trained
COMPARED = 1_000  # about so many texts are compared with the texts of the fitted confidence
MANY = 1.5  # texts are unusual with so many times the usual share of unknown n-grams
DEFAULT_K = 5  # most codes of a row if --k is not given
PIECE = 2048  # distinct texts coded and kept together
SETTINGS_FILE, INPUT = "settings.json", "input"  # files in the folder of the pieces, INPUT only for a pipe
PIECES = r"\d+\.part"  # names of the pieces


Counts = tuple[Counter[str], Counter[str], Mapping[str, float]]  # see `Coding.join`


def numbered(count: int, *names: str) -> list[str]:
    return [f"{name}_{i}" for i in range(1, count + 1) for name in names]


class Coding:
    """The coding of one input, `path`, with one model, `loaded` or named. With an `outline` it is a check.
    span: number of the only range of rows to read. before: the tables that the input continues.
    """

    def __init__(
        self,
        args: PredictConfig,
        path: Path,
        world: World,
        outline: models.Loaded | None = None,
        *,
        loaded: models.Loaded | None = None,
        span: int | None = None,
        before: Sequence[Path] = (),
    ):
        self.args, self.path, self.world, self.folder = args, path, world, args.beside(".parts")
        self.span, self.before = span, before
        self.stage: Stage | None = None
        self.batches = 0  # finished batches of the current piece
        self.pieces: list[list[tuple[str, str]]] = []  # see `read_texts`
        self.settings: dict[str, Any] = {}  # see `begin`
        self.forked = Forked(1, world.give_up_if_asked)
        precision = Precision.of(args, world.device)
        precision.use()
        self.weights = args.model if outline else models.find_weights(args.model, args.model)
        given = args.given(args.target_cols, args.system)
        self.loaded = loaded = outline or loaded or models.load_model(self.weights, world.device, given)
        self.figure = Figure.of(loaded[2], os.path.dirname(self.weights))
        self.started = time.monotonic()  # excludes making a model
        self.coder = coder = Coder(
            *loaded,
            batch_size=args.batch_size,
            precision=precision,
            check=self.between_batches,
            raw_confidence=args.raw_confidence or outline is not None,  # an outline has no fit
            choices=args.choices or 0,
            split_texts=args.split_texts == "auto",
        )
        args = self.args = self.with_columns(args)
        self.decoder = self.chosen_decoder()
        self.levels = coder.asked_levels(args.level, self.decoder, args.model) if args.level else []
        if not outline:
            fit_ranked(coder, self.weights, self.decoder, world)
        self.confidence_of = DECODERS[self.decoder].confidence_of or self.decoder
        self.is_fitted = self.confidence_of in coder.confidence.maps
        for flag in ("draws", "target_accuracy"):
            if getattr(args, flag) is not None and not coder.raw_confidence:
                coder.need_fitted(flag_of(flag), [self.confidence_of], args.model)
        self.key, self.system, kind = set(coder.codes), args.system or coder.system, coder.formatter.kind
        self.codes_to_keep = self.key.union(hisco_key() if kind == "hisco" else ())
        if args.classes and kind != "hisco":
            what = f"this model writes {self.system} as {kind}; train with --formatter hisco for HISCO"
            raise UserError(f"--classes: classes exist only for HISCO codes, and {what}")
        titles = ["title"] if kind == "hisco" and not args.no_titles else []
        # columns beside each code: name → code → text
        self.words = {name: hisco_classes()[name] for name in [*titles, *(args.classes or [])]}
        if args.descriptions:
            self.words["desc"] = read_descriptions(args.descriptions, coder.codes, coder.formatter)
        self.draws = Draws(coder, self.decoder, args.draws, args.classes or []) if args.draws else None
        self.known, notes = read_known(args, coder, self.system, self.input_cols) if args.known else ({}, [])
        self.notes += notes
        self.beside = list(self.groups_beside())
        self.find_columns()
        self.min_conf = self.limit_of_review()

    def limit_of_review(self) -> float:
        """Return the conf below which a row needs review, and note it if --target-accuracy decides it."""
        args, coder, target = self.args, self.coder, self.args.target_accuracy
        if target is None:  # all answers count if nothing is known of them (a list of titles)
            unknown = coder.is_published or coder.trained is not None and self.figure is None
            return (0.0 if unknown else MIN_CONF) if args.min_prob is None else args.min_prob
        if args.level or coder.raw_confidence:  # an outline has no fit
            return target
        limit, reach = coder.confidence.limit(self.confidence_of, target)
        note = (
            f"rows with conf below {limit:.3g} get needs_review. Of the answers above it {percent(target)}"
            f" were right, and {percent(reach)} of the texts on which the confidence was fitted"
            f" ({coder.confidence.texts:,}) reach it"
        )
        none = f"at no conf are {percent(target)} of answers right, so every row gets needs_review"
        self.notes.append(note if reach else none)
        return limit

    def with_columns(self, args: PredictConfig) -> PredictConfig:
        """Return the arguments with the columns to read. They decide `format`. Raises UserError."""
        trained, notes, language = self.coder.input_cols, [], [*filter(None, [args.language_col])]
        if args.input_col is None and trained not in ([], text_columns(None)):
            with contextlib.suppress(UserError):  # no sheet of the workbook has them
                names = {*unique_names(table_format(self.path, *args.how([*trained, *language])).names)}
                # if the usual column is missing as well, the message names these
                if {*trained} <= names or names.isdisjoint(text_columns(None)):
                    args = args.with_decided(input_col=trained)
                    notes = [f"descriptions are read from {in_series(trained)}, as in the training"]
        texts = self.input_cols = text_columns(args.input_col)
        if trained and len(trained) != len(texts):
            what = f"the model was trained on descriptions in {in_series(trained)}, not in {in_series(texts)}"
            notes = [f"{what}: its answers will be worse than conf says"]
        self.format = table_format(self.path, *args.how([*texts, *language]))
        if args.language is args.language_col is None:
            others = {*unique_names(self.format.names)} - {*texts}
            column = next((name for name in (self.coder.language_col, "lang") if name in others), None)
            of_training = self.coder.known(self.coder.language or UNKNOWN_LANGUAGE)
            if column:
                args, language = args.with_decided(language_col=column), [column]
                notes.append(f"languages are read from column {column!r}; --language unk leaves it out")
            elif of_training != UNKNOWN_LANGUAGE:
                args = args.with_decided(language=of_training)
                notes.append(f"all texts are read as {of_training}, the language of the training")
            elif len(self.coder.languages) > 1:  # "unk" counts as one
                what = "no languages are read: give their column as --language-col, or one as --language"
                notes.append(what)
        self.how = args.how([*texts, *language])
        self.notes = [*(f"{args.named} {note}" for note in self.format.notes), *notes]
        return args

    def chosen_decoder(self) -> str:
        """Return the decoder, ready to code. Raises UserError if the model lacks it or its thresholds."""
        coder, args = self.coder, self.args
        decoder = coder.best_decoder if args.decoder == "auto" else args.decoder
        coder.need(decoder)
        if args.threshold and decoder not in BY_THRESHOLD:  # chosen by auto
            what = f"--threshold is for --decoder {in_series(BY_THRESHOLD)}, but auto chose {decoder} here"
            give = f"give --decoder {in_series(BY_THRESHOLD, 'or')}, or leave out --threshold"
            raise UserError(f"{what} ({coder.why_best}): {give}")
        thresholds = {language and coder.known(language): value for language, value in args.threshold or []}
        coder.thresholds = coder.thresholds.with_given(thresholds or None)
        if args.choices and "flat" not in coder.decoders:
            what = "--choices: this model has no linear decoder"
            raise UserError(f"{what}; use --decoder topk --k {args.choices} for the most probable codes")
        if "tree" in DECODERS[decoder].needs:
            coder.search()  # once, before processes are forked
        return decoder

    def find_columns(self) -> None:
        """Find the columns of an earlier coding, which the output replaces. Raises UserError if columns do
        not fit together, or the model does not know a language.
        """
        args, coder, header, first = self.args, self.coder, self.format.names, f"{self.system}_1"
        most, replaces = coder.most_codes(self.decoder), args.overwrite_columns or args.only_missing
        self.k = args.k or DEFAULT_K
        # columns of codes: as many as --k asks for (a person may add codes), or as the fullest row needs
        room = max(coder.room, DEFAULT_K) if DECODERS[self.decoder].title else most
        self.most = min(args.k, room) if args.k else 1
        self.keeps_rows = args.only_missing or args.overwrite_columns and DECIDED in header
        self.old: dict[str, int] = {}  # the earlier columns, with their places
        self.old_codes = next(i for i in itertools.count() if f"{self.system}_{i + 1}" not in header)
        known = max(map(len, self.known.values()), default=0)
        if args.in_parts:  # all parts get the same columns, whatever their texts
            self.most = max(known, min(self.k, len(coder.codes)))
        asked = self.added_columns(max(min(self.k, most), known, self.old_codes if replaces else 0))
        wanted = [*self.input_cols, *filter(None, [args.language_col])]
        if replaces:
            is_coded = {first, ANSWER[-1]} <= {*header}
            written = coded_columns(header, header.index(first)) if is_coded else ()
            self.old = {
                name: place
                for place, name in enumerate(header)
                if name in asked
                and name not in ("source", *wanted, *OF_LEVEL, *ANSWER)
                or place in written
                and (name in ANSWER or re.fullmatch(BESIDE_CODES, name))
            }
            wanted += self.old
        wanted += args.fill_down or ()
        problems = column_problems(self.path, header, wanted, column_flags(args))
        if args.only_missing and first not in header:
            what = f"--only-missing fills blank cells of {first}, which {args.named} lacks"
            problems.append(f"{what}: rename your column of codes to {first}, or leave the flag out")
        if len(self.input_cols) > 1 and coder.text_rule != AS_IS:
            problems.append(f"--input-col: this model cleans texts ({coder.text_rule}) and reads one column")
        others = [name for name in header if name not in self.old]
        if twice := {name: None for name in asked if [*others, *asked].count(name) > 1}:
            ways = "--overwrite-columns replaces them, --only-missing fills them in rows without a code,"
            ways = f"{ways} --system NAME and --no-titles avoid some; or rename them in the input"
            ways = "no codes of predict come before them; rename them in the input" if replaces else ways
            problems.append(f"output would have several columns {', '.join(map(repr, twice))}: {ways}")
        for language in filter(None, [args.language, *(language for language, _ in args.threshold or [])]):
            if coder.known(language) == UNKNOWN_LANGUAGE != language:
                known = ", ".join(coder.languages)
                what = f"the model does not know the language {language!r}; it knows {known}"
                problems.append(f"{what} (unk: any other)")
        raise_if_any(problems)

    def groups_beside(self) -> Iterator[tuple[Iterable[str], Callable[[Coded], Iterable[str]]]]:
        """Yield the groups of columns that follow the codes, with their cells for an answer."""
        args, coder, draws, least = self.args, self.coder, self.draws, self.args.target_accuracy or 0.0
        names = [name for name in ("title", "desc") if name in self.words]

        def choice(code: str, prob: float) -> list[str]:
            return [code, f"{prob:.6g}", *(self.words[name].get(code, "") for name in names)]

        def at_level(coded: Coded) -> list[str]:
            found = coder.levels.answer(coded.codes, self.levels, coded.levels, least)
            return [*found[:2], f"{found[2]:.6g}"] if found else []

        if args.known or coder.trained:
            yield ["source"], lambda coded: [coded.source]
        if args.level:
            yield OF_LEVEL, at_level
        if draws:
            yield draws.columns, lambda coded: coded.draws or draws.certain(coded)
        columns = numbered(SIMILAR_TEXTS * args.explain, "similar_text", "similar_codes")
        yield columns, lambda coded: itertools.chain(*coded.similar)
        columns = numbered(coder.choices, "choice", "choice_prob", *(f"choice_{name}" for name in names))
        yield columns, lambda coded: itertools.chain(*itertools.starmap(choice, coded.choices))

    def added_columns(self, codes: int) -> list[str]:
        """Return the output's columns for so many codes. Rows that keep their codes keep earlier columns."""
        codes = max(codes, self.old_codes * self.keeps_rows)
        columns = numbered(codes, self.system, *["title"] * ("title" in self.words), "prob")
        beside = numbered(codes, *(name for name in self.words if name != "title"))
        beside += [name for columns, _ in self.beside for name in columns]
        if self.keeps_rows:
            beside += [name for name in self.old if name not in (*columns, *beside, *ANSWER)]
        # names that input tables also use come between the codes, which marks an earlier coding
        among = [name for name in beside if name in ("source", *OF_LEVEL)]
        return [*columns, *among, *ANSWER, *(name for name in beside if name not in among)]

    # ---- texts and their answers

    def chunks(self) -> Iterator[tuple[Records, list[bool]]]:
        """Yield the input, many rows at a time, and whether each row keeps its codes."""
        args, codes = self.args, numbered(self.old_codes * self.args.only_missing, self.system)
        table = self.table = Table(
            *(self.path, self.how, self.input_cols, codes, None),
            language=args.language or UNKNOWN_LANGUAGE,
            language_col=args.language_col,
            ditto=args.ditto,
            fill_down=args.fill_down,
            repair=args.repair_text or self.coder.repair_text,
            before=self.before,
        )
        for some in table.records(self.world.give_up_if_asked, self.span):
            stays = [self.keeps_rows and bool(name) for name in some.deciders]
            if args.only_missing:
                rows = zip(*(some.filled[place] for place in table.codes))
                has_code = (any(code_of_cell(x, self.coder.formatter, self.key) for x in row) for row in rows)
                stays = [is_decided or has for is_decided, has in zip(stays, has_code)]
            yield some, stays

    def look_up(self, text: str, language: str) -> tuple[Coded | None, tuple[str, str]]:
        """Return (answer of --known or None, text and language as the model reads them, or "")."""
        if self.known:
            key, name = text_key(text), language_name(language) or UNKNOWN_LANGUAGE
            codes = self.known.get((key, name), self.known.get((key, "")))
            if codes is not None:
                answer = Coded(codes, [1.0] * len(codes), 1.0, levels=[1.0] * len(self.levels), source=KNOWN)
                return answer, ("", UNKNOWN_LANGUAGE)
        return None, (self.coder.clean(text), self.coder.known(language))

    def read_texts(self) -> int:
        """Collect each distinct text once, in `pieces`, and return the number of rows to code."""
        distinct, rows, coded = {}, 0, 0
        for some, stays in self.chunks():
            read = [row for row, keeps_code in zip(zip(some.texts, some.languages), stays) if not keeps_code]
            found = [self.look_up(*row) for row in read]
            distinct |= dict.fromkeys(key for _, key in found)
            self.most = max([self.most, *(len(known.codes) for known, _ in found if known)])
            rows, coded = rows + len(stays), coded + len(read)
        if ending_of(self.args.output) == ".xlsx" and rows >= SHEET_ROWS:
            what = f"a sheet has {SHEET_ROWS:,} rows, but the output has {rows:,} and a row for the names of"
            raise UserError(f"--output {self.args.output}: {what} its columns: name it .csv.gz or .parquet")
        others = [name for name in self.format.names if name not in self.old]
        check_names(self.args.output, [*others, *self.added_columns(self.most)])
        texts = list(distinct)
        self.pieces = [texts[start : start + PIECE] for start in range(0, len(texts), PIECE)]
        return coded

    @functools.lru_cache(1 << 14)  # noqa: B019  one Coding at a time. Few texts make up most rows
    def cells(self, line: str, is_ditto: bool) -> list[str]:
        """Return the cells for `columns` from an answer in a line of JSON."""
        coded = Coded(*json.loads(line))
        cells = dict.fromkeys(self.columns, "") | self.cells_beside(coded)
        for i, (code, prob) in enumerate(zip(coded.codes, coded.probs), 1):
            cells |= {f"{self.system}_{i}": code, f"prob_{i}": f"{prob:.6g}"}
        sure = float(cells["level_conf"] or "nan") if self.args.level else coded.conf
        is_sure = coded.codes and sure is not None and sure >= self.min_conf  # False for NaN
        is_outside = not self.key.issuperset(coded.codes)  # e.g. written digit by digit
        needs_review = coded.source != KNOWN and (not is_sure or is_outside or is_ditto)
        conf = "" if coded.conf is None else f"{coded.conf:.6g}"
        cells |= zip(ANSWER, (conf, str(int(self.is_fitted)), str(int(needs_review))))
        return [*cells.values()]

    def cells_beside(self, coded: Coded) -> dict[str, str]:
        """Return the words and classes of each code, and the cells of `beside`'s columns."""
        cells = {
            f"{name}_{i}": words.get(code, "")
            for i, code in enumerate(coded.codes, 1)
            for name, words in self.words.items()
        }
        return cells | {name: cell for names, of in self.beside for name, cell in zip(names, of(coded))}

    def kept_cells(self, row: tuple[str, ...], is_decided: bool) -> list[str]:
        """Return the cells for `columns` of a row that keeps its codes: its own, or from the codes."""
        cells = dict.fromkeys(self.columns, "") | dict(zip(ANSWER, ("1", str(int(self.is_fitted)), "0")))
        cells |= {name: str(row[place]) for name, place in self.old.items()}
        written = (cells[f"{self.system}_{i}"] for i in range(1, self.old_codes + 1))
        codes = [code_of_cell(cell, self.coder.formatter, self.key) for cell in written]
        conf = 1.0 if cells["conf"] in ("", "1") else None  # None: a model gave them, or they are none
        if not (is_decided or self.codes_to_keep.issuperset(filter(None, codes))):
            cells |= zip(ANSWER, ("", "0", "1")) if conf else {ANSWER[-1]: "1"}
            conf = None
        beside = self.cells_beside(Coded(codes, [], conf, source=""))
        return [cell or beside.get(name, "") for name, cell in cells.items()]

    # ---- pieces

    def deciding(self) -> dict[str, Any]:
        """Return all settings on which the answers depend."""
        args = self.args
        flags = declarations(PredictConfig).items()
        now = {name: getattr(args, name) for name, (flag, *_) in flags if not flag.metadata["resumable"]}
        for name in ("descriptions", "key", "known"):
            now[name] = files.checksum(now[name]) if now[name] and os.path.isfile(now[name]) else now[name]
        now |= {"model": files.checksum(self.weights), "system": self.system, "decoder": self.decoder}
        return json.loads(json.dumps(now | {"thresholds": str(self.coder.thresholds)}))

    def begin(self) -> tuple[dict, bool]:
        """Write the settings on which the pieces depend into their folder. Return (these settings, whether
        they were there before). Rank 0 only. Raises UserError if other settings were there, unless
        --overwrite is given.
        """
        args, path = self.args, os.path.join(self.folder, SETTINGS_FILE)
        now = self.deciding() | {"input": self.fingerprint()}
        before = json.loads(files.read_sealed(path) or "null")
        if before is not None and before != now and not args.overwrite:
            names = ", ".join(name for name in sorted({*now, *before}) if before.get(name) != now.get(name))
            what = f"{self.folder} holds an unfinished output with other settings ({names} differ). Repeat"
            raise UserError(f"{what} that command to continue with it, or start over with --overwrite")
        if before != now:
            files.remove_files(self.folder, PIECES)
            files.write_sealed(path, json.dumps(now).encode())
        return now, before == now

    def fingerprint(self) -> list:
        """Return values that change with the input's file or content."""
        if self.path == os.path.join(self.folder, INPUT):  # a copy of a pipe's content
            return [files.checksum(str(self.path))]
        states = (os.stat(part.path) for part in files_of(self.path))
        return [[state.st_size, state.st_mtime_ns] for state in states]

    def piece(self, number: int) -> tuple[str, str]:
        """Return (file with a line of JSON for each of a piece's texts, the settings on which it depends)."""
        return os.path.join(self.folder, f"{number:06d}.part"), json.dumps(self.settings, sort_keys=True)

    def code_pieces(self) -> None:
        """Code this rank's pieces, in all its processes."""
        self.batches = 0
        self.stage = Stage("coding", sum(map(len, self.pieces)), "texts", self.done())

        def work(process: int) -> None:
            share = self.world.share(process, self.forked.number)
            for number, texts in list(enumerate(self.pieces))[share]:
                if files.read_sealed(*self.piece(number)) is None:
                    self.code_piece(number, texts)

        self.forked.each(work)

    def code_piece(self, number: int, texts: list[tuple[str, str]]) -> None:
        self.batches = 0
        cleaned, languages = map(list, zip(*texts))
        how = {"cleaned": True, "levels": self.levels}
        coded = self.coder.code(cleaned, languages, self.decoder, self.k, **how)
        if self.draws:
            drawn = self.draws.cells(cleaned, languages, coded)
            coded = [one._replace(draws=cells) for one, cells in zip(coded, drawn)]
        path, settings = self.piece(number)
        files.write_sealed(path, "\n".join(map(json.dumps, coded)).encode(), settings)

    def done(self) -> int:
        """Return how many texts all processes have coded so far."""
        pieces = sum(name.endswith(".part") for name in os.listdir(self.folder))
        return pieces * PIECE + self.batches * self.args.batch_size

    def between_batches(self) -> None:
        self.forked.check()
        if self.stage is not None and self.stage.is_due():
            self.stage.at(self.done())
        self.batches += 1

    # ---- the output

    def read_pieces(self) -> tuple[dict[tuple[str, str], str], int]:
        """Return (a line of JSON for each text, most codes of one). Raises UserError for a damaged piece."""
        first_of = json.JSONDecoder().raw_decode  # reads only the codes of a line
        answers, most = {}, self.most
        for number, texts in enumerate(self.pieces):
            content = files.read_sealed(*self.piece(number))
            if content is None:
                raise UserError(f"{self.folder}: part {number} is damaged; repeat the command")
            answers |= zip(texts, content.decode().split("\n"), strict=True)
            most = max([most, *(len(first_of(answers[text], 1)[0]) for text in texts)])
        return answers, most

    def join(self) -> Counts:
        """Write the output. Return (counts of rows, rows by unknown language, sums of conf and level_conf).
        Rank 0 only. Raises UserError if a piece is missing or damaged, or the input was changed.
        """
        args, rejected, before = self.args, self.args.beside(".rejected.csv"), self.format.names
        if args.in_parts:  # the folder's name stands for the pieces here
            before = before[: len(before) - len(files_of(self.path)[0].keys)]
        changed = UserError(f"{args.named} changed while it was being coded; start over with --overwrite")
        answers, most = self.read_pieces()
        total, unknown, sums = Counter(), Counter(), {"conf": 0.0, "level_conf": 0.0}
        read = (place for place, name in enumerate(before) if name in (*self.input_cols, DECIDED))
        usual = 1 + max(read) if args.columns == "beside" else len(before)
        self.columns, place = self.added_columns(most), min(self.old.values(), default=usual)
        behind = [i for i in range(place, len(before)) if before[i] not in self.old]
        header = [*before[:place], *self.columns, *(before[i] for i in behind)]
        at_level = self.columns.index("level") if args.level else None
        conf, review = map(self.columns.index, (ANSWER[0], ANSWER[-1]))
        numbers = {*filter(re.compile(NUMBERS).fullmatch, self.columns)}
        types = self.format.types_but(self.columns)
        with (
            files.atomic_write(os.path.realpath(args.output), args.overwrite) as file,
            table_writer(file, args.output, header, numbers, types) as write,
        ):
            for some, stays in self.chunks():
                total["broken"] += len(some.noted["letters_broken"])
                rows, languages, left = [], some.languages, set(some.left)
                for i, (row, filled) in enumerate(zip(zip(*some.columns), zip(*some.filled))):
                    if stays[i]:
                        cells = self.kept_cells(filled, bool(some.deciders[i]))
                    else:
                        known, key = self.look_up(some.texts[i], languages[i])
                        line = json.dumps(known) if known else answers.get(key)
                        if line is None:
                            raise changed
                        cells = self.cells(line, i in left)
                        if not cells[conf]:
                            total["unknown" if key[0].strip() else "empty"] += 1
                        if not known and key[1] == UNKNOWN_LANGUAGE != language_name(languages[i]):
                            unknown[languages[i].strip()] += 1
                        total["coded"] += 1
                        total["known"] += bool(known)
                        total["no_code"] += not cells[0]
                        sums["conf"] += float(cells[conf] or 0) if known or cells[0] else 0.0
                        if at_level is not None and cells[at_level]:
                            total[f"level {cells[at_level]}"] += 1
                            sums["level_conf"] += float(cells[at_level + 1])
                    total["review"] += cells[review] == "1"
                    rows.append([*row[:place], *cells, *(row[i] for i in behind)])
                total["rows"] += len(rows)
                write_rows_of(args.named, rows, write)
            if self.fingerprint() != self.settings["input"]:
                raise changed
            self.table.list_faults(os.path.realpath(rejected), args.overwrite)
        total["faults"] = len(self.table.faults)
        if args.overwrite and not total["faults"] and os.path.isfile(rejected):
            os.remove(rejected)  # the list belongs to the previous output
        # the settings last: they mark the others as ours
        files.remove_files(self.folder, rf"{PIECES}|{INPUT}|{SETTINGS_FILE}")
        return total, unknown, sums

    def start_lines(self, rows: int, resumed: bool) -> Iterator[str]:
        args, coder, processes = self.args, self.coder, self.world.size * self.forked.number
        model = args.model if models.is_shared(args.model) else self.weights
        rule = f"texts {coder.text_rule}, " if coder.text_rule != AS_IS else ""
        how = f"{self.decoder}, {counted(len(coder.codes), 'code')}, {rule}"
        how += f"{processes} process{'es' * (processes > 1)}"
        yield (
            f"Coding {counted(rows, 'row')} of {args.named} with {model}{at_step(coder.step)} ({how} on"
            f" {self.world.device.type}){'; resuming' if resumed else ''}"
        )
        yield f"The model's own figure, not of this table: {self.figure or NOT_EVALUATED}"
        if args.decoder == "auto":
            yield f"Decoder: {self.decoder} ({coder.why_best})"
        if self.decoder in BY_THRESHOLD:
            yield f"Thresholds of the linear decoder: {coder.thresholds}"
        yield from (f"Note: {note}" for note in [*self.notes, *self.unusual()])

    def unusual(self) -> Iterator[str]:
        """Yield notes on texts that are cut, and on texts unlike those of the fitted confidence."""
        texts = [text for piece in self.pieces for text in piece if text[0].strip()]
        positions = [2 + len(language + LANGUAGE_SEPARATOR + text) for text, language in texts]
        if cut := sum(number > self.coder.max_len for number in positions):
            longer = min(max(positions), MOST_LEN)
            remedy = f" (train with --max-len {longer} to read more)" * (longer > self.coder.max_len)
            read = f"the {self.coder.max_len:,} positions that the model reads"
            yield f"texts longer than {read}, which will be cut: {cut:,}{remedy}"
        usual = self.coder.confidence.known
        some = texts[:: max(1, len(texts) // COMPARED)]
        known = self.coder.known_ngrams(*map(list, zip(*some))) if some and usual else 1.0
        if 1 - known > MANY * (1 - usual):
            what = (
                f"these texts are unlike those on which the confidence was fitted: the model knows"
                f" {percent(known)} of their n-grams, against {percent(usual)} there. Its"
                " answers may be worse, and conf wrong. To correct conf, let a person code rows on the sheet"
                " that review make writes:"
            )
            yield "\n  histocc ".join([what, *map(shlex.join, self.fitting_commands())])

    def fitting_commands(self) -> list[list[str]]:
        """Return the commands that fit the confidence to rows coded by a person."""
        args, coded = self.args, "coded.csv" if self.args.in_parts else self.args.output
        stem = TABLE_NAME.sub(r"\1", coded)
        texts = text_flags(self.input_cols)
        column = ["--language-col", args.language_col] if args.language_col else []
        key = ["--key", os.path.join(os.path.dirname(self.weights), "key.csv")]
        review = [*text_flags(self.input_cols, args), *(key if self.system != "hisco" else [])]
        sheet, rows, final = (f"{stem}.{name}.csv" for name in ("sheet", "rows", "final"))
        new = ["--output", f"{stem}.model"] if models.is_shared(args.model) else []
        language = column or ["--language", args.language or UNKNOWN_LANGUAGE]
        of_model = [rows, "--model", args.model, *texts, *language, "--fit-confidence", *new]
        return [
            *[["predict", "--join", (args.asked or args).output, "--output", coded]] * args.in_parts,
            ["review", "make", coded, "--output", sheet, "--rows", "500", "--sample", *review],
            ["review", "apply", sheet, "--to", coded, "--output", final, "--training-data", rows, *review],
            ["evaluate", *of_model],
        ]

    def end_lines(self, total: Counter, unknown: Counter, sums: Mapping[str, float]) -> Iterator[str]:
        args, rows, seconds = self.args, total["rows"], time.monotonic() - self.started
        if not args.non_verbose:
            known = f"; {total['known']:,} with known codes" if args.known else ""
            known += f"; {rows - total['coded']:,} with codes kept" if self.keeps_rows else ""
            yield (
                f"{args.output}: {counted(rows, 'row')} in {seconds:.1f} s,"
                f" {rows / max(seconds, 1e-9):,.0f} rows/s; {total['no_code']:,} without a code"
                f" (empty: {total['empty']:,}, unknown: {total['unknown']:,}){known}"
            )
        if dittos := self.table.about_dittos():
            yield f"Texts such as {dittos}"
        if total["broken"]:
            count = f"{counted(total['broken'], 'row')}; --repair-text repairs those that it can"
            yield f"Texts with broken letters or escapes (such as Ã¦, &oslash;): {count}"
        if unknown:
            names = ", ".join(f"{name or 'none'} ({count:,})" for name, count in unknown.most_common(10))
            names += f"; it knows {', '.join(self.coder.languages)}"
            number = counted(unknown.total(), "row")
            yield f"Languages that the model does not know, coded as unk: {number}: {names}"
        if not args.non_verbose:
            unfitted = f"the confidence of {self.decoder} is not fitted"
            command = f"histocc evaluate CODED.csv --model {shlex.quote(args.model)}"
            unfitted += f"; {command} --fit-confidence fits it on rows with known codes"
            why = "--raw-confidence is given" if args.raw_confidence else unfitted
            expected = f"How many rows are right is not known: {why}"
            if self.is_fitted:
                first = " in their first code" * (self.decoder not in MEASURED)
                number = f"{sums['conf']:,.0f} of {counted(total['coded'], 'row')}"
                expected = f"Expected to be right{first}: about {number}"
            if args.level:
                number = {level: total[f"level {level}"] for level in self.levels}
                share = 100 * sum(number.values()) / max(total["coded"], 1)
                each = ", ".join(f"{level}: {number[level]:,}" for level in number if number[level])
                right = f", about {sums['level_conf']:,.0f} of them expected to be right" * self.is_fitted
                yield f"--level {args.level}: {share:.1f} % of rows have an answer ({each or 0}){right}"
            limit = f"{'level_conf' if args.level else 'conf'} below {self.min_conf:.3g}, or no usable code"
            yield f"{expected}; marked for review: {total['review']:,} (needs_review: {limit})"
            if total["review"] and not args.in_parts:
                key = os.path.join(os.path.dirname(self.weights), "key.csv")
                of_codes = ["--key", key] * (self.coder.formatter.kind != "hisco" and os.path.isfile(key))
                command = shlex.join(["serve", args.output, *text_flags(self.input_cols, args), *of_codes])
                yield f"Review them, the most useful first: histocc review {command}"

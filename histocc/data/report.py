"""The report on prepared data: sizes, languages, codes, lengths, duplicates, contradictions, problems."""

import os
import tempfile
from collections.abc import Iterator
from itertools import chain

import numpy as np

from histocc.data.arrays import RowSet, code_counts, text_keys
from histocc.data.rows import MOST_LEN, NOTES, WITH_VALUES, escape_formula, row_writer
from histocc.runtime.log import counted
from histocc.runtime.rng import mix
from histocc.text import LANGUAGES

RARE = 10  # a code in fewer rows than this is rare
MIN_LIST = 8  # rows of a list of titles
LEARNED = f"they know {' '.join(LANGUAGES)}; a model trained from scratch learns any"
_BUCKET = 1 << 21  # rows compared at once
_BLOCK = 1 << 18  # rows read at once


def _anew(rows: RowSet) -> RowSet:
    """Map rows again to free the pages that were read. Repeated rows are not mapped."""
    return rows if len(rows.times) else RowSet(rows.folder, rows.part, rows.max_codes)


def _blocks(rows: RowSet) -> Iterator[tuple[slice, RowSet]]:
    """Yield blocks of the rows, mapped again for each."""
    for start in range(0, len(rows), _BLOCK):
        yield slice(start, start + _BLOCK), _anew(rows)


def _hashes_of_texts(parts: list[RowSet], folder: str) -> Iterator[np.ndarray]:
    """Yield uint64 [4, n] for all rows, a share of the texts at a time to bound memory: hashes of a row's
    text, of text and language, of these and the codes, and its number. They pass through a file in `folder`.
    """
    buckets, done = max(1, -(-sum(map(len, parts)) // _BUCKET)), 0
    sizes = [np.zeros(buckets, dtype=np.int64)]  # bytes of each bucket in each block
    with tempfile.TemporaryFile(dir=folder) as hashes:  # has no name that could remain
        for block, mapped in chain.from_iterable(map(_blocks, parts)):
            text = mapped.text_hash[block]
            labels = np.zeros(len(text), dtype=np.uint64)
            for column in np.sort(mapped.codes[block], axis=1).astype(np.uint64).T:
                labels = mix(labels * np.uint64(3) + column)
            inputs = text_keys(text, mapped.language[block])
            rows = np.arange(done, done := done + len(text), dtype=np.uint64)
            bucket = (text % np.uint64(buckets)).astype(np.int64)
            content = np.stack([text, inputs, inputs + mix(labels), rows], axis=1)
            hashes.write(content[np.argsort(bucket, kind="stable")].tobytes())
            sizes.append(np.bincount(bucket, minlength=buckets) * 4 * content.itemsize)
        sizes = np.stack(sizes)
        for of_blocks, ends in zip(sizes.T, np.cumsum(sizes).reshape(sizes.shape).T):
            read = []
            for size, end in zip(of_blocks.tolist(), ends.tolist()):
                hashes.seek(end - size)
                read.append(hashes.read(size))
            yield np.frombuffer(b"".join(read), np.uint64).reshape(-1, 4).T


def compare_rows(
    parts: list[RowSet], split: bool, files: list[str], codes: list[str], languages: list[str], path: str
) -> dict:
    """Count duplicates and conflicts among the rows of all parts, and list conflicts in `path`. A duplicate
    has the text, language and codes of an earlier row. In a conflict a text has several sets of codes in one
    language. split: whether files were split by text.
    """
    names = "distinct_texts", "duplicates", "most_rows_of_a_text", "conflicts", "val_rows_seen_in_training"
    counts = dict.fromkeys(names, 0)
    with open(path, "w", encoding="utf-8", newline="", errors="backslashreplace") as file:
        write_row = row_writer(file)
        write_row(["text", "language", "codes", "rows", "file", "line"])
        for texts, inputs, answers, rows in _hashes_of_texts(parts, os.path.dirname(path)):
            _, first, repeats = np.unique(answers, return_index=True, return_counts=True)
            counts["duplicates"] += len(rows) - len(first)
            _, of_text = np.unique(texts, return_counts=True)
            counts["distinct_texts"] += len(of_text)
            counts["most_rows_of_a_text"] = int(of_text.max(initial=counts["most_rows_of_a_text"]))
            if not split:
                val = rows >= len(parts[0])
                counts["val_rows_seen_in_training"] += int(np.isin(texts[val], texts[~val]).sum())
            _, group, sizes = np.unique(inputs[first], return_inverse=True, return_counts=True)
            counts["conflicts"] += int((sizes > 1).sum())
            total = np.bincount(group, weights=repeats)
            several = np.flatnonzero(sizes[group] > 1)
            of_text = group[several]
            order = np.lexsort((rows[first[several]], -repeats[several], of_text, -total[of_text]))
            for i, at in enumerate(several[order]):
                if i % 256 == 0:
                    parts = list(map(_anew, parts))
                    lines = [part.lines() for part in parts]
                number = int(rows[first[at]])
                in_val = number >= len(parts[0])
                number -= len(parts[0]) * in_val
                part = parts[in_val]
                source, line = divmod(int(lines[in_val][number]), 1 << 40)
                [text] = part.strings(np.array([number]))
                label = " ".join(codes[code] for code in part.codes[number] if code >= 0)
                cells = text, languages[part.language[number]], label, repeats[at], files[source], line
                write_row(list(map(escape_formula, cells)))
    return counts


def describe_parts(parts: list[RowSet], codes: list[str], languages: list[str]) -> dict:
    """Return languages, codes per row, rare codes, and lengths of descriptions in characters."""
    of_language = np.zeros(len(languages), dtype=np.int64)
    in_part = np.stack([code_counts(part, len(codes)) for part in parts])  # rows of each code
    per_row = np.zeros(parts[0].max_codes + 1, dtype=np.int64)
    of_length = np.zeros(1, dtype=np.int64)  # rows of each length
    for block, mapped in chain.from_iterable(map(_blocks, parts)):
        of_language += np.bincount(mapped.language[block], minlength=len(languages))
        per_row += np.bincount((mapped.codes[block] >= 0).sum(axis=1), minlength=len(per_row))
        lengths = mapped.ends[block] - mapped.starts[block]
        before, of_length = of_length, np.bincount(lengths, minlength=len(of_length))
        of_length[: len(before)] += before
    count, longest = int(of_length.sum()), len(of_length) - 1
    mean = of_length @ np.arange(longest + 1) / max(1, count)
    median = np.searchsorted(np.cumsum(of_length), [(count - 1) // 2, count // 2], side="right").mean()
    of_code = in_part.sum(axis=0)
    order = np.argsort(-of_language, kind="stable").tolist()

    def rows_of(marked: np.ndarray) -> dict[str, int]:
        return {codes[i]: int(of_code[i]) for i in np.flatnonzero(marked & (of_code > 0))}

    return {
        "languages": {languages[i]: int(of_language[i]) for i in order if of_language[i]},
        "codes": len(codes),
        "codes_used": int((of_code > 0).sum()),
        "codes_per_row": {str(n): int(count) for n, count in enumerate(per_row) if count},
        "rare_codes": rows_of(of_code < RARE),
        "codes_only_in_validation": rows_of((in_part[0] == 0) & in_part[0].any()),
        "length": {"mean": round(float(mean), 2), "median": int(median), "max": longest},
    }


def titles_alone(report: dict) -> int:
    """Return how many codes have one row, if the rows are a list of titles, and else 0. A list has distinct
    texts with one code each, and at least half of them are the only one with their code. Of a sample of a
    register this may be so for many codes, but they have few of its texts.
    """
    alone = sum(rows == 1 for rows in report["rare_codes"].values())
    rows = report["train_rows"] + report["val_rows"]
    is_list = MIN_LIST <= rows == report["distinct_texts"] and {*report["codes_per_row"]} == {"1"}
    return alone if is_list and 2 * alone >= rows else 0


def report_lines(report: dict) -> list[str]:
    """Return a report as lines for people. Counts of 0 are left out."""

    def listed(counts: dict) -> str:
        return ", ".join(f"{name} {count:,}" for name, count in counts.items())

    def found(action: str) -> list[dict]:
        return [problem for problem in report["problems"] if problem["action"] == action]

    unusable = f", {report['unusable_rows']:,} that stop the run (not counted below)"
    others = f", {report['test_rows']:,} for the test" * bool(report["test_rows"])
    others += unusable * bool(report["unusable_rows"])
    lines = [
        *report["read"],
        f"Rows: {report['rows']:,} read, {report['train_rows']:,} for training, {report['val_rows']:,} for"
        f" validation{others}",
        f"Texts: {report['distinct_texts']:,} distinct; rows that repeat an earlier one (text, language and"
        f" codes): {report['duplicates']:,}",
        f"Length in characters: {listed(report['length'])}",
    ]
    if report["codes"]:
        key = f" of {report['codes']:,} in the key" * (report["codes"] > report["codes_used"])
        rare = f"{len(report['rare_codes']):,} of them in fewer than {RARE} rows"
        rows = [
            f"; rows with {n} {'code' if n == '1' else 'codes'}: {count:,}"
            for n, count in report["codes_per_row"].items()
        ]
        lines.append(f"Codes: {report['codes_used']:,} used{key}, {rare}{''.join(rows)}")
    lines.append(f"Languages: {listed(report['languages']) or 'none'}")
    notes = [f"{os.path.basename(file['path'])} {note}" for file in report["files"] for note in file["notes"]]
    others = [name for name in report["languages"] if name not in LANGUAGES]
    notes += [f"languages that published models do not know ({LEARNED}): {', '.join(others)}"] * bool(others)
    findings = (
        (report["conflicts"], "texts coded differently in different rows (see conflicts.csv)"),
        (len(report["codes_only_in_validation"]), "codes only in validation rows, which no model can learn"),
        (report["val_rows_seen_in_training"], "validation rows with a text that is also trained on"),
    )
    notes += [f"{text}: {count:,}" for count, text in findings if count]
    if alone := titles_alone(report):
        notes.append(
            f"the rows are a list of titles (a code book); codes with one text: {alone:,} of"
            f" {report['codes_used']:,}. Without that text a model has no example of the code, so validation"
            " on such texts measures nothing. predict gives texts of the list their codes (source: trained)."
            " To measure other texts, let people code rows of the register itself: histocc evaluate"
        )
    longest, words = report["longest"], dict(NOTES)
    if longest["read"] < MOST_LEN:
        most, share = min(longest["has"], MOST_LEN), "more" if longest["has"] > MOST_LEN else "all"
        words["texts_cut"] += f" (--max-len {most} reads {share} of them; without encoder there is no limit)"
    notes += [f"{words[kind['kind']]}: {kind['rows']:,}{_where(kind)}" for kind in found("noted")]
    if report["rejected_rows"]:
        notes.append(f"{counted(report['rejected_rows'], 'row')} rejected, listed in rejected_rows.csv")
    lines += [f"Note: {note}" for note in notes]
    return [*lines, *(f"  {kind['rows']:,} × {kind['kind']}{_where(kind)}" for kind in found("rejected"))]


def _where(problem: dict) -> str:
    """Return the first rows of a kind, with file and line, and their values if helpful."""
    lines: dict[str, list[str]] = {}
    for first in problem["first"]:
        lines.setdefault(os.path.basename(first["file"]), []).append(f"{first['line']:,}")
    places = "; ".join(f"{name} line{'s' * (len(of) > 1)} {', '.join(of)}" for name, of in lines.items())
    values = dict.fromkeys(first["value"].strip() for first in problem["first"])
    shown = ": " + ", ".join(map(repr, values)) if problem["kind"] in WITH_VALUES else ""
    if counts := problem.get("values"):
        shown = ": " + ", ".join(f"{count:,} × {value!r}" for value, count in counts.items())
    return f" ({places}{' …' if problem['rows'] > len(problem['first']) else ''}{shown})"

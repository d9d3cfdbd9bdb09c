"""Compare two models by their reports, on the texts that both have and neither model has learned from:

python -m histocc.evaluate.compare ./first/evaluation ./second/evaluation > comparison.md
"""

import csv
import json
import math
import os
import sys
from collections import Counter
from dataclasses import MISSING, dataclass
from typing import Any

import numpy as np

from histocc.data.arrays import PreparedData, SomeRows
from histocc.data.rows import csv_text
from histocc.evaluate.report import ERRORS, JSON, MAX_SHOWN, Groups, automatic, table
from histocc.figure import Z, percent
from histocc.formatter import SEP_VALUE, cut
from histocc.predict.coder import Coded
from histocc.runtime.config import Config, Parser, flag
from histocc.runtime.errors import UserError, in_words, run_command

ANSWERS = "answers.csv"
HEADER = ["text", "language", "codes", "predicted", "conf", "rows", "learned"]  # further ones: of --by
OF_BY = "column "
DIGITS, PARTS = "digits", "parts between "  # units of levels in a report
Answer = dict[str, str]  # a row of answers.csv


def answers_csv(
    coded: list[Coded], of_row: np.ndarray, data: PreparedData, rows: SomeRows, groups: Groups
) -> str:
    """Return the text of answers.csv: each distinct text with its codes, the answer, and how many rows have
    it; learned: 1 if the model was trained on the text. The arguments are those of `decoder_report`.
    """
    names = [name for name in groups if name.startswith(OF_BY)]
    columns = [[str(groups[name][1][i]) for i in groups[name][0].tolist()] for name in names]
    learned = (
        [str(int(i == 0)) for i in groups["training"][0].tolist()]
        if "training" in groups
        else [""] * len(rows)
    )
    true = [SEP_VALUE.join(sorted(data.codes[i] for i in row if i >= 0)) for row in rows.codes.tolist()]
    texts = [text.encode("utf-8", "backslashreplace").decode() for text in rows.strings(np.arange(len(rows)))]
    number = Counter(zip(texts, rows.language.tolist(), true, of_row.tolist(), learned, *columns))
    lines: list[list] = [[*HEADER, *names]]
    for (text, language, codes, i, is_learned, *cells), count in number.most_common():
        answer = SEP_VALUE.join(sorted(coded[i].codes)), f"{coded[i].conf or 0:.4f}"
        lines.append([text, data.languages[language], codes, *answer, count, is_learned, *cells])
    return csv_text(lines).decode()


def read_answers(folder: str) -> tuple[dict, list[tuple[tuple[str, str], Answer]]]:
    """Return (the report in a folder, its answers, each with a key: the text but for case and blanks, and its
    codes). Raises UserError.
    """
    try:
        with open(os.path.join(folder, JSON), encoding="utf-8") as file:
            report = json.load(file)
        with open(os.path.join(folder, ANSWERS), encoding="utf-8", newline="") as file:
            answers = list(csv.DictReader(file))
        return report, [((" ".join(x["text"].casefold().split()), x["codes"]), x) for x in answers]
    except (OSError, ValueError, KeyError) as error:
        what = f"{folder}: holds no report with {ANSWERS}; evaluate writes one ({in_words(error)})"
        raise UserError(what) from None


def difference(ahead: np.ndarray) -> list[float]:
    """Return the mean of paired differences of shares, float [n], with its 95 % interval (Bonett and Price,
    2012, doi 10.3102/1076998611411915), which also holds for few or equal pairs.
    """
    n = len(ahead) + 2
    up, down = (float(np.maximum(each, 0).sum() + 1) / n for each in (ahead, -ahead))
    reach = Z * math.sqrt((up + down - (up - down) ** 2) / n)
    return [float(ahead.mean()), max(up - down - reach, -1.0), min(up - down + reach, 1.0)]


def is_right(answer: Answer, digits: int, separator: str | None) -> float:
    """Return 1 if an answer is right with codes cut to a level, else 0."""
    cells = (answer[name].split(SEP_VALUE) for name in ("codes", "predicted"))
    true, predicted = ({cut(code, digits, separator) for code in codes} for codes in cells)
    return float(true == predicted)


def figures_of(right: list[np.ndarray], text: np.ndarray, rows: np.ndarray) -> dict[str, Any]:
    """Return how often two models are right. All arguments are [N], one for each text with its codes: whether
    it gets these, the number of the text, and how many rows have it.
    """
    place = np.unique(text, return_inverse=True)[1]
    a, b = (np.bincount(place, rows * each) / np.bincount(place, rows) for each in right)
    return {
        "texts": len(a),
        "rows": int(rows.sum()),
        "over_texts": [float(a.mean()), float(b.mean())],
        "over_rows": [float(rows @ each / rows.sum()) for each in right],
        "difference": difference(b - a),
    }


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the comparison of the models of two reports, by the answers of the decoder that each codes with,
    to texts that both have with the same codes and no model has learned from. A difference above 0 says that
    the second is ahead. first, second: folders. Raises UserError.
    """
    folders = [os.fspath(first), os.fspath(second)]
    reports, answers = zip(*map(read_answers, folders))
    models = [report["model"] for report in reports]
    if models[0]["system"] != models[1]["system"]:
        what = " and ".join(f"{folder} has codes of {x['system']}" for folder, x in zip(folders, models))
        raise UserError(f"{what}: compare models of the same codes")
    learned = {key[0] for key, x in (*answers[0], *answers[1]) if x["learned"] == "1"}
    others = dict(answers[1])
    common = [(key, x) for key, x in answers[0] if key in others and key[0] not in learned]
    if not common:
        what = f"{' and '.join(folders)} have no text with the same codes that is new to both models"
        raise UserError(what)
    text = np.unique([key[0] for key, _ in common], return_inverse=True)[1]
    pairs = [[x for _, x in common], [others[key] for key, _ in common]]
    levels = [(next(iter(x["decoders"].values()))["by_digits"], x["levels"]) for x in reports]
    names = [os.path.basename(os.path.dirname(os.path.abspath(x["file"]))) for x in models]
    return {
        "models": names if names[0] != names[1] else folders,
        "reports": folders,
        "left_out": [len({key[0] for key, _ in each}) - int(text.max()) - 1 for each in answers],
        "is_new": all(x["learned"] for each in pairs for x in each),
        **compared(pairs, text, *max(levels, key=lambda of_report: len(of_report[0]))),
    }


def compared(pairs: list[list[Answer]], text: np.ndarray, levels: list[dict], unit: str) -> dict[str, Any]:
    """Return the figures of a comparison.

    Args:
        pairs: answers of both models to the same texts with the same codes, N each.
        text: number of each one's text, int64 [N].
        levels, unit: of the codes, as a report has them.
    """
    rows = np.array([float(x["rows"]) for x in pairs[0]])
    separator, groups, right = None if unit == DIGITS else unit.removeprefix(PARTS), [], []
    for digits in [each["digits"] for each in levels]:
        right = [np.array([is_right(x, digits, separator) for x in each]) for each in pairs]
        groups.append({"group": unit, "label": str(digits)} | figures_of(right, text, rows))
    whole = groups.pop()
    for name in ("language", *(name for name in pairs[0][0] if name.startswith(OF_BY))):
        values = np.array([x[name] for x in pairs[0]])
        for value, number in Counter(values.tolist()).most_common():
            if number < len(values):
                part = values == value
                figures = figures_of([each[part] for each in right], text[part], rows[part])
                groups.append({"group": name, "label": value} | figures)
    weight, conf = rows / np.bincount(text, rows)[text], ([float(x["conf"]) for x in each] for each in pairs)
    shares = zip(ERRORS, *(automatic(np.array(each), share, weight) for each, share in zip(conf, right)))
    differ = [i for i in np.argsort(-rows, kind="stable").tolist() if right[0][i] != right[1][i]]
    answers = [(pairs[0][i], pairs[1][i]["predicted"], int(rows[i])) for i in differ[:MAX_SHOWN]]
    return {
        "all": whole,
        "groups": groups,
        "automatic": [{"errors": error, "over_texts": [a["texts"], b["texts"]]} for error, a, b in shares],
        "examples": [[x["text"], x["codes"], x["predicted"], other, number] for x, other, number in answers],
    }


# ---- the comparison in words


def points(*values: float, sign: str = "+") -> list[str]:
    return [f"{100 * each:{sign}.1f}".replace("-", "−") for each in values]


def verdict(found: dict[str, Any]) -> str:
    """Return which model is ahead, in a sentence."""
    whole, names = found["all"], found["models"]
    shares, (value, *bounds) = whole["over_texts"], whole["difference"]
    if value < 0:
        names, shares, value, bounds = names[::-1], shares[::-1], -value, [-bound for bound in bounds[::-1]]
    ahead, low, high = points(value, *bounds, sign="-")
    chance = ", so this may be chance" * (bounds[0] <= 0)
    new = "that neither has learned from" if found["is_new"] else "(what they have learned from is not known)"
    of = f"on {whole['texts']:,} texts {new}: {percent(shares[1])} against {percent(shares[0])}"
    return (
        f"{names[1]} is ahead of {names[0]} by {ahead} points (95 % interval {low} to {high}{chance}) {of}."
    )


def markdown(found: dict[str, Any]) -> str:
    """Return the text of a comparison."""
    names, whole = found["models"], found["all"]
    lines = ["# Comparison", "", f"**{verdict(found)}**", ""]
    lines += [f"- {name}: {folder}" for name, folder in zip(names, found["reports"])]
    if any(found["left_out"]):
        some = " and ".join(f"{number:,} of {name}" for number, name in zip(found["left_out"], names))
        lines.append(f"- Compared are the texts that both reports have with the same codes; left out: {some}")
    rows: list[list[Any]] = []
    for each in (whole, *found["groups"]):
        label = "all" if each is whole else f"{each['group']}: {each['label']}"
        gap = "{} ({} to {})".format(*points(*each["difference"]))
        rows.append([label, each["texts"], *(percent(x, "") for x in each["over_texts"]), gap])
    if whole["rows"] > whole["texts"]:
        a, b = whole["over_rows"]
        rows.insert(
            1, ["all, % of rows", f"{whole['rows']:,} rows", percent(a, ""), percent(b, ""), *points(b - a)]
        )
    for each in found["automatic"]:
        title = f"coded with at most {100 * each['errors']:.0f} % wrong"
        rows.append([title, whole["texts"], *(percent(x, "") for x in each["over_texts"]), ""])
    lines += ["", *table(["right, % of texts", "texts", *names, "difference, points"], rows)]
    lines += ["Texts with different answers that most rows have:", ""] * bool(found["examples"])
    return "\n".join([*lines, *table(["text", "codes", *names, "rows"], found["examples"])])


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Config):
    """The flags of compare."""

    reports: list[str] = flag(
        MISSING, "folders of two reports of evaluate", metavar="FOLDER", positional=True
    )


def run(args: CompareConfig) -> None:
    if len(args.reports) != 2:
        raise UserError(f"compare takes the folders of two reports: {len(args.reports)} are given")
    print(markdown(compare(*args.reports)))


def get_args_parser() -> Parser:
    return Parser(CompareConfig, "python -m histocc.evaluate.compare", "Compare two models by their reports.")


def main(argv: list[str] | None = None) -> int:
    return run_command(lambda: run(get_args_parser().parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())

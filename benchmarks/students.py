#!/usr/bin/env python3
"""What a small model learns from a larger one: accuracy and speed of a teacher, of students, and of the same
models without a teacher after the same seconds.

    python benchmarks/students.py               # a teacher of size small, 20 minutes; students, 4 minutes
    python benchmarks/students.py --teacher ./output --sizes tiny --seeds 1    # a folder of a training

Rows: the real ones, or the sample; a tenth of the texts is held out. The teacher is trained on the
others. Students have the same rows and --texts unlabelled ones, made out of them and of the sample:
misspelled texts, beginnings of some with ends of others, two with "and" between them, and English texts
of the sample. None of them is held out (a teacher that is given must not know the held-out texts,
either). A student alone has the rows without these. --labelled N gives students, with a teacher or alone,
N of the labelled rows, and the texts of the others are among the unlabelled ones. Both kinds are trained
for --minutes, which count the fit of n-grams and the training; steps follow from the rate of some steps
before. What the teacher takes to answer is said apart: it is done once, for all students.

Accuracy: % of distinct held-out texts whose set of codes is right, mean and half the range over --seeds.
Texts per second: of the coder on held-out texts, one thread. Prints a table and one JSON line.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import torch
from quality import DataSet, Run, data_flags, spread

from histocc.evaluate import baseline
from histocc.predict.coder import Coder
from histocc.sample.files import write
from histocc.sample.generate import rows

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def misspelled(text: str, draw: random.Random) -> str:
    """One letter replaced, left out, or swapped with the next."""
    at = draw.randrange(len(text))
    kind = draw.randrange(3)
    if kind == 0:
        return text[:at] + draw.choice(LETTERS) + text[at + 1 :]
    if kind == 1:
        return text[:at] + text[at + 1 :]
    return text[:at] + text[at + 1 : at + 2] + text[at] + text[at + 2 :]


def unlabelled(texts: list[str], number: int, seed: int = 1) -> list[str]:
    """`number` different texts like those of a register, from the texts of rows."""
    draw, found = random.Random(seed), {}
    sample = [text for text, language, *_ in rows(4 * number, 5) if language == "en"]
    while len(found) < number:
        one, other = draw.choice(texts), draw.choice(texts)
        kind = len(found) % 4
        if kind == 0:
            text = misspelled(one, draw)
        elif kind == 1:
            words, more = one.split(), other.split()
            text = " ".join([*words[: draw.randint(1, len(words))], *more[draw.randrange(len(more)) :]])
        elif kind == 2:
            text = f"{one} and {other}"
        else:
            text = draw.choice(sample)
        if text.strip():
            found[text] = None
    return list(found)


def write_texts(path: str, texts: list[str]) -> None:
    write([(text, "en", "", "", "") for text in texts], path)


def speed(model: str, texts: list[str], languages: list[str]) -> dict[str, float]:
    """Texts per second of both decoders."""
    coder, found = Coder.load(model), {}
    for decoder in ("flat", "greedy"):
        coder.code(texts[:64], languages[:64], decoder)
        rates = []
        for _ in range(3):
            started = time.perf_counter()
            coder.code(texts, languages, decoder, deduplicate=False)
            rates.append(len(texts) / (time.perf_counter() - started))
        found[decoder] = statistics.median(rates)
    return found


class Table:
    """Lines of results, printed as they come."""

    def __init__(self, data: DataSet, texts: int):
        val = data.prepared.val
        self.texts = baseline.texts_of(val)[:texts]
        self.languages = [data.prepared.languages[number] for number in val.language[:texts]]
        self.found: list[dict] = []
        print(
            f"{'':24} {'steps':>6} {'seconds':>8} {'writing':>13} {'linear':>13} {'both':>13}"
            f" {'flat, texts/s':>14} {'greedy':>7}"
        )

    def add(self, name: str, run: Run, results: list[dict]) -> None:
        rates = speed(os.path.join(run.folder, "last.bin"), self.texts, self.languages)
        cells = " ".join(
            f"{spread([each[part]['all'] for each in results]) if part in results[0] else '':>13}"
            for part in ("seq2seq", "linear", "both")
        )
        seconds = statistics.mean(each["seconds"] for each in results)
        print(
            f"{name:24} {results[0]['steps']:6} {seconds:8.0f} {cells} {rates['flat']:14,.0f}"
            f" {rates['greedy']:7,.0f}",
            flush=True,
        )
        self.found.append({"name": name, "results": results, "texts_per_sec": rates})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--data", default="real", choices=("real", "sample"))
    parser.add_argument("--teacher", default=None, metavar="RUN", help="its folder, instead of training one")
    parser.add_argument("--teacher-minutes", type=float, default=20)
    parser.add_argument("--teacher-size", default="small")
    parser.add_argument("--teacher-flags", default="", help="more of finetune.py for the teacher")
    parser.add_argument("--keep-teacher", default=None, metavar="FOLDER", help="leave it there")
    parser.add_argument("--sizes", nargs="+", default=["tiny", "ngrams"])
    parser.add_argument("--without-alone", action="store_true", help="students with the teacher only")
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--texts", type=int, default=40_000, help="unlabelled")
    parser.add_argument("--labelled", type=int, default=None, metavar="N", help="rows of the students")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--flags", default="", help="more of finetune.py for students with a teacher")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--probe", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        flags = data_flags(args.data, folder) or data_flags("sample", folder) or []
        os.makedirs(os.path.join(folder, "whole"))
        data = DataSet(flags, os.path.join(folder, "whole"), False)
        texts = os.path.join(folder, "texts.csv")
        known = baseline.texts_of(data.prepared.train)
        write_texts(texts, unlabelled(known, args.texts) + (known if args.labelled else []))
        table, own = Table(data, 1024), data
        teacher = args.teacher and os.path.abspath(args.teacher)
        if args.labelled:
            os.makedirs(os.path.join(folder, "fewer"))
            own = data.fewer(args.labelled, os.path.join(folder, "fewer"), False)
        args.size = args.teacher_size
        run = Run(args, data, args.teacher_flags, args.keep_teacher or os.path.join(folder, "teacher"))
        if teacher is None:
            steps = run.steps_of(60 * args.teacher_minutes, run.rate())
            table.add(f"teacher, {args.teacher_size}", run, [run.accuracy(steps, 1)])
            teacher = run.folder
        else:
            os.makedirs(run.folder)
            for name in ("last.bin", "logs.csv"):
                shutil.copy(os.path.join(teacher, name), run.folder)
            table.add("teacher", run, [run.result(1)])
        taught = f"--teacher {shlex.quote(teacher)} --unlabelled {shlex.quote(texts)} {args.flags}"
        kinds = ({} if args.without_alone else {"alone": ""}) | {"with the teacher": taught}
        for size in args.sizes:
            for name, more in kinds.items():
                args.size = size
                run = Run(args, own, more, os.path.join(folder, f"{size}_{len(more)}"))
                started = time.perf_counter()
                rate = run.rate()
                print(f"  ({time.perf_counter() - started:.0f} s before: answers, a first fit, some steps)")
                steps = run.steps_of(60 * args.minutes, rate)
                table.add(f"{size} {name}", run, [run.accuracy(steps, seed) for seed in args.seeds])
    result = {"data": args.data, "texts": args.texts, "labelled": args.labelled, "minutes": args.minutes}
    print(json.dumps({**result, "found": table.found}))


if __name__ == "__main__":
    main()

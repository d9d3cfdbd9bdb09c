"""What a small model learns from a larger one: accuracy and speed of a teacher, of students, and of the same
models without a teacher after the same time.

    python -m benchmarks.students               # a teacher of size small, 20 minutes; students, 4 minutes
    python -m benchmarks.students --teacher ./output --sizes tiny --seeds 1    # a folder of a training
    python -m benchmarks.students --teacher ./output --labelled 1000           # of the rows, for students

A tenth of the texts is held out. The teacher is trained on the others; one that is given must not know the
held-out texts, either. Students have the same rows and --texts unlabelled ones, made out of them and of the
sample: misspelled texts, beginnings of some with ends of others, two with "and" between them, and English
texts of the sample. A student alone has the rows without these. With --labelled the texts of the other rows
are among the unlabelled ones. --minutes count the fit of n-grams and the training, and not the teacher's
answers, which are made once for all students.

Accuracy: % of distinct held-out texts whose set of codes is right, mean and half the range over --seeds.
Texts per second: of coding held-out texts, one thread.
"""

import os
import random
import re
import shutil
import tempfile
from functools import partial

from histocc.predict.coder import Coder

from . import common
from .common import arguments, data_flags, finish, in_turns, read_csv, spread, table, write_csv, write_sample
from .quality import DECODERS, DataSet, of_model

LETTERS = "abcdefghijklmnopqrstuvwxyz"
CODING = ("flat", "greedy")
BATCH = 64


def misspelled(text: str, draw: random.Random) -> str:
    """Return the text with one letter replaced, left out, or swapped with the next."""
    at = draw.randrange(len(text))
    before, letter, after = text[:at], text[at], text[at + 1 :]
    return before + draw.choice([draw.choice(LETTERS) + after, after, after[:1] + letter + after[1:]])


def unlabelled(texts: list[str], number: int, sample: list[str]) -> list[str]:
    """Return `number` different texts like those of a register, from the texts of rows."""
    draw, found = random.Random(1), {}
    while len(found) < number:
        one, other = draw.choice(texts), draw.choice(texts)
        words, more = one.split(), other.split()
        joined = [*words[: draw.randint(1, len(words))], *more[draw.randrange(len(more)) :]]
        kinds = (misspelled(one, draw), " ".join(joined), f"{one} and {other}", draw.choice(sample))
        text = kinds[len(found) % 4]
        if text.strip():
            found[text] = None
    return list(found)


class Run:
    """Trainings with the same flags on the same data, one after the other in one folder."""

    def __init__(self, data: DataSet, flags: str, folder: str, threads: int):
        self.data, self.folder, self.threads = data, folder, threads
        self.flags = f"{data.flags} --batch-size {BATCH} {flags}"

    def train(self, steps: int, seed: int, log_interval: int) -> float:
        """Train; return the seconds that the fit of the n-grams took."""
        flags = f"{self.flags} --seed {seed} --log-interval {log_interval}"
        said = common.train(flags, steps, self.folder, self.threads)
        fitted = re.search(r"^Fitted in ([0-9.]+) s$", said, re.MULTILINE)
        return float(fitted[1]) if fitted else 0.0

    def steps_in(self, minutes: float) -> int:
        """Return how many steps fit into so many minutes, behind the fit of the n-grams."""
        fit = self.train(40, 0, 20)
        rates = [row["samples_per_sec"] for row in read_csv(f"{self.folder}/logs.csv")]
        return max(1, round((60 * minutes - fit) * float([*filter(None, rates)][-1]) / BATCH))

    def accuracy(self, steps: int, seed: int) -> dict:
        """Train `steps` and return what the last checkpoint gets right."""
        return self.result(self.train(steps, seed, steps))

    def result(self, seconds: float = 0.0) -> dict:
        """Return for each decoder the fraction of distinct held-out texts ("all"), for the training that is
        in the folder. seconds: of the fit of its n-grams.
        """
        before, log = 0, read_csv(f"{self.folder}/logs.csv")
        for row in log:
            if float(row["samples_per_sec"] or 0):
                seconds += (int(row["samples"]) - before) / float(row["samples_per_sec"])
                before = int(row["samples"])
        found = of_model(f"{self.folder}/last.bin", {"all": self.data.val})["decoders"]
        return {"steps": int(log[-1]["step"]), "seconds": seconds, **found}


def entry(name: str, model: Run, results: list[dict]) -> dict:
    """Return a line of the table. The texts per second of both decoders are those of the last training."""
    coder, rows = Coder.load(f"{model.folder}/last.bin"), model.data.val[:1024]
    texts, languages = [row.text for row in rows], [row.language for row in rows]

    def code(decoder: str, some: int) -> None:
        coder.code(texts[: 64 * some], languages[: 64 * some], decoder)

    taken = in_turns({name: partial(code, name) for name in CODING}, 3, -(-len(texts) // 64))
    rates = {decoder: len(texts) / seconds for decoder, seconds in taken.items()}
    print(name, results, rates, flush=True)
    return {"name": name, "results": results, "texts_per_sec": rates}


def words(parts: list[dict]) -> str:
    """Return the text for the page."""
    part = parts[0]
    if part["labelled"]:
        above = (
            f"As above, with {part['labelled']:,} labelled rows for the students, alone or with the teacher,"
            f" which has learned from all of them, planned for {60 * part['minutes']:.0f} seconds; the texts"
            " of the other rows are among the unlabelled ones, as the texts of a register of which a part was"
            " coded by hand."
        )
    else:
        seeds = max(len(each["results"]) for each in part["found"])
        above = (
            f"A student learns from the labelled rows and {part['texts']:,} unlabelled texts what its teacher"
            " answers; the same model alone has the labelled rows. Both are trained for the steps that fit"
            f" into the same {60 * part['minutes']:.0f} seconds, behind the fit of the n-grams. Figures are %"
            f" of distinct held-out texts whose set of codes is right, mean and half the range over {seeds}"
            f" seeds (the teacher: one), and distinct texts per second of one core in float32."
        )
    rows = []
    for each in part["found"]:
        results = each["results"]
        shares = ([result[name]["all"] for result in results if name in result] for name in DECODERS)
        cells = [spread(each) if each else "–" for each in shares]
        seconds = sum(result["seconds"] for result in results) / len(results)
        rates = [f"{each['texts_per_sec'][name]:,.0f}" for name in CODING]
        rows.append([each["name"], f"{seconds:.0f}", *cells, *rates])
    heads = ["", "seconds", "writing decoder", "linear decoder", "both", "texts/s, linear"]
    return f"{above}{part.get('note', '')}\n\n{table([*heads, 'texts/s, digit by digit'], rows)}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--teacher", metavar="RUN", help="its folder, instead of training one")
    parser.add_argument("--teacher-minutes", type=float, default=20)
    parser.add_argument("--teacher-size", default="small")
    parser.add_argument("--sizes", nargs="+", default=["tiny", "ngrams"])
    parser.add_argument("--minutes", type=float, default=4)
    parser.add_argument("--texts", type=int, default=40_000, help="unlabelled")
    parser.add_argument("--labelled", type=int, metavar="N", help="rows of the students")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = DataSet.of(data_flags("english", folder), f"{folder}/whole")
        more = read_csv(write_sample(f"{folder}/more.csv", 4 * args.texts, seed=5))
        sample = [row["occ1"] for row in more if row["lang"] == "en"]
        known = [row.text for row in data.train]
        texts = unlabelled(known, args.texts, sample) + (known if args.labelled else [])
        write_csv(f"{folder}/texts.csv", ("occ1", "lang"), ((text, "en") for text in texts))
        own = data.fewer(args.labelled, f"{folder}/fewer") if args.labelled else data
        teacher = Run(data, f"--model-size {args.teacher_size}", f"{folder}/teacher", args.threads)
        if args.teacher:
            os.makedirs(teacher.folder)
            for name in ("last.bin", "logs.csv"):
                shutil.copy(os.path.join(args.teacher, name), teacher.folder)
            results = [teacher.result()]
        else:
            results = [teacher.accuracy(teacher.steps_in(args.teacher_minutes), 1)]
        found = [entry("teacher" if args.teacher else f"teacher, {args.teacher_size}", teacher, results)]
        taught = f"--teacher {teacher.folder} --unlabelled {folder}/texts.csv"
        for size in args.sizes:
            for name, more in {"alone": "", "with the teacher": taught}.items():
                model = Run(own, f"--model-size {size} {more}", f"{folder}/student", args.threads)
                steps = model.steps_in(args.minutes)
                results = [model.accuracy(steps, seed) for seed in args.seeds]
                found.append(entry(f"{size} {name}", model, results))
    result = {name: getattr(args, name) for name in ("texts", "labelled", "minutes")} | {"found": found}
    finish(result, words([result]))


if __name__ == "__main__":
    main()

"""How many rows of a register without codes are right after so many decisions on the review page, in three
orders, and how far what the page says of it is true:

    python -m benchmarks.learning --picture docs/img/decisions.png
    python -m benchmarks.learning --registers english --seeds 1 --decisions 200 500
    python -m benchmarks.learning --guesses --decisions 0 200 1000

The most frequent code of each text stands for the person. A row is right if its text is decided, or guessed,
as the row is coded. The same learner guesses in all orders: most rows first, at random (texts), and what
teaches most, where it learns anew every 50 decisions. Seeds draw the order, the rows that the page draws and
6,000 of the Swedish titles, each of which stands in one row. Choices: rows not yet decided whose true code
is among the five offered, beside the codes of the three most similar decided texts. --guesses: in the last
order alone, from the first guesses of the built-in model.
"""

import itertools
import resource
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from histocc.review.__main__ import give_choices
from histocc.review.learn import Guesses, Learner
from histocc.review.serve import DRAW_EVERY, Decisions
from histocc.review.sheet import CodedFile, CodedText, Codes, Decision

from .common import REGISTERS, arguments, draw, finish, read_csv, spread, table, write_csv

TITLES = 6_000
EVERY = 50  # decisions between two guesses
ORDERS = {"rows": "most rows first", "random": "at random", "learn": "what teaches most"}


def register(name: str, seed: int) -> list[tuple[CodedText, Counter[str]]]:
    """Return the texts of a register, with how many of their rows have each code."""
    found: dict[str, tuple[CodedText, Counter[str]]] = {}
    for row in read_csv(REGISTERS[name]):
        text, codes = found.setdefault(row["occ1"], (CodedText(row["occ1"], row["lang"]), Counter()))
        text.rows += 1
        codes[row["hisco_1"]] += 1
    texts = list(found.values())
    if name == "swedish":
        texts = [texts[i] for i in np.random.default_rng(seed).permutation(len(texts))[:TITLES]]
    return texts


class Simulation:
    """Decisions on the texts of a register, by its codes."""

    def __init__(self, name: str, order: str, seed: int, guesses: bool = False):
        texts = register(name, seed)
        if guesses:
            give_choices([text for text, _ in texts], "built-in")
        self.codes = [codes for _, codes in texts]
        self.truth = [codes.most_common(1)[0][0] for _, codes in texts]
        self.learner = Learner([text for text, _ in texts], self.truth)
        self.rows, self.order = self.learner.rows, order
        generator = np.random.default_rng(seed)
        self.learner.draws = np.argsort(generator.exponential(size=len(texts)) / self.rows).tolist()
        mixed = generator.permutation(len(texts))
        self.queue = mixed[np.argsort(-self.rows[mixed], kind="stable")] if order == "rows" else mixed
        self.decided: dict[int, tuple[str, ...]] = {}

    def decide(self) -> None:
        is_draw = self.order == "learn" and len(self.decided) % DRAW_EVERY == DRAW_EVERY - 1
        queue = self.learner.draws if is_draw else self.queue
        text = next(int(text) for text in queue if text not in self.decided)
        self.decided[text] = (self.truth[text],)

    def run(self, measured: list[int]) -> dict[int, dict]:
        found = {}
        for number in range(max(measured) + 1):
            if number in measured or number % EVERY == 0 and self.order == "learn":
                guesses = self.learner.learn(self.decided)
                if self.order == "learn":
                    self.queue = [*guesses.order, *np.argsort(-self.rows, kind="stable")]
                if number in measured:
                    found[number] = self.measure(guesses)
            self.decide()
        return found

    def measure(self, guesses: Guesses) -> dict:
        """Return shares of rows: right ones, and what the page says; and of the choices."""
        is_open = np.ones(len(self.rows), bool)
        is_open[list(self.decided)] = False
        answer = [self.learner.names[place] for place in guesses.codes[:, 0]]
        for text, (code,) in self.decided.items():
            answer[text] = code
        right = sum(codes[code] for codes, code in zip(self.codes, answer)) / self.rows.sum()
        low, said, high = guesses.right
        # the share that the person would not change, of which the page speaks
        person = self.rows @ [code == true for code, true in zip(answer, self.truth)] / self.rows.sum()
        hits = np.zeros(2)
        asked = np.flatnonzero(is_open)
        asked = np.random.default_rng(1).choice(asked, 500, p=self.rows[asked] / self.rows[asked].sum())
        for text in asked:
            near = [self.decided[other][0] for other in self.learner.nearest(text, [*self.decided])]
            offered = [self.learner.names[place] for place in guesses.codes[text]]
            hits += self.truth[text] in offered, self.truth[text] in near[:5]
        choices, similar = hits / len(asked)
        return dict(
            right=right, person=person, said=said, low=low, high=high, choices=choices, similar=similar
        )


def latencies(count: int, decided: int) -> dict[str, float]:
    """Return seconds that decisions took on a file of so many texts after so many decisions, and those of
    guessing anew, which goes on meanwhile; and the peak memory, without torch and the texts.
    """
    titles = [row["occ1"] for row in read_csv(REGISTERS["swedish"])]
    english = list(dict.fromkeys(row["occ1"] for row in read_csv(REGISTERS["english"])))
    mixed = (f"{one} {two}" for one, two in zip(itertools.cycle(english), titles))
    texts = list(itertools.islice(itertools.chain(titles, mixed), count))
    first = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    codes = sorted({row["hisco_1"] for row in read_csv(REGISTERS["swedish"])})
    with tempfile.TemporaryDirectory() as folder:
        path = write_csv(f"{folder}/texts.csv", ["occ1"], ([text] for text in texts))
        coded = CodedFile(path, system="hisco", key=set(codes))
        page = Decisions(coded, Codes(codes, "hisco", {}), f"{folder}/decided.csv")
        for place in range(decided):
            page.made[place] = Decision((codes[place % 500],), "")
        page.has_changed.set()
        threading.Thread(target=page.learn, daemon=True).start()
        taken, started = [], time.perf_counter()
        while page.guesses is None or len(taken) < 200:
            shown = page.next("one")["text"]
            begin = time.perf_counter()
            page.decide(shown["id"], [codes[0]], "")
            page.next("one")
            taken.append(time.perf_counter() - begin)
            time.sleep(0.1)
            if page.guesses and "guessed" not in locals():
                guessed = time.perf_counter() - started
    taken.sort()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - first
    return {
        "median": taken[len(taken) // 2],
        "99 of 100": taken[len(taken) * 99 // 100],
        "guesses": guessed,
        "MB": peak / 1024,
    }


def picture(path: Path, found: dict[str, dict], decisions: list[int]) -> None:
    def fill(panels) -> None:
        for axes, (name, orders) in zip(panels, found.items()):
            for i, (order, label) in enumerate(ORDERS.items()):
                if order in orders:
                    shares = [100 * mean(orders[order][number], "right") for number in decisions]
                    axes.plot(decisions, shares, marker="o", label=label, color=f"C{i}")
            axes.set(title=name, xlabel="decisions", ylabel="% of rows right")
            axes.grid(alpha=0.3)
            axes.legend()

    draw(path, len(found), fill)


def mean(results: list[dict], name: str) -> float:
    return statistics.mean(each[name] for each in results)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--registers", nargs="+", default=list(REGISTERS), choices=REGISTERS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--decisions", type=int, nargs="+", default=[200, 500, 1000, 2000])
    parser.add_argument("--guesses", action="store_true", help="from those of the built-in model")
    parser.add_argument("--picture", help="draw the shares of rows that are right to this file")
    parser.add_argument("--latency", action="store_true", help="of decisions, on 100,000 texts after 5,000")
    args = parser.parse_args()
    if args.latency:
        found = latencies(100_000, 5_000)
        return finish(found, table(["figure", "seconds, or MB"], found.items()))
    found, lines = {}, []
    for name in args.registers:
        found[name] = {}
        for order in ["learn"] if args.guesses else list(ORDERS)[name != "english" :]:
            runs = [Simulation(name, order, seed, args.guesses).run(args.decisions) for seed in args.seeds]
            found[name][order] = {number: [run[number] for run in runs] for number in args.decisions}
            for number, each in found[name][order].items():
                said = ", ".join(
                    f"{100 * run['said']:.1f} ({100 * run['low']:.1f} to {100 * run['high']:.1f})"
                    f" {100 * run['person']:.1f}"
                    for run in each
                )
                shares = [spread([run[share] for run in each]) for share in ("right", "choices", "similar")]
                lines.append([name, ORDERS[order], number, *shares, said])
    if args.picture:
        picture(Path(args.picture), found, args.decisions)
    heads = ("register", "order", "decisions", "rows right", "choices", "similar", "said, true, by seed")
    finish(found, table(heads, lines))


if __name__ == "__main__":
    main()

"""The pictures of the pages, docs/img, and the outputs of docs/tour.ipynb, from the sample and the results of
the benchmarks:

    python -m benchmarks.screens                     # all of them, in about a quarter of an hour on two cores
    python -m benchmarks.screens review terminal     # some of them

Those of the page, of a sheet and of the terminal need Chromium, plots need matplotlib. In `review` the codes
of the sample stand for a person. `decisions` and `confidence` need the registers of the benchmarks, and are
left out without them.
"""

import html
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from PIL import Image

from .browser import Browser
from .common import REGISTERS, REPO, arguments, command, environment, read_csv, run, write_csv, write_sample
from .quality import grouped, mean

WIDE, PHONE = (1280, 800), (390, 844)  # sizes of the window
ROWS, DECISIONS = 6_000, 150
COLORS = {"ours": "#0072B2", "svm": "#D55E00"}
NAMES = {"ours": "histocc", "svm": "SVM (tf-idf of n-grams)"}
TITLES = {"english": "English register", "swedish": "Swedish job titles"}
SHEET = {"text": 30, "language": 12, "rows": 8, "code_1": 10, "title_1": 60, "prob_1": 10, "decision": 14}
DECIDED = {0: "1", 1: "1", 2: "1", 3: "1", 6: "none", 7: "skip"}  # rows of the sheet that are filled in
PAGE = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; font: 15px/1.45 "DejaVu Sans Mono", monospace }}
.terminal {{ background: #1e1f29; color: #e6e6e6; padding: 14px 20px; white-space: pre-wrap;
  display: inline-block; box-sizing: border-box; width: {width}px }}
.terminal b {{ color: #7ee787; font-weight: normal }}
table {{ border-collapse: collapse; font: 13px "DejaVu Sans", sans-serif }}
td, th {{ border: 1px solid #d0d0d0; padding: 4px 7px; height: 18px; white-space: nowrap; overflow: hidden;
  text-overflow: ellipsis }}
th {{ background: #f0f1f2; color: #555; font-weight: normal; text-align: center }}
tr.head td {{ font-weight: bold; background: #fafafa }}
td.n {{ text-align: right }}
td.d {{ background: #fff6d6 }}
td.d.yes {{ background: #ffe58a; font-weight: bold }}
</style>{content}"""


# ---- the page


@contextmanager
def served(*words: str, folder: str | Path = REPO) -> Iterator[str]:
    """Yield the address of the page that `histocc review` serves."""
    line = [sys.executable, "-m", "histocc", "review", *words, "--no-browser"]
    pipes = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(line, cwd=folder, env=environment(), **pipes) as process:
        try:
            assert process.stdout
            yield next(found[0] for line in process.stdout if (found := re.search(r"http://\S+/", line)))
        finally:
            process.terminate()


def decide(address: str, codes: dict[tuple[str, str], list[str]], decisions: int) -> None:
    """Answer the texts that the page asks for with their codes."""

    def ask(**content) -> dict:
        body = json.dumps({"window": "person", **content}).encode()
        with urllib.request.urlopen(address + "api", body) as reply:
            return json.load(reply)

    text = ask()["text"]
    for _ in range(decisions):
        answer = codes[text["text"], text["language"]]
        text = ask(id=text["id"], answer=answer, seen=text["seen"])["text"]


def review(folder: Path, images: Path) -> None:
    """The page after decisions on the English rows of the sample: in a window, and on a phone."""
    rows = [row for row in read_csv(write_sample(folder / "sample.csv", ROWS)) if row["lang"] == "en"]
    table = write_csv(folder / "register.csv", ["occ1", "lang"], ([r["occ1"], r["lang"]] for r in rows))
    codes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        answer = [row[f"hisco_{i}"] for i in (1, 2, 3) if row[f"hisco_{i}"]]
        codes.setdefault((row["occ1"], row["lang"]), answer)
    flags = ["--key", "hisco", "--guesses", "none", "--by", "Ann"]
    with served("serve", table, *flags) as address, closing(Browser(folder / "profile")) as browser:
        decide(address, codes, DECISIONS)
        for name, size in {"review": WIDE, "review_phone": PHONE}.items():
            browser.resize(*size)
            browser.set_theme("light")
            browser.open(address)
            browser.wait("text")
            while not browser.value("text.near.length > 1 && text.choices[0].prob > 0.4"):
                shown = browser.value("text.id")
                browser.press("s")
                browser.wait(f"text.id !== '{shown}'")
            if name == "review":
                browser.press("/")
                browser.type(browser.value("text.text.split(' ')[0].toLowerCase()"))
                browser.wait("results.length")
            browser.picture(images / f"{name}.png")


def start(folder: Path, images: Path) -> None:
    """The choice of a table, in the folder of the demo."""
    with served(folder=demo(folder)) as address, closing(Browser(folder / "profile")) as browser:
        browser.resize(1100, 790)
        browser.open(address)
        browser.wait("document.body.innerText.includes('register.csv')")
        browser.value(
            "[...document.querySelectorAll('button')].find(x => /register.csv/.test(x.innerText)).click()"
        )
        browser.wait("document.body.innerText.includes('Begin')")
        browser.value(
            "document.body.querySelectorAll('*').forEach(x => { if (!x.children.length) "
            "x.textContent = x.textContent.replace(/(The tables of ).*/, '$1/home/ann/demo') })"
        )
        browser.picture(images / "start.png")


# ---- plots


def histocc(words: str, folder: Path) -> str:
    """Run a command of histocc in `folder` and return its output."""
    line = command(f"-m histocc {words}")
    return subprocess.run(
        line, cwd=folder, env=environment(), capture_output=True, text=True, check=True
    ).stdout


def demo(folder: Path) -> Path:
    """Return the folder of the demo's files, written when it is first asked for."""
    if not (folder / "demo").exists():
        histocc("sample --demo demo", folder)
    return folder / "demo"


def evaluation(folder: Path, images: Path) -> None:
    """An evaluation on texts of the sample that were set aside."""
    write_sample(folder / "sample.csv", ROWS)
    histocc("train sample.csv --output mine --model-size ngrams --prior none --share-test 0.25", folder)
    histocc("evaluate sample.csv --model mine --output report", folder)
    histocc(f"plot report --output {images / 'evaluation.png'} --overwrite", folder)
    (images / "evaluation.svg").unlink()


def curves(folder: Path, images: Path) -> None:
    """The curves of a small model with an encoder."""
    write_sample(folder / "sample.csv", ROWS)
    often = "--batch-size 64 --log-interval 10 --eval-interval 20 --num-epochs 2 --ngram-passes 0"
    histocc(f"train sample.csv --output encoder --model-size tiny {often}", folder)
    histocc(f"plot encoder --output {images / 'curves.png'} --overwrite", folder)
    (images / "curves.svg").unlink()


def learning(folder: Path, images: Path) -> None:
    """Accuracy by labels of histocc and of the SVM, from the results of the benchmarks."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    groups = grouped(json.loads((REPO / "benchmarks" / "results.json").read_text())["quality"]["runs"])
    with rc_context({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.5, 4), layout="constrained")
        panels = figure.subplots(1, 2, sharey=True, width_ratios=[2, 3])
        for axes, (data, title) in zip(panels, TITLES.items()):
            ticks = set()
            for method, color in COLORS.items():
                points = []
                for (name, _, way, flags), entries in groups.items():
                    if (name, way, flags) == (data, method, ""):
                        right = [100 * each["right"]["0"] for each in entries]
                        points.append(
                            (min(each["train"] for each in entries), mean(right), min(right), max(right))
                        )
                x, y, low, high = zip(*sorted(points))
                ticks |= set(x)
                axes.plot(x, y, "o-", color=color, label=NAMES[method])
                axes.fill_between(x, low, high, color=color, alpha=0.2, linewidth=0)
                for number, value in zip(x, y):
                    above = method == "ours"
                    axes.annotate(
                        f"{value:.0f}",
                        (number, value),
                        (0, 7 if above else -17),
                        color=color,
                        textcoords="offset points",
                        ha="center",
                    )
            axes.set(xscale="log", title=title, xlabel="labeled texts", ylim=(0, 100))
            axes.xaxis.set_major_locator(FixedLocator(sorted(ticks)))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter("{x:,.0f}")
            axes.margins(x=0.08)
            axes.grid(alpha=0.3)
        panels[0].set_ylabel("new texts coded right, %")
        panels[0].legend(loc="upper left", frameon=False)
        figure.savefig(images / "learning.png", dpi=100)


def decisions(folder: Path, images: Path) -> None:
    """Rows that are right after so many decisions on the page."""
    if all(path.exists() for path in REGISTERS.values()):
        run(f"-m benchmarks.learning --picture {images / 'decisions.png'}")


def confidence(folder: Path, images: Path) -> None:
    """How often answers of each confidence are right."""
    if all(path.exists() for path in REGISTERS.values()):
        run(f"-m benchmarks.confidence --picture {images / 'confidence.png'}")


# ---- a sheet, a terminal


def shown(folder: Path, content: str, image: Path, width: int) -> None:
    """Write a picture of HTML, as high as its content."""
    page = folder / "page.html"
    page.write_text(PAGE.format(content=content, width=width), encoding="utf-8")
    with closing(Browser(folder / "profile")) as browser:
        browser.resize(width, 100)
        browser.open(page.as_uri())
        browser.resize(width, browser.value("document.documentElement.scrollHeight"))
        browser.picture(image)


def sheet(folder: Path, images: Path) -> None:
    """A sheet of doubtful texts in a spreadsheet program, with some decisions."""
    histocc("predict register.csv --output coded.csv --overwrite", demo(folder))
    histocc("review make coded.csv --output sheet.csv --rows 200 --overwrite", demo(folder))
    rows, columns = read_csv(demo(folder) / "sheet.csv"), [*SHEET]
    letters = "".join(f"<th>{chr(65 + i)}</th>" for i in range(len(columns)))
    widths = "".join(f'<col style="width:{SHEET[name] * 8}px">' for name in columns)
    lines = [f"<tr><th></th>{letters}</tr>"]
    lines.append(f'<tr class="head"><th>1</th>{"".join(f"<td>{name}</td>" for name in columns)}</tr>')
    for number, row in enumerate(rows[:14]):
        row |= {"decision": DECIDED.get(number, ""), "prob_1": f"{float(row['prob_1']):.2f}"}
        cells = ""
        for name in columns:
            kind = "n" * (name == "rows" or name[:4] in ("conf", "prob"))
            kind = f"d{' yes' * bool(row[name])}" if name == "decision" else kind
            cells += f'<td class="{kind}">{html.escape(row[name])}</td>'
        lines.append(f"<tr><th>{number + 2}</th>{cells}</tr>")
    widths = f'<col style="width:34px">{widths}'
    table = f'<table style="table-layout:fixed;width:100%">{widths}{"".join(lines)}</table>'
    shown(folder, table, images / "sheet.png", 1280)


def terminal(folder: Path, images: Path) -> None:
    """What histocc prints when a table is coded."""
    content = ""
    for line in ("", "predict register.xlsx --output coded.xlsx --quiet"):
        said = html.escape(histocc(line, demo(folder)))
        content += f"<b>$ {html.escape(f'histocc {line}'.strip())}</b>\n{said}\n"
    shown(folder, f'<div class="terminal">{content.strip()}</div>', images / "terminal.png", 980)


def tour(folder: Path, images: Path) -> None:
    """The outputs of the notebook, which stays where it is."""
    import nbclient
    import nbformat

    path = REPO / "docs" / "tour.ipynb"
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=1800, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                text = re.sub(r"/\S+/(built-in)-\w+/?", r"~/.cache/histocc/\1/", output.text)
                output.text = re.sub(r"\x1b\[\d*m", "", text).replace("\r\n", "\n")
    nbformat.write(notebook, path)


PICTURES: dict[str, Callable[[Path, Path], None]] = {
    each.__name__: each
    for each in (
        review,
        start,
        learning,
        evaluation,
        curves,
        sheet,
        terminal,
        tour,
        decisions,
        confidence,
    )
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", choices=[*PICTURES, []], metavar="NAME", help=", ".join(PICTURES))
    parser.add_argument("--folder", type=Path, default=REPO / "docs" / "img")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.names or PICTURES:
            print(name, flush=True)
            PICTURES[name](Path(folder), args.folder.resolve())
    for path in (path for path in args.folder.glob("*.png") if path.stat().st_mtime > began):
        with Image.open(path) as image:
            image.convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()

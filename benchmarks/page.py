"""The page docs/benchmarks.md and its pictures, from the results of `python -m benchmarks`."""

import textwrap
from pathlib import Path

from . import census, coding, data, formats, lexicon, processes, quality, recovery, speed
from .common import draw

WIDTH = 150  # columns of the page

# A blank line ends a paragraph; paragraphs are wrapped when the page is written.
PAGE = """# Benchmarks

After this page you know how fast histocc is on a machine like yours, what sets its speed, and how to
measure it on your own machine.

One command measures most of it and writes this page with its pictures: `python -m benchmarks --all` (about
half an hour on two cores; `python -m benchmarks length` measures one part again, and `python -m benchmarks
--help` names the longer parts, which stand at the end). The results and the command of each part are kept in
[results.json](../benchmarks/results.json). [LOG.md](../benchmarks/LOG.md) has the decisions, the ideas that
lost, and the cost of failures and of preparing rows.

{machines}

## Against a plain model

The reference is the same model built of `transformers` and torch parts, with the same weights, rows and
threads; its batches are padded to 128 positions, as the published trainer pads them. Both take turns in one
run, each warm, so that a ratio holds if the machine is slower for a while. Training is in samples per
second, coding in distinct texts per second, from text to codes.

{ratios}

{speed}

## By length of the text

![Milliseconds of a text by its length](benchmarks_length.png)

{length}

## By samples of a step

![Milliseconds of a sample by the samples of a step](benchmarks_batch.png)

{batch}

## By processes

![Samples per second by processes and cores](benchmarks_processes.png)

{processes}

## By rows

![Seconds by rows of a file](benchmarks_rows.png)

{rows}
"""

# Sections of the longer parts; each appears once the first of its parts was measured.
LONGER = {
    "Preparing rows": (("data",), data.words),
    "Accuracy by labels": (("quality",), quality.words),
    "Tables of other classifications": (("tables",), quality.words_of_tables),
    "Number formats on CPUs": (("formats", "formats base"), formats.words),
    "A census": (("census", "census base"), census.words),
    "Lists of titles": (("lexicon",), lexicon.words),
    "Failures": (("recovery 60", "recovery 30"), recovery.words),
}


def write(found: dict, folder: Path) -> None:
    """Write the page. found: part → the output of its script and the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    coded = {part["rows"]: part for name, part in found.items() if name.startswith("coding ")}
    draw(folder / "benchmarks_length.png", 3, lambda panels: speed.figure_by(found["length"], panels))
    draw(folder / "benchmarks_batch.png", 1, lambda panels: speed.figure_by(found["batch"], panels))
    draw(folder / "benchmarks_processes.png", 1, lambda panels: bars(found["processes"], panels[0]), 6.3)
    draw(folder / "benchmarks_rows.png", 1, lambda panels: seconds_by_rows(coded, panels[0]), 6.3)
    if "quality" in found:
        quality.draw(found["quality"], folder / "benchmarks_quality.png")
    beside_reference = [found[name] for name in ("small", "base") if name in found]
    text = PAGE.format(
        machines=machines(found),
        ratios=speed.ratios(beside_reference),
        speed=speed.words(beside_reference),
        length=speed.words_by(found["length"]),
        batch=speed.words_by(found["batch"]),
        processes=processes.words(found["processes"]),
        rows=coding.words(coded),
    )
    for title, (names, words) in LONGER.items():
        if parts := [found[name] for name in names if name in found]:
            commands = " and ".join(f"`{part['command'].strip()}`" for part in parts)
            text += f"\n## {title}\n\n{words(parts)}\n\nMeasured by {commands}.\n"
    (folder / "benchmarks.md").write_text(wrapped(text), encoding="utf-8")


def wrapped(text: str) -> str:
    """Return a page with its paragraphs in lines of at most WIDTH columns; tables and lists as they are."""
    paragraphs = [
        each if each.startswith(("|", "- ")) else textwrap.fill(each, WIDTH, break_on_hyphens=False)
        for each in text.rstrip("\n").split("\n\n")
    ]
    return "\n\n".join(paragraphs) + "\n"


def machines(found: dict) -> str:
    """Return a line on each machine that parts were measured on."""
    parts: dict[str, list[str]] = {}
    for name, part in found.items():
        machine = part["machine"]
        kind = machine["cpu"] or "a CPU"
        if "family" in machine:
            kind += f", family {machine['family']}, model {machine['model']}"
        features = ", ".join(machine["features"])
        words = f"{machine['cores']} cores of {kind} ({features}), torch {machine['torch']}"
        parts.setdefault(words, []).append(name)
    lines = []
    for words, names in parts.items():
        rates = [found[name]["matmul"] for name in names if found[name].get("matmul")]
        best = [
            f"{max(each[form] for each in rates):,.0f} GFLOP/s in {formats.NAMES[form]}"
            for form in (rates[0] if rates else {})
        ]
        reached = f" Its matrix products reach {' and '.join(best)}." if best else ""
        line = f"- {words}: {', '.join(names)}.{reached}"
        lines.append(textwrap.fill(line, WIDTH, subsequent_indent="  "))
    return "\n".join(lines)


def bars(part: dict, axes) -> None:
    rates = processes.medians(part)
    axes.barh(list(rates), list(rates.values()))
    axes.invert_yaxis()
    axes.set(title=f"training, size {part['size']}, {part['batch']} samples a step", xlabel="samples/s")


def seconds_by_rows(coded: dict[int, dict], axes) -> None:
    taken = [number / part["greedy"]["rows_per_sec"] for number, part in coded.items()]
    axes.plot(list(coded), taken, "C1-", marker=".", label="coding, digit by digit")
    axes.set(xscale="log", yscale="log", xlabel="rows of the file", ylabel="seconds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))

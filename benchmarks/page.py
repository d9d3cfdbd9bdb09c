"""docs/benchmarks.md and its pictures, from what `python -m benchmarks` measured."""

import textwrap
from pathlib import Path

import page_coding
import page_processes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

SIDES = {"reference": "plain reference", "float32": "histocc, float32", "bf16": "histocc, bfloat16"}
STYLES = {"reference": "k:", "float32": "C0-", "bf16": "C1--"}

WIDTH = 150  # columns of the page

# A blank line ends a paragraph; paragraphs are wrapped when the page is written.
PAGE = """# Benchmarks

After this page you know how fast histocc is on a machine like yours, what sets its speed, and how to
measure it on your own machine.

One command measures most of it and writes this page with its pictures: `python -m benchmarks --all` (about
half an hour on two cores; `python -m benchmarks length` measures one part again, and `python -m benchmarks
--help` names the longer parts, which stand at the end). What was measured, with
the command of each part, is kept in [results.json](../benchmarks/results.json); what was tried and lost is
in [LOG.md](../benchmarks/LOG.md), and accuracy is measured by `python benchmarks/quality.py`.

{machines}

## Against a plain model

The reference is the same model built of `transformers` and torch parts, with the same weights, rows and
threads; its batches are padded to 128 positions, as the published trainer pads them. Both take turns in one
run, each warm, so that a ratio holds where the machine is slower for a while. Training is in samples per
second, coding in distinct texts per second, from text to codes.

{ratios}

{shares} Both models give losses that differ by {difference:.0e} on the same rows, and the same codes in
{same:.0f} % of the texts in float32.{note}

## By length of the text

![Milliseconds of a text by its length](benchmarks_length.png)

A text costs as much as it is long: {length}, while the reference pays for 128 positions each time.

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

# Sections of the longer parts, each there once all its parts were measured; those with ? may be missing.
LONGER = {
    "Products in int8": (("products",), ("products_words", "products")),
    "Number formats on CPUs": (("formats", "formats base"), ("formats_words", "formats")),
    "A census": (("census", "census base?"), ("census_words", "census", "register_words")),
    "Students of a larger model": (("students",), ("students_words", "students")),
    "Students with fewer labels": (("students with fewer labels",), ("fewer_labels_words", "students")),
    "Failures": (("recovery 60", "recovery 30"), ("recovery_words",)),
}


def longer(found: dict) -> str:
    """The sections of LONGER, with a line of the commands that measured them."""
    sections: list[str] = []
    for title, (names, functions) in LONGER.items():
        if all(name in found for name in names if not name.endswith("?")):
            parts = [found[name] for name in (each.rstrip("?") for each in names) if name in found]
            commands = " and ".join(f"`{part['command'].strip()}`" for part in parts)
            texts = [
                getattr(page_coding if hasattr(page_coding, function) else page_processes, function)(parts)
                for function in functions
            ]
            sections += [f"## {title}", *filter(None, texts), f"Measured by {commands}."]
    return "\n\n".join(sections)


def write(found: dict, folder: Path) -> None:
    """found: part → what its script printed and the machine."""
    folder.mkdir(parents=True, exist_ok=True)
    data = by_rows(found, "data")
    coded = by_rows(found, "predict")
    for name, figure in {
        "length": by_length(found["length"]),
        "batch": by_batch(found["batch"]),
        "processes": by_processes(found["processes"]),
        "rows": rows_figure(data, coded),
    }.items():
        FigureCanvasAgg(figure)
        figure.savefig(folder / f"benchmarks_{name}.png", dpi=70)
    text = PAGE.format(
        machines=machines(found),
        ratios=ratios([found["small"], found["base"]]),
        shares=shares([found["small"], found["base"]]),
        difference=max(found[name]["loss difference"] for name in ("small", "base")),
        same=100 * min(found[name]["decode"]["same codes float32"] for name in ("small", "base")),
        note="".join(found[name].get("note", "") for name in ("small", "base")),
        length=length_words(found["length"]),
        batch=batch_words(found["batch"]),
        processes=processes_words(found["processes"]),
        rows=rows_words(data, coded),
    )
    text = f"{text}\n{longer(found)}"
    (folder / "benchmarks.md").write_text(wrapped(text), encoding="utf-8")


def wrapped(text: str) -> str:
    """The paragraphs of a page in lines of at most WIDTH columns; tables and lists as they are."""
    return (
        "\n\n".join(
            each
            if each.startswith(("|", "- "))
            else textwrap.fill(each, WIDTH, break_long_words=False, break_on_hyphens=False)
            for each in text.rstrip("\n").split("\n\n")
        )
        + "\n"
    )


def machines(found: dict) -> str:
    """A sentence on each machine that parts were measured on."""
    parts: dict[str, list[str]] = {}
    for name, part in found.items():
        parts.setdefault(machine_words(part["machine"]), []).append(name)
    described = {}
    for words, names in parts.items():
        rated = [found[name] for name in names if found[name].get("matmul")]
        rates = " and ".join(
            f"{rate:,.0f} GFLOP/s in {'bfloat16' if name == 'bf16' else name}"
            for name, rate in (best_matmul(rated) if rated else {}).items()
        )
        described[words] = f" Its matrix products reach {rates}." if rates else ""
    if len(parts) == 1:
        return "".join(f"Machine: {words}.{rates}" for words, rates in described.items())
    return "\n".join(
        textwrap.fill(f"- {words}: {', '.join(parts[words])}.{rates}", WIDTH, subsequent_indent="  ")
        for words, rates in described.items()
    )


def machine_words(machine: dict) -> str:
    kind = machine["cpu"] or "a CPU"
    if "family" in machine:
        kind += f", family {machine['family']}, model {machine['model']}"
    return f"{machine['cores']} cores of {kind} ({', '.join(machine['features'])}), torch {machine['torch']}"


def best_matmul(parts: list[dict]) -> dict[str, float]:
    """The machine's rate of matrix products by format, GFLOP/s: the best of the parts, since a machine that
    is shared is slower at times.
    """
    return {name: max(part["matmul"][name] for part in parts) for name in parts[0]["matmul"]}


def ratios(parts: list[dict]) -> str:
    """The table: rows are a size and a work, columns are the sides."""
    names = [name for name in SIDES if any(name in part["train"] for part in parts)]
    lines = ["| | " + " | ".join(SIDES[name] for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for part in parts:
        decode = part["decode"]
        works = {
            f"training, {part['batch']} samples a step": part["train"],
            "coding, linear decoder": {name: decode.get(f"flat {name}") for name in names},
            f"coding, digit by digit ({decode['codes written']:.1f} codes a text)": {
                name: decode.get(f"greedy {name}") for name in names
            },
        }
        for work, rates in works.items():
            cells = [cell(rates.get(name), rates["reference"], name) for name in names]
            lines.append(f"| {part['size']}: {work} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(rate: float | None, base: float, name: str) -> str:
    if rate is None:
        return "–"
    words = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return words if name == "reference" else f"{words} ({rate / base:.3g} times)"


def shares(parts: list[dict]) -> str:
    best = best_matmul(parts)
    words = [
        f"{part['size']} {100 * share * part['matmul'][name] / best[name]:.0f} % in"
        f" {'bfloat16' if name == 'bf16' else name}"
        for part in parts
        for name, share in part["share of matmul"].items()
        if name != "reference"
    ]
    return (
        f"Counted on the real positions alone, training reaches this share of the machine's matrix product"
        f" rate: {', '.join(words)}."
    )


def new_axes(columns: int, width: float = 4.2) -> tuple[Figure, list]:
    """width: of a column, in inches."""
    figure = Figure(figsize=(width * columns, 3.4), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def cost_lines(axes, rates: dict, kind: str) -> None:
    values = [int(value) for value in rates]
    for side, style in STYLES.items():
        if all(f"{kind} {side}" in each for each in rates.values()):
            cost = [1000 / each[f"{kind} {side}"] for each in rates.values()]
            axes.plot(values, cost, style, marker=".", label=SIDES[side])
    axes.set(yscale="log")
    plain_numbers(axes.yaxis)
    axes.grid(alpha=0.3, which="both")


def plain_numbers(axis) -> None:
    """Ticks of a logarithmic axis as 3 and 20, not as powers of ten; as many as there is room for."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def by_length(part: dict) -> Figure:
    titles = {"train": "training", "flat": "coding, linear decoder", "greedy": "coding, digit by digit"}
    figure, panels = new_axes(len(titles))
    for axes, (kind, title) in zip(panels, titles.items()):
        cost_lines(axes, part["rates"], kind)
        axes.set(title=f"{title}, size {part['size']}", xlabel="characters of a text")
    panels[0].set(ylabel="milliseconds of a text")
    panels[0].legend(fontsize=8)
    return figure


def by_batch(part: dict) -> Figure:
    figure, (axes,) = new_axes(1)
    cost_lines(axes, part["rates"], "train")
    axes.set(title=f"training, size {part['size']}", xlabel="samples of a step", xscale="log")
    axes.set(ylabel="milliseconds of a sample")
    axes.set_xticks([int(value) for value in part["rates"]], list(part["rates"]), minor=False)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=8)
    return figure


def medians(part: dict) -> dict[str, float]:
    """Samples/s of the three ways to use the cores, by name."""
    rates, many = part["samples_per_sec"]["ddp"], part["processes"]
    names = ("1 process, 1 core", f"1 process, {many} cores", f"{many} processes, 1 core each")
    return {
        name: sorted(rates[key])[len(rates[key]) // 2]
        for name, key in zip(names, ("one core", "one", "many"))
    }


def by_processes(part: dict) -> Figure:
    figure, (axes,) = new_axes(1, 6.3)
    found = medians(part)
    axes.barh(list(found), list(found.values()))
    axes.invert_yaxis()
    axes.set(title=f"training, size {part['size']}, {part['batch']} samples a step", xlabel="samples/s")
    return figure


def by_rows(found: dict, script: str) -> dict[int, dict]:
    return {part["rows"]: part for name, part in found.items() if name.startswith(script + " ")}


def rows_figure(data: dict[int, dict], coded: dict[int, dict]) -> Figure:
    figure, (axes,) = new_axes(1, 6.3)
    axes.plot(
        list(data), [each["prepare_sec"] for each in data.values()], "C0-", marker=".", label="preparing"
    )
    again = [each["cached_start_sec"] for each in data.values()]
    axes.plot(list(data), again, "C0:", marker=".", label="second start")
    for (way, label), style in zip(
        (("every row", "coding every row"), ("de-duplicated", "coding distinct texts")), ("C1-", "C1--")
    ):
        seconds = [rows / each[f"greedy, {way}"]["rows_per_sec"] for rows, each in coded.items()]
        axes.plot(list(coded), seconds, style, marker=".", label=label)
    axes.set(xscale="log", yscale="log", xlabel="rows of the file", ylabel="seconds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def length_words(part: dict) -> str:
    rates = part["rates"]
    first, last = list(rates)[0], list(rates)[-1]
    kinds = {"train": "training", "flat": "the linear decoder", "greedy": "coding digit by digit"}
    words = [
        f"{name} takes {rates[first][f'{kind} float32'] / rates[last][f'{kind} float32']:.1f} times as long"
        for kind, name in kinds.items()
    ]
    return f"at {last} characters, {', '.join(words)} as at {first}"


def batch_words(part: dict) -> str:
    rates = {int(value): each["train float32"] for value, each in part["rates"].items()}
    first, best = min(rates), max(rates, key=rates.get)
    return (
        f"With {first} samples a step, training does {100 * rates[first] / rates[best]:.0f} % of the"
        f" samples per second that it does with {best}, the fastest. Samples are computed in up to four"
        " groups of similar length, which need samples to choose from, and the optimizer's work is shared by"
        " all samples of a step."
    )


def processes_words(part: dict) -> str:
    core, one, many = medians(part).values()
    count = part["processes"]
    return (
        f"{count} processes with a core each do {many / core:.2f} times the samples of one process with one"
        f" core, and {many / one:.2f} times those of one process with {count} cores; what they compute is the"
        " same. [MULTI_GPU_TRAINING.md](../MULTI_GPU_TRAINING.md) has the commands for several GPUs and"
        " machines."
    )


def rows_words(data: dict[int, dict], coded: dict[int, dict]) -> str:
    most, rows = data[max(data)], max(coded)
    last = coded[rows]
    every, distinct = (last[f"greedy, {way}"] for way in ("every row", "de-duplicated"))
    return (
        f"{max(data):,} rows of the sample are prepared in {most['prepare_sec']:.1f} s, once for each file"
        f" and formatter ({most['prepare_rows_per_sec']:,.0f} rows/s, {most['prepare_peak_mb']:,.0f} MB); a"
        f" later start on the same file takes {most['cached_start_sec']:.2f} s. A model of size tiny codes"
        f" {rows:,} rows of the sample, digit by digit, at {distinct['rows_per_sec']:,.0f} rows/s where equal"
        f" texts are coded once, the default, and at {every['rows_per_sec']:,.0f} where every row is coded"
        f" ({distinct['peak_mb']:,.0f} and {every['peak_mb']:,.0f} MB)."
    )

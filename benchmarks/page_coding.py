"""The sections of docs/benchmarks.md on coding a lot: number formats, a census, students."""

import statistics

FORMATS = {"float32": "float32", "bf16": "bfloat16", "int8": "int8"}
DECODERS = {"greedy": "digit by digit", "flat": "linear decoder"}


def formats_words(parts: list[dict]) -> str:
    return (
        "Distinct texts per second of one core by the number format in which a model codes, and the share of"
        f" {parts[0]['rows']:,} register rows that get the codes of float32; the models were trained on such"
        " rows for some minutes, but base for seconds, so that its codes are not worth comparing."
    )


def formats(parts: list[dict]) -> str:
    """The table: size and decoder, and for each format its rate, its codes and its confidence."""
    found = {name: each for part in parts for name, each in part["formats"].items()}
    names = list(next(iter(found.values())))
    lines = [
        "| | " + " | ".join(FORMATS[name] for name in names) + " | same codes | conf apart: mean, most |",
        "|---" * (len(names) + 3) + "|",
    ]
    for name, each in found.items():
        size, decoder = name.split(", ")
        base = each["float32"]["texts_per_sec"]
        rates = [
            f"{each[form]['texts_per_sec']:,.0f}"
            + (f" ({each[form]['texts_per_sec'] / base:.2f} times)" if form != "float32" else "")
            for form in names
        ]
        if size == "base":
            lines.append(f"| {size}: {DECODERS[decoder]} | {' | '.join(rates)} | – | – |")
            continue
        same = ", ".join(f"{100 * each[form]['same_rows']:.2f} %" for form in names[1:])
        apart = ", ".join(
            f"{each[form]['conf_mean']:.4f}, {each[form]['conf_most']:.2f}" for form in names[1:]
        )
        lines.append(f"| {size}: {DECODERS[decoder]} | {' | '.join(rates)} | {same} | {apart} |")
    return "\n".join(lines)


def products_words(parts: list[dict]) -> str:
    threads = parts[0]["threads"]
    return (
        "A linear layer from float32 to float32 by several libraries: how many times as fast as in float32,"
        f" on {'one thread' if threads == 1 else f'{threads} threads'}, and the mean error as a share of the"
        " mean size of the right values. Weights are rounded beforehand, per output; activations on the way,"
        " by ours and torchao per row. The other int8 ones round them per tensor: what a text gets then"
        " depends on the texts beside it. `--int8` takes ours."
    )


def products(parts: list[dict]) -> str:
    """The table: a product, and each library's rate against float32."""
    found = parts[0]["products"]
    names = [name for name in next(iter(found.values())) if name != "float32"]
    lines = ["| | float32 | " + " | ".join(names) + " |", "|---" * (len(names) + 2) + "|"]
    for name, each in found.items():
        base = each["float32"]["ms"]
        cells = [f"{base / each[lib]['ms']:.2f} times, {100 * each[lib]['error']:.2g} %" for lib in names]
        lines.append(f"| {name} | {base:.3g} ms | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def census_words(parts: list[dict]) -> str:
    """What stands above the table."""
    part = parts[0]
    known = part["known_rows_per_sec"]
    gains = [
        found["all cores"] / found["one core"]
        for each in parts
        for formats in each["rates"].values()
        for found in formats.values()
    ]
    return (
        "Hours for a census of 18 million rows on this machine, digit by digit, by division from measured"
        " rates of `python -m histocc.predict` on distinct texts, for several shares of distinct texts among"
        f" the rows: equal texts are coded once, and rows whose text is known are read and written at"
        f" {known:,.0f} rows/s. One core is `--processes 1` with one thread; all cores, the default, does"
        f" {min(gains):.2f} to {max(gains):.2f} times as much on its {part['cores']} cores."
    )


def census(parts: list[dict]) -> str:
    """The table: size, format and cores, and hours for each share of distinct texts."""
    shares = (1.0, 0.38, 0.10)
    heads = ["", "texts/s", *(f"{share:.0%} distinct".replace("%", " %") for share in shares)]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for part in parts:
        known = part["known_rows_per_sec"]
        for size, formats in part["rates"].items():
            for form, by_cores in formats.items():
                for cores, rate in by_cores.items():
                    hours = [18e6 * (share / rate + 1 / known) / 3600 for share in shares]
                    cells = " | ".join(f"{each:.1f} h" for each in hours)
                    lines.append(f"| {size}, {FORMATS[form]}, {cores} | {rate:,.0f} | {cells} |")
    return "\n".join(lines)


def register_words(parts: list[dict]) -> str:
    register = next((part["register"] for part in parts if part["register"]), None)
    if not register:
        return ""
    return (
        f"A register of {register['rows']:,} rows, whose texts follow Zipf's law, was coded at size tiny in"
        f" {register['seconds']:,.0f} s ({register['rows_per_sec']:,.0f} rows/s); killed twice on"
        f" the way and given again, the command resumed {register['resumed']} times, and its output was"
        f" {'the same to the byte' if register['equal'] else 'another one'}."
    )


def students_words(parts: list[dict]) -> str:
    part = parts[0]
    seeds = max(len(each["results"]) for each in part["found"])
    return (
        f"A student learns from the labelled rows and {part['texts']:,} unlabelled texts what its teacher"
        " answers; the same model alone has the labelled rows. Both are trained for the steps that fit into"
        f" the same {60 * part['minutes']:.0f} seconds, behind the fit of the n-grams. Figures are % of"
        f" distinct held-out texts whose set of codes is right, mean and half the range over {seeds} seeds"
        " (the teacher: one), and distinct texts per second of one core in float32."
        f"{part.get('note', '')}"
    )


def fewer_labels_words(parts: list[dict]) -> str:
    """What stands above the table of students that have fewer labelled rows than their teacher."""
    part = parts[0]
    return (
        f"As above, with {part['labelled']:,} labelled rows for the students, alone or with the teacher,"
        f" which has learned from all of them, planned for {60 * part['minutes']:.0f} seconds; the texts of"
        " the other rows are among the unlabelled ones, as the texts of a register of which a part was coded"
        f" by hand.{part.get('note', '')}"
    )


def students(parts: list[dict]) -> str:
    """The table: a model, what each decoder gets right, and how fast it codes."""
    decoders = {"seq2seq": "writing decoder", "linear": "linear decoder", "both": "both"}
    heads = ["", "seconds", *decoders.values(), "texts/s, linear", "texts/s, digit by digit"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for each in parts[0]["found"]:
        cells = [
            spread([100 * result[name]["all"] for result in each["results"]])
            if name in each["results"][0]
            else "–"
            for name in decoders
        ]
        seconds = statistics.mean(result["seconds"] for result in each["results"])
        rates = [f"{each['texts_per_sec'][name]:,.0f}" for name in ("flat", "greedy")]
        lines.append("| " + " | ".join([each["name"], f"{seconds:.0f}", *cells, *rates]) + " |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Mean, and half the way from the lowest to the highest where there are several."""
    mean = f"{statistics.mean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:.1f}"

"""The sections of docs/benchmarks.md on several processes: slow links, failures."""

import re
import statistics

NONE = "none"  # link without limit
WAYS = {
    "ddp": "every step together",
    "bf16": "`--gradient-compression bf16`",
    "accumulate-4": "`--accumulate-steps 4`",
    "sync-10": "`--sync-every 10`",
    "sync-20": "`--sync-every 20`",
    "sync-50": "`--sync-every 50`",
    **{
        f"mean-{every}": f"`--sync-every {every} --outer-learning-rate 1 --outer-momentum 0`"
        for every in (10, 20, 50)
    },
}


def links(parts: list[dict]) -> str:
    """The table: a size and a way, and what it does over each link, as a share of DDP without limit."""
    limits = list(dict.fromkeys(link for part in parts for link in runs(part)["ddp"]))
    words = ["no limit" if link == NONE else re.sub("([a-z])bit", in_words, link) for link in limits]
    lines = ["| | MB a step | " + " | ".join(words) + " |", "|---" * (len(limits) + 2) + "|"]
    for part in parts:
        base = runs(part)["ddp"][NONE]["samples_per_sec"]
        for way, found in runs(part).items():
            sent = max(found[NONE]["bytes_per_step"]) / 1e6
            cells = [of_ddp(found[link], base) if link in found else "–" for link in limits]
            lines.append(f"| {table(part)['size']}: {WAYS[way]} | {sent:.3g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def in_words(found: re.Match) -> str:
    """The unit of a rate as tc writes it."""
    return f" {found[1].upper()}bit/s"


def table(part: dict) -> dict:
    return part["tables"][0]


def runs(part: dict) -> dict[str, dict[str, dict]]:
    """Way → link → what was measured."""
    return table(part)["runs"]


def of_ddp(run: dict, base: float) -> str:
    return f"{run['samples_per_sec'] / base:.2f}" if "samples_per_sec" in run else "–"


def links_words(parts: list[dict]) -> str:
    """What stands above the table."""
    sizes = [
        f"size {table(part)['size']} takes {part['batch']} samples a step on both, sends"
        f" {4 * table(part)['trained_parameters'] / 1e6:.0f} MB of gradients and does"
        f" {runs(part)['ddp'][NONE]['samples_per_sec']:.1f} samples/s"
        for part in parts
    ]
    return (
        "Two nodes of one process and one core each, joined by a link whose rate is limited at both ends; no"
        " n-grams. Figures are samples per second as a share of what every step together does without a limit"
        f" ({'; '.join(sizes)}); with `--sync-every` each node takes"
        " steps on its own and so does more than that. The bytes are those that a node's device sends for an"
        " optimizer step."
    )


def forecast_words(parts: list[dict]) -> str:
    """How far what a dry run says is from what was measured."""
    errors = {
        f"{table(part)['size']}, {way}, {'no limit' if link == NONE else link}": run["forecast"]
        / run["samples_per_sec"]
        - 1
        for part in parts
        for way, found in runs(part).items()
        for link, run in found.items()
        if "forecast" in run and "samples_per_sec" in run
    }
    if not errors:
        return ""
    worst = max(errors, key=lambda name: abs(errors[name]))
    usual = statistics.median(map(abs, errors.values()))
    return (
        f"What a dry run of both nodes says of these {len(errors)} cases beforehand (`--dry-run --processes 2"
        f" --link-gbit …`) is {100 * usual:.0f} % off in the median and {100 * abs(errors[worst]):.0f} % at"
        f" most ({worst})."
    )


def accuracy(parts: list[dict]) -> str:
    """The table: a way, and % of held-out texts that each decoder codes right, over the seeds."""
    decoders = [name for name in parts[0]["tables"][0]["accuracy"]["ddp"][0] if name in ("seq2seq", "linear")]
    lines = ["| | " + " | ".join(f"{name} decoder" for name in decoders) + " |"]
    lines.append("|---" * (len(decoders) + 1) + "|")
    for found in [each for part in parts for each in part["tables"]]:
        what = "with n-grams" if found["ngrams"] == "default" else "without n-grams"
        for way, seeds in found["accuracy"].items():
            cells = [spread([100 * seed[name]["all"] for seed in seeds]) for name in decoders]
            lines.append(f"| {found['size']}, {what}: {WAYS[way]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def accuracy_words(parts: list[dict]) -> str:
    seeds = parts[0]["tables"][0]["accuracy"]["ddp"]
    return (
        f"Two processes, the same {seeds[0]['steps']:,} steps of {parts[0]['batch']} real rows for all,"
        f" {len(seeds)} seeds: % of {seeds[0]['texts']:,} distinct held-out texts that are coded right, mean"
        " and each seed."
    )


def spread(values: list[float]) -> str:
    """Mean, and all values."""
    return f"{statistics.mean(values):.1f} ({', '.join(f'{value:.1f}' for value in sorted(values))})"


def recovery_words(parts: list[dict]) -> str:
    """What the failures of measured jobs cost."""
    words = [
        f"With a failure every {part['every']:.0f} s ({part['failures']} in {part['minutes']:.0f} minutes)"
        f" and a checkpoint every {part['steps'] / part['saves']:.0f} steps the first new step came"
        f" {part['seconds_median']:.1f} s after the death in the median and {part['seconds_max']:.1f} s at"
        f" most, {statistics.mean(part['repeated']):.1f} steps were repeated, and {100 * part['ettr']:.0f} %"
        " of the time was training whose results were kept."
        for part in parts
    ]
    first = parts[0]
    return (
        f"A job of {first['processes']} processes with a core each, size {first['size']}, under `torchrun"
        " --max-restarts`; a process that is drawn by chance is killed without warning."
        f" {' '.join(words)} A step takes {first['step_seconds']:.2f} s; a checkpoint holds the"
        f" training up for {first['blocked']:.2f} s and is written {first['written']:.1f} s later."
    )

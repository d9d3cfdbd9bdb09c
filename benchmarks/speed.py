"""How fast training and coding are beside a plain model of well-known parts, which takes turns with ours in
one run, each warm; and what they cost by the length of the texts, or by the samples of a step.

    python -m benchmarks.speed                                    # size small, batch 64, two threads
    python -m benchmarks.speed --size base --batch 32 --rounds 3
    python -m benchmarks.speed --by length                        # texts of 8 to 120 characters
    python -m benchmarks.speed --by batch --values 16 64 256
    python -m benchmarks.speed --device cuda --size base --batch 512

Same rows, weights and threads; the device's matrix product rates are measured in the same run. The reference
(reference_model.py) gets its batches ready-made and padded to 128, ours makes its own as a run does. On a GPU
the reference has torch's fused AdamW, and computes in every format that ours does.
"""

import argparse
import contextlib
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import torch
from torch import Tensor

import finetune
from histocc import seq2seq_mixer_engine as engine
from histocc.formatter import BlockyFormatter
from histocc.job import inputs
from histocc.job.config import decide
from histocc.job.model import make_loss, make_model, place
from histocc.predict.coder import Coder
from histocc.runtime.device import Precision, matmul_rate
from histocc.runtime.world import World
from histocc.text import encode
from histocc.trainer import batches, loop
from histocc.trainer.schedule import make_optimizer

from .common import arguments, data_flags, finish, in_turns, read_csv, table, write_csv, write_sample
from .reference_model import Reference

SIDES = {"reference": "plain reference", "reference bf16": "plain reference, bfloat16"}
SIDES |= {"float32": "histocc, float32", "bf16": "histocc, bfloat16"}
STYLES = {"reference": "k:", "float32": "C0-", "bf16": "C1--"}
FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KINDS = {"train": "training", "flat": "coding, linear decoder", "greedy": "coding, digit by digit"}
VALUES = {"length": [8, 16, 32, 64, 120], "batch": [16, 32, 64, 128, 256]}


def matmul_rates(precisions: list[str], device: torch.device) -> dict[str, float]:
    """Rates of matrix products by format, GFLOP/s; a format that the device only emulates is left out of
    `precisions`, in place.
    """
    names = dict.fromkeys(["float32", *precisions])
    rates = {name: matmul_rate(device, FORMATS[name], 2.0) / 1e9 for name in names}
    for name in [name for name in precisions if rates[name] < rates["float32"] / 2]:
        precisions.remove(name)
        print(f"{name}: left out, this device only emulates it")
    return rates


class Bench:
    """Both models with the same weights, and the batches of both.

    Args:
        args: of the command line.
        folder: for prepared data.
        source: flags of the rows; None: the real ones, or those of the sample.
    """

    def __init__(self, args: argparse.Namespace, folder: str, source: str | None = None):
        self.args, self.step, self.device = args, 0, torch.device(args.device)
        self.world = World(device=self.device)
        as_the_reference = "--ngrams none --empty-blocks all --linear-loss mean"
        flags = f"{source or data_flags('english', folder)} --model-size {args.size}"
        flags += f" --batch-size {args.batch} --device {args.device} --save-path {folder}"
        flags += f" {as_the_reference} {args.flags}"
        with contextlib.redirect_stdout(None):
            asked = finetune.get_args_parser().parse_args(shlex.split(flags))
            asked, read = inputs.prepare_data(asked, self.world, asked.dataset, [])
            self.formatter, self.data = BlockyFormatter.from_dict(read.settings.formatter), read.data
            made = make_model(decide(asked), self.formatter, self.world, self.data)
        self.asked, self.model, self.config = made
        self.loss = make_loss(self.asked, self.formatter)
        self.train_batches = self.batches(self.config)
        self.padded = self.batches({**self.config, "memory_mask": False}, groups=1)
        width, codes = self.config["decoder_dim_feedforward"], len(self.data.codes)
        self.reference = Reference(self.model.config, self.model.vocab_size, codes, width)
        self.share_weights()
        place(self.model, self.train_batches.rows, self.world, self.asked.compile)
        self.reference.to(self.device)
        self.use_rate(2e-5)

    def batches(self, config: dict, groups: int | None = None) -> batches.MicroBatches:
        """Return batches of training rows; groups: number of groups of similar length in a step."""
        rows, _ = inputs.make_rows(self.asked, self.formatter, self.data, config)
        plan = batches.batch_plan(self.asked, rows, self.world)
        return batches.MicroBatches(rows, replace(plan, groups=groups or plan.groups), 0, 1)

    def share_weights(self) -> None:
        """Our weights for the reference."""
        keys = self.reference.load_state_dict(self.model.state_dict(), strict=False)
        assert not keys.unexpected_keys, keys
        assert not [name for name in keys.missing_keys if "position_ids" not in name], keys

    def use_rate(self, rate: float) -> None:
        """A new optimizer; its rate is reached after ten steps."""
        self.optimizer = make_optimizer(self.model, self.asked.weight_decay, rate)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=10)

    def train(self, steps: int, precision: str = "float32") -> None:
        """Takes `steps` of ours, all within an epoch."""
        first = self.step % (len(self.train_batches) - steps)
        loader = (part for number in range(first, first + steps) for part in self.train_batches[0, number])
        given = self.model, loader, self.loss, self.optimizer, self.device, self.scheduler, self.step
        named = {"log_interval": None, "precision": Precision(precision, self.device)}
        self.step = engine.train_one_epoch(*given, **named)

    def padded_batch(self, number: int) -> dict:
        return loop.to_device(self.padded[0, number][0], self.device)

    def reference_loss(self, batch: dict) -> Tensor:
        target = batch["targets_seq2seq"]
        outputs = self.reference(batch["input_ids"], batch["attention_mask"].long(), target[:, :-1])
        return engine.row_losses(self.loss, outputs, batch)["loss"].mean()

    @torch.no_grad()
    def difference(self) -> float:
        """Return the relative difference of both losses on the first batch, without dropout."""
        self.model.eval()
        self.reference.eval()
        theirs, task = float(self.reference_loss(self.padded_batch(0))), engine.MixerTask(self.loss)
        parts = [loop.to_device(part, self.device) for part in self.train_batches[0, 0]]
        losses = torch.cat([task.losses(self.model, part)["loss"] for part in parts])
        return abs(float(losses.mean()) - theirs) / theirs

    def training_rates(self, precisions: list[str]) -> dict[str, float]:
        """Samples per second, by side."""
        fused = self.device.type == "cuda"
        optimizer = torch.optim.AdamW(self.reference.parameters(), lr=2e-5, fused=fused)
        ready = [self.padded_batch(number) for number in range(self.args.steps)]

        def reference(steps: int, precision: str = "float32") -> None:
            self.reference.train()
            for batch in ready[:steps]:
                with Precision(precision, self.device).autocast():
                    loss = self.reference_loss(batch)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.reference.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

        Precision("float32", self.device).use()  # the reference, too, has TF32 if there is any
        sides: dict[str, Callable[[int], object]] = {"reference": reference}
        if fused and "bf16" in precisions:
            sides["reference bf16"] = partial(reference, precision="bf16")
        sides |= {name: partial(self.train, precision=name) for name in precisions}
        turns = in_turns(sides, self.args.rounds, self.args.steps, self.device)
        return {name: self.args.batch * self.args.steps / taken for name, taken in turns.items()}

    def flops_of_a_sample(self) -> float:
        """Return the operations of both passes for the real characters and the tokens of targets."""
        task = engine.MixerTask(self.loss, model=self.model)
        parts = [part for number in range(4) for part in self.train_batches[0, number]]
        return sum(map(task.flops, parts)) / sum(len(part["weights"]) for part in parts)

    def coding_rates(self, precisions: list[str]) -> dict[str, float]:
        """Texts per second by "kind side", and how the codes of both sides agree; ours from text to codes."""
        args = self.args
        self.share_weights()
        self.reference.eval()
        rows = self.data.val if len(self.data.val) >= args.rows else self.data.train
        index = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).numpy()
        names = [self.data.languages[number] for number in rows.language[index]]
        pairs = list(dict.fromkeys(zip(rows.strings(index), names)))[: args.rows]
        texts, languages = map(list, zip(*pairs))
        starts = range(0, len(texts), args.decode_batch)
        parts = [slice(start, start + args.decode_batch) for start in starts]
        inputs = [encode(texts[part], languages[part], width=128) for part in parts]
        inputs = [[torch.from_numpy(array).long().to(self.device) for array in each] for each in inputs]
        state = {"key": {code: i for i, code in enumerate(self.data.codes)}, "config": self.config}
        state["languages"] = self.data.languages
        made = partial(Coder, self.model, self.formatter, state, batch_size=args.decode_batch)
        coders = {name: made(precision=Precision(name, self.device)) for name in precisions}
        tokens, answers, rates = self.formatter.max_seq_len - 2, {}, {}

        def reference(kind: str, precision: str, count: int) -> None:
            decode = self.reference.flat if kind == "flat" else partial(self.reference.greedy, tokens=tokens)
            with Precision(precision, self.device).autocast():
                answers[kind, f"reference {precision}"] = torch.cat([decode(*x) for x in inputs[:count]])

        def ours(kind: str, name: str, count: int) -> None:
            some = slice(count * args.decode_batch)
            answers[kind, name] = coders[name].code(texts[some], languages[some], kind)

        for kind in ("flat", "greedy"):
            sides: dict[str, Callable] = {name: partial(ours, kind, name) for name in precisions}
            sides["reference"] = partial(reference, kind, "float32")
            if self.device.type == "cuda" and "bf16" in precisions:
                sides["reference bf16"] = partial(reference, kind, "bf16")
            turns = in_turns(sides, max(2, args.rounds // 2), len(parts), self.device)
            rates |= {f"{kind} {name}": len(texts) / taken for name, taken in turns.items()}
        written = answers["greedy", precisions[0]]
        rates["codes written"] = statistics.mean(len(each.codes) for each in written)
        for name, coder in coders.items():
            theirs = cut(answers["greedy", "reference float32"], self.formatter.block_size).tolist()
            codes = [self.formatter.clean_pred([2, *row, 3]).split("&") for row in theirs]
            pairs = zip(codes, answers["greedy", name])
            same = (set(filter(None, theirs)) == set(ours.codes) for theirs, ours in pairs)
            rates[f"same codes {name}"] = statistics.mean(same)
            probabilities = torch.from_numpy(coder.probabilities(texts, languages, "flat"))
            furthest = (answers["flat", "reference float32"].cpu() - probabilities).abs().max()
            rates[f"greatest difference of a probability {name}"] = float(furthest)
        return rates


def cut(tokens: Tensor, block_size: int) -> Tensor:
    """Without what comes after the first empty block, which ours does not write; int64 [B, blocks × size]."""
    body = tokens.clone().unflatten(1, (-1, block_size))
    body[(body[:, :, 0] == 1).long().cumsum(1) > 0] = 1
    return body.flatten(1)


def rows_of_length(length: int, folder: str) -> str:
    """Flags of rows whose texts have so many characters exactly, joined and cut from those of the sample."""
    sample, random = read_csv(write_sample(f"{folder}/sample.csv", 1_000)), Random(length)

    def text(first: str) -> str:
        while len(first) < length:
            first += f" {random.choice(sample)['occ1']}"
        return first[: length - 1].strip().ljust(length, "x")

    rows = [(text(row["occ1"] or "x"), row["lang"], row["hisco_1"]) for row in sample]
    path = write_csv(f"{folder}/rows.csv", ("occ1", "lang", "hisco_1"), rows)
    return f"--dataset {path} --formatter hisco --target-cols hisco_1 --language-col lang --share-val 0.3"


def measure(args: argparse.Namespace) -> dict:
    """Return the figures of one size and batch, for results.json."""
    found = {name: getattr(args, name) for name in ("size", "batch", "threads", "device")}
    found["matmul"] = matmul_rates(args.precisions, torch.device(args.device))
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, folder)
        found["loss difference"] = bench.difference()
        found["train"], flops = bench.training_rates(args.precisions), bench.flops_of_a_sample()
        found["share of matmul"] = {
            name: rate * flops / 1e9 / found["matmul"].get(name.split()[-1], found["matmul"]["float32"])
            for name, rate in found["train"].items()
        }
        bench.use_rate(1e-3)
        bench.train(min(args.learn, len(bench.train_batches) - 1))
        found["decode"] = bench.coding_rates(args.precisions)
    return found


def measure_by(args: argparse.Namespace) -> dict:
    """Rates by length of the texts or samples of a step."""
    matmul_rates(args.precisions, torch.device(args.device))
    found = {name: getattr(args, name) for name in ("by", "size", "threads", "device")} | {"rates": {}}
    steps = args.steps
    for value in args.values or VALUES[args.by]:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            args.batch = value if args.by == "batch" else args.batch
            args.steps = steps or max(1, 128 // args.batch)
            bench = Bench(args, folder, rows_of_length(value, folder) if args.by == "length" else None)
            rates = {f"train {name}": rate for name, rate in bench.training_rates(args.precisions).items()}
            if args.by == "length":
                bench.use_rate(1e-3)
                bench.train(min(args.learn, len(bench.train_batches) - 1))
                coding = bench.coding_rates(args.precisions)
                rates |= {name: coding[name] for name in coding if name.startswith(("flat", "greedy"))}
        found["rates"][str(value)] = rates
    return found


def ratios(parts: list[dict]) -> str:
    """The table: rows are a size and a work, columns are the sides."""
    names = [name for name in SIDES if any(name in part["train"] for part in parts)]
    rows = []
    for part in parts:
        works = {f"training, {part['batch']} samples a step": part["train"]}
        decode = part["decode"]
        written = f", digit by digit ({decode['codes written']:.1f} codes a text)"
        for kind, words in (("flat", ", linear decoder"), ("greedy", written)):
            works[f"coding{words}"] = {name: decode.get(f"{kind} {name}") for name in names}
        for work, rates in works.items():
            base = rates.get("reference")
            cells = [cell(rates.get(name), None if name == "reference" else base) for name in names]
            rows.append([f"{part['size']}: {work}", *cells])
    return table(["", *(SIDES[name] for name in names)], rows)


def cell(rate: float | None, base: float | None) -> str:
    if rate is None:
        return "–"
    words = f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
    return words if base is None else f"{words} ({rate / base:.3g} times)"


def words(parts: list[dict]) -> str:
    """Return the text below the table."""
    best = {name: max(part["matmul"][name] for part in parts) for name in parts[0]["matmul"]}
    shares = [
        f"{part['size']} {100 * share * part['matmul'][name] / best[name]:.0f} % in"
        f" {SIDES[name].removeprefix('histocc, ')}"
        for part in parts
        for name, share in part["share of matmul"].items()
        if not name.startswith("reference")
    ]
    difference = max(part["loss difference"] for part in parts)
    same = min(part["decode"].get("same codes float32", 1.0) for part in parts)
    return (
        "Counted on the real positions alone, training reaches this share of the machine's matrix product"
        f" rate: {', '.join(shares)}. Both models give losses that differ by {difference:.0e} on the same"
        f" rows, and the same codes in {100 * same:.0f} % of the texts in"
        f" float32.{''.join(part.get('note', '') for part in parts)}"
    )


def words_by(part: dict) -> str:
    """Return the text below the picture by length or by samples."""
    rates = part["rates"]
    first, last = list(rates)[0], list(rates)[-1]
    if part["by"] == "length":
        kinds = {"train": "training", "flat": "the linear decoder", "greedy": "coding digit by digit"}
        longer = [
            f"{name} takes {rates[first][f'{kind} float32'] / rates[last][f'{kind} float32']:.1f} times"
            for kind, name in kinds.items()
        ]
        return (
            f"A text costs as much as it is long: at {last} characters, {', '.join(longer)} as long as at"
            f" {first}, while the reference pays for 128 positions each time."
        )
    samples = {int(value): each["train float32"] for value, each in rates.items()}
    best = max(samples, key=lambda value: samples[value])
    return (
        f"With {first} samples a step, training does {100 * samples[int(first)] / samples[best]:.0f} % of the"
        f" samples per second that it does with {best}, the fastest. Samples are computed in groups of"
        " similar length, which need samples to choose from, and the optimizer's work is shared by all"
        " samples of a step."
    )


def figure_by(part: dict, panels) -> None:
    """Draws milliseconds of a text or sample on one or three axes of matplotlib."""
    values = [int(value) for value in part["rates"]]
    for axes, (kind, title) in zip(panels, KINDS.items()):
        for side, style in STYLES.items():
            if all(f"{kind} {side}" in rates for rates in part["rates"].values()):
                cost = [1000 / rates[f"{kind} {side}"] for rates in part["rates"].values()]
                axes.plot(values, cost, style, marker=".", label=SIDES[side])
        axes.set(yscale="log", title=f"{title}, size {part['size']}")
        if part["by"] == "batch":
            axes.set(xscale="log")
            axes.set_xticks(values, [str(value) for value in values])
            axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.set_xlabel("characters of a text" if part["by"] == "length" else "samples of a step")
    panels[0].set_ylabel("milliseconds")
    panels[0].legend(fontsize=8)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--by", choices=list(VALUES))
    parser.add_argument("--values", nargs="+", type=int, help="characters of a text, or samples of a step")
    parser.add_argument("--size", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--decode-batch", type=int, default=64)
    parser.add_argument("--rows", type=int, default=256, help="distinct texts to code")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="timed steps of a turn (default: 4; --by: 128 samples)")
    parser.add_argument("--learn", type=int, default=60, help="steps before coding: models stop after a code")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precisions", nargs="+", default=["float32", "bf16"], choices=FORMATS)
    parser.add_argument("--flags", default="", help="more flags of finetune.py, in one argument")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.by:
        found = measure_by(args)
        heads = [args.by, *next(iter(found["rates"].values()))]
        rows = [[value, *map("{:.1f}".format, rates.values())] for value, rates in found["rates"].items()]
        return finish(found, f"{table(heads, rows)}\n\n{words_by(found)}")
    args.steps = args.steps or 4
    found = measure(args)
    finish(found, f"{ratios([found])}\n\n{words([found])}")


if __name__ == "__main__":
    main()

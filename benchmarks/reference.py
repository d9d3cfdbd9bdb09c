#!/usr/bin/env python3
"""How fast training and decoding are, as ratios to a plain reference model that takes turns with ours in one
run, each warm:

    python benchmarks/reference.py                                    # size small, batch 64, two threads
    python benchmarks/reference.py --size base --batch 32 --rounds 3
    python benchmarks/reference.py --device cuda --size base --batch 512 --no-reference

Same rows, weights and threads; the device's matrix product rates are measured in the same run. Prints tables
and one JSON line. The reference (reference_model.py) gets its batches ready-made and padded to 128, ours
makes its own as a run does.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import torch
from reference_model import Reference
from training import Training

from histocc.predict.coder import Coder
from histocc.runtime.device import Precision, matmul_rate
from histocc.seq2seq_mixer_engine import MixerTask, row_losses
from histocc.text import LANGUAGE_SEPARATOR, SEP_ID
from histocc.trainer import loop

MATMUL_SECONDS = 2.0
FORMATS = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
REAL = REPO.parent / "shared" / "data" / "occupations_en.csv"


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(work, device: torch.device) -> float:
    sync(device)
    started = time.perf_counter()
    work()
    sync(device)
    return time.perf_counter() - started


def in_turns(sides: dict, rounds: int, sizes: tuple[int, int], device: torch.device) -> dict[str, float]:
    """Median seconds of each side's work of the second size. In a turn it first does work of the first
    size, untimed, so that it is as warm as it is alone; the order alternates; the first round is not
    counted.
    """
    times = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in sorted(sides, reverse=number % 2 == 1):
            sides[name](sizes[0])
            times[name].append(seconds(lambda name=name: sides[name](sizes[1]), device))
    return {name: statistics.median(each[1:]) for name, each in times.items()}


def forward_flops(
    config, positions: int, tokens: int, feedforward: int, vocabulary: int, codes: int
) -> float:
    """Multiplications and additions of one text's forward pass."""
    h, f, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    layer = 8 * h * h + 4 * h * f  # per position: four projections, feed-forward
    molecules = positions / config.downsampling_rate
    # outer layers, two convolutions
    total = positions * (2 * (layer + 4 * h * positions) + 2 * h * h + 16 * h * h)
    total += molecules * layers * (layer + 4 * h * molecules)
    total += 3 * (
        tokens * (12 * h * h + 4 * h * feedforward + 4 * h * (positions + tokens)) + positions * 4 * h * h
    )
    return total + tokens * 2 * h * vocabulary + 2 * h * codes + 2 * h * h


def ceilings(precisions: list[str], device: torch.device) -> dict[str, float]:
    """Rates of matrix products by format, GFLOP/s; a format that the device only emulates is left out of
    `precisions`, in place, and said.
    """
    found = {
        name: matmul_rate(device, FORMATS[name], MATMUL_SECONDS) / 1e9
        for name in dict.fromkeys(["float32", *precisions])
    }
    print("matrix products: " + ", ".join(f"{name} {rate:,.3g} GFLOP/s" for name, rate in found.items()))
    for name in [name for name in precisions if found[name] < found["float32"] / 2]:
        precisions.remove(name)
        print(f"{name}: left out, this device only emulates it")
    return found


def default_rows(folder: str) -> list[str]:
    if REAL.exists():
        return [str(REAL), "--target-cols", "hisco_1"]
    from histocc.sample.files import write
    from histocc.sample.generate import rows

    path = str(Path(folder) / "rows.csv")
    write(rows(10_000, 1), path)
    return [path, "--target-cols", "hisco_1", "hisco_2"]


class Bench(Training):
    """Both models with the same weights, and the batches of both.

    args: the arguments below; source: a file and its flags, by default real rows, or those of the sample.
    """

    def __init__(self, args, folder: str, source: list[str] | None = None):
        source = source or default_rows(folder)
        self.args, self.device = args, torch.device(args.device)
        # as the reference
        flags = [
            "--dataset",
            *source,
            "--formatter",
            "hisco",
            "--language-col",
            "lang",
            "--model-size",
            args.size,
            "--save-path",
            folder,
            "--ngrams",
            "none",
            "--empty-blocks",
            "all",
            "--linear-loss",
            "mean",
        ]
        super().__init__([*flags, "--batch-size", str(args.batch), *args.flags], self.device)
        self.padded = self.make_loaders({**self.config, "memory_mask": False}, whole=True)
        self.reference = Reference(
            self.model.config,
            self.model.vocab_size,
            len(self.data.codes),
            self.config["decoder_dim_feedforward"],
        )
        missing = self.reference.load_state_dict(self.model.state_dict(), strict=False)
        assert not missing.unexpected_keys and not [
            name for name in missing.missing_keys if "position_ids" not in name
        ], missing
        self.train_seen_rows()
        self.reference.to(self.device)

    def padded_batch(self, number: int) -> dict:
        return loop.to_device(self.padded["train"].dataset[0, number][0], self.device)

    def reference_loss(self, batch: dict) -> torch.Tensor:
        target = batch["targets_seq2seq"]
        outputs = self.reference(batch["input_ids"], batch["attention_mask"].long(), target[:, :-1])
        return row_losses(self.loss, outputs, batch)["loss"].mean()

    def difference(self) -> float:
        """Of the losses of both models on the first batch, without dropout; relative."""
        self.model.eval(), self.reference.eval()
        with torch.no_grad():
            theirs = float(self.reference_loss(self.padded_batch(0)))
            parts = [loop.to_device(part, self.device) for part in self.loaders["train"].dataset[0, 0]]
            ours = sum(
                float((MixerTask(self.loss).losses(self.model, part)["loss"] * part["weights"]).sum())
                for part in parts
            ) / len(self.plan_rows(0))
        return abs(ours - theirs) / theirs

    def plan_rows(self, number: int):
        return self.loaders["train"].dataset.order.batch(0, number)

    # ---- training ----

    def reference_steps(self, steps: int) -> None:
        self.reference.train()
        for batch in self.batches[:steps]:
            self.reference_loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(self.reference.parameters(), 1.0)
            self.reference_optimizer.step()
            self.reference_optimizer.zero_grad()

    def rates(self, precisions: list[str]) -> dict:
        """Samples per second of training, by name."""
        self.reference_optimizer = torch.optim.AdamW(self.reference.parameters(), lr=2e-5)
        self.use_rate(2e-5)
        Precision("float32", self.device).use()  # the reference, too, has TF32 where there is any
        self.batches = [self.padded_batch(number) for number in range(self.args.steps)]
        sides = {"reference": self.reference_steps} if not self.args.no_reference else {}
        for name in precisions:
            sides[name] = partial(self.train, precision=Precision(name, self.device))
        turns = in_turns(sides, self.args.rounds, (1, self.args.steps), self.device)
        return {name: self.args.batch * self.args.steps / each for name, each in turns.items()}

    def real_flops(self) -> float:
        """Of one training step's row on its real positions alone, mean over some batches: forward and twice
        that backward.
        """
        dataset = self.padded["train"].dataset
        lengths = torch.cat([dataset[0, number][0]["attention_mask"].sum(1) for number in range(4)]).tolist()
        return 3 * statistics.mean(
            forward_flops(
                self.model.config,
                n,
                1 + 2 * self.formatter.block_size,
                self.config["decoder_dim_feedforward"],
                self.model.vocab_size,
                len(self.data.codes),
            )
            for n in lengths
        )

    # ---- decoding ----

    def texts(self, rows: int) -> list[dict]:
        """Distinct validation texts, padded to 128, in batches."""
        dataset, seen, kept = self.padded["val"].dataset, set(), []
        for number in range(len(dataset)):
            batch = dataset[0, number][0]
            for ids, mask in zip(batch["input_ids"], batch["attention_mask"]):
                if (key := ids.numpy().tobytes()) not in seen and len(kept) < rows:
                    seen.add(key)
                    kept.append((ids, mask))
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(1)).tolist()
        return [
            {
                "input_ids": torch.stack([kept[i][0] for i in part]).to(self.device),
                "attention_mask": torch.stack([kept[i][1] for i in part]).to(self.device),
            }
            for part in (
                order[start : start + self.args.decode_batch]
                for start in range(0, len(order), self.args.decode_batch)
            )
        ]

    def decode(self, precisions: list[str]) -> dict:
        """Texts per second of both; ours as users get them, from texts to codes."""
        self.reference.load_state_dict(self.model.state_dict(), strict=False)
        self.reference.eval()
        batches, tokens = self.texts(self.args.rows), self.formatter.max_seq_len - 2
        texts, languages = zip(*(text_of(ids) for batch in batches for ids in batch["input_ids"].tolist()))
        key = {code: i for i, code in enumerate(self.data.codes)}
        state = {"key": key, "languages": self.data.languages, "config": self.config}
        coders = {
            name: Coder(
                self.model,
                self.formatter,
                state,
                batch_size=self.args.decode_batch,
                precision=Precision(name, self.device),
            )
            for name in precisions
        }
        found, rates = {}, {}

        def reference(kind: str, count: int) -> None:
            inputs = [
                {**batch, "attention_mask": batch["attention_mask"].long()} for batch in batches[:count]
            ]
            decode = self.reference.flat if kind == "flat" else partial(self.reference.greedy, tokens=tokens)
            found[kind] = torch.cat([decode(**batch) for batch in inputs])

        def ours(kind: str, name: str, count: int) -> None:
            some = slice(count * self.args.decode_batch)
            found[kind, name] = coders[name].code(list(texts[some]), list(languages[some]), kind)

        for kind in ("flat", "greedy"):
            sides = {"reference": partial(reference, kind)} if not self.args.no_reference else {}
            sides |= {name: partial(ours, kind, name) for name in precisions}
            turns = in_turns(sides, max(2, self.args.rounds // 2), (1, len(batches)), self.device)
            rates |= {f"{kind} {name}": len(texts) / each for name, each in turns.items()}
        rates["codes written"] = statistics.mean(len(each.codes) for each in found["greedy", precisions[0]])
        if not self.args.no_reference:
            separator = self.formatter.sep_value
            theirs = [self.formatter.clean_pred([2, *row, 3]) for row in cut(found["greedy"]).tolist()]
            for name, coder in coders.items():
                pairs = zip(theirs, found["greedy", name])
                same = [set(filter(None, one.split(separator))) == set(each.codes) for one, each in pairs]
                rates[f"same codes {name}"] = statistics.mean(same)
                probabilities = coder.probabilities(list(texts), list(languages), "flat")
                difference = (found["flat"].cpu() - torch.from_numpy(probabilities)).abs().max()
                rates[f"greatest difference of a probability {name}"] = float(difference)
        return rates


def text_of(ids: list[int]) -> tuple[str, str]:
    """(text, language) of the characters of an input."""
    characters = "".join(map(chr, ids[1:])).split(chr(SEP_ID))[0]
    language, _, text = characters.partition(LANGUAGE_SEPARATOR)
    return text, language


def cut(tokens: torch.Tensor) -> torch.Tensor:
    """Without what comes after the first empty block, which ours does not write; int64 [B, blocks × 5]."""
    body = tokens.clone().unflatten(1, (-1, 5))
    ended = (body[:, :, 0] == 1).long().cumsum(1) > 0
    body[ended] = 1
    return body.flatten(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", default="small", choices=("tiny", "small", "base"))
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--decode-batch", type=int, default=64)
    parser.add_argument("--rows", type=int, default=256, help="distinct texts to decode")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a turn")
    parser.add_argument(
        "--learn", type=int, default=60, help="steps before decoding, so that the model stops after a code"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--precisions", nargs="+", default=["float32", "bf16"], choices=("float32", "bf16", "fp16")
    )
    parser.add_argument("--no-reference", action="store_true")
    parser.add_argument("--only", choices=("train", "decode"))
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="flags of finetune.py, last")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    found = {
        "size": args.size,
        "batch": args.batch,
        "threads": args.threads,
        "device": args.device,
        "torch": torch.__version__,
        "matmul": ceilings(args.precisions, device),
    }
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, folder)
        found["loss difference"] = bench.difference()
        print(f"loss of both models on the same rows differs by {found['loss difference']:.1e}")
        if args.only != "decode":
            found["train"], flops = bench.rates(args.precisions), bench.real_flops()
            base, found["share of matmul"] = found["train"].get("reference"), {}
            for name, rate in found["train"].items():
                share = rate * flops / 1e9 / found["matmul"].get(name, found["matmul"]["float32"])
                found["share of matmul"][name] = share
                print(
                    f"train {name:10} {rate:9.1f} samples/s"
                    + (f"  {rate / base:5.2f}×" if base else "")
                    + f"  {share:4.0%} of the matrix product rate on real positions"
                )
            if device.type == "cuda":
                found["memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
                print(f"most memory: {found['memory_gb']:.1f} GB")
        if args.only != "train":
            bench.use_rate(1e-3, warmup=10)
            bench.step = 0
            bench.train(args.learn, Precision("float32", device))
            found["decode"] = bench.decode(args.precisions)
            for name, value in found["decode"].items():
                kind, _, what = name.partition(" ")
                base = found["decode"].get(f"{kind} reference")
                ratio = f" texts/s {value / base:6.2f}×" if base and kind in ("flat", "greedy") else ""
                print(f"decode {name:24} {value:9.4g}{ratio}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()

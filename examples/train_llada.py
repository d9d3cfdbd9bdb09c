#!/usr/bin/env python3
"""Train a masked-diffusion language model (LLaDA) on text or tokens, or an autoregressive one to compare.

    python examples/train_llada.py --save_dir ./llada
    torchrun --nproc_per_node=4 examples/train_llada.py --distributed --data_dir FOLDER --save_dir ./llada
    SCRIPT=examples/train_llada.py ./launch_training.sh 2 FOLDER

FOLDER has text, to learn its bytes, or tokens: arrays train.npy and val.npy, and metadata.json with their
vocab_size. Without it the text is the Python code of this repository. The same command, given again,
continues.
"""

import math
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # before torch is imported, which takes seconds

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from examples.text import MaskedDraws, MaskedWindows, Windows, read_data
from examples.transformer import SIZES, Transformer, sample
from histocc.runtime.config import Count, Parser, flag
from histocc.runtime.errors import UserError
from histocc.runtime.frame import start
from histocc.trainer import script
from histocc.trainer.config import ScriptConfig
from histocc.trainer.script import Training

DATA_FLAG = "--data_dir"  # the launchers pass DATA here
OWN_CODE = (str(REPO / "histocc"), str(REPO / "examples"))
OBJECTIVES = ("diffusion", "autoregressive")


class Diffusion:
    """The weighted cross entropy of the masked tokens: an upper bound for the text, in nats per token."""

    def __init__(self, mask, unit):
        self.mask, self.columns = mask, ("loss", f"bits_per_{unit}")

    def losses(self, model, batch):
        logits = model(batch["tokens"].masked_fill(batch["masked"], self.mask))
        each = cross_entropy(logits.transpose(1, 2), batch["tokens"], reduction="none")
        return {"loss": (each * batch["masked"]).sum(1) * batch["weight"].to(each.dtype)}

    def metrics(self, model, batch):
        loss = self.losses(model, batch)["loss"]
        return {"loss": loss, self.columns[1]: loss / math.log(2)}


class Autoregressive(Diffusion):
    """The cross entropy of each token given those before it in its window: exact."""

    def losses(self, model, batch):
        tokens = batch["tokens"]
        logits = model(torch.cat([torch.full_like(tokens[:, :1], self.mask), tokens[:, :-1]], 1))
        return {"loss": cross_entropy(logits.transpose(1, 2), tokens, reduction="none").mean(1)}


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    """text and model"""

    save_path: str = "./llada"
    num_epochs: int = 5
    batch_size: int = 32
    learning_rate: float | None = 4e-3
    eval_interval: int = 500
    data_dir: list[str] = flag(
        OWN_CODE,
        "files or folders of text, or a folder of tokens: train.npy, val.npy, metadata.json with vocab_size",
        "--data-root",
        resumable=True,
    )
    model_name: str = flag(
        "tiny",
        f"size of a new model ({', '.join(SIZES)}), or a folder or file with a checkpoint to start from",
        resumable=True,
    )
    objective: str = flag(
        "diffusion", "learn masked tokens, or each token after the others", choices=OBJECTIVES
    )
    window: Count = flag(64, "bytes or tokens that the model sees at once")
    val_windows: Count = flag(64, "most windows to validate on: the first ones")
    sample: Count | None = flag(
        None, "print this many bytes or tokens written by the model", metavar="NUMBER", resumable=True
    )


def get_args_parser():
    return Parser(Config, "train_llada.py", (__doc__ or "").split("\n", 1)[0])


def size_of(args: Config) -> list[int]:
    """Return width, layers and heads, from the name or the checkpoint. Raises UserError."""
    if args.model_name in SIZES:
        return list(SIZES[args.model_name])
    config = script.read_checkpoint(args.model_name, "--model-name")[0].get("config", {})
    if "size" not in config:
        raise UserError(f"--model-name {args.model_name}: holds no model of this script")
    return config["size"]


def run(args, world):
    """Train on text or tokens. All ranks."""

    def make():
        causal = args.objective == "autoregressive"
        width, layers, heads = world.run_on_main(lambda: size_of(args))  # only its node must see a checkpoint
        data = read_data(args.data_dir)
        train, val = (Windows, Windows) if causal else (MaskedWindows, MaskedDraws)
        config = {"size": [width, layers, heads], "window": args.window, "objective": args.objective}
        config |= {"vocabulary": data.vocabulary} if data.unit == "token" else {}
        model = Transformer(width, layers, heads, causal, data.vocabulary)
        return Training(
            model,
            (Autoregressive if causal else Diffusion)(data.vocabulary, data.unit),
            train(data.train, args.window, args.seed),
            val(data.val, args.window, most=args.val_windows),
            entries={"config": config},
            about=[
                f"Dataset: {data.files}: {len(data.train):,} {data.unit}s for training,"
                f" {len(data.val):,} for validation",
                f"Model: {args.objective}, width {width}, {layers} layers, {heads} heads",
                f"Model parameters: {sum(p.numel() for p in model.parameters()):,}",
                f"Vocabulary size: {data.vocabulary:,} and a mask",
            ],
            finish=lambda model: (
                args.sample and world.print(sample(model, args.sample, causal, args.seed, data.vocabulary))
            ),
        )

    if args.model_name not in SIZES:
        args = args.with_decided(initial_checkpoint=args.model_name)
    script.train(get_args_parser(), args, world, make)


def main(argv=None):
    start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Train a masked-diffusion language model (LLaDA) on bytes of text, or an autoregressive one to compare with.

    python examples/train_llada.py --save_dir ./llada
    torchrun --nproc_per_node=4 examples/train_llada.py --distributed --data_dir FOLDER --save_dir ./llada
    SCRIPT=examples/train_llada.py ./launch_training.sh 2 FOLDER

Without --data_dir the text is the Python code of this repository. The same command, given again, continues.
"""

import math
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # from here on a signal is heard, though importing torch takes seconds

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from examples.text import MaskedDraws, MaskedWindows, Windows, read_text
from examples.transformer import MASK, SIZES, Transformer, sample
from histocc.runtime.config import Count, Parser, flag
from histocc.runtime.errors import UserError
from histocc.runtime.world import start
from histocc.trainer import script
from histocc.trainer.config import ScriptConfig
from histocc.trainer.script import Training

DATA_FLAG = "--data_dir"  # to which the launchers give DATA
OWN_CODE = (str(REPO / "histocc"), str(REPO / "examples"))
OBJECTIVES = ("diffusion", "autoregressive")


class Diffusion:
    """Cross entropy of the masked bytes, weighted: an upper bound of that of the text, in nats per byte."""

    columns = ("loss", "bits_per_byte")

    def losses(self, model, batch):
        logits = model(batch["tokens"].masked_fill(batch["masked"], MASK))
        each = cross_entropy(logits.transpose(1, 2), batch["tokens"], reduction="none")
        return {"loss": (each * batch["masked"]).sum(1) * batch["weight"].to(each.dtype)}

    def metrics(self, model, batch):
        loss = self.losses(model, batch)["loss"]
        return {"loss": loss, "bits_per_byte": loss / math.log(2)}


class Autoregressive(Diffusion):
    """Cross entropy of each byte given those before it in its window: exact."""

    def losses(self, model, batch):
        tokens = batch["tokens"]
        logits = model(torch.cat([torch.full_like(tokens[:, :1], MASK), tokens[:, :-1]], 1))
        return {"loss": cross_entropy(logits.transpose(1, 2), tokens, reduction="none").mean(1)}


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    """text and model"""

    save_path: str = "./llada"
    num_epochs: int = 5
    batch_size: int = 32
    learning_rate: float | None = 4e-3
    eval_interval: int = 500
    data_dir: list[str] = flag(OWN_CODE, "files or folders of text", "--data-root", resumable=True)
    model_name: str = flag(
        "tiny",
        f"size of a new model ({', '.join(SIZES)}), or a folder or file with a checkpoint to start from",
        resumable=True,
    )
    objective: str = flag(
        "diffusion", "what is learned: masked bytes, or each byte after the others", choices=OBJECTIVES
    )
    window: Count = flag(64, "bytes that the model sees at once")
    val_windows: Count = flag(64, "windows to validate on, at most: the first ones")
    sample: Count | None = flag(
        None, "print so many bytes of the model's own", metavar="BYTES", resumable=True
    )


def get_args_parser():
    return Parser(Config, "train_llada.py", (__doc__ or "").split("\n", 1)[0])


def size_of(args: Config) -> list[int]:
    """Width, layers and heads: by name, or as the checkpoint has them. Raises UserError."""
    if args.model_name in SIZES:
        return list(SIZES[args.model_name])
    config = script.read_checkpoint(args.model_name, "--model-name")[0].get("config", {})
    if "size" not in config:
        raise UserError(f"--model-name {args.model_name}: holds no model of this script")
    return config["size"]


def run(args, world):
    """All ranks."""

    def make():
        causal, (width, layers, heads) = args.objective == "autoregressive", size_of(args)
        text, held_out = read_text(args.data_dir)
        world.print(f"Text: {len(text):,} bytes for training, {len(held_out):,} for validation")
        train, val = (Windows, Windows) if causal else (MaskedWindows, MaskedDraws)
        config = {"size": [width, layers, heads], "window": args.window, "objective": args.objective}
        return Training(
            Transformer(width, layers, heads, causal),
            Autoregressive() if causal else Diffusion(),
            train(text, args.window, args.seed),
            val(held_out, args.window, most=args.val_windows),
            entries={"config": config},
            finish=lambda model: args.sample and world.print(sample(model, args.sample, causal, args.seed)),
        )

    if args.model_name not in SIZES:
        args = args.decide(initial_checkpoint=args.model_name)
    script.train(get_args_parser(), args, world, make)


def main(argv=None):
    start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Train a model that finds the answer to a question in an image (after PRS-Med), on scenes or your images.

    python examples/train_prs_med.py --checkpoint_dir ./scenes
    torchrun --nproc_per_node=4 examples/train_prs_med.py --distributed --data_root FOLDER
    SCRIPT=examples/train_prs_med.py ./run_multi_gpu_train.sh FOLDER 4

FOLDER has PNG images, their masks, and questions.csv (image, mask, question, answer). Without it scenes are
drawn. The same command, given again, continues.
"""

import importlib.util
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from histocc.runtime import signals

if __name__ == "__main__":
    signals.start_listening()  # before torch is imported, which takes seconds

import numpy as np
from torch.nn.functional import cross_entropy

from examples.images import Images
from examples.scenes import Scenes
from examples.segmentation import Segmenter, overlap, structure_loss
from histocc.runtime.config import Count, Parser, flag
from histocc.runtime.files import OwnFiles, atomic_write
from histocc.runtime.frame import start
from histocc.trainer import script
from histocc.trainer.config import ScriptConfig
from histocc.trainer.script import Training

DATA_FLAG = "--data_root"  # the launchers pass DATA here
SHOWN, PICTURES = 8, "pictures.png"


class Segmentation:
    """The task: mask, answer and, in the first epochs, modality."""

    columns = ("loss", "loss_mask", "loss_answer", "loss_modality", "dice", "iou", "answer_acc")

    def losses(self, model, batch):
        return self.of(batch, *model(batch["image"], batch["question"]))

    def of(self, batch, mask, answer, modality):
        parts = {
            "loss_mask": structure_loss(mask, batch["mask"].to(mask.dtype)),
            "loss_answer": cross_entropy(answer, batch["answer"], reduction="none"),
            "loss_modality": cross_entropy(modality, batch["modality"], reduction="none"),
        }
        weighted = parts["loss_modality"] * batch["modality_weight"].to(mask.dtype)
        return {"loss": parts["loss_mask"] + parts["loss_answer"] + weighted, **parts}

    def metrics(self, model, batch):
        mask, answer, modality = model(batch["image"], batch["question"])
        dice, iou = overlap(mask, batch["mask"])
        right = answer.argmax(1) == batch["answer"]
        return {**self.of(batch, mask, answer, modality), "dice": dice, "iou": iou, "answer_acc": right}


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    """images and model"""

    instead = {
        **ScriptConfig.instead,
        "image_size": "images keep their size; resize the files: mogrify -resize 256x256! *.png",
    }
    save_path: str = "./prs_med"
    num_epochs: int = 8
    batch_size: int = 16
    learning_rate: float | None = 3e-3
    weight_decay: float = 1e-5
    eval_interval: int = 125
    data_root: str | None = flag(
        None, "images, masks and questions.csv", "--data-dir", metavar="FOLDER", resumable=True
    )
    scenes: Count = flag(2000, "drawn scenes to train on, without a folder")
    val_scenes: Count = flag(256, "drawn scenes to validate on")
    width: int = flag(32, "channels of the model", choices=(16, 32, 64, 128))
    shuffle_questions: bool = flag(
        False,
        "with --eval-only: validate with the questions of other images, to see whether the model reads",
        resumable=True,
    )


def get_args_parser():
    return Parser(Config, "train_prs_med.py", (__doc__ or "").split("\n", 1)[0])


def draw(args, world, rows, model):
    """Draw the first validation images with truth and prediction into the run's folder. Rank 0 only."""
    if args.eval_only or not world.is_main or importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    device = next(model.parameters()).device
    batch = rows.batch(np.arange(min(SHOWN, len(rows))), 0)
    mask, answer, _ = (part.cpu() for part in model(batch["image"].to(device), batch["question"].to(device)))
    figure = Figure(figsize=(2 * len(mask), 6), layout="constrained")
    for i, column in enumerate(np.atleast_2d(figure.subplots(3, len(mask), squeeze=False)).T):
        title = f"{rows.asked(i)}\n{rows.answers[answer[i].argmax()]} ({rows.answers[batch['answer'][i]]})"
        column[0].set_title(title, fontsize="x-small")
        column[0].imshow(batch["image"][i].permute(1, 2, 0))
        column[1].imshow(batch["mask"][i], vmin=0, vmax=1, cmap="gray")
        column[2].imshow(mask[i].sigmoid(), vmin=0, vmax=1, cmap="gray")
        for axes, name in zip(column, ("image", "truth", "prediction")):
            axes.set(xticks=[], yticks=[], ylabel=name if i == 0 else "")
    [path] = OwnFiles(args.save_path).claim(PICTURES)
    with atomic_write(path) as file:
        figure.savefig(file, format="png", dpi=100)
    world.print(f"Pictures of {len(mask)} validation images: {path}")


def run(args, world):
    """Train on scenes or images. All ranks."""

    def make():
        shuffled = args.shuffle_questions
        if args.data_root:
            train, val = Images(args.data_root, False), Images(args.data_root, True, shuffled)
        else:
            train, val = (
                Scenes(args.scenes, 2 * args.seed),
                Scenes(args.val_scenes, 2 * args.seed + 1, shuffled),
            )
        sizes = {"width": args.width, "answers": len(train.answers), "modalities": len(train.modalities)}
        model, finish = Segmenter(**sizes), partial(draw, args, world, val)
        about = [
            f"Dataset: {args.data_root or 'drawn scenes'} ({len(train):,} rows for training,"
            f" {len(val):,} for validation)",
            f"Model: convolutions of width {args.width} on images, a character encoder on questions",
            f"Model parameters: {sum(p.numel() for p in model.parameters()):,}",
            f"Vocabulary size: 256 (bytes of a question); {len(train.answers):,} answers",
        ]
        return Training(
            model, Segmentation(), train, val, entries={"config": sizes}, about=about, finish=finish
        )

    script.train(get_args_parser(), args, world, make)


def main(argv=None):
    start(get_args_parser(), run, argv)


if __name__ == "__main__":
    main()

"""The mixer's task, and `train_one_epoch`, `evaluate`, `train` with their published signatures. They run the
loop of `histocc/trainer/loop.py`. This file computes the losses, figures and operations of a batch.

Nothing here handles files or arguments: the caller passes `save` and `log` functions.

A batch is a dict with input_ids [B, S], attention_mask [B, S], targets_seq2seq int [B, T], targets_linear
(float [B, C], or int [B, K], the indices of each row's codes with −1 for none), and the entries for the loop.
"""

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sized
from typing import Any, cast

import torch
from torch import Tensor, nn

from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.model import metrics
from histocc.model.decoding import greedy_from_memory
from histocc.model.loss import MEAN, ROWS
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.model.ngrams import NoEncoder
from histocc.runtime import checkpoint
from histocc.runtime.device import Precision
from histocc.runtime.parallel import unwrap
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World, current_world
from histocc.trainer import loop
from histocc.trainer.log import RunLog, log_columns

LOSSES = ("loss", "loss_linear", "loss_seq2seq")
ACCURACIES = ("seq_acc", "token_acc", "flat_acc")
COLUMNS = log_columns((*LOSSES, *ACCURACIES))  # columns of logs.csv
INSTEAD = {  # remedies for arguments of the published engine and others
    "save_dir": "pass save=…, a function that writes checkpoints; see histocc.trainer.loop.Run",
    "log_wandb": "pass log=…, a function that takes a row of the log",
    "data_loader_eval": "train() validates, with data_loader_val among its data_loaders",
    **dict.fromkeys(("scaler", "use_amp"), 'pass precision=histocc.runtime.device.Precision("fp16", device)'),
}
FLOP_UNITS = (  # units that pass through the weights with these prefixes
    (r"encoder\.(encoder|chars_to_molecules)\.", "blocks"),
    (r"(encoder\.((initial|final)_char_encoder|projection)|ngrams\.word_to_memory)\.", "characters"),
    (r"(encoder\.pooler|linear_decoder|ngrams\.(linear|text_to_memory))\.", "rows"),
    (r"decoder\.(decoder|head)\.", "tokens"),
)


def multi_hot(codes: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Return targets of the linear decoder [B, C], 0 and 1, from indices of codes int [B, K], −1 for none."""
    if codes.is_floating_point():
        return codes
    found = torch.zeros(len(codes), num_classes + 1, dtype=dtype, device=codes.device)
    return found.scatter_(1, codes.masked_fill(codes < 0, num_classes), 1)[:, :num_classes]


def forward(model: nn.Module, batch: dict) -> tuple[Tensor, Tensor]:
    """Return teacher-forced (logits [B, T−1, V], linear logits [B, C])."""
    target = batch["targets_seq2seq"][:, :-1].long()
    text = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return model(**text, target=target, target_mask=None, target_padding_mask=target == PAD_IDX)


def row_losses(loss_fn: nn.Module, outputs: tuple[Tensor, Tensor], batch: dict) -> dict[str, Tensor]:
    """Return named losses of each row, [B] each. "loss" is the one to be trained."""
    out_seq2seq, out_linear = outputs
    dtype = torch.promote_types(out_linear.dtype, torch.float32)
    arguments = {
        "out_seq2seq": out_seq2seq,
        "out_linear": out_linear,
        "target_seq2seq": batch["targets_seq2seq"].long(),
        "target_linear": multi_hot(batch["targets_linear"], out_linear.shape[1], dtype),
    }
    if hasattr(loss_fn, "per_sample"):
        return cast(Any, loss_fn).per_sample(**arguments)
    return {"loss": loss_fn(**arguments).expand(len(out_linear))}


def flops_per_unit(model: Any) -> dict[str, float]:
    """Return floating point operations of training by unit of FLOP_UNITS, {} for a model of another kind.

    Each weight counts six, two forward and four backward, a frozen one two (Kaplan et al., 2020,
    arXiv 2001.08361). Parts without weights do not count: attention between positions, norms, losses.
    """
    flops: dict[str, float] = defaultdict(float)
    for name, weight in model.named_parameters() if isinstance(model, Seq2SeqMixerOccCANINE) else ():
        unit = next((unit for pattern, unit in FLOP_UNITS if re.match(pattern, name)), None)
        if unit is None or weight.dim() < 2:
            continue
        count = weight.numel() * (6 if weight.requires_grad else 2)
        if "multihead_attn.in_proj" in name:  # keys and values come from characters
            flops["characters"] += count * 2 / 3
            count /= 3
        flops[unit] += count
    return flops


def accuracy(figures: dict[str, float]) -> float:
    """Return the accuracy of the better decoder, from the figures of a validation, 0…1."""
    return max(figures.get("seq_acc", 0.0), figures["flat_acc"])


class MixerTask:
    """The task of the trainer: the losses and accuracies of both decoders, of each row.

    Losses and token_acc are teacher-forced. flat_acc compares the linear decoder's codes, as in `predict`.
    seq_acc, only with a `formatter`, compares the codes of greedy decoding. Accuracies are fractions 0…1. If
    its loss has no weight, the writing decoder's accuracies are left out.

    Args:
        loss_fn: a criterion called like `LossMixer`. Without `per_sample` its mean is used for each row.
        model: the bare model in training, whose operations `flops` counts.
        at_most: most codes in an answer of the linear decoder. None: no limit.
    """

    def __init__(
        self,
        loss_fn: nn.Module,
        formatter: BlockyFormatter | None = None,
        model: Any = None,
        at_most: int | None = None,
    ):
        self.loss_fn, self.at_most = loss_fn, at_most
        writes = getattr(loss_fn, "seq2seq_weight", 1.0) > 0
        self.formatter, self.writes = formatter if writes else None, writes
        self.flops_per_unit = flops_per_unit(model)
        self.at_least_one = getattr(getattr(loss_fn, "loss_fn_linear", None), "kind", MEAN) == ROWS
        losses = LOSSES if hasattr(loss_fn, "per_sample") else LOSSES[:1]
        lacking = () if self.formatter else ("seq_acc",) if writes else ("seq_acc", "token_acc")
        self.columns = (*losses, *(name for name in ACCURACIES if name not in lacking))

    def losses(self, model: nn.Module, batch: dict) -> dict[str, Tensor]:
        outputs = forward(model, batch)
        with torch.autocast(outputs[0].device.type, enabled=False):
            return row_losses(self.loss_fn, outputs, batch)

    def metrics(self, model: Any, batch: dict) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        targets, formatter = batch["targets_seq2seq"].long(), self.formatter
        values: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        if not self.writes and isinstance(getattr(model, "encoder", None), NoEncoder):
            # the other decoder has learned nothing, and would need memory for the words of long texts
            linear = model.classify(model.encode_text(batch["input_ids"], batch["attention_mask"]))
            outputs = linear.new_zeros(*targets[:, 1:].shape, model.vocab_size), linear
        elif formatter is None:
            outputs = forward(model, batch)
        else:
            memory, text = model.encode(batch["input_ids"], batch["attention_mask"])
            padding = model.memory_padding_mask(batch["attention_mask"])
            outputs = model.decode(memory, targets[:, :-1], padding), model.classify(text)
            most, size = formatter.max_num_codes, formatter.block_size
            decoded = greedy_from_memory(model, memory, padding, max_codes=most, block_size=size)
            codes, true = (metrics.canonical_blocks(formatter, x) for x in (decoded.tokens, targets))
            values["seq_acc"] = metrics.same_code_sets(codes, true, PAD_IDX)
        with torch.autocast(outputs[0].device.type, enabled=False):
            linear = multi_hot(batch["targets_linear"], outputs[1].shape[1], torch.float32)
            if "token_acc" in self.columns:
                values["token_acc"] = metrics.token_counts(outputs[0], targets, PAD_IDX)  # (right, tokens)
            values["flat_acc"] = metrics.flat_sets_equal(outputs[1], linear, self.at_least_one, self.at_most)
            return values | row_losses(self.loss_fn, outputs, batch)

    def flops(self, batch: dict) -> float:
        """Return the operations of a forward and backward pass for the real characters of a batch and the
        tokens of its targets, or nan for a model that cannot be counted, and for a batch outside the CPU.
        """
        mask, weights = batch["attention_mask"], batch.get("weights")
        if not self.flops_per_unit or mask.device.type != "cpu":
            return math.nan
        lengths = mask.sum(1) if weights is None else mask.sum(1)[weights > 0]
        characters, rows = int(lengths.sum()), len(lengths)
        counts = {"characters": characters, "blocks": characters / 4, "rows": rows}
        counts["tokens"] = rows * (batch["targets_seq2seq"].shape[1] - 1)
        return sum(flops * counts[unit] for unit, flops in self.flops_per_unit.items())


def check_options(function: str, options: Iterable[str], known: Iterable[str] = ()) -> None:
    """Raise TypeError for an unknown option, with what to pass instead."""
    for name in sorted({*options} - {*known}):
        raise TypeError(f"{function}() has no {name}: {INSTEAD.get(name, 'leave it out')}")


def train_one_epoch(
    model: nn.Module,
    data_loader: Iterable[dict],
    loss_fn: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device | str,
    scheduler: Any,
    current_step: int,
    *,
    epoch: int = 0,
    log_interval: int | None = 100,
    distributed: bool = False,
    is_main_process: bool = True,
    world: World | None = None,
    **options: Any,
) -> int:
    """Train on the batches of `data_loader` and return the number of optimizer steps done so far. All ranks.
    By default it runs in one process, and `distributed` joins the existing process group.

    Args:
        loss_fn: a criterion called like `LossMixer`.
        scheduler: any torch scheduler, whose `step` is called after each optimizer step, or None.
        options: as for `histocc.trainer.loop.Run`: stop_step, seed, precision, stop, step_done, …
    """
    check_options("train_one_epoch", options, loop.Run.__dataclass_fields__)
    world = world or (current_world(device) if distributed else World(device=torch.device(device)))
    task = MixerTask(loss_fn, model=unwrap(model))
    batches = len(data_loader) if isinstance(data_loader, Sized) else 0
    last = options.get("stop_step") or current_step + batches
    main = world.is_main and is_main_process
    options.setdefault("log", RunLog(None, log_columns(task.columns), last, current_step, is_main=main).row)
    options |= {"scheduler": scheduler, "flops": task.flops, "log_interval": log_interval}
    run, state = loop.Run(model, task, optimizer, world, **options), loop.State(current_step)
    with contextlib.suppress(Stopped):
        loop.train_one_epoch(run, data_loader, state, epoch)
    return state.step


def evaluate(
    model: nn.Module,
    data_loader: Iterable[dict],
    loss_fn: nn.Module,
    device: torch.device | str,
    *,
    formatter: BlockyFormatter | None = None,
    stop: Callable[[], bool] | None = None,
    precision: Precision | None = None,
    world: World | None = None,
    **others: Any,
) -> dict[str, float]:
    """Return losses and accuracies over all rows of all ranks' `data_loader`s, see `MixerTask`. All ranks."""
    check_options("evaluate", others)
    world = world or World(device=torch.device(device))
    return loop.evaluate(model, data_loader, MixerTask(loss_fn, formatter), world, precision, stop)


def train(
    model: nn.Module,
    data_loaders: dict[str, Any],
    loss_fn: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device | str,
    scheduler: Any,
    total_steps: int,
    current_step: int = 0,
    log_interval: int | None = 100,
    eval_interval: int | None = 1000,
    save_interval: int | None = 1000,
    *,
    formatter: BlockyFormatter | None = None,
    log: Callable[[dict], None] | None = None,
    save_each_epoch: bool = False,
    distributed: bool = False,
    is_main_process: bool = True,
    world: World | None = None,
    **options: Any,
) -> int:
    """Train from `current_step` to `stop_step` (default `total_steps`) and return the last step. All ranks.

    Args:
        data_loaders: "data_loader_train" or "train", and perhaps "data_loader_val" or "val".
        options: as for `histocc.trainer.loop.Run`: save, stop_step, steps_per_epoch, seed, precision, …
    """
    check_options("train", options, loop.Run.__dataclass_fields__)
    world = world or (current_world(device) if distributed else World(device=torch.device(device)))
    task = MixerTask(loss_fn, formatter, model=unwrap(model))
    options |= {"scheduler": scheduler, "flops": task.flops}
    options["stop_step"] = min(total_steps, options.get("stop_step", total_steps))
    options |= {"epoch_name": checkpoint.EPOCH} if save_each_epoch else {}
    options |= {"log_interval": log_interval, "eval_interval": eval_interval, "save_interval": save_interval}
    run = loop.Run(model, task, optimizer, world, log=log if is_main_process else None, **options)
    loaders = {name.removeprefix("data_loader_"): loader for name, loader in data_loaders.items()}
    return loop.train(run, loaders, loop.State(current_step))

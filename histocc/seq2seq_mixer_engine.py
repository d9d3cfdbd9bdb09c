"""The shared engine: `train_one_epoch`, `evaluate`, `train`.

It knows models, batches and processes, but no files and no arguments: the caller hands it `save` and `log`
functions. Any model called like `Seq2SeqMixerOccCANINE` and any criterion called like `LossMixer` runs on it.

A batch is a dict with input_ids [B, S], attention_mask [B, S], targets_seq2seq int [B, T] and targets_linear,
float [B, C] or the indices of each row's codes, int [B, K] with −1 for none. Batches of
`histocc.data.dataset` also say how much each row weighs and how many observations the whole optimizer step
has; other batches are whole steps of their own.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from histocc.formatter import PAD_IDX, BlockyFormatter
from histocc.model import metrics
from histocc.model.decoding import GreedyResult, evaluating, greedy_from_memory
from histocc.runtime.errors import TrainingError
from histocc.runtime.parallel import (
    PeerWait,
    is_sharded,
    is_wrapped,
    no_sync,
    unwrap,
    whole_tensor,
    whole_weights,
)
from histocc.runtime.precision import LEAST_SCALE, Precision
from histocc.runtime.rng import derived_seed
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World, current_world
from histocc.trainer.hooks import Boundary, Meter, StopPoll
from histocc.trainer.profiling import phase
from histocc.trainer.run_log import RunLog

CLIP_NORM = 1.0


def multi_hot(codes: Tensor, num_classes: int, dtype: torch.dtype) -> Tensor:
    """Indices of codes int [B, K], −1 for none → [B, num_classes] of 0 and 1."""
    target = torch.zeros(len(codes), num_classes + 1, dtype=dtype, device=codes.device)
    return target.scatter_(1, codes.masked_fill(codes < 0, num_classes), 1.0)[:, :num_classes]


def to_device(batch: dict, device: torch.device) -> dict:
    """The batch with its tensors on `device`; pinned memory is copied while the device works."""
    return {
        name: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
        for name, value in batch.items()
    }


def forward(model: nn.Module, batch: dict) -> tuple[Tensor, Tensor]:
    """Teacher-forced (logits [B, T−1, V], linear logits [B, C])."""
    target = batch["targets_seq2seq"][:, :-1].long()
    return model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        target=target,
        target_mask=None,
        target_padding_mask=target == PAD_IDX,
    )


def row_losses(loss_fn: nn.Module, outputs: tuple[Tensor, Tensor], batch: dict) -> dict[str, Tensor]:
    """Named losses of each observation, [B] each; "loss" is the one that is trained.

    A criterion without `per_observation` returns the mean over its rows, which then stands for each of them.
    """
    out_seq2seq, out_linear = outputs
    target_linear = batch["targets_linear"]
    if not target_linear.is_floating_point():
        target_linear = multi_hot(
            target_linear, out_linear.shape[1], torch.promote_types(out_linear.dtype, torch.float32)
        )
    arguments = {
        "out_seq2seq": out_seq2seq,
        "out_linear": out_linear,
        "target_seq2seq": batch["targets_seq2seq"].long(),
        "target_linear": target_linear,
    }
    if hasattr(loss_fn, "per_observation"):
        return loss_fn.per_observation(**arguments)
    return {"loss": loss_fn(**arguments).expand(len(target_linear))}


def weighted_sums(losses: dict[str, Tensor], weights: Tensor | None) -> dict[str, Tensor]:
    """Sum of each loss over the observations; rows that only fill up a batch weigh nothing."""
    return {
        name: (values if weights is None else values * weights.to(values.dtype)).sum()
        for name, values in losses.items()
    }


def settle(
    model: nn.Module,
    data_loader: Any,
    loss_fn: nn.Module,
    world: World,
    precision: Precision | None = None,
    compiled: bool = False,
) -> None:
    """Two throw-away passes through DDP, FSDP or layers to be compiled (`compiled`), before optimizer and
    random state are set. All ranks.

    DDP lays its buckets out anew after its first step, so a run that is resumed would sum the gradients of
    more than two ranks in another order than one that was never interrupted. After this the layout no longer
    depends on when the process started. It costs two micro-batches at every start. FSDP finds out in its
    first pass which module is the outermost. What torch.compile makes depends on the shapes that it sees
    first.
    """
    if not is_wrapped(model) and not compiled:
        return
    batch = to_device(data_loader.dataset[(0, 0)][0], world.device)
    precision = precision or Precision("float32", world.device)
    for _ in range(2):
        add_gradients(model, batch, loss_fn, precision, 1.0)
    model.zero_grad(set_to_none=True)


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
    stop_step: int | None = None,
    boundary: Boundary | None = None,
    seed: int | None = None,
    step_done: Callable[[], None] | None = None,
    stop: StopPoll | None = None,
    max_bad_steps: int = 20,
    precision: Precision | None = None,
    distributed: bool = False,
    is_main_process: bool = True,
    world: World | None = None,
) -> int:
    """Trains on the batches of `data_loader` and returns the number of optimizer steps done so far. All
    ranks.

    The loss of a step is the mean over all its observations, whichever rank holds them: each rank's sum is
    divided by their number everywhere, and multiplied by the number of ranks, since DDP averages over ranks.

    current_step: optimizer steps done before; stop_step: return there. boundary: called after each step; None
    prints a line every `log_interval` steps. seed: makes dropout a function of (seed, step, rank), so that
    nothing but the step has to be known to go on; None leaves torch's generators alone. stop: asked before
    each micro-batch; a step that is not finished then is discarded. A step whose gradient is not finite
    changes nothing and is counted; after `max_bad_steps` in a row TrainingError is raised, on all ranks
    alike. precision: float32 where it is None. Called alone it runs in one process; `distributed` joins the
    process group that exists.
    """
    device = torch.device(device)
    world = world or (current_world(device) if distributed else World(device=device))
    precision = precision or Precision("float32", device)
    if boundary is None:
        printer = RunLog(
            None,
            stop_step or current_step + _length(data_loader),
            world.is_main and is_main_process,
            current_step,
            bar=False,
        )
        boundary = Boundary(world, Meter(device=device), log_interval=log_interval, log=printer.row)
    meter = boundary.meter
    model.train()
    batches, opens_step = iter(data_loader), True
    while stop_step is None or current_step < stop_step:
        if stop is not None and stop():
            meter.open = {}
            optimizer.zero_grad(set_to_none=True)
            break
        world.did(f"step {current_step + 1:,}: waiting for data")
        with phase("data"):
            batch = meter.time_data(lambda: next_batch(batches, stop))
        if batch is None:
            break
        if opens_step and seed is not None:
            torch.manual_seed(derived_seed(seed, current_step, world.rank))
        world.did(f"step {current_step + 1:,}: forward and backward pass")
        batch = to_device(batch, device)
        observations = batch.get("global_count", len(batch["input_ids"]) * world.size)
        opens_step = batch.get("last_micro_batch", True)
        with no_sync(model, sync=opens_step):
            meter.add(add_gradients(model, batch, loss_fn, precision, world.size / observations))
        if not opens_step:
            continue
        meter.peers.backward_done()
        with phase("optimizer"):
            norm, done, bad = optimizer_step(model, optimizer, precision)
        meter.add_step(observations, norm, done, bad)
        boundary.count_bad_steps(bad, max_bad_steps, current_step + 1)
        learning_rate = optimizer.param_groups[0]["lr"]
        scheduler.step()
        current_step += 1
        if step_done is not None:
            meter.leave_out(step_done)
        with phase("log, validation, saving"):
            boundary(current_step, epoch, learning_rate)
    return current_step


def next_batch(batches: Iterator[dict], stop: StopPoll | None) -> dict | None:
    """The next one; None at the end, and where this process alone was asked to stop while its loader did not
    answer (`stop` knows).
    """
    try:
        return next(batches, None)
    except Stopped:
        if stop is None:
            raise
        stop.asked_by_loader = True
        return None


def add_gradients(
    model: nn.Module, batch: dict, loss_fn: nn.Module, precision: Precision, factor: float
) -> dict[str, Tensor]:
    """Forward and backward pass of a micro-batch: the gradients of `factor` times its summed loss are added
    to those that are there. Returns the sums of its losses.
    """
    with phase("forward"):
        with precision.autocast():
            outputs = forward(model, batch)
        sums = weighted_sums(row_losses(loss_fn, outputs, batch), batch.get("weights"))
    with phase("backward"):
        precision.scale(sums["loss"] * factor).backward()
    return sums


def _length(data_loader: Iterable[dict]) -> int:
    return len(data_loader) if hasattr(data_loader, "__len__") else 0


def checksum(model: nn.Module) -> int:
    """A number that any changed bit of the weights changes, but for rare accidents."""
    whole = {4: torch.int32, 8: torch.int64, 2: torch.int16}
    sums = [
        p.detach().contiguous().view(whole[p.element_size()]).sum(dtype=torch.int64)
        for p in model.parameters()
    ]
    return hash(tuple(torch.stack(sums).tolist()))


def optimizer_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, precision: Precision
) -> tuple[Tensor, Tensor, Tensor]:
    """Clips the gradients to norm 1 and takes the step, unless the norm is not finite. All ranks.

    Returns the norm before clipping, whether the step was taken, and whether it was bad: not finite, and not
    because the scaler of fp16 is still looking for its scale. All 0-d, on the device: nothing here waits for
    it where the optimizer can skip by itself (torch's fused ones). After DDP and FSDP the norm is the same on
    all ranks, so all of them skip together.
    """
    scaler = precision.scaler
    if scaler is not None:
        scaler.unscale_(optimizer)
    norm = whole_tensor(
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], CLIP_NORM)
    )
    done = torch.isfinite(norm)
    if scaler is not None:
        bad = ~done & (scaler._scale <= LEAST_SCALE)
        scaler.step(optimizer)
        scaler.update()
    else:
        bad = ~done
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.found_inf, optimizer.grad_scale = bad.float(), None
            optimizer.step()
            del optimizer.found_inf, optimizer.grad_scale
        elif done:
            optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm, done, bad


def evaluate(
    model: nn.Module,
    data_loader: Iterable[dict],
    loss_fn: nn.Module,
    device: torch.device | str,
    *,
    formatter: BlockyFormatter | None = None,
    stop: StopPoll | None = None,
    precision: Precision | None = None,
    world: World | None = None,
    each: Callable[[dict, Tensor, Tensor | None, GreedyResult, Tensor], None] | None = None,
) -> dict[str, float] | None:
    """Losses and accuracies over all rows of all ranks' `data_loader`s; None where `stop` said so on the way.
    All ranks.

    val_loss and its parts, and token_acc, are teacher-forced; flat_acc holds the linear decoder's codes with
    probability above 0.5 against the target; seq_acc, only with a `formatter`, decodes greedily and compares
    sets of codes. All accuracies are fractions 0…1. each: is given every batch, its memory with what of it is
    padding, what was decoded, and the linear logits [B, C]; needs a `formatter`.
    """
    device = torch.device(device)
    world = world or World(device=device)
    raw_model, precision = unwrap(model), precision or Precision("float32", device)
    totals: dict[str, Tensor | float] = {}
    world.did("validation")
    with evaluating(raw_model), whole_weights(raw_model):
        batches = iter(data_loader)
        while (batch := next_batch(batches, stop)) is not None:
            if stop is not None and stop():
                return None
            for name, value in _evaluation_sums(
                raw_model, to_device(batch, device), loss_fn, formatter, precision, each
            ).items():
                totals[name] = totals.get(name, 0.0) + value
    if stop is not None and stop.asked_by_loader:
        return None
    total = world.sum_over_ranks(totals)
    rows, tokens = max(total.pop("_rows"), 1.0), max(total.pop("_tokens"), 1.0)
    right_tokens = total.pop("_right_tokens")
    return {**{name: value / rows for name, value in total.items()}, "token_acc": right_tokens / tokens}


def _evaluation_sums(
    model: nn.Module,
    batch: dict,
    loss_fn: nn.Module,
    formatter: BlockyFormatter | None,
    precision: Precision,
    each: Callable[[dict, Tensor, Tensor | None, GreedyResult, Tensor], None] | None = None,
) -> dict:
    """Weighted sums over one batch: losses, rows and tokens counted, rows right."""
    weights = batch.get("weights")
    if weights is None:
        weights = torch.ones(len(batch["input_ids"]), device=batch["input_ids"].device)
    targets = batch["targets_seq2seq"].long()
    inner = targets[:, :-1]
    with precision.autocast():
        if formatter is not None:
            memory, pooled = model.encode(batch["input_ids"], batch["attention_mask"])
            memory_padding = model.memory_padding_mask(batch["attention_mask"])
            outputs = model.decode(memory, inner, memory_padding), model.classify(pooled)
            decoded = greedy_from_memory(
                model,
                memory,
                memory_padding,
                max_codes=formatter.max_num_codes,
                block_size=formatter.block_size,
            )
        else:
            outputs = forward(model, batch)
    losses = row_losses(loss_fn, outputs, batch)
    right, counted = metrics.token_counts(outputs[0], targets, PAD_IDX)
    linear = batch["targets_linear"]
    if not linear.is_floating_point():
        linear = multi_hot(linear, outputs[1].shape[1], torch.float32)
    rows = {f"val_{name}": values for name, values in losses.items()}
    rows |= {
        "_rows": torch.ones_like(weights),
        "_tokens": counted,
        "_right_tokens": right,
        "flat_acc": metrics.flat_sets_equal(outputs[1], linear),
    }
    if formatter is not None:
        rows["seq_acc"] = metrics.same_code_sets(
            formatter.canonical_blocks(decoded.tokens), formatter.canonical_blocks(targets), PAD_IDX
        )
        if each is not None:
            each(batch, memory, memory_padding, decoded, outputs[1])
    return {name: (values.double() * weights.double()).sum() for name, values in rows.items()}


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
    stop_step: int | None = None,
    steps_per_epoch: int | None = None,
    formatter: BlockyFormatter | None = None,
    save: Callable[[int, list[str], dict], None] | None = None,
    log: Callable[[dict], None] | None = None,
    step_done: Callable[[], None] | None = None,
    position: dict | None = None,
    save_each_epoch: bool = False,
    seed: int | None = None,
    stop: StopPoll | None = None,
    max_bad_steps: int = 20,
    check_interval: int | None = None,
    precision: Precision | None = None,
    distributed: bool = False,
    is_main_process: bool = True,
    world: World | None = None,
) -> int:
    """Trains from `current_step` to `stop_step` (default `total_steps`) and returns the last step. All ranks.

    data_loaders: "data_loader_train" and, where there is something to validate on, "data_loader_val". A
    loader with a method `at(epoch, first_batch)` starts in the middle of an epoch. There is an evaluation
    after the last step.
    position: what `save` was given by an earlier run, to go on counting where that stopped. stop: says
    whether to stop; then everything is saved as last.bin between two steps, and the last step is returned.
    Raises TrainingError, on all ranks alike, for a run that has diverged; see `histocc.trainer.hooks`.
    """
    device = torch.device(device)
    world = world or (current_world(device) if distributed else World(device=device))
    stop_step = min(total_steps, stop_step or total_steps)
    stop = stop or StopPoll(None)
    loader, loader_val = data_loaders["data_loader_train"], data_loaders.get("data_loader_val")
    steps_per_epoch = steps_per_epoch or len(loader)
    position = position or {}
    running = position.get("running") or []
    meter = Meter(position.get("samples", 0), _own_share(running, world), PeerWait(model, device), device)
    boundary = Boundary(
        world,
        meter,
        log_interval=log_interval,
        eval_interval=eval_interval,
        save_interval=save_interval,
        stop_step=stop_step,
        steps_per_epoch=steps_per_epoch,
        save=save,
        log=log if is_main_process else None,
        save_each_epoch=save_each_epoch,
        best_val_loss=position.get("best_val_loss"),
        bad_in_row=position.get("bad_in_row", 0),
        val_not_finite=position.get("val_not_finite", 0),
        finite_step=position.get("finite_step"),
        check_interval=None if is_sharded(model) else check_interval,
        checksum=lambda: checksum(unwrap(model)),
        started=(current_step, time.perf_counter()),
        evaluate=(
            None
            if loader_val is None
            else lambda: evaluate(
                model,
                loader_val,
                loss_fn,
                device,
                formatter=formatter,
                stop=stop,
                precision=precision,
                world=world,
            )
        ),
    )
    if position.get("unfinished"):
        boundary(**position["unfinished"])
    while current_step < stop_step:
        epoch, first_batch = divmod(current_step, steps_per_epoch)
        batches = loader.at(epoch, first_batch) if hasattr(loader, "at") else loader
        before = current_step
        current_step = train_one_epoch(
            model,
            batches,
            loss_fn,
            optimizer,
            device,
            scheduler,
            current_step,
            epoch=epoch,
            stop_step=stop_step,
            boundary=boundary,
            seed=seed,
            step_done=step_done,
            stop=stop,
            max_bad_steps=max_bad_steps,
            precision=precision,
            world=world,
        )
        if stop():
            boundary.save_stopped(current_step)
            break
        if current_step == before:
            raise TrainingError("the data loader gave no batch")
    meter.peers.close()
    return current_step


def _own_share(running: list[dict], world: World) -> dict | None:
    """This rank's sums of the log row that was open when the checkpoint was written; on another number of
    ranks the first takes them all.
    """
    if len(running) == world.size:
        return running[world.rank]
    if not running:
        return None
    names = running[0]["sums"].keys()
    sums = {
        name: sum(part["sums"].get(name, 0.0) for part in running) if world.is_main else 0.0 for name in names
    }
    return {
        "sums": sums,
        "count": running[0]["count"],
        "skipped": running[0].get("skipped", 0),
        "seconds_data": 0.0,
    }

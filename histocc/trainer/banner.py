"""The banner of a run: what is about to run, on which devices, in which batches and steps."""

from collections.abc import Iterable
from typing import Any

import torch

from histocc.runtime.device import Precision, why_no_gpu
from histocc.runtime.log import counted
from histocc.runtime.world import World
from histocc.trainer.batches import BatchPlan
from histocc.trainer.config import TrainConfig
from histocc.trainer.schedule import Schedule

PARALLEL = {
    "none": "none (one process)",
    "ddp": "DDP (each process holds the whole model)",
    "fsdp": "FSDP (each process holds a share of weights, gradients and optimizer state)",
}


def banner(
    args: TrainConfig, world: World, about: Iterable[str], on_rate: str, plan: BatchPlan, schedule: Schedule
) -> str:
    """Return the banner. about, on_rate: `about` and `about_rate` of `script.Training`."""
    kind, size = world.device.type, world.size
    reason = "--device cpu" if args.device == "cpu" else why_no_gpu()
    gpus = torch.cuda.device_count() if kind == "cuda" else 0
    name = f" ({torch.cuda.get_device_name(world.device)})" if gpus else ""
    device = "GPU" if kind == "cuda" else f"{kind.upper()} process"
    accumulation, total, at_once = plan.accumulation(0), plan.global_batch_size, args.samples_at_once
    is_exact, epochs = total == at_once * size * accumulation, args.num_epochs
    shares = f"{at_once} × {devices_of(world)} × {counted(accumulation, 'accumulation step')}"
    stops = f"; stops at step {schedule.stop:,}, --max-steps" if schedule.stop < schedule.total else ""
    scaling = f"{args.learning_rate:g} with {args.lr_scaling} scaling at the first start"
    sizes = (1, 2, 4, 8)
    numbers = {"processes": sizes, "steps per epoch": [-(-plan.rows // args.total_batch(n)) for n in sizes]}
    table = [f"  {name:15}{''.join(f'{number:>10,}' for number in row)}" for name, row in numbers.items()]
    of_steps = [
        f"Batch size per {device}: {'' if is_exact else 'at most '}{shares}"
        f"{' = ' if is_exact else '; '}Total batch size: {total}",
        f"Steps per epoch: {plan.steps_per_epoch:,}",
        *([] if size == 1 else ["  on any number of processes"] if args.global_batch_size else table),
        f"Epochs: {epochs} ({counted(schedule.total, 'step')}{stops})",
        f"Learning rate: {schedule.rate:g} ({'not scaled' if args.lr_scaling == 'none' else scaling};"
        f" warm-up over {counted(schedule.warmup, 'step')}){on_rate}",
    ]
    wandb = ["Note: --wandb-project-name has no effect without --log-wandb"]
    on_several = [
        *([f"TRAINING ON CPUs, NO GPU IS USED: {reason}"] if kind == "cpu" else []),
        f"Distributed environment: {'MULTI_GPU' if gpus else 'MULTI_CPU'}",
        f"Number of processes: {size}",
        f"Number of GPUs: {size if gpus else 0}",
        f"Nodes: {-(-size // world.local_size)}",
        f"Backend: {world.backend}",
        f"Parallel: {PARALLEL[args.parallel if world.backend else 'none']}",
        f"Available GPUs: {gpus}{name}",
        f"Threads per process: {torch.get_num_threads()}",
    ]
    threads = torch.get_num_threads()
    on_cpu = f"CPU, {counted(threads, 'thread')}; NO GPU IS USED: {reason}"
    lines = [
        "=" * 72,
        *(on_several if size > 1 else [f"Device: {on_cpu if kind == 'cpu' else device + name}"]),
        *about,
        *(of_steps if schedule.total else []),
        f"Precision: {Precision.of(args, world.device).name}",
        f"Save directory: {args.save_path}",
        *(wandb if args.wandb_project_name and not args.log_wandb else []),
        "=" * 72,
    ]
    return "\n".join(lines)


def start_lines(epochs: int, world: World, plan: BatchPlan, resumed: dict[str, Any] | None) -> str:
    """Return the lines printed when the steps begin. For a resumed run they also say where it begins."""
    verb, lines = "Starting training for", []
    if resumed:
        verb, step, before = "Continuing the training of", resumed["step"], resumed["args"]["num_epochs"]
        epoch, batch = divmod(step, plan.steps_per_epoch)
        more = f"; {counted(epochs, 'epoch')} instead of {before}, with the longer schedule"
        more *= epochs > before
        lines.append(f"Resuming from step {step:,} (epoch {epoch + 1}, batch {batch:,}){more}")
    what = f"{verb} {counted(epochs, 'epoch')}"
    lines.append(what if epochs else "Validating the fitted model; --max-steps N trains it further")
    return "\n".join([*lines, f"Training on {devices_of(world)}"] if world.size > 1 else lines)


def devices_of(world: World) -> str:
    """Return the number and the kind of the devices: "4 GPUs", "2 CPU processes"."""
    kind, many = world.device.type, world.size > 1
    return f"{world.size} {'GPU' + 's' * many if kind == 'cuda' else f'{kind.upper()} process' + 'es' * many}"

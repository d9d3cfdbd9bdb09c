"""What a run says before it starts, with the labels that users of the guides look for."""

import math
import os
from typing import Any

import torch

from histocc.runtime.world import World
from histocc.trainer.batches import BatchPlan
from histocc.trainer.config import TrainConfig
from histocc.trainer.schedule import Schedule, scaled_learning_rate

PARALLEL = {
    "ddp": "DDP (each process holds the whole model)",
    "fsdp": "FSDP (each process holds a share of weights, gradients and optimizer state)",
}


def say_banner(
    args: TrainConfig,
    world: World,
    about: list[str],
    about_rate: str,
    plan: BatchPlan,
    schedule: Schedule,
    precision: str,
) -> None:
    """What is about to run. Rank 0 speaks.

    Args:
        about: lines on data and model.
        about_rate: on learning rates other than that of the schedule.
        precision: its name.
    """
    kind = world.device.type
    gpu = kind == "cuda"
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    lines = ["=" * 72]

    # The args.
    if kind == "cpu":
        why = "torch sees none; nvidia-smi, CUDA_VISIBLE_DEVICES and python -m histocc.doctor tell more"
        if args.device == "cpu":
            why = "--device cpu"
        elif torch.version.cuda is None:
            why = "this torch is made for CPUs"
        lines.append(f"TRAINING ON CPUs, NO GPU IS USED: {why}")
    elif not gpu:
        lines.append(f"Device: {kind}")
    environment = "SINGLE" if world.size == 1 else "MULTI_GPU" if gpu else "MULTI_CPU"
    name = f" ({torch.cuda.get_device_name(world.device)})" if gpu else ""
    lines += [
        f"Distributed environment: {environment}",
        f"Number of processes: {world.size}",
        f"Number of GPUs: {world.size if gpu else 0}",
        f"Nodes: {world.nodes}",
        f"Backend: {world.backend or 'none (one process)'}",
        f"Parallel: {PARALLEL[args.parallel] if world.backend else 'none (one process)'}",
        f"Available GPUs: {visible}{name}",
        f"Threads per process: {torch.get_num_threads()}",
    ]
    if args.gradient_compression != "none" and world.backend:
        lines.append(f"Gradients between processes: {args.gradient_compression}")
    lines += about

    # The batch arithmetic.
    accumulation, total = plan.accumulation(0), plan.global_batch_size
    steps = f"{accumulation} accumulation step{'s' * (accumulation > 1)}"
    at_once = f"{args.samples_at_once} × {devices(world)} × {steps}"
    if total == args.samples_at_once * world.size * accumulation:
        lines.append(f"Batch size per {kind_of(world)}: {at_once} = Total batch size: {total}")
    else:  # not divisible
        lines.append(f"Batch size per {kind_of(world)}: at most {at_once}; Total batch size: {total}")
    if plan.micro_batches(0) > accumulation:
        lines.append(f"Micro-batches of similar length: {plan.micro_batches(0)} per step, for less padding")
    on = {n: BatchPlan(plan.rows, args.total_batch(n), n).steps_per_epoch for n in (1, 2, 4, 8)}
    steps = ", ".join(f"{n} → {steps:,}" for n, steps in on.items())
    ends = f"; stops at step {schedule.stop:,}, --max-steps" if schedule.stop < schedule.total else ""

    # The learning rate, and how it came from the one that was asked for.
    rate = args.learning_rate or 0.0
    scaling = {
        "none": "not scaled",
        "linear": f"{rate:g} × {world.size} processes, linear scaling",
        "sqrt": f"{rate:g} × √{world.size} processes, square-root scaling",
    }[args.lr_scaling]
    if not math.isclose(schedule.rate, scaled_learning_rate(rate, args.lr_scaling, world.size)):
        scaling = "as at the first start of the run"
    warmup = f"warm-up over {schedule.warmup:,} step{'s' * (schedule.warmup != 1)}"
    lines += [
        f"Steps per epoch: {plan.steps_per_epoch:,} (processes → steps: {steps})",
        f"Epochs: {args.num_epochs} ({schedule.total:,} steps{ends})",
        f"Learning rate: {schedule.rate:g} ({scaling}; {warmup}){about_rate}",
        *schedule.warnings(),
        f"Precision: {precision}",
        *([f"Configuration: {args.config}"] if args.config else []),
        f"Save directory: {args.save_path}",
        "=" * 72,
        *(f"Note: {note}" for note in notes(world, plan, visible if gpu else 0)),
    ]
    world.print("\n".join(lines))


def notes(world: World, plan: BatchPlan, gpus: int) -> list[str]:
    """What of the machine or the data this run leaves unused. gpus: that this process sees."""
    lines: list[str] = []
    if gpus > world.local_size:
        lines.append(
            f"{gpus} GPUs are here and {world.local_size} used: torchrun --nproc_per_node={gpus} …"
            " --distributed uses all"
        )
    allocated = os.environ.get("SLURM_JOB_NUM_NODES", "")
    if allocated.isdecimal() and int(allocated) > world.nodes:
        lines.append(
            f"this SLURM job has {allocated} nodes, and the run uses {world.nodes}: start one torchrun on"
            " each with srun, as scripts/train_slurm_multi_node.sh does"
        )
    if plan.rows < plan.global_batch_size:
        lines.append(
            f"a step takes all {plan.rows:,} rows, fewer than the total batch of {plan.global_batch_size:,}:"
            " a smaller --batch-size learns more often"
        )
    return lines


def kind_of(world: World) -> str:
    return {"cuda": "GPU", "cpu": "CPU process"}.get(world.device.type, f"{world.device.type} process")


def devices(world: World) -> str:
    plural = "s" if world.device.type == "cuda" else "es"
    return f"{world.size} {kind_of(world)}{plural if world.size > 1 else ''}"


def say_start(epochs: int, world: World, resumed: dict[str, Any] | None, plan: BatchPlan) -> None:
    """resumed: what the run continues from, or None."""
    name = f"{epochs} epoch{'s' * (epochs > 1)}"
    start = f"Starting training for {name}"
    if resumed:
        step, before = resumed["step"], resumed["args"]["num_epochs"]
        epoch, batch = divmod(step, plan.steps_per_epoch)
        longer = f"; {epochs} epochs instead of {before}, with the longer schedule" if epochs > before else ""
        if resumed["position"].get("unfinished"):
            longer += "; first the validation that was interrupted"
        world.print(f"Resuming from step {step:,} (epoch {epoch + 1}, batch {batch:,}){longer}")
        start = f"Continuing the training of {name}"
    world.print(f"{start}\nTraining on {devices(world)}")

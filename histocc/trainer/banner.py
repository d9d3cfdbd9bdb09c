"""What a run says before it starts, with the labels that users of the guides look for."""

import math
import os
from dataclasses import dataclass
from typing import Any

import torch

from histocc.runtime.world import World
from histocc.trainer.plan import BatchPlan
from histocc.trainer.schedule import Schedule, scaled_learning_rate
from histocc.trainer.settings import MachineSettings, RunSettings

PARALLEL = {
    "ddp": "DDP (each process holds the whole model)",
    "fsdp": "FSDP (each process holds a share of weights, gradients and optimizer state)",
}


@dataclass(frozen=True)
class Banner:
    """What is about to run. about: lines on data and model; about_rate: on learning rates other than that of
    the schedule; precision: its name.
    """

    settings: RunSettings
    world: World
    about: list[str]
    about_rate: str
    plan: BatchPlan
    schedule: Schedule
    precision: str


def say_banner(run: Banner) -> None:
    """With the labels that users of the guides look for. Rank 0 speaks."""
    world, gpu = run.world, run.world.device.type == "cuda"
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    folder, machine = run.settings.folder, run.settings.machine
    lines = [
        "=" * 72,
        *_machine_lines(machine, world, visible),
        *(
            [f"Gradients between processes: {machine.gradient_compression}"]
            if machine.gradient_compression != "none" and world.backend
            else []
        ),
        *run.about,
        *_step_lines(run),
        f"Precision: {run.precision}",
        *([f"Configuration: {folder.config}"] if folder.config else []),
        f"Save directory: {folder.save_path}",
        "=" * 72,
    ]
    world.print("\n".join(lines))
    for note in notes(world, run.plan, visible if gpu else 0):
        world.print(f"Note: {note}")


def _machine_lines(machine: MachineSettings, world: World, visible: int) -> list[str]:
    gpu, on_cpu = world.device.type == "cuda", world.device.type == "cpu"
    kind = "SINGLE" if world.size == 1 else "MULTI_GPU" if gpu else "MULTI_CPU"
    names = f" ({torch.cuda.get_device_name(world.device)})" if gpu else ""
    return [
        *([f"TRAINING ON CPUs, NO GPU IS USED: {no_gpu(machine.device)}"] if on_cpu else []),
        *([] if gpu or on_cpu else [f"Device: {world.device.type}"]),
        f"Distributed environment: {kind}",
        f"Number of processes: {world.size}",
        f"Number of GPUs: {world.size if gpu else 0}",
        f"Nodes: {world.nodes}",
        f"Backend: {world.backend or 'none (one process)'}",
        f"Parallel: {PARALLEL[machine.parallel] if world.backend else 'none (one process)'}",
        f"Available GPUs: {visible}{names}",
        f"Threads per process: {torch.get_num_threads()}",
    ]


def _step_lines(run: Banner) -> list[str]:
    batch, plan, world, schedule = run.settings.batch, run.plan, run.world, run.schedule
    accumulation, micro_batches = plan.accumulation(0), plan.micro_batches(0)
    uneven = plan.global_batch_size != batch.batch_size * world.size * accumulation
    on = {n: BatchPlan(plan.rows, batch.total(n), n).steps_per_epoch for n in (1, 2, 4, 8)}
    return [
        f"Batch size per {kind_of(world)}: {'at most ' if uneven else ''}{batch.batch_size} ×"
        f" {devices(world)} × {accumulation} accumulation step{'s' * (accumulation > 1)}"
        f"{'; ' if uneven else ' = '}Total batch size: {plan.global_batch_size}",
        *(
            [f"Micro-batches of similar length: {micro_batches} per step, for less padding"]
            if micro_batches > accumulation
            else []
        ),
        f"Steps per epoch: {plan.steps_per_epoch:,} (processes → steps: "
        + ", ".join(f"{n} → {steps:,}" for n, steps in on.items())
        + ")",
        f"Epochs: {run.settings.schedule.num_epochs} ({schedule.total:,} steps"
        + f"; stops at step {schedule.stop:,}, --max-steps" * (schedule.stop < schedule.total)
        + ")",
        f"Learning rate: {schedule.rate:g} ({_scaling(run)}; warm-up over {schedule.warmup:,}"
        f" step{'s' * (schedule.warmup != 1)})" + run.about_rate,
        *schedule.warnings(),
    ]


def _scaling(run: Banner) -> str:
    """How the learning rate came from the one that was asked for."""
    asked, processes = run.settings.schedule, run.world.size
    rate = asked.learning_rate or 0.0
    if not math.isclose(run.schedule.rate, scaled_learning_rate(rate, asked.lr_scaling, processes)):
        return "as at the first start of the run"
    return {
        "none": "not scaled",
        "linear": f"{rate:g} × {processes} processes, linear scaling",
        "sqrt": f"{rate:g} × √{processes} processes, square-root scaling",
    }[asked.lr_scaling]


def no_gpu(device: str) -> str:
    """Why."""
    if device == "cpu":
        return "--device cpu"
    if torch.version.cuda is None:
        return "this torch is made for CPUs"
    return "torch sees none; nvidia-smi, CUDA_VISIBLE_DEVICES and python -m histocc.doctor tell more"


def notes(world: World, plan: BatchPlan, gpus: int) -> list[str]:
    """What of the machine or the data this run leaves unused. gpus: that this process sees."""
    found: list[str] = []
    if gpus > world.local_size:
        found.append(
            f"{gpus} GPUs are here and {world.local_size} used: torchrun --nproc_per_node={gpus} …"
            " --distributed uses all"
        )
    allocated = os.environ.get("SLURM_JOB_NUM_NODES", "")
    if allocated.isdecimal() and int(allocated) > world.nodes:
        found.append(
            f"this SLURM job has {allocated} nodes, and the run uses {world.nodes}: start one torchrun on"
            " each with srun, as scripts/train_slurm_multi_node.sh does"
        )
    if plan.rows < plan.global_batch_size:
        found.append(
            f"a step takes all {plan.rows:,} rows, fewer than the total batch of {plan.global_batch_size:,}:"
            " a smaller --batch-size learns more often"
        )
    return found


def kind_of(world: World) -> str:
    return {"cuda": "GPU", "cpu": "CPU process"}.get(world.device.type, f"{world.device.type} process")


def devices(world: World) -> str:
    plural = "s" if world.device.type == "cuda" else "es"
    return f"{world.size} {kind_of(world)}{plural if world.size > 1 else ''}"


def say_start(epochs: int, world: World, resumed: dict[str, Any] | None, plan: BatchPlan) -> None:
    """resumed: what the run continues from, or None."""
    if resumed:
        before = resumed["args"]["num_epochs"]
        longer = f"; {epochs} epochs instead of {before}, with the longer schedule" if epochs > before else ""
        step = resumed["step"]
        epoch, batch = divmod(step, plan.steps_per_epoch)
        world.print(
            f"Resuming from step {step:,} (epoch {epoch + 1}, batch {batch:,}){longer}"
            + ("; first the validation that was interrupted" if resumed["position"].get("unfinished") else "")
        )
    number = f"{epochs} epoch{'s' * (epochs > 1)}"
    world.print(f"Continuing the training of {number}" if resumed else f"Starting training for {number}")
    world.print(f"Training on {devices(world)}")

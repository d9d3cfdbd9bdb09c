"""What a run says before it starts, with the labels that users of the guides look for."""

import argparse
import math
import os

import torch

from histocc.data.arrays import PreparedData
from histocc.formatter import BlockyFormatter
from histocc.runtime.world import World
from histocc.text_rules import AS_IS
from histocc.trainer.plan import BatchPlan
from histocc.trainer.schedule import Schedule, scaled_learning_rate

PARALLEL = {
    "ddp": "DDP (each process holds the whole model)",
    "fsdp": "FSDP (each process holds a share of weights, gradients and optimizer state)",
}


def say_banner(
    args: argparse.Namespace,
    world: World,
    data: PreparedData,
    formatter: BlockyFormatter,
    model: torch.nn.Module,
    plan: BatchPlan,
    files: list[str],
    schedule: Schedule,
    precision: str,
) -> None:
    """What is about to run, on rank 0, with the labels that users of the guides look for."""
    gpu = world.device.type == "cuda"
    kind = "SINGLE" if world.size == 1 else "MULTI_GPU" if gpu else "MULTI_CPU"
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = f" ({torch.cuda.get_device_name(world.device)})" if gpu else ""
    per = "GPU" if gpu else "GPU (CPU process here)"
    on = {
        n: (
            BatchPlan(
                plan.rows, args.global_batch_size or args.batch_size * n * args.accumulate_steps, n
            ).steps_per_epoch
        )
        for n in (1, 2, 4, 8)
    }
    accumulation = plan.accumulation(0)
    scaling = {
        "none": "not scaled",
        "linear": f"{args.learning_rate:g} × {world.size} processes, linear scaling",
        "sqrt": f"{args.learning_rate:g} × √{world.size} processes, square-root scaling",
    }
    if not math.isclose(schedule.rate, scaled_learning_rate(args.learning_rate, args.lr_scaling, world.size)):
        scaling = "as at the first start of the run"
    else:
        scaling = scaling[args.lr_scaling]
    if schedule.ngrams_alone:
        faster = "the n-grams"
    else:
        faster = "the linear decoder and the n-grams" if model.ngrams else "the linear decoder"
    uneven = plan.global_batch_size != args.batch_size * world.size * accumulation
    world.print(
        "\n".join(
            [
                "=" * 72,
                *([f"TRAINING ON CPUs, NO GPU IS USED: {no_gpu(args.device)}"] if not gpu else []),
                f"Distributed environment: {kind}",
                f"Number of processes: {world.size}",
                f"Number of GPUs: {world.size if gpu else 0}",
                f"Nodes: {world.nodes}",
                f"Backend: {world.backend or 'none (one process)'}",
                f"Parallel: {PARALLEL[args.parallel] if world.backend else 'none (one process)'}",
                f"Available GPUs: {visible}{names}",
                f"Threads per process: {torch.get_num_threads()}",
                (
                    f"Dataset: {', '.join(files)} ({len(data.train):,} rows for training, {len(data.val):,}"
                    " for validation)"
                ),
                (
                    f"Model: {args.model_size} (width {model.encoder.config.hidden_size},"
                    f" {model.encoder.config.num_hidden_layers} layers)"
                ),
                f"Model parameters: {sum(p.numel() for p in model.parameters()):,}",
                f"Vocabulary size: {model.vocab_size}",
                f"Codes: {len(data.codes):,} ({formatter.kind}, columns {', '.join(formatter.target_cols)})"
                + (
                    f", the first {data.kept_codes:,} those of the initial checkpoint, the others new"
                    " (--shrink-key: those of the data alone)"
                    if data.kept_codes
                    else ""
                ),
                *([f"Texts: {data.clean_text}"] if data.clean_text != AS_IS else []),
                *(
                    ["Target mask: published (PAD among the codes is looked at)"]
                    if not model.target_mask
                    else []
                ),
                (
                    f"Batch size per {per}: {'at most ' if uneven else ''}{args.batch_size} × {world.size}"
                    f" processes × {accumulation} accumulation steps{'; ' if uneven else ' = '}Total batch"
                    f" size: {plan.global_batch_size}"
                ),
                *(
                    [f"Micro-batches of similar length: {plan.micro_batches(0)} per step, for less padding"]
                    if plan.micro_batches(0) > accumulation
                    else []
                ),
                f"Steps per epoch: {plan.steps_per_epoch:,} (processes → steps: "
                + ", ".join(f"{n} → {steps:,}" for n, steps in on.items())
                + ")",
                f"Epochs: {args.num_epochs} ({schedule.total:,} steps)",
                f"Learning rate: {schedule.rate:g} ({scaling}; warm-up over {schedule.warmup:,} steps)"
                + (
                    f", of {faster} {schedule.linear_factor:g} times that"
                    if schedule.linear_factor != 1
                    else ""
                ),
                f"Precision: {precision}",
                *([f"Configuration: {args.config}"] if args.config else []),
                f"Save directory: {args.save_path}",
                "=" * 72,
            ]
        )
    )
    for note in notes(world, plan, visible if gpu else 0):
        world.print(f"Note: {note}")


def no_gpu(device: str) -> str:
    """Why."""
    if device == "cpu":
        return "--device cpu"
    if torch.version.cuda is None:
        return "this torch is made for CPUs"
    return "torch sees none; nvidia-smi, CUDA_VISIBLE_DEVICES and python -m histocc.doctor tell more"


def notes(world: World, plan: BatchPlan, gpus: int) -> list[str]:
    """What of the machine or the data this run leaves unused. gpus: that this process sees."""
    found = []
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


def devices(world: World) -> str:
    kind = "GPU" if world.device.type == "cuda" else "CPU process"
    plural = "s" if kind == "GPU" else "es"
    return f"{world.size} {kind}{plural if world.size > 1 else ''}"


def say_start(
    args: argparse.Namespace, world: World, resumed: dict | None, step: int, plan: BatchPlan
) -> None:
    if resumed:
        before = resumed["args"]["num_epochs"]
        longer = (
            f"; {args.num_epochs} epochs instead of {before}, with the longer schedule"
            if args.num_epochs > before
            else ""
        )
        epoch, batch = divmod(step, plan.steps_per_epoch)
        world.print(
            f"Resuming from step {step:,} (epoch {epoch + 1}, batch {batch:,}){longer}"
            + ("; first the validation that was interrupted" if resumed["position"].get("unfinished") else "")
        )
    world.print(f"Starting training for {args.num_epochs} epochs")
    world.print(f"Training on {devices(world)}")

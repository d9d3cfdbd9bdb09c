"""Resuming a run: which checkpoint, whether it fits these arguments and data, and what of it comes
back when.
"""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from histocc.runtime import checkpoint
from histocc.runtime.config import differing
from histocc.runtime.device import Precision
from histocc.runtime.errors import TrainingError, UserError
from histocc.runtime.parallel import load_optimizer_state
from histocc.runtime.world import World, launcher_id
from histocc.trainer.batches import BatchPlan
from histocc.trainer.config import TrainConfig
from histocc.trainer.schedule import Schedule

MAX_THREADS = 1024
# What a resumed run takes of the groups of the optimizer; the rest is how they are made now.
OF_GROUP = ("lr", "initial_lr", "betas", "eps", "weight_decay")
OTHER = ", so the checkpoint is of another run: choose another folder, or start over with --overwrite"


def find_resumable(
    args: TrainConfig,
    world: World,
    read: Callable[[str], dict[str, Any]],
    refuse: Callable[[dict[str, Any]], None],
    fingerprint: str,
) -> dict[str, Any] | None:
    """The checkpoint to resume from, the same on every rank, with its file as the entry `path`; None to start
    over. All ranks. Raises UserError where it does not fit.

    Each node looks in its own folder, since nodes may not share one and the launcher may give rank 0 to
    another node than before. The file of the node that has come furthest is then read by all ranks at the
    same time; where one does not find the same there, by its checksum, it is sent to all.

    Args:
        world: the processes.
        read: a file, as `histocc.runtime.checkpoint.load_resumable`.
        refuse: raises UserError for a checkpoint with other arguments.
        fingerprint: of the rows.
    """
    state: dict[str, Any] | None = None

    def newest() -> dict[str, Any] | None:
        nonlocal state
        if not checkpoint.exists_in(args.save_path):
            return None
        try:
            path, state, wrong = checkpoint.newest_good(args.save_path, read)
        except UserError:
            if args.overwrite:
                return None
            raise
        with checkpoint.reading(path):
            return {
                "path": path,
                "wrong": wrong,
                "step": int(state["step"]),
                "run": state["position"]["run"],
                "launchers": set(state["position"]["launchers"]),
                "checksum": state.get(checkpoint.CHECKSUM),
            }

    leaders, launchers = world.node_leaders(), set(world.gather(launcher_id()))
    answers = dict(zip(leaders, world.run_on("resume", leaders, newest)))
    # a restart by the launcher starts nothing over
    on_nodes = {
        rank: answer
        for rank, answer in answers.items()
        if answer and (not args.overwrite or launchers & answer["launchers"] - {""})
    }
    if 0 in on_nodes:  # what another node holds of an earlier run is not for this one
        on_nodes = {rank: answer for rank, answer in on_nodes.items() if answer["run"] == on_nodes[0]["run"]}
    if not on_nodes:
        return None
    owner = max(on_nodes, key=lambda rank: (on_nodes[rank]["step"], -rank))
    path, checksum = on_nodes[owner]["path"], on_nodes[owner]["checksum"]
    if on_nodes[owner]["wrong"]:
        world.print(
            "\n  ".join(
                [
                    "WARNING: a newer checkpoint cannot be used:",
                    *on_nodes[owner]["wrong"],
                    f"Continuing from {path} instead.",
                ]
            )
        )
    if owner != 0 and on_nodes.get(0, {}).get("step") != on_nodes[owner]["step"]:
        world.print(
            f"Note: the checkpoint to continue from lies on the node of rank {owner} alone; from here on rank"
            " 0 writes on its own node"
        )
    if world.rank != owner:
        state = None
        with contextlib.suppress(UserError, TrainingError):  # whoever has it can still send it
            state = read(path) if checksum is not None else None
        if state and state[checkpoint.CHECKSUM] != checksum:
            state = None
    if not all(world.gather(state is not None)):
        state = world.broadcast(state, owner)
    assert state is not None
    with checkpoint.reading(path):
        refuse(state)
        if state["position"]["fingerprint"] != fingerprint:
            raise UserError(
                f"{args.save_path} holds a run on other data (or data prepared with other settings)."
                " Give it the same files, choose another folder, or start over with --overwrite."
            )
    return {**state, "path": path}


def refuse_other_arguments(
    args: TrainConfig, state: dict[str, Any], more: list[str], before: dict[str, Any] | None = None
) -> None:
    """Raises UserError where a resumed run is asked for with arguments that decide the result and differ.

    state: the checkpoint; more: what else differs, a line each; before: what the run has of the arguments
    that its checkpoint keeps elsewhere.
    """
    saved = state["args"] | (before or {})
    as_before = replace(args, num_epochs=saved["num_epochs"], warmup_steps=None)
    warmup = Schedule.of(as_before, state["position"]["steps_per_epoch"], 1, 1.0).warmup
    different = differing(type(args), args.values(), saved, {"warmup_steps": warmup}) + more
    if args.num_epochs < saved["num_epochs"]:
        different.append(
            f"--num-epochs was {saved['num_epochs']}, now it is {args.num_epochs}; only more can continue"
        )
    if different:
        raise UserError(
            "\n  ".join(
                [
                    f"{args.save_path} holds a run with other arguments:",
                    *different,
                    "Repeat them as they were, choose another folder, or start over with --overwrite.",
                ]
            )
        )


def check_unchanged(
    args: TrainConfig, resumed: dict[str, Any], plan: BatchPlan, files: dict[str, int]
) -> None:
    """files: checksum of each file beside the rows that decides the result, by flag. Raises UserError where
    one was changed, or the total batch.
    """
    folder, position = args.save_path, resumed["position"]
    total, before = position["total_batch"], position["files"]
    if total != plan.global_batch_size:
        raise UserError(
            f"the run in {folder} has a total batch of {total}, these arguments make"
            f" {plan.global_batch_size}; pass --global-batch-size {total}"
        )
    changed = [name for name in before if before[name] != files.get(name)]
    if changed:
        raise UserError(
            f"{getattr(args, changed[0])}: was changed since the run in {folder} began"
            f" (--{changed[0].replace('_', '-')}). Give it the same file, choose another folder, or start"
            " over with --overwrite"
        )


def set_threads(resumed: dict[str, Any] | None, world: World) -> None:
    """The number of threads decides the last bits of every sum: a resumed run takes that of its first
    start.
    """
    if not resumed:
        return
    with checkpoint.reading(resumed["path"]):
        threads, processes = int(resumed["rng"]["threads"]), resumed["rng"]["processes"]
        if not 1 <= threads <= MAX_THREADS:
            raise ValueError(f"rng: threads: found {threads}, expected 1 … {MAX_THREADS}")
    if threads == torch.get_num_threads():
        return
    if processes == world.size:
        torch.set_num_threads(threads)
        world.print(f"Threads per process: set to {threads}, as in the interrupted run")
    else:
        world.print(
            f"Note: {torch.get_num_threads()} threads per process instead of {threads} before; last digits"
            " may differ"
        )


def restore(resumed: dict[str, Any], optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """All but the weights, which are whole in a checkpoint and must be in the model before it is shared out;
    of the optimizer's groups only the rates and decays, since all else is that of this optimizer. All ranks.
    Raises UserError where the checkpoint is of other parameters.
    """
    path, state, own = resumed["path"], resumed["optimizer"], optimizer.state_dict()["param_groups"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with checkpoint.reading(path):
        theirs, peaks = state["param_groups"], resumed["scheduler"]["base_lrs"]  # of the first start
        sizes = [len(group["params"]) for group in own]
        if [len(group["params"]) for group in theirs] != sizes or len(peaks) != len(sizes):
            raise UserError(
                f"{path}: optimizer: found other groups of parameters than this run trains{OTHER}"
            )
        for number, entry in state["state"].items():
            shape = parameters[number].shape
            shapes = {name: tensor.shape for name, tensor in entry.items()}
            if shapes != {"step": torch.Size(), "exp_avg": shape, "exp_avg_sq": shape}:
                raise UserError(
                    f"{path}: optimizer: state: {number}: found {shapes}, expected {list(shape)}{OTHER}"
                )
        groups = [
            {**ours, **{name: group[name] for name in OF_GROUP if name in group}}
            for ours, group in zip(own, theirs)
        ]
        load_optimizer_state(optimizer, {"state": state["state"], "param_groups": groups})
        for group, peak in zip(optimizer.param_groups, peaks):
            group["initial_lr"] = float(peak)
        if resumed.get("scaler"):
            precision.scaler.load_state_dict(resumed["scaler"])


def nothing_to_do(folder: str, start: int, schedule: Schedule) -> str:
    """What to say where a run has no step left to take. folder: of the run."""
    if start >= schedule.total:
        return (
            f"The run in {folder} is finished ({start:,} steps): nothing to do. "
            "More --num-epochs continue, --overwrite starts over."
        )
    return f"The run in {folder} is at step {start:,}, and --max-steps is {schedule.stop:,}: nothing to do."

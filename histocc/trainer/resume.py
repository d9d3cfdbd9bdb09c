"""Continuing with a run: which checkpoint, whether it fits these arguments and data, and what of it comes
back when.
"""

from collections.abc import Callable
from typing import Any

import torch

from histocc.runtime import checkpoint
from histocc.runtime.checksums import SUMS
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.parallel import load_optimizer_state
from histocc.runtime.world import World, launcher_id
from histocc.trainer.plan import BatchPlan
from histocc.trainer.schedule import Schedule
from histocc.trainer.settings import FolderSettings, RunSettings

# What a resumed run takes of the groups of the optimizer; the rest is how they are made now.
OF_GROUP = ("lr", "initial_lr", "betas", "eps", "weight_decay")
OTHER = ", so the checkpoint is of another run: choose another folder, or start over with --overwrite"


# Entries of a checkpoint that are tensors, and take the time.
LARGE = ("model", "optimizer")
Newest = Callable[[str], tuple[str, dict[str, Any], list[str]]]


def find_resumable(
    folder: FolderSettings,
    world: World,
    newest_good: Newest,
    refuse: Callable[[dict[str, Any]], None],
    fingerprint: str,
) -> dict[str, Any] | None:
    """The checkpoint to continue from, the same on every rank; None to start over. Raises UserError where it
    does not fit.

    newest_good: of a folder, as that of `histocc.runtime.run_checkpoint`; refuse: raises UserError for a
    checkpoint with other arguments; fingerprint: of the rows.

    Each node looks in its own folder, since nodes may not share one and the launcher may give rank 0 to
    another node than before. The one that has come furthest hands its state to all.
    """
    here: dict[str, Any] = {}

    def newest() -> dict[str, Any] | None:
        found, here["state"] = _newest_here(folder, newest_good)
        return found

    leaders, launchers = world.node_leaders(), set(world.gather(launcher_id()))
    answers = dict(zip(leaders, world.run_on("resume", leaders, newest)))
    # a restart by the launcher starts nothing over
    found = {
        rank: answer
        for rank, answer in answers.items()
        if answer and (not folder.overwrite or launchers & set(answer["launchers"]) - {""})
    }
    if 0 in found:  # what another node holds of an earlier run is not for this one
        found = {rank: answer for rank, answer in found.items() if answer["run"] == found[0]["run"]}
    if not found:
        return None
    owner = max(found, key=lambda rank: (found[rank]["step"], -rank))
    if found[owner]["wrong"]:
        world.print(
            "\n  ".join(
                [
                    "WARNING: a newer checkpoint cannot be used:",
                    *found[owner]["wrong"],
                    f"Continuing from {found[owner]['path']} instead.",
                ]
            )
        )
    if owner != 0 and found.get(0, {}).get("step") != found[owner]["step"]:
        world.print(
            f"Note: the checkpoint to continue from lies on the node of rank {owner} alone; from here on rank"
            " 0 writes on its own node"
        )
    state = _shared(world, owner, found[owner]["path"], here.get("state"))
    refuse(state)
    if state["position"]["fingerprint"] != fingerprint:
        raise UserError(
            f"{folder.save_path} holds a run on other data (or data prepared with other settings). Give it"
            " the same files, choose another folder, or start over with --overwrite."
        )
    return state


def _shared(world: World, owner: int, path: str, state: dict[str, Any] | None) -> dict[str, Any]:
    """The state that rank `owner` has read from `path`, on every rank. Its tensors come from the file, which
    all ranks read at the same time, where all find the same there by its checksums; else the owner sends
    them.
    """
    sums: dict[str, Any] = {}
    small: dict[str, Any] | None = None
    if state is not None and world.rank == owner:
        sums = {name: state[SUMS][name] for name in LARGE if SUMS in state and name in state[SUMS]}
        small = {name: value for name, value in state.items() if name not in (SUMS, *sums)}
    small, sums = world.broadcast((small, sums), owner)
    large: dict[str, Any] | None = None
    if state is not None and world.rank == owner:
        large = {name: state[name] for name in sums}
    elif sums:
        large = checkpoint.load_same(path, sums)
    if not all(world.gather(large is not None)):
        large = world.broadcast(large, owner)
    return {**(small or {}), **(large or {})}


def _newest_here(
    folder: FolderSettings, newest_good: Newest
) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """(what the other processes must know of the newest good checkpoint in this node's folder, its state)"""
    if not checkpoint.exists_in(folder.save_path):
        return None, None
    try:
        path, state, wrong = newest_good(folder.save_path)
    except UserError:
        if folder.overwrite:
            return None, None
        raise
    position = state["position"]
    return {
        "path": path,
        "step": state["step"],
        "wrong": wrong,
        "run": position["run"],
        "launchers": position["launchers"],
    }, state


def refuse_other_arguments(
    settings: RunSettings, saved: dict[str, Any], resumable: set[str], more: list[str]
) -> None:
    """Raises UserError where a resumed run is asked for with arguments that decide the result and differ.

    saved: those of the checkpoint by name; resumable: names (dest) that may differ; more: what else differs,
    a line each.
    """
    different = checkpoint.differing_args(saved, settings.decided(), resumable) + more
    if settings.schedule.num_epochs < saved["num_epochs"]:
        different.append(
            f"--num-epochs was {saved['num_epochs']}, now it is {settings.schedule.num_epochs}; only more"
            " can continue"
        )
    if different:
        raise UserError(
            "\n  ".join(
                [
                    f"{settings.folder.save_path} holds a run with other arguments:",
                    *different,
                    "Repeat them as they were, choose another folder, or start over with --overwrite.",
                ]
            )
        )


def check_unchanged(
    settings: RunSettings, resumed: dict[str, Any], plan: BatchPlan, files: dict[str, int]
) -> None:
    """files: checksum of each file beside the rows that decides the result, by flag. Raises UserError where
    one was changed, or the total batch.
    """
    folder = settings.folder.save_path
    total = resumed["position"]["total_batch"]
    if total != plan.global_batch_size:
        raise UserError(
            f"the run in {folder} has a total batch of {total}, these arguments make"
            f" {plan.global_batch_size}; pass --global-batch-size {total}"
        )
    before = resumed["position"]["files"]
    changed = [name for name in before if before[name] != files.get(name)]
    if changed:
        raise UserError(
            f"{settings.asked[changed[0]]}: was changed since the run in {folder} began"
            f" (--{changed[0].replace('_', '-')}). Give it the same file, choose another folder, or start"
            " over with --overwrite"
        )


def set_threads(resumed: dict[str, Any] | None, world: World) -> None:
    """The number of threads decides the last bits of every sum: a resumed run takes that of its first
    start.
    """
    if not resumed or resumed["rng"]["threads"] == torch.get_num_threads():
        return
    threads = resumed["rng"]["threads"]
    if resumed["rng"]["processes"] == world.size:
        torch.set_num_threads(threads)
        world.print(f"Threads per process: set to {threads}, as in the interrupted run")
    else:
        world.print(
            f"Note: {torch.get_num_threads()} threads per process instead of {threads} before; last digits"
            " may differ"
        )


def restore(resumed: dict[str, Any], optimizer: torch.optim.Optimizer, precision: Precision) -> None:
    """All but the weights, which are whole in a checkpoint and must be in the model before it is shared out.
    All ranks. Raises UserError where the checkpoint is of other parameters.
    """
    load_optimizer_state(optimizer, _fitting(resumed["optimizer"], optimizer))
    peaks = resumed["scheduler"]["base_lrs"]  # of the first start
    if len(peaks) != len(optimizer.param_groups):
        raise UserError(
            f"scheduler: base_lrs: found {len(peaks)} rates, expected {len(optimizer.param_groups)}{OTHER}"
        )
    for group, peak in zip(optimizer.param_groups, peaks):
        group["initial_lr"] = peak
    if resumed.get("scaler"):
        precision.scaler.load_state_dict(resumed["scaler"])


def _fitting(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state of a checkpoint; of its groups only the rates and decays, since all else is that
    of this optimizer. Raises UserError where it is that of other parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    own = optimizer.state_dict()["param_groups"]
    if [len(group["params"]) for group in state["param_groups"]] != [len(group["params"]) for group in own]:
        raise UserError(
            f"optimizer: param_groups: found other groups of parameters than this run trains{OTHER}"
        )
    for number, entry in state["state"].items():
        if entry["exp_avg"].shape != parameters[number].shape:
            raise UserError(
                f"optimizer: state: {number}: found a state of shape {list(entry['exp_avg'].shape)}, expected"
                f" {list(parameters[number].shape)}{OTHER}"
            )
    groups = [
        {**ours, **{name: theirs[name] for name in OF_GROUP if name in theirs}}
        for ours, theirs in zip(own, state["param_groups"])
    ]
    return {"state": state["state"], "param_groups": groups}


def nothing_to_do(folder: str, start: int, schedule: Schedule) -> str:
    """What to say where a run has no step left to take. folder: of the run."""
    if start >= schedule.total:
        return (
            f"The run in {folder} is finished ({start:,} steps): nothing to do. "
            "More --num-epochs continue, --overwrite starts over."
        )
    return f"The run in {folder} is at step {start:,}, and --max-steps is {schedule.stop:,}: nothing to do."

"""What a run writes while it trains: its lists, its log and plots, its checkpoints."""

import contextlib
import uuid
from collections.abc import Callable, Generator
from typing import Any

import torch

from histocc.runtime import checkpoint, console, stacks
from histocc.runtime.errors import TrainingError
from histocc.runtime.lock import run_lock
from histocc.runtime.outputs import OwnFiles
from histocc.runtime.parallel import is_sharded, unwrap, whole
from histocc.runtime.world import World, launcher_id
from histocc.trainer import loop, run_files
from histocc.trainer.loggers import LoggedRun, Loggers
from histocc.trainer.plan import BatchPlan
from histocc.trainer.profiling import StepProfiler
from histocc.trainer.run_log import RunLog, log_columns
from histocc.trainer.saver import Saver
from histocc.trainer.schedule import Steps
from histocc.trainer.settings import FolderSettings, RunSettings
from histocc.trainer.training import Training


@contextlib.contextmanager
def held_folder(folder: FolderSettings, world: World) -> Generator[None]:
    """The folder of the run, that no other job may use meanwhile, without what a killed run left half
    written; meanwhile stacks of a run that hangs go there. All ranks. Raises UserError.
    """
    with contextlib.ExitStack() as held:

        def take() -> list[str]:
            held.enter_context(run_lock(folder.save_path))
            own = OwnFiles(folder.save_path, folder.overwrite)
            checkpoint.remove_leftovers(own)
            console.write_into(own.free_name(console.FILE))
            return own.free_names(stacks.NAME.format(rank) for rank in range(world.size))

        paths = world.run_on_main("lock", take)
        held.enter_context(stacks.in_folder(paths, world.rank, world.time_limit))
        yield


@contextlib.contextmanager
def opened_outputs(
    settings: RunSettings, training: Training, world: World, state: "RunState", steps: Steps
) -> Generator[tuple[RunLog, Saver, Callable[[], None]]]:
    """Clears what is started over, writes args.json and the lists of the data, and gives log, saver of
    checkpoints, and what is to be called after each step. All ranks. Raises UserError.
    """
    folder, position = settings.folder, state.position
    loggers: dict[str, Loggers] = {}
    own = OwnFiles(folder.save_path, folder.overwrite)
    logged = LoggedRun(folder.save_path, state.name, steps.start, settings.decided())

    def open_loggers() -> None:
        loggers["own"] = Loggers(settings.loggers, logged, own, world.stop_asked_anywhere)

    world.run_on_main("loggers", open_loggers)
    if folder.overwrite and not position:
        world.run_on("clear", world.node_leaders(), lambda: run_files.clear(own, world.size))
    if world.is_main:
        run_files.write_args(own, settings.asked, world.print)
        if training.lists:
            run_files.copy_lists(training.lists, own, world.print)
    log = RunLog(
        own,
        steps,
        log_columns(tuple(training.task.columns)),
        world.is_main,
        again=bool(position.get("unfinished")),
        workers=settings.loader.num_workers,
        others=loggers.get("own"),
    )
    save = Saver(own, folder.keep_checkpoints, world, state, log.say)
    with contextlib.ExitStack() as ends:
        ends.callback(log.close, "ended by an error")  # unless it is closed before
        step_done = log.step
        if settings.machine.profile and world.is_main:
            profiler = StepProfiler(settings.machine.profile, own, world.device, log.say)
            ends.callback(profiler.close)

            def step_done() -> None:
                log.step()
                profiler.step_done()

        yield log, save, step_done


def check_last_save(save: Saver, step: int) -> None:
    """Raises TrainingError where the checkpoint of the last step could not be written."""
    if save.failed:
        raise TrainingError(
            f"the last checkpoint, of step {step:,}, could not be saved: {save.failed}. After that, give the"
            " same command again (without --overwrite): it continues from the checkpoint before, if there is"
            " one."
        )


class RunState:
    """Makes the content of checkpoints: called with (step, position) on all ranks, it is whole on rank 0
    alone.

    resumed: the checkpoint that the run continues from, of which its position counts; or None.

    `name` is what all checkpoints of a run have in common; `position`: of the resumed one, or {}.
    """

    def __init__(
        self,
        settings: RunSettings,
        training: Training,
        run: loop.Run,
        plan: BatchPlan,
        resumed: dict[str, Any] | None,
    ):
        world = run.world
        self.run, self.raw_model = run, unwrap(run.model)
        self.steps_per_epoch = plan.steps_per_epoch
        self.position: dict[str, Any] = resumed["position"] if resumed else {}
        self.name: str = self.position.get("run") or uuid.uuid4().hex
        self.fixed: dict[str, Any] = {
            "format": checkpoint.FORMAT,
            "args": settings.decided(),
            **training.entries,
            "rng": {"seed": settings.seed, "threads": torch.get_num_threads(), "processes": world.size},
        }
        self.facts: dict[str, Any] = {
            "files": training.files,
            "total_batch": plan.global_batch_size,
            "steps_per_epoch": plan.steps_per_epoch,
            "fingerprint": training.fingerprint,
            "launchers": sorted(set(world.gather(launcher_id()))),
            "run": self.name,
        }

    def __call__(self, step: int, position: dict[str, Any]) -> dict[str, Any]:
        run = self.run
        if not (run.world.is_main or is_sharded(self.raw_model)):
            return {}
        epoch, batch = divmod(step, self.steps_per_epoch)
        weights = whole(
            {"model": self.raw_model.state_dict(), "optimizer": run.optimizer.state_dict()},
            keep=run.world.is_main,
        )
        return {
            **weights,
            "scheduler": {
                "base_lrs": [group["initial_lr"] for group in run.optimizer.param_groups],
                "last_epoch": step,
            },
            "scaler": run.number_format.state(),
            "step": step,
            **self.fixed,
            "position": {"epoch": epoch, "batch": batch, **self.facts, **position},
        }

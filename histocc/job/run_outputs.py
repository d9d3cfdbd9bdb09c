"""What a run writes while it trains: its lists, its log and plots, its checkpoints."""

import contextlib
import uuid
from collections.abc import Callable, Iterator

import torch

from histocc.data.arrays import PreparedData
from histocc.job import recipe
from histocc.job.settings import FolderSettings, NoiseSettings, Settings
from histocc.model import model_io
from histocc.runtime import checkpoint, checksums, console
from histocc.runtime.errors import TrainingError
from histocc.runtime.input_files import opened
from histocc.runtime.lock import run_lock
from histocc.runtime.parallel import is_sharded, unwrap, whole
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import COLUMNS
from histocc.trainer import loop, run_files
from histocc.trainer.hints import Hints
from histocc.trainer.hooks import Steps
from histocc.trainer.loggers import LoggedRun, Loggers
from histocc.trainer.plan import BatchPlan
from histocc.trainer.profiling import StepProfiler
from histocc.trainer.run_log import RunLog
from histocc.trainer.saver import Saver


@contextlib.contextmanager
def held_folder(folder: FolderSettings, world: World) -> Iterator[None]:
    """The folder of the run, that no other job may use meanwhile, without what a killed run left half
    written. All ranks. Raises UserError.
    """
    with contextlib.ExitStack() as held:

        def take() -> None:
            held.enter_context(run_lock(folder.save_path))
            own = run_files.own_files(folder.save_path, folder.overwrite)
            checkpoint.remove_leftovers(own)
            console.write_into(own.free_name(console.FILE))

        world.run_on_main("lock", take)
        yield


@contextlib.contextmanager
def opened_outputs(
    settings: Settings, world: World, data: PreparedData, state: "RunState", steps: Steps, hints: Hints
) -> Iterator[tuple[RunLog, Saver, Callable[[], None]]]:
    """Clears what is started over, writes args.json and the lists of the data, and gives log, saver of
    checkpoints, and what is to be called after each step. All ranks. Raises UserError.
    """
    folder, position, loggers = settings.folder, state.position, {}
    own = run_files.own_files(folder.save_path, folder.overwrite)
    logged = LoggedRun(folder.save_path, state.name, steps.start, settings.decided())

    def open_loggers() -> None:
        loggers["own"] = Loggers(settings.loggers, logged, own, world.stop_asked_anywhere)

    world.run_on_main("loggers", open_loggers)
    if folder.overwrite and not position:
        world.run_on("clear", world.node_leaders(), lambda: run_files.clear(own))
    if world.is_main:
        run_files.write_args(own, settings.asked, world.print)
        run_files.copy_lists(data.folder, own, world.print)
    log = RunLog(
        own,
        steps,
        COLUMNS,
        world.is_main,
        again=bool(position.get("unfinished")),
        hints=hints,
        others=loggers.get("own"),
    )
    save = Saver(own, folder.keep_checkpoints, world, state, log.say)
    with contextlib.ExitStack() as ends:
        ends.callback(log.close, "ended by an error")  # unless it is closed before
        ends.callback(save.close)
        step_done = log.step
        if settings.machine.profile and world.is_main:
            profiler = StepProfiler(settings.machine.profile, own, world.device, log.say)
            ends.callback(profiler.close)

            def step_done() -> None:
                log.step()
                profiler.step_done()

        yield log, save, step_done


def finish(save: Saver, step: int) -> float:
    """Waits for the checkpoint of the last step; the seconds that it took. Raises TrainingError where it
    could not be written.
    """
    if save.finish():
        raise TrainingError(
            f"the last checkpoint, of step {step:,}, could not be saved: {save.failed}. After that, give the"
            " same command again (without --overwrite): it continues from the checkpoint before, if there is"
            " one."
        )
    return save.seconds


class RunState:
    """Makes the content of checkpoints: called with (step, position) on all ranks, it is whole on rank 0
    alone.

    Args:
        run, config: what is trained, and the config of its model.
        files: checksum of each file beside the rows that decides the result, by flag.
        resumed: of the checkpoint that the run continues from, its position; or None.

    `name` is what all checkpoints of a run have in common; `position`: of the resumed one, or {}.
    """

    def __init__(
        self,
        settings: Settings,
        data: PreparedData,
        run: loop.Run,
        config: dict,
        plan: BatchPlan,
        files: dict[str, int],
        resumed: dict | None,
    ):
        world, formatter = run.world, settings.formatter
        self.run, self.raw_model = run, unwrap(run.model)
        self.steps_per_epoch = plan.steps_per_epoch
        self.position: dict = resumed["position"] if resumed else {}
        self.name: str = self.position.get("run") or uuid.uuid4().hex
        self.fixed = {
            "format": checkpoint.FORMAT,
            "config": config,
            "formatter": formatter.to_dict(),
            "key": {code: i for i, code in enumerate(data.codes)},
            "system": model_io.system_name(formatter),
            "languages": data.languages,
            "args": settings.decided(),
            "kept_codes": data.kept_codes,
            "hisco_numbers": data.hisco_numbers,
            **recipe.coding_entries(
                settings.loss.linear_loss, settings.noise.join_rows, self.raw_model.ngrams is not None, data
            ),
            "rng": {"seed": settings.seed, "threads": torch.get_num_threads(), "processes": world.size},
        }
        self.facts = {
            "files": files,
            "total_batch": plan.global_batch_size,
            "steps_per_epoch": plan.steps_per_epoch,
            "fingerprint": data.fingerprint,
            "launchers": sorted(set(world.gather(world.launcher))),
            "run": self.name,
        }

    def __call__(self, step: int, position: dict) -> dict:
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
            "scheduler": run.scheduler.state_dict(),
            "scaler": run.number_format.state(),
            "step": step,
            **self.fixed,
            "position": {"epoch": epoch, "batch": batch, **self.facts, **position},
        }


def checksums_of_files(noise: NoiseSettings) -> dict[str, int]:
    """Of the files beside the rows that decide the result, by flag. Raises UserError."""
    found = {}
    for dest, path in (
        ("fn_word_freq", noise.fn_word_freq),
        ("descriptions_file", noise.descriptions.descriptions_file),
    ):
        if path:
            with opened(path):  # a regular file that can be read
                found[dest] = checksums.of_file(path)
    return found

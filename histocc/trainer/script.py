"""A training script for any model: its flags, and from its arguments to its run.

@dataclass(frozen=True, kw_only=True)
class Mine(ScriptConfig):
    width: Count = flag(64, "of the model")
    batch_size: int = 16                  # another default than that of any script

parser = Parser(Mine, "train_mine.py", __doc__)

def run(args, world):
    script.train(parser, args, world, lambda: Training(Net(), Classify(), TrainRows(), ValRows()))

start(parser, run)      # of histocc.runtime.entrypoint
"""

import contextlib
import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from histocc.runtime import checkpoint
from histocc.runtime.config import Parser
from histocc.runtime.device import Precision, compile_layers
from histocc.runtime.errors import UserError, raise_if_any
from histocc.runtime.files import OwnFiles, save_path_problem
from histocc.runtime.rng import derived_seed
from histocc.runtime.world import World
from histocc.trainer import loop, run
from histocc.trainer.batches import WEIGHTS, Rows, validation_loader
from histocc.trainer.config import ScriptConfig
from histocc.trainer.estimate import memory_advice
from histocc.trainer.log import log_columns, validation_line
from histocc.trainer.run import Training


def train(parser: Parser, args: ScriptConfig, world: World, make: Callable[[], Training]) -> None:
    """Trains what `make` returns as the arguments ask: a run, or its continuation, a dry run, a validation.
    All ranks.

    Args:
        make: called on every rank once the arguments are checked, with torch's generator seeded, so that the
            weights are the same everywhere; raises UserError for data that are none. Nothing is written
            before.

    Raises:
        UserError, TrainingError
    """
    world.run_on_main("arguments", lambda: raise_if_any(_problems(args)))
    torch.manual_seed(derived_seed(args.seed, WEIGHTS) % 2**32)
    training = _complete(make(), parser, world)
    precision = run.number_format(args, world)
    training.model.to(precision.dtype)
    if args.eval_only:
        return _validate(args, world, training, precision)

    def refuse(state: dict[str, Any]) -> None:
        run.refuse_other_arguments(args, state, _other_entries(state, training.entries))

    with contextlib.ExitStack() as held:
        if not args.dry_run:
            held.enter_context(run.held_folder(args, world))
        with memory_advice(args, world, training.smaller_model, of_steps=False):
            read = checkpoint.load_resumable
            resumed = run.find_resumable(args, world, read, refuse, training.fingerprint)
            run.set_threads(resumed, world)
            if resumed:
                _load(training.model, resumed["model"], resumed["path"])
            elif args.initial_checkpoint:
                _load(training.model, *_weights(args.initial_checkpoint, "--initial-checkpoint"))
            if args.compile:
                compile_layers(training.model)
            training.model.to(world.device)
        with run.ready(args, world, precision, training, resumed) as ready:
            if ready:
                of_loop = loop.Run(
                    ready.model, training.task, ready.optimizer, flops=training.flops, **ready.options
                )
                loop.train(of_loop, ready.loaders, ready.state)


def _problems(args: ScriptConfig) -> list[str]:
    """All that is wrong with the arguments, and all that stands in the way of what the run writes."""
    problems = [*args.problems(), *filter(None, [save_path_problem(args.save_path)])]
    try:
        own = OwnFiles(args.save_path, args.overwrite)
        return problems + run.output_problems(args, {args.config: "the file of --config"}, own)
    except UserError as error:
        return [*problems, str(error)]


def _complete(training: Training, parser: Parser, world: World) -> Training:
    """With what any script's checkpoints hold. All ranks. Raises ValueError for what are no rows, UserError
    if the nodes have other data.
    """
    given = [rows for rows in (training.train, training.val) if rows is not None]
    for rows in given:
        if not isinstance(rows, Rows):
            raise ValueError(f"rows must be a histocc.trainer.batches.Rows; found {type(rows).__name__}")
        if not len(rows):
            raise UserError(f"{type(rows).__name__}: there is no row")
    fingerprint = training.fingerprint or " ".join(rows.fingerprint or str(len(rows)) for rows in given)
    if others := world.differing(fingerprint):
        raise UserError(
            f"ranks {', '.join(map(str, others))} have other data than rank 0: copy the same to every node"
        )
    entries = {"config": {}, **training.entries, "script": os.path.basename(parser.prog)}
    digest = hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
    return replace(training, entries=entries, fingerprint=digest, epoch_name=checkpoint.EPOCH_OF_ANY)


def _other_entries(state: dict[str, Any], entries: dict[str, Any]) -> list[str]:
    """What another script or another model has written, a line each."""
    if state.get("script") != entries["script"]:
        return [f"it is a run of {state.get('script') or 'another script'}, not of {entries['script']}"]
    before, now = state.get("config", {}), entries["config"]
    return [
        f"{name} was {before.get(name)!r}, now it is {now.get(name)!r}"
        for name in sorted({*before, *now}, key=str)
        if before.get(name) != now.get(name)
    ]


def _content(path: str, flag: str) -> tuple[dict[str, Any], str]:
    """(content, file) of a checkpoint, or of that in the folder of a run. flag: what a message begins with.
    Raises UserError.
    """
    file = checkpoint.find(path, (checkpoint.BEST, checkpoint.LAST))
    if file is None:
        raise UserError(f"{flag} {path}: no checkpoint there (neither a file nor a folder of a run)")
    return checkpoint.load(file), file


def _weights(path: str, flag: str) -> tuple[dict[str, Any], str]:
    """(weights, file) of a checkpoint: of a run of any script, or a plain state dict. Raises UserError."""
    state, file = _content(path, flag)
    return state.get("model", state.get(checkpoint.SECOND_NAME, state)), file


def _load(model: nn.Module, weights: dict[str, Any], file: str) -> None:
    """Copies all weights. Raises UserError if they are those of another model."""
    with checkpoint.reading(file):
        model.load_state_dict(weights)


def _validate(args: ScriptConfig, world: World, training: Training, precision: Precision) -> None:
    """--eval-only: validates, prints the figures, and does what the script does with a trained model. All
    ranks. Raises UserError.
    """
    if training.val is None:
        raise UserError("--eval-only needs rows to validate on")
    weights, file = _weights(args.initial_checkpoint or args.save_path, "--eval-only:")
    _load(training.model, weights, file)
    model = training.model.to(world.device)
    loader = validation_loader(args, world, training.val)
    values = loop.evaluate(model, loader, training.task, world, precision, world.stop_agreed)
    step = checkpoint.step_of(file) or 0
    world.print(validation_line({"step": step, **values}, log_columns(training.task.columns)))
    run.finish(args, world, training, model)


def config_of(path: str, flag: str) -> dict[str, Any]:
    """The entry `config` of a checkpoint of a script's run: what its model was made of. Raises UserError."""
    return _content(path, flag)[0].get("config") or {}

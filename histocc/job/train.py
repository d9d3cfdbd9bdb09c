"""A training job from prepared data to its last checkpoint: what `finetune.py` and `train_mixer.py` have in
common.
"""

import contextlib
from functools import partial

from histocc.data.arrays import PreparedData
from histocc.job import banner, build, confidence
from histocc.job.optimizer import fast_parameters, linear_rate
from histocc.job.recipe import make_loss
from histocc.job.resume import refuse_other_arguments
from histocc.job.settings import Settings
from histocc.job.teacher import with_teacher
from histocc.job.validate import validate
from histocc.model import model_io
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import MixerTask
from histocc.trainer import run
from histocc.trainer.batch_size import memory_advice, model_memory_advice
from histocc.trainer.resume import find_resumable, set_threads
from histocc.trainer.run_outputs import held_folder
from histocc.trainer.training import Training

SMALLER_MODEL = "a smaller --model-size or --max-len, or --freeze-encoder"


def run_as_asked(settings: Settings, world: World, data: PreparedData) -> None:
    """What the settings ask for once the data are prepared: nothing more, a validation, a dry run, or the
    run. All ranks. Raises UserError, TrainingError.
    """
    data = with_teacher(settings, world, data)
    if settings.prepare_only:
        return
    if settings.eval_only:
        return validate(settings, world, data)
    with contextlib.ExitStack() as held:
        if not settings.dry_run:
            held.enter_context(held_folder(settings.folder, world))
        with memory_advice(settings.batch, world, SMALLER_MODEL, settings.schedule.lr_scaling != "none"):
            train(settings, world, data)


def train(settings: Settings, world: World, data: PreparedData) -> None:
    """Trains, or continues training, on prepared data; a dry run ends before the first step and writes
    nothing. All ranks. Raises UserError, TrainingError.
    """
    machine = settings.machine
    precision = run.number_format(machine, world)
    with model_memory_advice(machine.parallel, machine.precision.float64, world, SMALLER_MODEL):
        resumed = find_resumable(
            settings.folder,
            world,
            model_io.newest_good,
            partial(refuse_other_arguments, settings),
            data.fingerprint,
        )
        set_threads(resumed, world)
        settings, model, config = build.make_model(settings, world, data, resumed)
    train_rows, val_rows = build.make_rows(settings, world, data, config)
    build.train_seen_characters(model, train_rows, config, settings.model.freeze_encoder)
    linear = linear_rate(settings, model, resumed)
    loss_fn = make_loss(settings.loss, settings.formatter, settings.teaching.distillation_temperature)
    task = MixerTask(loss_fn, settings.formatter, model=model)
    training = Training(
        model,
        task,
        train_rows,
        val_rows,
        build.entries(settings, data, config, model.ngrams is not None),
        data.fingerprint,
        build.checksums_of_files(settings.noise),
        fast_parameters(model, linear),
        task.flops,
        banner.about(settings, data, model),
        banner.about_rate(linear, model),
        lists=data.folder,
        fitted_before="the n-grams" if linear.fitted else "",
        smaller_model=SMALLER_MODEL,
        finish=lambda _: confidence.fit_run(settings, world, data),
    )
    run.train(settings, world, precision, training, resumed)

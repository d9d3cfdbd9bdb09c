"""A training job from prepared data to its last checkpoint: what `finetune.py` and `train_mixer.py` have in
common.
"""

import contextlib
import os
from functools import partial

from histocc import seq2seq_mixer_engine as engine
from histocc.data.arrays import PreparedData
from histocc.data.prepare import LISTS
from histocc.job import banner, build, confidence
from histocc.job.optimizer import fast_parameters, linear_rate
from histocc.job.recipe import make_loss
from histocc.job.resume import refuse_other_arguments
from histocc.job.settings import Settings
from histocc.job.teacher import with_teacher
from histocc.job.validate import validate
from histocc.model import model_io
from histocc.runtime.world import World
from histocc.trainer import resume, run

SMALLER_MODEL = "a smaller --model-size or --max-len, or --freeze-encoder"


def train(settings: Settings, world: World, data: PreparedData) -> None:
    """Trains, or continues training, on prepared data, as the settings ask: nothing more than to prepare, a
    validation, a dry run, or the run. All ranks. Raises UserError, TrainingError.
    """
    data = with_teacher(settings, world, data)
    if settings.prepare_only:
        return
    if settings.eval_only:
        return validate(settings, world, data)
    precision = run.number_format(settings.machine, world)
    with contextlib.ExitStack() as held:
        if not settings.dry_run:
            held.enter_context(run.held_folder(settings.folder, world))

        # The model: from scratch, from published weights, or as the interrupted run left it.
        with run.memory_of_model(settings, world, SMALLER_MODEL):
            refuse = partial(refuse_other_arguments, settings)
            read = model_io.load_resumable
            resumed = resume.find_resumable(settings.folder, world, read, refuse, data.fingerprint)
            resume.set_threads(resumed, world)
            settings, model, config = build.make_model(settings, world, data, resumed)
        train_rows, val_rows = build.make_rows(settings, world, data, config)
        build.train_seen_characters(model, train_rows, config, settings.model.freeze_encoder)

        # What is trained: the losses of both decoders, each with its own learning rate.
        formatter, linear = settings.formatter, linear_rate(settings, model, resumed)
        loss_fn = make_loss(settings.loss, formatter, settings.teaching.distillation_temperature)
        training = run.Training(
            model,
            engine.MixerTask(loss_fn, formatter, model=model),
            train_rows,
            val_rows,
            entries=build.entries(settings, data, config, model.ngrams is not None),
            fingerprint=data.fingerprint,
            files=build.checksums_of_files(settings.noise),
            fast=fast_parameters(model, linear),
            about=banner.about(settings, data, model),
            about_rate=banner.about_rate(linear, model),
            lists=[os.path.join(data.folder, name) for name in LISTS],
            fitted_before="the n-grams" if linear.fitted else "",
            smaller_model=SMALLER_MODEL,
            finish=lambda _: confidence.fit_run(settings, world, data),
        )

        # DDP or FSDP, loaders, optimizer, and where the interrupted run was; then the loop.
        ready = run.set_up(settings, world, precision, training, resumed)
        del resumed
        if ready:
            with run.outputs(ready) as calls:
                engine.train(
                    ready.model,
                    ready.loaders,
                    loss_fn,
                    ready.optimizer,
                    world.device,
                    scheduler=None,
                    formatter=formatter,
                    state=ready.state,
                    **ready.options,
                    **calls,
                )

        # Probabilities that say how often they are right.
        run.finish(training, settings, world, ready)

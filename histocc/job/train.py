"""A training job from prepared data to its last checkpoint: what `finetune.py` and `train_mixer.py` have in
common.
"""

import contextlib
import os
from functools import partial

from histocc import seq2seq_mixer_engine as engine
from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings
from histocc.data.prepare import LISTS
from histocc.formatter import BlockyFormatter
from histocc.job import banner, build, confidence
from histocc.job.config import JobConfig
from histocc.job.optimizer import fast_parameters, linear_rate
from histocc.job.recipe import make_loss, refuse_other_arguments
from histocc.job.teacher import with_teacher
from histocc.job.validate import validate
from histocc.published import models
from histocc.runtime.world import World
from histocc.trainer import resume, run

SMALLER_MODEL = "a smaller --model-size or --max-len, or --freeze-encoder"


def train(args: JobConfig, read: PrepareSettings, world: World, data: PreparedData) -> None:
    """Trains, or continues training, on prepared data, as the arguments ask: nothing more than to prepare, a
    validation, a dry run, or the run. All ranks. Raises UserError, TrainingError.
    """
    formatter = BlockyFormatter.from_dict(read.formatter)
    data = with_teacher(args, read, world, data)
    if args.prepare_only:
        return
    if args.eval_only:
        return validate(args, read, world, data)
    precision = run.number_format(args, world)
    with contextlib.ExitStack() as held:
        if not args.dry_run:
            held.enter_context(run.held_folder(args, world))

        # The model: from scratch, from published weights, or as the interrupted run left it.
        with run.memory_of_model(args, world, SMALLER_MODEL):
            refuse = partial(refuse_other_arguments, args)
            reader = models.load_resumable
            resumed = resume.find_resumable(args, world, reader, refuse, data.fingerprint)
            resume.set_threads(resumed, world)
            args, model, config = build.make_model(args, formatter, world, data, resumed)
        train_rows, val_rows = build.make_rows(args, formatter, world, data, config)
        build.train_seen_characters(model, train_rows, config, args.freeze_encoder)

        # What is trained: the losses of both decoders, each with its own learning rate.
        linear = linear_rate(args, model, resumed)
        args = args.decide(linear_lr_factor=linear.factor)
        loss_fn = make_loss(args, formatter, args.distillation_temperature)
        training = run.Training(
            model,
            engine.MixerTask(loss_fn, formatter, model=model),
            train_rows,
            val_rows,
            entries=build.entries(args, formatter, data, config, model.ngrams is not None),
            fingerprint=data.fingerprint,
            files=build.checksums_of_files(args),
            fast=fast_parameters(model, linear),
            about=banner.about(args, read, data, model),
            about_rate=banner.about_rate(linear, model),
            lists=[os.path.join(data.folder, name) for name in LISTS],
            fitted_before="the n-grams" if linear.fitted else "",
            smaller_model=SMALLER_MODEL,
            finish=lambda _: confidence.fit_run(args, formatter, world, data),
        )

        # DDP or FSDP, loaders, optimizer, and where the interrupted run was; then the loop, that of
        # histocc/trainer/loop.py with the mixer's task.
        ready = run.set_up(args, world, precision, training, resumed)
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
        run.finish(training, args, world, ready)

"""A run's model, loaders and optimizer, made from its flags as the training scripts make them, for benchmarks
that take its steps themselves.
"""

import contextlib
from dataclasses import replace
from functools import partial

import torch

import finetune
from histocc.formatter import BlockyFormatter
from histocc.job import build
from histocc.job import data as job_data
from histocc.job.recipe import make_loss
from histocc.runtime.device import Precision
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import MixerTask
from histocc.trainer import batches, loop
from histocc.trainer.schedule import linear_factor, make_optimizer

FOREVER = 10**6  # steps of a schedule


class Training:
    """flags: of finetune.py; it writes prepared data into its --save-path and nothing else."""

    def __init__(self, flags: list[str], device: torch.device):
        self.world, self.step = World(device=device), 0
        args = finetune.get_args_parser().parse_args([*flags, "--device", device.type])
        with contextlib.redirect_stdout(None):
            args, read, self.data = job_data.prepared(args, self.world, [args.dataset], [])
            self.formatter = BlockyFormatter.from_dict(read.formatter)
            made = build.make_model(args, self.formatter, self.world, self.data, None)
            self.run_args, self.model, self.config = made
        self.loss = make_loss(self.run_args, self.formatter)
        self.loaders = self.make_loaders(self.config)
        self.plan = self.loaders["train"].plan
        self.use_rate(self.run_args.learning_rate)

    def make_loaders(self, config: dict, whole: bool = False) -> dict:
        """For the model of `config`; whole: a step is not cut into micro-batches of similar length."""
        train, val = build.make_rows(self.run_args, self.formatter, self.world, self.data, config)
        plan = batches.batch_plan(self.run_args, train, self.world)
        plan = replace(plan, groups=1) if whole else plan
        return batches.make_loaders(self.run_args, self.world, train, val, plan)

    def train_seen_rows(self) -> None:
        """Of the embeddings of characters only those that occur are trained, as in a run."""
        frozen = self.run_args.freeze_encoder
        build.train_seen_characters(self.model, self.loaders["train"].dataset.rows, self.config, frozen)

    def use_rate(self, rate: float, warmup: int = 0) -> None:
        """A new optimizer, of one learning rate."""
        decay = self.run_args.weight_decay
        self.optimizer = make_optimizer(self.model, decay, rate)
        self.schedule = partial(linear_factor, warmup_steps=warmup, total_steps=FOREVER)

    def train(self, steps: int, precision: Precision | None = None) -> None:
        """Takes `steps` steps, all within an epoch."""
        batches = self.loaders["train"].at(0, self.step % (self.plan.steps_per_epoch - steps))
        run = loop.Run(
            self.model,
            MixerTask(self.loss),
            self.optimizer,
            self.world,
            precision,
            1,
            self.schedule,
            stop_step=self.step + steps,
            log_interval=None,
        )
        state = loop.State(self.step)
        loop.train_one_epoch(run, batches, state)
        self.step = state.step

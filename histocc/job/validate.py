"""`--eval-only`: validates a checkpoint on the validation rows and prints the figures; writes nothing."""

from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings
from histocc.data.rows import key_reader
from histocc.formatter import BlockyFormatter
from histocc.job import recipe
from histocc.job.build import make_rows
from histocc.job.config import JobConfig
from histocc.job.recipe import make_loss
from histocc.published import formats, models
from histocc.published.formats import Given
from histocc.runtime.config import differing
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import COLUMNS, MixerTask
from histocc.trainer import loop
from histocc.trainer.batches import validation_loader
from histocc.trainer.log import validation_line


def validate(args: JobConfig, read: PrepareSettings, world: World, data: PreparedData) -> None:
    """All ranks. Raises UserError."""
    formatter = BlockyFormatter.from_dict(read.formatter)
    named = args.initial_checkpoint or args.save_path
    file = models.find_weights(named, named)
    content = formats.load_content(file)
    separated = formatter.within_block_sep is not None
    key = key_reader(args.initial_key or args.key)
    given = Given(formatter.kind, key, formatter.target_cols, separated)
    model, own_formatter, state = models.model_of(
        file, content, Given() if models.brings_settings(content) else given
    )
    rest = {"target_cols": None, "allow_short": None}
    if own_formatter.to_dict() | rest != formatter.to_dict() | rest:
        raise UserError(
            f"the checkpoint was trained with the formatter {own_formatter.to_dict()}, "
            f"these arguments make {formatter.to_dict()}"
        )
    if list(state["key"]) != data.codes:
        raise UserError(
            "the checkpoint knows other codes than the data; pass --key with the key.csv of its run"
        )
    before = state["args"] | recipe.of_run(state) if "args" in state else {}
    if other := differing(type(args), args.values(), before, only_kept=True):
        world.print(f"Note: the model and its losses are those of {file}: {'; '.join(other)}")
    args = recipe.decide(args, state)
    rows = make_rows(args, formatter, world, data, state["config"])[1]
    if rows is None:
        raise UserError("--eval-only needs rows to validate on; raise --share-val")
    precision = Precision.of(args, world.device)
    precision.use()
    model.to(world.device, precision.dtype)
    task = MixerTask(make_loss(args, formatter), formatter)
    values = loop.evaluate(
        model, validation_loader(args, world, rows), task, world, precision, world.stop_agreed
    )
    world.print(validation_line({"step": state.get("step") or 0, **values}, COLUMNS))

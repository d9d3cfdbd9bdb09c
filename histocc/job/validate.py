"""`--eval-only`: validates a checkpoint on the validation rows and prints the figures; writes nothing."""

from histocc.data.arrays import PreparedData
from histocc.data.rows import key_reader
from histocc.job import recipe
from histocc.job.build import make_rows
from histocc.job.recipe import make_loss
from histocc.job.resume import differing_model
from histocc.job.settings import Settings
from histocc.model import model_io, published
from histocc.model.ngrams import AUTO
from histocc.model.published import Given
from histocc.runtime.device import Precision
from histocc.runtime.errors import UserError
from histocc.runtime.world import World
from histocc.seq2seq_mixer_engine import COLUMNS, MixerTask
from histocc.trainer import loop
from histocc.trainer.batches import validation_loader
from histocc.trainer.log import validation_line


def validate(settings: Settings, world: World, data: PreparedData) -> None:
    """All ranks. Raises UserError."""
    asked, formatter = settings.model, settings.formatter
    named = asked.initial_checkpoint or settings.folder.save_path
    file = model_io.find_weights(named, named)
    content = published.load_content(file)
    separated = formatter.within_block_sep is not None
    key = key_reader(asked.initial_key or asked.key)
    given = Given(formatter.kind, key, formatter.target_cols, separated)
    model, own_formatter, state = model_io.model_of(
        file, content, Given() if model_io.brings_settings(content) else given
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
    other = differing_model(settings, state) if "args" in state else []
    if other := [each for each in other if asked.ngrams != AUTO or not each.startswith("--ngrams")]:
        world.print(f"Note: the model and its losses are those of {file}: {'; '.join(other)}")
    settings = recipe.decide(settings, state)
    rows = make_rows(settings, world, data, state["config"])[1]
    if rows is None:
        raise UserError("--eval-only needs rows to validate on; raise --share-val")
    precision = Precision.of(settings.machine.precision, world.device)
    precision.use()
    model.to(world.device, precision.dtype)
    task = MixerTask(make_loss(settings.loss, formatter), formatter)
    values = loop.evaluate(
        model, validation_loader(settings, world, rows), task, world, precision, world.stop_agreed
    )
    world.print(validation_line({"step": state.get("step") or 0, **values}, COLUMNS))

"""What a checkpoint of a mixer must hold for its run to be resumed from it, beside what coding needs and what
that of any run must hold (`histocc.runtime.run_checkpoint`): the optimizer's state of just its parameters."""

from histocc.formatter import BlockyFormatter
from histocc.model.checkpoint_schema import shapes_of
from histocc.runtime import run_checkpoint


def check_resumable(file: str, state: dict) -> None:
    """Raises UserError unless a checkpoint, whose other entries are checked, has all that a run needs to be
    resumed from it."""
    run_checkpoint.check_resumable(file, state)
    kept = state["kept_codes"]
    run_checkpoint.check_agreement(file, {"kept_codes": (kept, min(kept, len(state["key"])))})
    formatter = BlockyFormatter.from_dict(
        {**state["formatter"], "target_cols": list(state["formatter"]["target_cols"])}
    )
    frozen = bool(state["args"].get("freeze_encoder"))
    trained = trained_shapes(state["config"], formatter, len(state["key"]), frozen)
    run_checkpoint.check_optimizer(file, state, trained)


def trained_shapes(config: dict, formatter: BlockyFormatter, codes: int, encoder_frozen: bool) -> list[tuple]:
    """Shapes of the trained parameters in the order of the optimizer. Of the encoder's tables only the rows
    of characters in the data are
    trained; how many is known to the data alone: None."""
    shapes, names = shapes_of(config, formatter.num_classes, codes)
    tables = [
        name for name in names if "HashBucketCodepointEmbedder" in name or "char_position_embeddings" in name
    ]
    rest = [
        tuple(shapes[name])
        for name in names
        if name not in tables and not (encoder_frozen and name.startswith("encoder."))
    ]
    width, has_tables = config["hidden_size"], bool(tables) and not encoder_frozen
    return rest if not has_tables else [(None, width // config["num_hash_functions"]), (None, width), *rest]

"""What a checkpoint of a mixer must hold for its run to be resumed from it, beside what coding needs and what
that of any run must hold (`histocc.runtime.run_checkpoint`): the optimizer's state of just its parameters."""

from typing import Any

from histocc.formatter import BlockyFormatter
from histocc.model.checkpoint_schema import shapes_of
from histocc.runtime import run_checkpoint
from histocc.runtime.errors import UserError
from histocc.runtime.schema import described, floats, kind, mapping, require


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
    check_optimizer(file, state, trained)


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


def check_optimizer(file: str, state: dict[str, Any], trained: list[tuple[int | None, ...]]) -> None:
    """Raises UserError unless the state of the optimizer in a checkpoint is AdamW's of parameters of these
    shapes, where None is any size: of all of them, or of none before the first step.
    """
    numbers = [number for group in state["optimizer"]["param_groups"] for number in group["params"]]
    if numbers != list(range(len(trained))):
        raise UserError(
            f"{file}: optimizer: param_groups: found {len(numbers):,} parameters, expected those "
            "of the model that are trained, "
            f"0 … {len(trained) - 1}"
        )
    moments: dict[int, Any] = state["optimizer"]["state"]
    require(
        file,
        kind(
            f"the states of all {len(trained):,} trained parameters, or none",
            lambda value: not value or value.keys() == set(range(len(trained))),
        ),
        moments,
        "optimizer: state",
    )
    memory: set[int] = set()
    for number, entry in moments.items():
        where = f"optimizer: state: {number}"
        means = floats(None)
        require(
            file,
            mapping({"step": floats(()), "exp_avg": means, "exp_avg_sq": floats(None, least=0)}),
            entry,
            where,
        )
        for name in ("exp_avg", "exp_avg_sq"):
            found, wanted = tuple(entry[name].shape), trained[number]
            if (
                len(found) != len(wanted)
                or any(size not in (None, there) for there, size in zip(found, wanted))
                or found != entry["exp_avg"].shape
            ):
                raise UserError(
                    f"{file}: {where}: {name}: found {described(entry[name])}, expected "
                    f"{['any number' if size is None else size for size in wanted]} as its parameter has"
                )
        if float(entry["step"]) < 0 or any(
            entry[name].requires_grad or not entry[name].is_contiguous() for name in entry
        ):
            raise UserError(
                f"{file}: {where}: found a state of another kind, expected one that AdamW has left"
            )
        places = {entry[name].untyped_storage().data_ptr() for name in ("step", "exp_avg", "exp_avg_sq")}
        if len(places) < 3 or places & memory:
            raise UserError(
                f"{file}: {where}: found tensors that share their memory, expected each by itself"
            )
        memory |= places

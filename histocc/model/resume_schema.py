"""What a checkpoint must hold for its run to be resumed from it, beside what coding needs: state of the
optimizer and of the schedule,
random state, and position in the data. Each entry by itself, and how they agree with each other and with the
weights."""

from histocc.formatter import BlockyFormatter
from histocc.model.checkpoint_schema import COUNT, shapes_of
from histocc.runtime.errors import UserError
from histocc.runtime.schema import (
    described,
    floats,
    kind,
    listing,
    mapping,
    maybe,
    plain,
    real,
    require,
    text,
    whole,
)

RNG = mapping({"seed": whole(-(2**63), 2**63), "threads": whole(1, 1024), "processes": whole(1, 1 << 20)})
ANY_FLOAT = real()  # of a log, where a loss may be infinite
RUNNING = mapping(
    {"sums": mapping({}, rest=ANY_FLOAT), "count": COUNT, "seconds_data": real(0)},
    {"skipped": COUNT, "grad_norm": maybe(ANY_FLOAT)},
)
POSITION = mapping(
    {
        "epoch": COUNT,
        "batch": COUNT,
        "total_batch": whole(1, 2**62),
        "steps_per_epoch": whole(1, 2**62),
        "fingerprint": text(100),
        "samples": COUNT,
        "running": listing(RUNNING, 1, 1 << 20),
    },
    {
        "launchers": listing(text(1000, empty=True)),
        "run": text(100),
        "best_val_loss": maybe(ANY_FLOAT),
        "bad_in_row": COUNT,
        "val_not_finite": COUNT,
        "finite_step": maybe(COUNT),
        "files": mapping({}, rest=COUNT),
        "unfinished": maybe(mapping({"step": COUNT, "epoch": COUNT, "learning_rate": real(0)})),
    },
    rest=plain,
)
SCHEDULER = mapping(
    {"base_lrs": listing(real(0, above=True), 1, 2), "last_epoch": COUNT},
    {"_step_count": COUNT, "_last_lr": listing(real(0), 1, 2)},
    rest=plain,
)
GROUP = mapping(
    {
        "params": listing(COUNT, 1),
        "lr": real(0),
        "betas": listing(real(0, 1), 2, 2),
        "eps": real(0),
        "weight_decay": real(0),
    },
    {"initial_lr": real(0)},
    rest=plain,
)
SCALER = mapping(
    {},
    {
        "scale": real(0, above=True),
        "growth_factor": real(1, above=True),
        "backoff_factor": real(0, 1, above=True),
        "growth_interval": whole(1, 2**62),
        "_growth_tracker": COUNT,
    },
    rest=plain,
)
RESUMABLE = mapping(
    {
        "step": COUNT,
        "rng": RNG,
        "position": POSITION,
        "scheduler": SCHEDULER,
        "args": mapping({"num_epochs": whole(1)}),
        "optimizer": mapping(
            {
                "state": kind("numbers and states", lambda value: isinstance(value, dict)),
                "param_groups": listing(GROUP, 1, 2),
            }
        ),
    },
    {"scaler": maybe(SCALER)},
)


def check_resumable(file: str, state: dict) -> None:
    """Raises UserError unless a checkpoint, whose other entries are checked, has all that a run needs to be
    resumed from it."""
    require(file, RESUMABLE, state)
    step, position, groups = state["step"], state["position"], state["optimizer"]["param_groups"]
    expected = {
        "position: epoch": (position["epoch"], step // position["steps_per_epoch"]),
        "position: batch": (position["batch"], step % position["steps_per_epoch"]),
        "scheduler: last_epoch": (state["scheduler"]["last_epoch"], step),
        "scheduler: base_lrs": (len(state["scheduler"]["base_lrs"]), len(groups)),
        "rng: seed": (state["rng"]["seed"], state["args"].get("seed", state["rng"]["seed"])),
        "position: unfinished: step": ((position.get("unfinished") or {"step": step})["step"], step),
        "kept_codes": (state.get("kept_codes", 0), min(state.get("kept_codes", 0), len(state["key"]))),
    }
    for entry, (found, wanted) in expected.items():
        if found != wanted:
            raise UserError(
                f"{file}: {entry}: found {found}, expected {wanted}, as the other entries have it"
            )
    config = state["config"]
    formatter = BlockyFormatter.from_dict(
        {**state["formatter"], "target_cols": list(state["formatter"]["target_cols"])}
    )
    trained = trained_shapes(config, formatter, len(state["key"]), bool(state["args"].get("freeze_encoder")))
    numbers = [number for group in groups for number in group["params"]]
    if numbers != list(range(len(trained))):
        raise UserError(
            f"{file}: optimizer: param_groups: found {len(numbers):,} parameters, expected those "
            "of the model that are trained, "
            f"0 … {len(trained) - 1}"
        )
    check_optimizer_state(file, state["optimizer"]["state"], trained)


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
    width = config["hidden_size"]
    return rest if encoder_frozen else [(None, width // config["num_hash_functions"]), (None, width), *rest]


def check_optimizer_state(file: str, state: dict, trained: list[tuple]) -> None:
    """Raises UserError unless `state` is AdamW's of parameters of these shapes: of all of them, or of none
    before the first step."""
    require(
        file,
        kind(
            f"the states of all {len(trained):,} trained parameters, or none",
            lambda value: not value or value.keys() == set(range(len(trained))),
        ),
        state,
        "optimizer: state",
    )
    memory = set()
    for number, entry in state.items():
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

"""Sizes of the encoder: what each field of its config may be, and what the shapes of its weights say of
it."""

import torch

from histocc.runtime.schema import Check, Wrong, described, mapping, real, text, whole

WIDEST = 1 << 20  # of any layer
_POSITIONS = "encoder.char_embeddings.char_position_embeddings.weight"
_TABLE = "encoder.char_embeddings.HashBucketCodepointEmbedder_"
_LAYER = "encoder.encoder.layer."

FIELDS: dict[str, Check] = {
    "hidden_size": whole(1, WIDEST),
    "num_hidden_layers": whole(0, 1000),
    "num_attention_heads": whole(1, WIDEST),
    "intermediate_size": whole(1, WIDEST),
    "hidden_act": text(100),
    "hidden_dropout_prob": real(0, 1),
    "attention_probs_dropout_prob": real(0, 1),
    "max_position_embeddings": whole(4, 1 << 24),
    "type_vocab_size": whole(1, WIDEST),
    "initializer_range": real(0, 10),
    "layer_norm_eps": real(0, 1, above=True),
    "downsampling_rate": whole(1, 64),
    "upsampling_kernel_size": whole(1, 64),
    "num_hash_functions": whole(1, 16),
    "num_hash_buckets": whole(1, 1 << 24),
    "local_transformer_stride": whole(4, 1 << 24),
}
# Field → (tensor, which of its dimensions shows it).
_SHOWN = {
    "hidden_size": (_POSITIONS, 1),
    "num_hash_buckets": (_POSITIONS, 0),
    "type_vocab_size": ("encoder.char_embeddings.token_type_embeddings.weight", 0),
    "intermediate_size": ("encoder.initial_char_encoder.layer.0.intermediate.dense.weight", 0),
    "downsampling_rate": ("encoder.chars_to_molecules.conv.weight", 2),
    "upsampling_kernel_size": ("encoder.projection.conv.weight", 2),
    "decoder_dim_feedforward": ("decoder.decoder.layers.0.linear1.weight", 0),
}
_COUNTED = {"num_hidden_layers": _LAYER, "num_hash_functions": _TABLE}


def problem(config: dict) -> Wrong | None:
    """What is wrong with the fields of the encoder in `config`, each by itself and together."""
    wrong = mapping(FIELDS)(config)
    if wrong:
        return wrong
    width = config["hidden_size"]
    for parts in ("num_attention_heads", "num_hash_functions"):
        if width % config[parts]:
            return Wrong(parts, str(config[parts]), f"a number of which hidden_size {width} is a multiple")
    return None


def shown_by(weights: dict[str, torch.Tensor]) -> tuple[dict[str, int], Wrong | None]:
    """(fields of a config that the shapes of `weights` show, what is wrong with these shapes). Names are
    those of the whole model."""
    found = {}
    for field, (name, axis) in _SHOWN.items():
        if name in weights:
            shape = weights[name].shape
            if len(shape) != (3 if "conv" in name else 2) or 0 in shape:
                return found, Wrong(
                    name,
                    described(weights[name]),
                    f"a tensor of {3 if 'conv' in name else 2} dimensions, none empty",
                )
            found[field] = shape[axis]
    for field, prefix in _COUNTED.items():
        numbers = {name[len(prefix) :].partition(".")[0] for name in weights if name.startswith(prefix)}
        odd = numbers - {str(i) for i in range(len(numbers))}
        if odd:
            return found, Wrong(
                f"{prefix}{sorted(odd)[0]}"[:200],
                "this name",
                f"numbers from 0 on without gaps behind {prefix}",
            )
        found[field] = len(numbers)
    return found, None


def disagreement(config: dict, weights: dict[str, torch.Tensor]) -> Wrong | None:
    """Where `config` names another size than the shapes of `weights` show."""
    shown, wrong = shown_by(weights)
    if wrong:
        return wrong
    if not config.get("encoder", True):  # there is none to show its sizes
        shown = {field: size for field, size in shown.items() if field not in _COUNTED}
    return next(
        (
            Wrong(field, str(config[field]), f"{size}, as the weights have it")
            for field, size in shown.items()
            if field in config and config[field] != size
        ),
        None,
    )

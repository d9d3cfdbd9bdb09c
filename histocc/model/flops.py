"""How many floating point operations training needs for what is real in its batches: six for each weight and
each character, block of characters, token or row that goes through it (Kaplan et al., 2020, arXiv
2001.08361): two forward, four backward, and the two alone if it is frozen. Not counted is what has no
weights: attention between positions, norms, losses.
"""

from torch import nn

from histocc.model.mixer import Seq2SeqMixerOccCANINE

UNITS = {  # of what goes through a part of the model
    "encoder.initial_char_encoder": "characters",
    "encoder.chars_to_molecules": "blocks",
    "encoder.encoder": "blocks",
    "encoder.projection": "characters",
    "encoder.final_char_encoder": "characters",
    "encoder.pooler": "rows",
    "linear_decoder": "rows",
    "ngrams.linear": "rows",
    "ngrams.text_to_memory": "rows",
    "ngrams.word_to_memory": "characters",
    "decoder.decoder": "tokens",
    "decoder.head": "tokens",
}


def flops_per_unit(model: nn.Module | None) -> dict[str, float]:
    """Operations for each unit of UNITS; {} for a model of another kind."""
    flops: dict[str, float] = {}
    for name, weight in model.named_parameters() if isinstance(model, Seq2SeqMixerOccCANINE) else ():
        unit = UNITS.get(".".join(name.split(".")[:2])) or UNITS.get(name.split(".")[0])
        if unit is None or weight.dim() < 2:
            continue
        count = weight.numel() * (6 if weight.requires_grad else 2)
        if "multihead_attn.in_proj" in name:  # the keys and values are those of characters
            flops["characters"] = flops.get("characters", 0.0) + count * 2 / 3
            count /= 3
        flops[unit] = flops.get(unit, 0.0) + count
    return flops

"""What a run on occupations says of its data and its model before it starts, with the labels that users of
the guides look for.
"""

from histocc.data.arrays import PreparedData
from histocc.data.config import PrepareSettings
from histocc.formatter import BlockyFormatter
from histocc.job.config import JobConfig
from histocc.job.optimizer import LinearRate
from histocc.model.canine import CanineEncoder
from histocc.model.mixer import Seq2SeqMixerOccCANINE
from histocc.text import AS_IS


def about(
    args: JobConfig, read: PrepareSettings, data: PreparedData, model: Seq2SeqMixerOccCANINE
) -> list[str]:
    """A line each."""
    formatter, encoder = BlockyFormatter.from_dict(read.formatter), model.encoder.config
    first = "the teacher" if args.teacher else "the initial checkpoint"
    if args.initial_checkpoint:
        first = "the initial checkpoint"
    kept = (
        f", the first {data.kept_codes:,} those of {first}, the others new (--shrink-key:"
        " those of the data alone)"
        if data.kept_codes
        else ""
    )
    return [
        f"Dataset: {', '.join(read.train_files)} ({len(data.train):,} rows for training,"
        f" {len(data.val):,} for validation)",
        f"Model: {args.model_size} ("
        + ("" if isinstance(model.encoder, CanineEncoder) else "no encoder, ")
        + f"width {encoder.hidden_size}, {encoder.num_hidden_layers} layers)",
        f"Model parameters: {sum(p.numel() for p in model.parameters()):,}",
        f"Vocabulary size: {model.vocab_size}",
        f"Codes: {len(data.codes):,} ({formatter.kind}, columns {', '.join(formatter.target_cols)}){kept}",
        *([f"Texts: {data.clean_text}"] if data.clean_text != AS_IS else []),
        *(["Target mask: published (PAD among the codes is looked at)"] if not model.target_mask else []),
    ]


def about_rate(linear: LinearRate, model: Seq2SeqMixerOccCANINE) -> str:
    """What has another learning rate than the rest, behind that of the rest."""
    faster = (
        "the n-grams"
        if linear.ngrams_alone
        else "the linear decoder and the n-grams"
        if model.ngrams
        else "the linear decoder"
    )
    return f", of {faster} {linear.factor:g} times that" if linear.factor != 1 else ""

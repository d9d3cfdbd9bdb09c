"""The whole model: CANINE encoder, a decoder that writes codes digit by digit, and one linear output per code
(Dahl, Johansen, Vedel, 2024, arXiv 2402.13604, section 3).
"""

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from histocc.formatter import PAD_IDX
from histocc.model.canine import CanineConfig, CanineEncoder
from histocc.model.decoder import TransformerDecoder, visible_memory
from histocc.model.layers import Dropout, Linear, width_groups
from histocc.model.ngrams import ASCII_CASE, FIRST_PATTERNS, Ngrams, NoEncoder, TextVectors
from histocc.model.ridge import Ridge

NGRAMS = "ngrams"
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
MODEL_SIZES = {
    "tiny": dict(zip(_SIZES, (128, 2, 2, 512))),
    "small": dict(zip(_SIZES, (256, 4, 4, 1024))),
    "base": {},  # the sizes of google/canine-s
    NGRAMS: dict(zip(_SIZES, (128, 0, 2, 512))),  # no encoder, only n-grams
}


def model_config(size: str, **overrides) -> CanineConfig:
    """Return the encoder config of one of MODEL_SIZES, with some fields changed."""
    return CanineConfig(**(MODEL_SIZES[size] | overrides))


class Seq2SeqMixerOccCANINE(nn.Module):
    """Encoder with a seq2seq decoder on its characters and a linear decoder on its pooled output.

    Args:
        num_classes: largest token id + 1 for each position of a target, from the formatter.
        num_classes_flat: number of codes of the linear decoder.
        dropout_rate: probability 0…1 in the decoder and on the input of the linear layer, never on logits.
        decoder_dim_feedforward: None for the encoder's width.
        config: encoder sizes, None for base.
        memory_mask: whether the decoder masks padding of the memory. Published models do not.
        target_mask: whether it masks PAD among the tokens, see `TransformerDecoder`.
        ngrams: {"rows", "width", "patterns", "case"} of n-grams added to the encoder, see `Ngrams`, or None.
        ngram_dropout: share of the n-grams left out in training.
        encoder: False for no encoder, see `NoEncoder`. The model then needs n-grams.
        ridge: sizes of a model in closed form, see `Ridge`, which answers instead of the linear decoder.
        model_domain: accepted for compatibility with the published class.
    """

    def __init__(
        self,
        num_classes: list[int],
        num_classes_flat: int,
        dropout_rate: float | None = None,
        decoder_dim_feedforward: int | None = None,
        *,
        config: CanineConfig | None = None,
        memory_mask: bool = True,
        target_mask: bool = True,
        ngrams: dict | None = None,
        ngram_dropout: float = 0.0,
        encoder: bool = True,
        ridge: dict | None = None,
        model_domain: str = "Multilingual_CANINE",
    ):
        super().__init__()
        if model_domain != "Multilingual_CANINE":
            raise ValueError(f"model_domain {model_domain!r} is not 'Multilingual_CANINE'")
        if not encoder and not ngrams:
            raise ValueError("a model without an encoder needs n-grams")
        self.config = config or CanineConfig()
        self.vocab_size = max(num_classes) + 1
        self.memory_mask = memory_mask
        self.in_groups = True  # of similar width, in training on CPUs
        width, dropout = self.config.hidden_size, dropout_rate or 0.0
        self.encoder = CanineEncoder(self.config) if encoder else NoEncoder(width)
        self.decoder = TransformerDecoder(
            self.vocab_size,
            width,
            decoder_dim_feedforward or width,
            dropout=dropout,
            max_positions=max(128, len(num_classes)),
            target_mask=target_mask,
        )
        self.linear_dropout = Dropout(dropout)
        self.linear_decoder = Linear(width, num_classes_flat)
        self.ngrams = None
        if ngrams:
            sizes = ngrams["rows"], ngrams["width"], width, num_classes_flat, ngram_dropout
            older = {"patterns": FIRST_PATTERNS, "case": ASCII_CASE}
            self.ngrams = Ngrams(*sizes, *(ngrams.get(name, usual) for name, usual in older.items()))
        self.ridge = Ridge(rows=(ngrams or {})["rows"], classes=num_classes_flat, **ridge) if ridge else None

    @property
    def target_mask(self) -> bool:
        """Whether the decoder masks PAD among the tokens."""
        return self.decoder.target_mask

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, TextVectors]:
        """Map input_ids int64 [B, S] and attention_mask bool or 0/1 [B, S] to (memory [B, S, H], vectors of
        the texts). With `memory_mask` inputs may be as narrow as `text.padded_width` says.
        """
        memory, text = self._encode_groups([input_ids], [attention_mask])
        return memory[0], text

    def _encode_groups(self, input_ids: list[Tensor], mask: list[Tensor]) -> tuple[list[Tensor], TextVectors]:
        """Encode groups of rows and return (memory of each, vectors of all)."""
        memory, pooled = self.encoder.forward_groups(input_ids, mask, list(map(self._is_narrow, input_ids)))
        if self.ngrams is None:
            return memory, TextVectors(pooled)
        text, of_words = self.ngrams(input_ids)
        return [group + words for group, words in zip(memory, of_words)], TextVectors(pooled, text)

    def encode_text(
        self, input_ids: Tensor, attention_mask: Tensor, answers: Tensor | None = None
    ) -> TextVectors:
        """Return only the vectors of `encode`, which `classify` takes, with less work. answers: probabilities
        of the prior model [B, its codes], for a model in closed form with a prior.
        """
        pooled = self.encoder.pooled(input_ids, attention_mask, padding_follows=self._is_narrow(input_ids))
        if self.ngrams is None:
            return TextVectors(pooled)
        if self.ridge is not None:
            return TextVectors(pooled, *self.ridge(self.ngrams, input_ids, answers))
        return TextVectors(pooled, self.ngrams.vectors(input_ids)[0])

    def _is_narrow(self, input_ids: Tensor) -> bool:
        """Return whether the encoder should assume that padding follows."""
        return self.memory_mask and input_ids.shape[1] < self.config.local_transformer_stride

    def memory_padding_mask(self, attention_mask: Tensor) -> Tensor | None:
        """Return the padding to mask from the decoder, bool [B, S], or None to mask nothing."""
        return ~attention_mask.bool() if self.memory_mask else None

    def decode(
        self,
        memory: Tensor,
        target: Tensor,
        memory_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits [B, T, V] for target int64 [B, T]. Without a target_padding_mask, PAD is masked."""
        if target_padding_mask is None:
            target_padding_mask = target == PAD_IDX
        return self.decoder(memory, target, memory_padding_mask, target_padding_mask)

    def classify(self, text: TextVectors) -> Tensor:
        """Return logits [B, num_classes_flat] of the linear decoder for vectors from `encode`."""
        if text.logits is not None:
            return text.logits
        logits = self.linear_decoder(self.linear_dropout(text.encoded))
        if self.ngrams is None:
            return logits
        return logits + self.ngrams.linear(text.ngrams)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        target: Tensor,
        target_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits of both decoders, teacher-forced: ([B, T, V], [B, num_classes_flat]).

        Args:
            input_ids, attention_mask: int64 [B, S], bool or 0/1 [B, S].
            target: int64 [B, T] from BOS on, at most as long as the decoder has positions.
            target_mask: accepted for the published interface, but unused: the decoder is always causal.
            target_padding_mask: [B, T], True or not 0 at PAD, or None to find PAD in the target.
        """
        may_group = torch.is_grad_enabled() and self.in_groups and self.memory_mask
        may_group = may_group and input_ids.device.type == "cpu" and input_ids.shape == attention_mask.shape
        grouped = width_groups(attention_mask) if may_group else None
        if grouped is None:
            memory, text = self.encode(input_ids, attention_mask)
            padding = self.memory_padding_mask(attention_mask)
            return self.decode(memory, target, padding, target_padding_mask), self.classify(text)
        order, groups = grouped

        def parts(x: Tensor) -> list[Tensor]:
            split = x[order].split([rows for rows, _ in groups])
            return [part[:, :width] for part, (_, width) in zip(split, groups)]

        masks = parts(attention_mask.bool())
        memory, text = self._encode_groups(parts(input_ids), masks)
        visible = [visible_memory(~mask) for mask in masks]
        padding = target == PAD_IDX if target_padding_mask is None else target_padding_mask.bool()
        out = self.decoder.forward_groups(memory, target[order], visible, padding[order])
        back = order.argsort()
        out, text = tree_map_only(Tensor, lambda x: x.index_select(0, back), (out, text))
        return out, self.classify(text)

"""The whole model: CANINE encoder, a decoder that writes codes digit by digit, and one linear output per
code.

Dahl, Johansen, Vedel, 2024 (arXiv 2402.13604, section 3).
"""

import torch
from torch import Tensor, nn

from histocc.formatter import PAD_IDX
from histocc.model.canine import CanineConfig, CanineEncoder
from histocc.model.decoder import TransformerDecoder, visible_memory
from histocc.model.layers import Dropout, Linear
from histocc.model.ngrams import Ngrams
from histocc.model.no_encoder import NoEncoder
from histocc.model.width_groups import width_groups

NGRAMS = "ngrams"
MODEL_SIZES = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 512},
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "base": {},  # the sizes of google/canine-s
    # no encoder: n-grams alone
    NGRAMS: {"hidden_size": 128, "num_hidden_layers": 0, "num_attention_heads": 2, "intermediate_size": 512},
}


def model_config(size: str, **overrides) -> CanineConfig:
    """Encoder config of a named size, with single fields changed. Raises ValueError for an unknown size."""
    if size not in MODEL_SIZES:
        raise ValueError(f"model size {size!r} is not one of {', '.join(MODEL_SIZES)}")
    return CanineConfig(**(MODEL_SIZES[size] | overrides))


class Seq2SeqMixerOccCANINE(nn.Module):
    """Encoder with a seq2seq decoder on its characters and a linear decoder on its pooled output.

    num_classes: a formatter's `num_classes`, one entry per position of a target, each its largest token id +
    1.
    num_classes_flat: number of codes of the linear decoder. dropout_rate: probability 0…1 (None is 0) in the
    decoder and on the input of the linear layer, never on logits. decoder_dim_feedforward: None for the
    encoder's width.
    config: encoder sizes, None for base. memory_mask: whether the decoder leaves out padded positions of the
    memory; published models look at all of them. target_mask: the same of PAD among the tokens, see
    `TransformerDecoder`.
    encoder: False for none, see `NoEncoder`; there are n-grams then.
    ngrams: {"rows", "width"} of hashed n-grams beside the encoder, see `histocc.model.ngrams`; None, as
    published, for none; ngram_dropout: share of them that is left out in training. model_domain is accepted
    for compatibility with the published class.
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
        model_domain: str = "Multilingual_CANINE",
    ):
        super().__init__()
        if model_domain != "Multilingual_CANINE":
            raise ValueError(f"model_domain {model_domain!r} is not 'Multilingual_CANINE'")
        self.config = config or CanineConfig()
        self.seq_len = len(num_classes)
        self.vocab_size = max(num_classes) + 1
        self.memory_mask = memory_mask
        self.in_groups = True  # of similar width, in training on CPUs
        width = self.config.hidden_size
        dropout = dropout_rate or 0.0
        if not encoder and not ngrams:
            raise ValueError("a model without an encoder needs n-grams")
        self.encoder = CanineEncoder(self.config) if encoder else NoEncoder(self.config)
        self.decoder = TransformerDecoder(
            self.vocab_size,
            width,
            decoder_dim_feedforward or width,
            dropout=dropout,
            max_positions=max(128, self.seq_len),
            pad_idx=PAD_IDX,
            target_mask=target_mask,
        )
        self.linear_dropout = Dropout(dropout)
        self.linear_decoder = Linear(width, num_classes_flat)
        self.ngrams = None
        if ngrams:
            self.ngrams = Ngrams(ngrams["rows"], ngrams["width"], width, num_classes_flat, ngram_dropout)

    @property
    def target_mask(self) -> bool:
        """Whether the decoder leaves out PAD among the tokens."""
        return self.decoder.target_mask

    def encode(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids int64 [B, S], attention_mask bool or 0/1 [B, S] → (memory [B, S, H], pooled [B, H]).

        With n-grams, their vector of the text is appended to the pooled one: [B, H + their width]. Where
        padding does not count (`memory_mask`), inputs may be as narrow as `text.padded_width` says.
        """
        memory, pooled = self.encoder(input_ids, attention_mask, padding_follows=self._is_narrow(input_ids))
        if self.ngrams is None:
            return memory, pooled
        text, of_words = self.ngrams(input_ids)
        return memory + of_words, torch.cat([pooled, text], dim=1)

    def encode_text(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """`encode`'s pooled alone, which is all that `classify` takes: the same values, for less work."""
        pooled = self.encoder.pooled(input_ids, attention_mask, padding_follows=self._is_narrow(input_ids))
        return pooled if self.ngrams is None else torch.cat([pooled, self.ngrams.text(input_ids)], dim=1)

    def _is_narrow(self, input_ids: Tensor) -> bool:
        """Whether the encoder takes it that padding follows the positions that are there."""
        return self.memory_mask and input_ids.shape[1] < self.config.local_transformer_stride

    def memory_padding_mask(self, attention_mask: Tensor) -> Tensor | None:
        """What the decoder may not look at: bool [B, S], True at padding; None where it looks at
        everything.
        """
        return ~attention_mask.bool() if self.memory_mask else None

    def decode(
        self,
        memory: Tensor,
        target: Tensor,
        memory_padding_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, vocabulary] for target int64 [B, T]; without a target_padding_mask, PAD is masked."""
        if target_padding_mask is None:
            target_padding_mask = target == PAD_IDX
        return self.decoder(memory, target, memory_padding_mask, target_padding_mask)

    def classify(self, pooled: Tensor) -> Tensor:
        """Logits [B, num_classes_flat] of the linear decoder for what `encode` gives as pooled."""
        width = self.config.hidden_size
        logits = self.linear_decoder(self.linear_dropout(pooled[:, :width]))
        return logits if self.ngrams is None else logits + self.ngrams.linear(pooled[:, width:])

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        target: Tensor,
        target_mask: Tensor | None = None,
        target_padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Both decoders, teacher-forced.

        input_ids int64 [B, S]; attention_mask bool or 0/1 [B, S]; target int64 [B, T] from BOS on, at most as
        long as the decoder has positions; target_padding_mask [B, T], True or not 0 at PAD, None to find it
        in the target. The decoder is always causal; target_mask is accepted for compatibility with the
        published class and not used. Returns (out_seq2seq [B, T, vocabulary], out_linear [B,
        num_classes_flat]), logits.
        """
        groups = None
        if (
            torch.is_grad_enabled()
            and self.in_groups
            and self.memory_mask
            and input_ids.device.type == "cpu"
            and input_ids.shape == attention_mask.shape
        ):
            groups = width_groups(attention_mask)
        if groups is not None:
            return self._forward_in_groups(input_ids, attention_mask, target, target_padding_mask, *groups)
        memory, pooled = self.encode(input_ids, attention_mask)
        out_seq2seq = self.decode(
            memory, target, self.memory_padding_mask(attention_mask), target_padding_mask
        )
        return out_seq2seq, self.classify(pooled)

    def _forward_in_groups(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        target: Tensor,
        target_padding_mask: Tensor | None,
        order: Tensor,
        groups: list[tuple[int, int]],
    ) -> tuple[Tensor, Tensor]:
        """`forward` with rows in `order` int64 [B], in groups of so many rows and positions."""
        padding = target == PAD_IDX if target_padding_mask is None else target_padding_mask.bool()
        sizes = [rows for rows, _ in groups]
        ids, masks = (
            [part[:, :width] for part, (_, width) in zip(each[order].split(sizes), groups)]
            for each in (input_ids, attention_mask.bool())
        )
        memory, pooled = self.encoder.of_groups(ids, masks, list(map(self._is_narrow, ids)))
        if self.ngrams is not None:
            texts, of_words = self.ngrams.of_groups(ids)
            memory = [each + words for each, words in zip(memory, of_words)]
            pooled = torch.cat([pooled, texts], dim=1)
        visible = [visible_memory(~mask) for mask in masks]
        out = self.decoder.of_groups(memory, target[order], visible, padding[order])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return out.index_select(0, back), self.classify(pooled.index_select(0, back))

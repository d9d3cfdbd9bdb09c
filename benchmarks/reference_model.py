"""The published model as its description says, built of well-known parts and with no trick; ours is measured
against it.

The parts are `transformers`' CanineModel, torch's TransformerDecoder, texts padded to 128 positions, whole
sequences decoded again for each token. Parameter names are those of `Seq2SeqMixerOccCANINE`, so that weights
go both ways.
"""

import math

import torch
from torch import Tensor, nn

PAD, BOS = 1, 2
POSITIONS = 128


class TokenEmbedding(nn.Module):
    def __init__(self, vocabulary: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)


class Positions(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        rates = torch.exp(-torch.arange(0, width, 2) * math.log(10000) / width)
        angle = torch.arange(POSITIONS)[:, None] * rates
        table = torch.stack([angle.sin(), angle.cos()], dim=2).reshape(POSITIONS, 1, width)
        self.register_buffer("pos_embedding", table)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, H]
        return x + self.get_buffer("pos_embedding")[: x.shape[1], 0]


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, feedforward: int):
        super().__init__()
        self.token_emb = TokenEmbedding(vocabulary, width)
        self.positional_encoding = Positions(width)
        layer = nn.TransformerDecoderLayer(width, 8, feedforward, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 3)
        self.head = nn.Linear(width, vocabulary)

    def forward(
        self,
        memory: Tensor,
        tokens: Tensor,
        padding: Tensor | None = None,
        memory_padding: Tensor | None = None,
    ) -> Tensor:
        """Return logits of the next token [B, T, V].

        Args:
            memory: float [B, S, H].
            tokens: int64 [B, T].
            padding: [B, T], bool, or float as in the published training, which adds it to the scores.
            memory_padding: bool [B, S].
        """
        later = torch.ones(tokens.shape[1], tokens.shape[1], device=tokens.device).triu(1).bool()
        if padding is not None and padding.is_floating_point():
            later = torch.zeros_like(later, dtype=padding.dtype).masked_fill(later, float("-inf"))
        x = self.positional_encoding(self.token_emb(tokens))
        x = self.decoder(
            x, memory, tgt_mask=later, tgt_key_padding_mask=padding, memory_key_padding_mask=memory_padding
        )
        return self.head(x)


class Reference(nn.Module):
    """The reference. config: a `CanineConfig` of ours, whose fields have the published names."""

    def __init__(self, config, vocabulary: int, codes: int, feedforward: int):
        super().__init__()
        from transformers import CanineConfig, CanineModel

        self.encoder = CanineModel(CanineConfig(**config.to_dict()))
        self.decoder = Decoder(vocabulary, config.hidden_size, feedforward)
        self.linear_decoder = nn.Linear(config.hidden_size, codes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logits [B, T, V], [B, codes]) for input_ids, attention_mask [B, 128], target [B, T]."""
        encoded = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        logits = self.decoder(encoded.last_hidden_state, target, target == PAD, attention_mask == 0)
        return logits, self.linear_decoder(encoded.pooler_output)

    @torch.no_grad()
    def flat(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return probabilities of the codes, [B, codes]."""
        encoded = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return self.linear_decoder(encoded.pooler_output).sigmoid()

    @torch.no_grad()
    def greedy(self, input_ids: Tensor, attention_mask: Tensor, tokens: int) -> Tensor:
        """Return the most probable token at each position, [B, tokens]."""
        memory = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        sequence = torch.full((len(input_ids), 1), BOS, device=input_ids.device)
        for _ in range(tokens):
            logits = self.decoder(memory, sequence, sequence == PAD, attention_mask == 0)
            sequence = torch.cat([sequence, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return sequence[:, 1:]

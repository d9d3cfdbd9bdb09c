"""The published model as its description says, built of well-known parts and with no trick: what ours is
measured against.

`transformers`' CanineModel, torch's TransformerDecoder, texts padded to 128 positions, whole sequences
decoded again for each token. Parameter names are those of `Seq2SeqMixerOccCANINE`, so that weights go both
ways.
"""

import math

import torch
from torch import Tensor, nn

PAD, BOS = 1, 2


class TokenEmbedding(nn.Module):
    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)


class PositionalEncoding(nn.Module):
    def __init__(self, width: int, positions: int = 128):
        super().__init__()
        self.register_buffer("pos_embedding", torch.zeros(positions, 1, width))  # comes with the weights

    def forward(self, x: Tensor) -> Tensor:
        return x + self.pos_embedding[: x.shape[1], 0]


class Decoder(nn.Module):
    def __init__(self, vocab_size: int, width: int, feedforward: int, heads: int = 8, layers: int = 3):
        super().__init__()
        self.token_emb = TokenEmbedding(vocab_size, width)
        self.positional_encoding = PositionalEncoding(width)
        layer = nn.TransformerDecoderLayer(width, heads, feedforward, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, layers)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, memory: Tensor, target: Tensor, memory_padding: Tensor) -> Tensor:
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool, device=target.device).triu(1)
        x = self.positional_encoding(self.token_emb(target))
        return self.head(
            self.decoder(
                x,
                memory,
                tgt_mask=later,
                tgt_key_padding_mask=target == PAD,
                memory_key_padding_mask=memory_padding,
            )
        )


class Reference(nn.Module):
    """config: a `CanineConfig` of ours, whose fields have the published names."""

    def __init__(self, config, vocab_size: int, codes: int, feedforward: int):
        super().__init__()
        from transformers import CanineConfig, CanineModel

        self.encoder = CanineModel(CanineConfig(**config.to_dict()))
        self.decoder = Decoder(vocab_size, config.hidden_size, feedforward)
        self.linear_decoder = nn.Linear(config.hidden_size, codes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """input_ids, attention_mask [B, 128], target [B, T] → (logits [B, T, V], [B, codes])."""
        found = self.encoder(input_ids=input_ids, attention_mask=attention_mask)
        return (
            self.decoder(found.last_hidden_state, target, attention_mask == 0),
            self.linear_decoder(found.pooler_output),
        )

    @torch.no_grad()
    def flat(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Probabilities of the codes, [B, codes]."""
        return self.linear_decoder(
            self.encoder(input_ids=input_ids, attention_mask=attention_mask).pooler_output
        ).sigmoid()

    @torch.no_grad()
    def greedy(self, input_ids: Tensor, attention_mask: Tensor, tokens: int) -> Tensor:
        """[B, tokens], the most probable token at each position."""
        memory = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        sequence = torch.full((len(input_ids), 1), BOS, device=input_ids.device)
        for _ in range(tokens):
            best = self.decoder(memory, sequence, attention_mask == 0)[:, -1].argmax(-1, keepdim=True)
            sequence = torch.cat([sequence, best], dim=1)
        return sequence[:, 1:]

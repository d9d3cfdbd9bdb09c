"""The published program, plainly as its description says: how it treats a text, weights in the published
layout, and their output.

Cleaning, encoding and decoding are those of Dahl, Johansen and Vedel (2024, arXiv 2402.13604, and their
package), from well-known parts alone: the package Unidecode, `transformers`' CanineModel, torch's
TransformerDecoder. Nothing of histocc is in it, so that both can be compared.
"""

import math

import torch
from torch import Tensor, nn

from .reference_model import BOS, PAD, POSITIONS, Decoder

EOS, SEP = 3, 4
CLS_ID, SEP_ID = 0xE000, 0xE001
THRESHOLDS = {"unk": 0.31, "ca": 0.30, "da": 0.24, "ge": 0.21, "en": 0.26, "es": 0.30, "fr": 0.21}
THRESHOLDS |= {"gr": 0.19, "is": 0.17, "it": 0.20, "nl": 0.22, "no": 0.34, "pt": 0.27, "se": 0.26}
# Standard deviations in `spread`, times the square root of what a weight sums over, by parts of the names;
# all others have 1.
SPREAD = {
    "Embedder": 3.0,
    "linear_decoder": 5.0,
    "head": 6.0,
    "token_emb": 0.3,
    "self_attn.out_proj": 0.1,
    "in_proj": 1.6,
    "multihead_attn.out_proj": 0.6,
    "decoder.decoder": 0.8,
}


def cleaned(text) -> str:
    from unidecode import unidecode

    return unidecode(str(text).lower())


def encoded(texts: list[str], languages: list[str]) -> tuple[Tensor, Tensor]:
    """Return (input_ids, attention_mask), int64 [B, 128]."""
    ids = torch.zeros(len(texts), POSITIONS, dtype=torch.int64)
    for row, text, language in zip(ids, texts, languages):
        points = [CLS_ID, *map(ord, f"{language}[SEP]{cleaned(text)}"[: POSITIONS - 2]), SEP_ID]
        row[: len(points)] = torch.tensor(points)
    return ids, (ids != 0).long()


class PublishedProgram(nn.Module):
    """A published model, coding as its program does.

    Args:
        tokens: tokens of the formatter in the order of their ids, from 5 on.
        key: codes of the linear outputs.
        blocks: blocks of a sequence.
        size: tokens of a block.
        hisco: whether the formatter is that of HISCO.
        separator: between the tokens of a code.
        kind: mix, seq2seq or flat.
        sizes: sizes of the encoder, by `transformers`' names.
    """

    def __init__(
        self,
        tokens: list[str],
        key: list[str],
        blocks: int,
        size: int,
        *,
        hisco: bool,
        separator: str = "",
        kind: str = "mix",
        **sizes,
    ):
        super().__init__()
        from transformers import CanineConfig, CanineModel

        self.tokens, self.key, self.blocks, self.size = dict(enumerate(tokens, start=5)), key, blocks, size
        self.hisco, self.separator = hisco, separator
        self.encoder = CanineModel(CanineConfig(**sizes))
        width = self.encoder.config.hidden_size
        self.decoder = Decoder(len(tokens) + 6, width, width) if kind != "flat" else None
        self.linear_decoder = nn.Linear(width, len(key)) if kind != "seq2seq" else None
        self.eval()

    def spread(self, seed: int = 1) -> "PublishedProgram":
        """Set random weights whose output depends on the text: the output of initial weights is nearly the
        same for all."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in self.named_parameters():
                scale = next((scale for part, scale in SPREAD.items() if part in name), 1.0)
                if value.dim() > 1:
                    scale /= math.sqrt(value.shape[1:].numel())
                    value.copy_(torch.randn(value.shape, generator=generator) * scale)
            if self.linear_decoder is not None:
                self.linear_decoder.bias.fill_(-4.0)
        return self

    @torch.no_grad()
    def encode(self, texts: list[str], languages: list[str]) -> tuple[Tensor, Tensor]:
        """Return (memory [B, 128, H], pooled [B, H])."""
        ids, mask = encoded(texts, languages)
        output = self.encoder(input_ids=ids, attention_mask=mask)
        return output.last_hidden_state, output.pooler_output

    @torch.no_grad()
    def greedy(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (tokens int64 [B, blocks · size], product of the probabilities of these and of the token
        behind them [B], the smallest distance of a token to the second most probable one [B], in logits)."""
        tokens, prob = torch.full((len(memory), 1), BOS), torch.ones(len(memory))
        margin = torch.full((len(memory),), float("inf"))
        for _ in range(self.blocks * self.size + 1):
            logits = self.decoder(memory, tokens)[:, -1]
            best = logits.topk(2)
            margin = torch.minimum(margin, best.values[:, 0] - best.values[:, 1])
            prob = prob * logits.softmax(-1).max(-1).values
            tokens = torch.cat([tokens, best.indices[:, :1]], dim=1)
        return tokens[:, 1:-1], prob, margin

    def codes_of(self, tokens: list[int]) -> list[str]:
        """Return the codes in a row of tokens. Where the published program ends with a KeyError, the block is
        left out."""
        codes = []
        for start in range(0, self.blocks * self.size, self.size):
            block = tokens[start : start + self.size]
            if self.hisco:
                if PAD in block:
                    continue
                if self.tokens.get(block[0]) in ("-1", "-2", "-3"):
                    block = block[:1]
            else:
                block = [token for token in block if token not in (PAD, BOS, EOS, SEP)]
            if block and all(token in self.tokens for token in block):
                codes.append(self.separator.join(self.tokens[token] for token in block))
        return codes

    @torch.no_grad()
    def flat(self, pooled: Tensor, languages: list[str], most: int = 5) -> tuple[list[list[str]], Tensor]:
        """Return (up to `most` codes above the language's threshold, the most probable first; the smallest
        distance of two of the first probabilities, or of one to the threshold [B])."""
        least = torch.tensor([THRESHOLDS.get(language, 0.31) for language in languages])
        best = self.linear_decoder(pooled).sigmoid().topk(most + 1)
        margin = torch.minimum(-best.values.diff(dim=1).amax(1), (best.values - least[:, None]).abs().amin(1))
        rows = zip(best.values[:, :most].tolist(), best.indices[:, :most].tolist(), least.tolist())
        codes = [[self.key[i] for p, i in zip(probs, places) if p > above] for probs, places, above in rows]
        return codes, margin

    @torch.no_grad()
    def full(self, memory: Tensor, ids: list[list[int]]) -> Tensor:
        """Return the probability of each code, of tokens `ids`, as the first one of each text, [B, codes]."""
        codes = torch.tensor(ids)  # [C, size]
        before = torch.cat([torch.full((len(codes), 1), BOS), codes[:, :-1]], dim=1)

        def of_a_text(row: Tensor) -> Tensor:
            log_probs = self.decoder(row.expand(len(codes), -1, -1), before).log_softmax(-1)
            return log_probs.gather(2, codes[..., None])[..., 0].sum(1).exp()

        return torch.stack([of_a_text(row) for row in memory])

    def published(self) -> dict:
        """Return the weights under the published names, as a published `.bin` of this kind holds them."""
        weights = {name: value.clone() for name, value in self.state_dict().items()}
        if self.decoder is not None:
            return {"model": weights, "key": {code: i for i, code in enumerate(self.key)}, "step": 1}
        names = {"encoder": "basemodel", "linear_decoder": "out"}
        parts = {name: name.split(".", 1) for name in weights}
        return {f"{names[parts[name][0]]}.{parts[name][1]}": value for name, value in weights.items()}

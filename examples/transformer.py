"""A transformer over bytes or other tokens, and the sampling of text from it."""

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

NEAR = 9  # tokens that the first layer sees at once
BLOCK = 8  # tokens sampled together
BYTES = 256  # different bytes
SIZES = {"tiny": (64, 2, 4), "small": (384, 6, 6), "base": (768, 12, 12)}  # width, layers, heads


class Layer(nn.Module):
    """Self-attention and a feed-forward network, each after a norm; x [B, S, width]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return x after the layer. bias: of the attention, [heads, S, S]."""
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype))
        x = x + self.out(found.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))


class Transformer(nn.Module):
    """A model of tokens int64 [B, S] → logits [B, S, vocabulary] of a token at each place. The id after the
    vocabulary means a masked token, or in an autoregressive model the start. causal: a place sees only itself
    and earlier places. A convolution over the nearest tokens comes first. Attention has a bias that grows
    with the distance, different in each head (ALiBi, arXiv 2108.12409); without causal every second head
    looks ahead instead of back.
    """

    def __init__(self, width: int, layers: int, heads: int, causal: bool = False, vocabulary: int = BYTES):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary + 1, width)
        self.near = nn.Conv1d(width, width, NEAR)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)
        self.heads, self.causal = heads, causal
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                last = name.endswith(("out.weight", "feed_forward.2.weight"))
                nn.init.normal_(weight, std=0.02 / (2 * layers) ** 0.5 if last else 0.02)
        nn.init.normal_(self.embedding.weight, std=0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        after = places[None, :] - places[:, None]  # [S, S]
        head = torch.arange(self.heads, device=tokens.device)
        steps = head if self.causal else head // 2  # one of a pair looks back, the other ahead
        slopes = 2.0 ** (-8 * steps / steps.max().clamp(min=1))
        looks_ahead = (head % 2 == 1) & (not self.causal)
        hidden = torch.where(looks_ahead[:, None, None], after < 0, after > 0)
        bias = (-slopes[:, None, None] * after.abs()).masked_fill(hidden, -torch.inf)
        x = self.embedding(tokens)
        around = (NEAR - 1, 0) if self.causal else (NEAR // 2, NEAR // 2)
        x = x + self.near(pad(x.transpose(1, 2), around)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x, bias)
        return self.head(self.norm(x))


def sample(model: nn.Module, length: int, causal: bool, seed: int, mask: int = BYTES) -> str:
    """Return a text of `length` bytes, or ids of other tokens. Autoregressive: token by token. Masked
    diffusion: block by block; each step proposes all tokens of the block still masked, and keeps the
    most probable one (LLaDA's low-confidence remasking). mask: the size of the vocabulary.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((1, length), mask)
    for step in range(length):
        shown = torch.cat([torch.full((1, 1), mask), tokens[:, :step]], 1) if causal else tokens
        chances = model(shown.to(device))[0].double().cpu().softmax(1)
        if causal:
            tokens[0, step] = torch.multinomial(chances[-1], 1, generator=generator)
            continue
        first = step // BLOCK * BLOCK
        block = slice(first, min(first + BLOCK, length))
        proposed = torch.multinomial(chances, 1, generator=generator)
        sure = chances.gather(1, proposed)[block, 0].masked_fill(tokens[0, block] != mask, -1.0)
        place = first + sure.argmax()
        tokens[0, place] = proposed[place, 0]
    ids = tokens[0].tolist()
    return bytes(ids).decode("utf-8", "replace") if mask == BYTES else " ".join(map(str, ids))

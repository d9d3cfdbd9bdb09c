"""What stands in the encoder's place in a model of n-grams alone."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from histocc.model.canine import CanineConfig


class NoEncoder(nn.Module):
    """Vectors of zeros, without weights: the n-grams beside it are all that the decoders read. They learn
    with it as with an encoder, and the linear decoder codes tens of thousands of texts a second.

    config: whose width counts.
    """

    nothing: Tensor

    def __init__(self, config: CanineConfig):
        super().__init__()
        self.config = config
        self.register_buffer("nothing", Tensor([0.0]), persistent=False)  # has the dtype and the device

    def say_nothing(self) -> None:
        """As of the encoder; there is nothing to change."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, padding_follows: bool = False
    ) -> tuple[Tensor, Tensor]:
        """input_ids int64 [B, S] → (zeros [B, S, H], zeros [B, H])."""
        rows, length = input_ids.shape
        text = self.pooled(input_ids, attention_mask)
        return text[:, None].expand(rows, length, -1), text

    def of_groups(
        self,
        input_ids: Sequence[Tensor],
        attention_mask: Sequence[Tensor],
        padding_follows: Sequence[bool],
    ) -> tuple[list[Tensor], Tensor]:
        """`forward` of groups of rows: (zeros [B, S, H] of each, zeros [rows of all, H])."""
        found = [self(*each) for each in zip(input_ids, attention_mask)]
        return [memory for memory, _ in found], torch.cat([pooled for _, pooled in found])

    def pooled(self, input_ids: Tensor, attention_mask: Tensor, padding_follows: bool = False) -> Tensor:
        """input_ids int64 [B, S] → zeros [B, H]."""
        return self.nothing.expand(len(input_ids), self.config.hidden_size)

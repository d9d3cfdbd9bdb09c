"""A model from image and question to mask and answer: convolutions, character encoder, cross-attention."""

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, binary_cross_entropy_with_logits, interpolate


def block(before: int, after: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution with GroupNorm; a batch norm would depend on how rows are shared out."""
    return nn.Sequential(nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(8, after), nn.GELU())


class Segmenter(nn.Module):
    """A model of image [B, 3, H, W], question int64 [B, Q], not empty → logits of mask [B, H, W], answer [B,
    A] and modality [B, M].

    The words that a place of the image attends to also scale its features (FiLM, arXiv 1709.07871): plain
    sums hardly learn facts about a place and a question together.
    """

    def __init__(self, width: int, answers: int, modalities: int):
        super().__init__()
        self.fine = nn.Sequential(block(3, width // 2), block(width // 2, width // 2, 2))
        self.coarse = nn.Sequential(block(width // 2, width, 2), block(width, width))
        self.characters = nn.Embedding(256, width)
        self.words = nn.Sequential(
            *(nn.Conv1d(width, width, 5, padding=2), nn.GroupNorm(8, width), nn.GELU()),
            *(nn.Conv1d(width, width, 5, padding=2), nn.GroupNorm(8, width), nn.GELU()),
        )
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.place, self.factor = nn.Linear(2, width), nn.Linear(width, width)
        self.decoder = nn.Sequential(block(width, width), block(width, width))
        self.up = block(width + width // 2, width // 2)
        self.mask = nn.Conv2d(width // 2, 1, 1)
        self.answer, self.modality = nn.Linear(width, answers), nn.Linear(width, modalities)

    def forward(self, image: Tensor, question: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.fine(image.to(self.mask.weight.dtype))  # a half
        coarse = self.coarse(fine)  # a quarter
        y, x = (torch.linspace(-1, 1, n, dtype=fine.dtype, device=fine.device) for n in coarse.shape[2:])
        places = torch.stack(torch.meshgrid(x, y, indexing="xy"), 2).flatten(0, 1)  # [H W / 16, 2]
        seen = coarse.flatten(2).transpose(1, 2) + self.place(places)  # [B, H W / 16, width], as below
        words = self.words(self.characters(question).transpose(1, 2)).transpose(1, 2)  # [B, Q, width]
        behind = question == 0
        of_place, of_words, of_all = self.norms
        read, _ = self.attention(of_place(seen), words, words, key_padding_mask=behind, need_weights=False)
        whole = words.masked_fill(behind[..., None], -torch.inf).amax(1, keepdim=True)  # the whole question
        read = of_words(read) + of_all(whole)
        joined = seen * (1 + self.factor(read)) + read
        found = self.decoder(joined.transpose(1, 2).unflatten(2, coarse.shape[2:]))
        up = self.up(torch.cat([interpolate(found, scale_factor=2.0), fine], 1))
        mask = interpolate(self.mask(up), scale_factor=2.0, mode="bilinear", align_corners=False)[:, 0]
        where = avg_pool2d(mask[:, None], 4).flatten(1).sigmoid()  # places in the mask
        pooled = (found.flatten(2) * where[:, None]).sum(2) / (where.sum(1, keepdim=True) + 1)
        return mask, self.answer(pooled), self.modality(coarse.mean((2, 3)))


def structure_loss(logits: Tensor, mask: Tensor) -> Tensor:
    """Return weighted cross entropy and weighted intersection over union, [B], of logits and masks [B, H, W]:
    pixels near an edge count up to six times (PRS-Med, arXiv 2505.11872).
    """
    rows = avg_pool2d(mask[:, None], (31, 1), 1, (15, 0))  # then columns: the mean of a square costs more
    weight = 1 + 5 * (avg_pool2d(rows, (1, 31), 1, (0, 15))[:, 0] - mask).abs()
    each = binary_cross_entropy_with_logits(logits, mask, reduction="none")
    entropy = (weight * each).sum((1, 2)) / weight.sum((1, 2))
    shown = logits.sigmoid()
    both, either = (weight * shown * mask).sum((1, 2)), (weight * (shown + mask)).sum((1, 2))
    return entropy + 1 - (both + 1) / (either - both + 1)


def overlap(logits: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return Dice and intersection over union of each image, [B]; 1 where both masks are empty."""
    shown, mask = logits > 0, mask > 0.5
    both, total = (shown & mask).sum((1, 2)).double(), (shown.sum((1, 2)) + mask.sum((1, 2))).double()
    empty = (total == 0).double()
    return (2 * both + empty) / (total + empty), (both + empty) / (total - both + empty)

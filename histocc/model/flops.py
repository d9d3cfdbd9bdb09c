"""How many floating point operations a training step needs for what is real in its batch: no padding."""

import numpy as np
from torch import nn

from histocc.model.canine import CanineEncoder
from histocc.model.mixer import Seq2SeqMixerOccCANINE


class FlopCount:
    """Floating point operations of forward and backward pass, from the lengths of texts and targets.

    Matrix products alone are counted, a multiplication and an addition as two operations; embeddings, norms,
    activations, softmax and the losses together are far below a hundredth. Backward, a product counts once
    for what is multiplied where that has a gradient, and once for the weights where they are trained: three
    times the forward pass, or only that where the encoder is frozen, since nothing is behind it.

    Counted is what the model must compute, however it does so: a position of a text attends to the real ones
    that it may look at, a token of a target to all tokens before and behind it, as is usual, although half of
    that is masked.

    model: whose sizes are read, and whether its encoder is trained; the decoders and n-grams are taken to be.
    """

    def __init__(self, model: Seq2SeqMixerOccCANINE):
        config, ngrams = model.config, model.ngrams
        h, taps, rate = config.hidden_size, config.upsampling_kernel_size, config.downsampling_rate
        self.rate, self.stride, self.narrow = rate, config.local_transformer_stride, model.memory_mask
        there = isinstance(model.encoder, CanineEncoder)
        trained = any(p.requires_grad for p in model.encoder.parameters())
        # a product backward: for its weights, and for what is multiplied by them where that has a gradient
        encoder, memory, pooled = there * (1 + 2 * trained), 2 + (trained or ngrams is not None), 2 + trained
        layer = 8 * h * h + 4 * h * config.intermediate_size  # of a position: four projections, feed-forward
        layers, classes = config.num_hidden_layers, model.linear_decoder.out_features
        decoder = model.decoder.decoder.layers
        of_token = sum(12 * h * h + 4 * h * each.linear1.out_features for each in decoder)
        self.row = encoder * (2 - 2 * rate) * h * h + pooled * 2 * h * classes
        self.position = encoder * (2 * layer + 2 * taps * h * h) + memory * len(decoder) * 4 * h * h
        self.pair = encoder * 4 * h  # of positions in the outer layers
        self.molecule = encoder * (layers * layer + 2 * (rate + taps) * h * h)
        self.pair_of_molecules = encoder * layers * 4 * h
        self.token = 3 * (of_token + 2 * h * model.vocab_size)
        self.look = 3 * len(decoder) * 4 * h  # of a token at a token, or at a position
        self.same_word = 0  # of a position with one of its text
        if ngrams is not None:
            self.row += 3 * 2 * ngrams.width * (h + classes)
            self.position += 3 * 2 * ngrams.width * h
            self.same_word = 2 * 2 * ngrams.width

    def __call__(self, positions: np.ndarray, tokens: np.ndarray, width: int) -> float:
        """For rows with these numbers of real positions, int [B], and of tokens in their targets that the
        loss trains, int [B]; width: positions of the batch with padding.
        """
        narrow = self.narrow and width < self.stride  # as in `Seq2SeqMixerOccCANINE.encode`
        # one for the text, one for each block of characters; the last one gives its place to the first
        molecules = np.minimum(1 + -(-positions // self.rate), width // self.rate + narrow).astype(float)
        chunks, rest = np.divmod(positions, self.stride)  # of the first layer
        local = int(chunks.sum()) * self.stride**2 + float(rest @ rest)
        n, t = positions.astype(float), tokens.astype(float)
        pairs = float(n @ n)
        return float(
            len(n) * self.row
            + n.sum() * self.position
            + (local + pairs) * self.pair
            + pairs * self.same_word
            + molecules.sum() * self.molecule
            + molecules @ molecules * self.pair_of_molecules
            + t.sum() * self.token
            + (t @ t + t @ n) * self.look
        )


def flop_count(model: nn.Module | None) -> FlopCount | None:
    """None for models of another kind, which nothing here knows how to count."""
    return FlopCount(model) if isinstance(model, Seq2SeqMixerOccCANINE) else None

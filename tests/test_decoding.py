"""The seq2seq decoder, the whole model, and greedy decoding."""

import math

import pytest
import torch
from test_predict import SMALL
from torch import nn

from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX
from histocc.model import decoding
from histocc.model.decoder import TransformerDecoder
from histocc.model.decoding import greedy_from_memory, set_probs
from histocc.model.mixer import MODEL_SIZES, Seq2SeqMixerOccCANINE, model_config

VOCAB, WIDTH, BLOCK, CODES = 9, 64, 3, 4
SIZES = {"max_codes": CODES, "block_size": BLOCK}


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    model = TransformerDecoder(VOCAB, WIDTH, 96).eval()
    for parameter in model.parameters():  # biases start at zero, where an error in them would not show
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def make_model(dropout: float = 0.0, sharp: bool = False, **options) -> Seq2SeqMixerOccCANINE:
    """sharp: logits in which PAD leads often enough that rows end after different blocks."""
    torch.manual_seed(3)
    classes, config = [VOCAB - 1] * (BLOCK * CODES + 2), model_config("tiny", **SMALL)
    model = Seq2SeqMixerOccCANINE(classes, 7, dropout, config=config, **options).eval()
    if sharp:
        with torch.no_grad():
            model.decoder.head.weight.mul_(4)
            model.decoder.head.bias[PAD_IDX] += 2
            for layer in model.decoder.decoder.layers:
                layer.multihead_attn.in_proj_weight.mul_(2)
    return model


def sequences(rows: int = 6, steps: int = 11) -> torch.Tensor:
    """Random targets from BOS on, PAD in the middle of some and at the end of others."""
    tokens = torch.randint(2, VOCAB, (rows, steps), generator=torch.Generator().manual_seed(1))
    tokens[:, 0] = BOS_IDX
    tokens[1, 4:] = PAD_IDX
    tokens[2, 3:5] = PAD_IDX
    return tokens


def memories(rows: int = 6, positions: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    memory = torch.randn(rows, positions, WIDTH, generator=torch.Generator().manual_seed(2))
    lengths = torch.arange(rows) % positions + 3
    return memory, torch.arange(positions) >= lengths[:, None]


def texts(rows: int = 6, positions: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(32, 0x3000, (rows, positions), generator=torch.Generator().manual_seed(4))
    mask = torch.arange(positions) < torch.arange(7, 7 + rows)[:, None]
    return ids * mask, mask


class TorchDecoder(nn.Module):
    """The published decoder out of torch's own layers; its state dict has our names."""

    def __init__(self):
        super().__init__()
        self.token_emb = nn.ModuleDict({"embedding": nn.Embedding(VOCAB, WIDTH)})
        self.positional_encoding = nn.Module()
        self.positional_encoding.register_buffer("pos_embedding", torch.zeros(128, 1, WIDTH))
        layer = nn.TransformerDecoderLayer(WIDTH, 8, 96, dropout=0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layer, 3)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, memory, target, memory_padding, target_padding):
        x = self.token_emb["embedding"](target) * math.sqrt(WIDTH)
        x = x + self.positional_encoding.pos_embedding[: target.shape[1], 0]
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        masks = {"tgt_key_padding_mask": target_padding, "memory_key_padding_mask": memory_padding}
        return self.head(self.decoder(x, memory, tgt_mask=causal, **masks))


@pytest.mark.parametrize("masked", [True, False])
def test_decoder_equals_torch(decoder, masked):
    torch_decoder = TorchDecoder().train()  # its fast path in evaluation mode is another implementation
    torch_decoder.load_state_dict(decoder.state_dict(), strict=True)
    target, (memory, padding) = sequences(), memories()
    masks = (padding, target == PAD_IDX) if masked else (None, None)
    expected, numbers = torch_decoder(memory, target, *masks), [m if m is None else m.float() for m in masks]
    assert (decoder(memory, target, *masks) - expected).abs().max() < 1e-5
    assert (decoder(memory, target, *numbers) - expected).abs().max() < 1e-5  # not 0 counts as True
    assert ((expected - decoder(memory, target)).abs().max() > 1e-2) == masked


@torch.no_grad()
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("masked", [True, False])
def test_stepwise_equals_full(decoder, dtype, tolerance, masked):
    """Rows that are selected, repeated and reordered on the way, too."""
    decoder.to(dtype)
    target, (memory, padding) = sequences(), memories()
    memory, padding, order = memory.to(dtype), padding if masked else None, torch.tensor([2, 2, 0, 5])
    full = decoder(memory, target, padding, target == PAD_IDX)
    cache = decoder.start(memory, padding, max_steps=target.shape[1])
    for t in range(target.shape[1]):
        if t == 4:
            chosen = cache.select(order)
        if t >= 4:
            assert (decoder.step(target[order, t], chosen) - full[order, t]).abs().max() < tolerance
        assert (decoder.step(target[:, t], cache) - full[:, t]).abs().max() < tolerance
    with pytest.raises(ValueError, match="128 positions"):
        decoder(memory, torch.full((6, 129), 5))


@torch.no_grad()
def test_rows_of_padding_stay_finite(decoder):
    target, (memory, padding) = sequences(), memories()
    target[0], padding[0] = PAD_IDX, True
    assert decoder(memory, target, padding, target == PAD_IDX).isfinite().all()
    assert decoder.step(target[:, 0], decoder.start(memory, padding)).isfinite().all()


# ---- the whole model


def test_model_shapes_and_sizes():
    seq2seq, linear = make_model()(*texts(), sequences(6, 4))
    assert seq2seq.shape == (6, 4, VOCAB) and linear.shape == (6, 7)
    assert list(MODEL_SIZES) == ["tiny", "small", "base", "ngrams"]
    assert model_config("base").hidden_size == 768 and model_config("small").intermediate_size == 1024
    with pytest.raises(ValueError, match="Multilingual"):
        make_model(model_domain="Multilingual")


@torch.no_grad()
@pytest.mark.parametrize("memory_mask", [True, False])
def test_memory_mask_leaves_out_padding(memory_mask):
    (ids, mask), target = texts(), sequences()
    model = make_model(memory_mask=memory_mask)
    memory, _ = model.encode(ids, mask)
    padding = model.memory_padding_mask(mask)
    changed = memory.masked_fill(~mask[:, :, None], 3.0)
    one, other = (model.decode(each, target, padding) for each in (memory, changed))
    assert torch.allclose(one, other, atol=1e-5) == memory_mask


def test_dropout_spares_the_logits():
    model = make_model(dropout=0.5).train()
    model.encoder.eval()  # its own dropout stays out of this
    for first, second in zip(*(model(*texts(), sequences()) for _ in range(2))):
        assert not torch.allclose(first, second, atol=1e-3)
        assert (first != 0).all()


# ---- greedy decoding


@torch.no_grad()
def plain_greedy(model: Seq2SeqMixerOccCANINE, memory, padding) -> tuple[torch.Tensor, torch.Tensor]:
    """One row after the other, with the whole sequence through the decoder at every token."""
    all_tokens, all_probs = [], []
    for row in range(len(memory)):
        tokens, probs = [BOS_IDX], [0.0] * CODES
        for position in range(BLOCK * CODES):
            target = torch.tensor([tokens])
            row_padding = None if padding is None else padding[row : row + 1]
            logits = model.decoder(memory[row : row + 1], target, row_padding, target == PAD_IDX)[0, -1]
            prob, token = logits.softmax(0).max(0)
            block, inside = divmod(position, BLOCK)
            if not inside and token == PAD_IDX:
                break
            probs[block] = prob.item() * (probs[block] if inside else 1.0)
            tokens.append(token.item())
        all_tokens.append(tokens + [PAD_IDX] * (BLOCK * CODES + 1 - len(tokens)) + [EOS_IDX])
        all_probs.append(probs)
    return torch.tensor(all_tokens), torch.tensor(all_probs)


@pytest.mark.parametrize("masked", [True, False])
def test_greedy_equals_the_plain_way(masked):
    """Row by row, so that what a row gets does not depend on its companions."""
    model, (memory, padding) = make_model(sharp=True), memories(rows=24)
    padding = padding if masked else None
    result = greedy_from_memory(model, memory, padding, **SIZES)
    tokens, probs = plain_greedy(model, memory, padding)
    assert len(set((probs > 0).sum(dim=1).tolist())) >= 3  # rows end after different blocks
    assert torch.equal(result.tokens, tokens) and torch.equal(result.block_probs == 0, probs == 0)
    assert (result.block_probs - probs).abs().max() < 1e-5


@pytest.mark.parametrize("at_once", [1, 256])
def test_the_probability_of_a_set_of_codes_is_that_of_all_orders(monkeypatch, at_once):
    """With bounded memory; of very many codes it is that of the given order alone."""
    model, (memory, padding) = make_model(), memories(rows=3)
    blocks = torch.tensor([[[4 + i, 5], [6, 4 + i]] for i in range(3)])
    monkeypatch.setattr(decoding, "SEQUENCES_AT_ONCE", at_once)
    both = set_probs(model, memory, padding, blocks)
    monkeypatch.setattr(decoding, "MAX_IN_ANY_ORDER", 1)
    ways = [set_probs(model, memory, padding, each) for each in (blocks, blocks.flip(1))]
    torch.testing.assert_close(ways[0] + ways[1], both)

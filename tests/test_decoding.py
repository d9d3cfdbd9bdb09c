"""The seq2seq decoder, the whole model, and greedy decoding."""

import math

import pytest
import torch
from torch import nn

from histocc.formatter import BOS_IDX, EOS_IDX, PAD_IDX
from histocc.model import decoding
from histocc.model.decoder import TransformerDecoder
from histocc.model.decoding import greedy, greedy_from_memory, set_probs
from histocc.model.mixer import MODEL_SIZES, Seq2SeqMixerOccCANINE, model_config

VOCAB, WIDTH, BLOCK, CODES = 9, 64, 3, 4
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "num_hash_buckets": 256,
}


@pytest.fixture
def decoder():
    torch.manual_seed(0)
    model = TransformerDecoder(VOCAB, WIDTH, 96, pad_idx=PAD_IDX).eval()
    for parameter in model.parameters():  # biases start at zero, where an error in them would not show
        if parameter.dim() == 1:
            parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model


def make_model(memory_mask: bool = True, dropout: float = 0.0) -> Seq2SeqMixerOccCANINE:
    torch.manual_seed(3)
    return Seq2SeqMixerOccCANINE(
        [VOCAB - 1] * (BLOCK * CODES + 2),
        7,
        dropout,
        config=model_config("tiny", **SMALL),
        memory_mask=memory_mask,
    ).eval()


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
    """The published decoder out of torch's own layers, sequence first; its state dict has our names."""

    def __init__(self):
        super().__init__()
        self.token_emb = nn.ModuleDict({"embedding": nn.Embedding(VOCAB, WIDTH)})
        self.positional_encoding = nn.Module()
        self.positional_encoding.register_buffer("pos_embedding", torch.zeros(128, 1, WIDTH))
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 8, 96, dropout=0.0), 3)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, memory, target, memory_padding_mask, target_padding_mask):
        target = target.T
        x = self.token_emb["embedding"](target) * math.sqrt(WIDTH)
        x = x + self.positional_encoding.pos_embedding[: len(target)]
        causal = torch.ones(len(target), len(target), dtype=torch.bool).triu(1)
        x = self.decoder(
            x,
            memory.transpose(0, 1),
            tgt_mask=causal,
            tgt_key_padding_mask=target_padding_mask,
            memory_key_padding_mask=memory_padding_mask,
        )
        return self.head(x).transpose(0, 1)


@pytest.mark.parametrize("masked", [True, False])
def test_decoder_equals_torch(decoder, masked):
    torch_decoder = TorchDecoder().train()  # its fast path in evaluation mode is another implementation
    torch_decoder.load_state_dict(decoder.state_dict(), strict=True)
    target, (memory, padding) = sequences(), memories()
    masks = (padding, target == PAD_IDX) if masked else (None, None)
    assert (decoder(memory, target, *masks) - torch_decoder(memory, target, *masks)).abs().max() < 1e-5
    assert ((decoder(memory, target, *masks) - decoder(memory, target)).abs().max() > 1e-2) == masked


def test_positions_are_sines_and_cosines(decoder):
    table = decoder.state_dict()["positional_encoding.pos_embedding"]
    assert table.shape == (128, 1, WIDTH)
    for position, i in ((0, 0), (1, 3), (5, 31), (127, 10)):
        angle = position / 10000 ** (2 * i / WIDTH)
        assert abs(table[position, 0, 2 * i].item() - math.sin(angle)) < 1e-4
        assert abs(table[position, 0, 2 * i + 1].item() - math.cos(angle)) < 1e-4


@torch.no_grad()
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("masked", [True, False])
def test_stepwise_equals_full(decoder, dtype, tolerance, masked):
    decoder.to(dtype)
    target, (memory, padding) = sequences(), memories()
    memory, padding = memory.to(dtype), padding if masked else None
    full = decoder(memory, target, padding, target == PAD_IDX)
    cache = decoder.start(memory, padding, max_steps=target.shape[1])
    stepwise = torch.stack([decoder.step(target[:, t], cache) for t in range(target.shape[1])], dim=1)
    assert stepwise.dtype == dtype
    assert (full - stepwise).abs().max() < tolerance
    with pytest.raises(ValueError, match="full"):
        decoder.step(target[:, 0], cache)


@torch.no_grad()
def test_cache_select_reorders_and_repeats_rows(decoder):
    target, (memory, padding) = sequences(), memories()
    cache = decoder.start(memory, padding, max_steps=8)
    for t in range(4):
        decoder.step(target[:, t], cache)
    order = torch.tensor([2, 2, 0, 5])
    chosen = cache.select(order)
    for t in (4, 5):
        selected, whole = decoder.step(target[order, t], chosen), decoder.step(target[:, t], cache)
        assert (selected - whole[order]).abs().max() < 1e-5
    assert chosen.length == cache.length == 6


@torch.no_grad()
def test_later_tokens_and_pad_are_not_seen(decoder):
    target, (memory, _) = sequences(), memories()
    changed = target.clone()
    changed[:, 6:] = 5
    padding = target == PAD_IDX
    assert torch.equal(
        decoder(memory, target, None, padding)[:, :6], decoder(memory, changed, None, padding)[:, :6]
    )
    changed = target.masked_fill(padding, 7)  # another token there, masked all the same
    same = (
        (decoder(memory, target, None, padding) - decoder(memory, changed, None, padding)).abs().amax(dim=2)
    )
    assert same[~padding].max() == 0


@torch.no_grad()
def test_number_masks_count_as_boolean(decoder):
    target, (memory, padding) = sequences(), memories()
    expected = decoder(memory, target, padding, target == PAD_IDX)
    for kind in (torch.float32, torch.int64):
        assert torch.equal(decoder(memory, target, padding.to(kind), (target == PAD_IDX).to(kind)), expected)


@torch.no_grad()
def test_rows_of_padding_stay_finite(decoder, monkeypatch):
    attention = torch.nn.functional.scaled_dot_product_attention

    def checked(*args, attn_mask=None, **kwargs):  # attention over nothing is not a number on some devices
        assert attn_mask is None or attn_mask.any(dim=-1).all()
        return attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", checked)
    target, (memory, padding) = sequences(), memories()
    target[0], padding[0] = PAD_IDX, True
    assert decoder(memory, target, padding, target == PAD_IDX).isfinite().all()
    assert decoder.step(target[:, 0], decoder.start(memory, padding)).isfinite().all()


def test_too_many_tokens_is_an_error(decoder):
    memory, _ = memories()
    with pytest.raises(ValueError, match="128 positions"):
        decoder(memory, torch.full((6, 129), 5))
    with pytest.raises(ValueError, match="128 positions"):
        decoder.start(memory, max_steps=129)


def test_decoder_starts_like_torch():
    torch.manual_seed(0)
    first = TransformerDecoder(VOCAB, 256, 256).state_dict()
    torch.manual_seed(0)
    second = TransformerDecoder(VOCAB, 256, 256).state_dict()
    layer = nn.TransformerDecoderLayer(256, 8, 256).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name, value in layer.items():
        ours = first[f"decoder.layers.1.{name}"]
        assert ours.shape == value.shape, name
        assert abs(ours.std() - value.std()) <= 0.1 * value.std(), name
        assert (ours.abs().max() - value.abs().max()).abs() <= 0.1 * value.abs().max(), name
    one, other = (first[f"decoder.layers.{i}.linear1.weight"] for i in (0, 1))
    assert not torch.equal(one, other)


def test_model_shapes_and_names():
    model = make_model()
    ids, mask = texts()
    for length in (BLOCK * CODES + 1, 4):
        seq2seq, linear = model(ids, mask, sequences(6, 13)[:, :length])
        assert seq2seq.shape == (6, length, VOCAB) and linear.shape == (6, 7)
    names = set(model.state_dict())
    assert {
        "encoder.pooler.dense.weight",
        "decoder.token_emb.embedding.weight",
        "decoder.head.bias",
        "decoder.positional_encoding.pos_embedding",
        "decoder.decoder.layers.2.self_attn.in_proj_weight",
        "decoder.decoder.layers.0.multihead_attn.out_proj.bias",
        "linear_decoder.weight",
    } <= names
    assert model.state_dict()["decoder.decoder.layers.0.linear1.weight"].shape == (64, 64)
    with pytest.raises(ValueError, match="Multilingual"):
        Seq2SeqMixerOccCANINE([5], 2, model_domain="Multilingual", config=model_config("tiny", **SMALL))


def test_sizes():
    assert list(MODEL_SIZES) == ["tiny", "small", "base", "ngrams"]
    assert model_config("base").hidden_size == 768 and model_config("small").intermediate_size == 1024
    assert model_config("tiny", hidden_dropout_prob=0.0).hidden_dropout_prob == 0.0
    with pytest.raises(ValueError, match="huge"):
        model_config("huge")


@torch.no_grad()
def test_memory_mask_leaves_out_padding():
    ids, mask = texts()
    target = sequences()
    for memory_mask in (True, False):
        model = make_model(memory_mask)
        memory, _ = model.encode(ids, mask)
        changed = memory.masked_fill(~mask[:, :, None], 3.0)
        padding = model.memory_padding_mask(mask)
        same = torch.allclose(
            model.decode(memory, target, padding), model.decode(changed, target, padding), atol=1e-5
        )
        assert same == memory_mask


@torch.no_grad()
def test_target_padding_is_found_in_the_target():
    model = make_model()
    target = sequences()
    default, _ = model(*texts(), target)
    explicit, _ = model(*texts(), target, None, target == PAD_IDX)
    unmasked, _ = model(*texts(), target, None, torch.zeros_like(target))
    assert torch.equal(default, explicit)
    assert not torch.allclose(default, unmasked, atol=1e-3)


def test_every_parameter_has_a_gradient():
    model = make_model(dropout=0.1).train()
    target = torch.randint(0, VOCAB, (6, 11), generator=torch.Generator().manual_seed(5))
    seq2seq, linear = model(*texts(), target)
    (seq2seq.square().mean() + linear.square().mean()).backward()
    for name, parameter in model.named_parameters():
        if not name.endswith("key.bias"):  # adds the same to all scores of a query, so it has none
            assert parameter.grad.abs().max() > 0, name


def test_dropout_spares_the_logits():
    model = make_model(dropout=0.5)
    for module in model.encoder.modules():  # the encoder's own dropout stays out of this
        module.training = False
    out = [model.train(True) and model.encoder.eval() and model(*texts(), sequences()) for _ in range(2)]
    for first, second in zip(*out):
        assert not torch.allclose(first, second, atol=1e-3)
        assert (first != 0).all()


def vary(model: Seq2SeqMixerOccCANINE) -> Seq2SeqMixerOccCANINE:
    """Sharper logits in which PAD leads often enough that rows end after different blocks."""
    with torch.no_grad():
        model.decoder.head.weight.mul_(4)
        model.decoder.head.bias[PAD_IDX] += 2
        for layer in model.decoder.decoder.layers:
            layer.multihead_attn.in_proj_weight.mul_(2)
    return model


@torch.no_grad()
def naive(model: Seq2SeqMixerOccCANINE, memory, padding) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy decoding of one row after the other, with the whole sequence through the decoder at every
    token.
    """
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
def test_greedy_equals_naive(masked):
    model = vary(make_model())
    memory, padding = memories(rows=24)
    padding = padding if masked else None
    result = greedy_from_memory(model, memory, padding, max_codes=CODES, block_size=BLOCK)
    tokens, probs = naive(model, memory, padding)
    written = (probs > 0).sum(dim=1)
    assert len(set(written.tolist())) >= 3  # rows end after different blocks, or this shows little
    assert torch.equal(result.tokens, tokens)
    assert result.tokens.dtype == torch.int64
    assert (result.block_probs - probs).abs().max() < 1e-5
    assert torch.equal(result.block_probs == 0, probs == 0)


def test_greedy_is_independent_of_companions():
    model = vary(make_model())
    memory, padding = memories(rows=24)
    together = greedy_from_memory(model, memory, padding, max_codes=CODES, block_size=BLOCK)
    for row in range(24):
        alone = greedy_from_memory(
            model, memory[row : row + 1], padding[row : row + 1], max_codes=CODES, block_size=BLOCK
        )
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert (alone.block_probs[0] - together.block_probs[row]).abs().max() < 1e-5


def test_greedy_goes_from_text_to_tokens():
    model = vary(make_model())
    ids, mask = texts()
    result = greedy(model, ids, mask, max_codes=CODES, block_size=BLOCK)
    with torch.no_grad():
        memory, pooled = model.encode(ids, mask)
        tokens, probs = naive(model, memory, ~mask)
        assert torch.allclose(result.linear_logits, model.linear_decoder(pooled))
    assert torch.equal(result.tokens, tokens)
    assert (result.block_probs - probs).abs().max() < 1e-5
    assert (result.tokens[:, 0] == BOS_IDX).all() and (result.tokens[:, -1] == EOS_IDX).all()


def test_greedy_stops_when_all_rows_are_finished(monkeypatch):
    model = vary(make_model())
    memory, padding = memories(rows=24)
    tokens = greedy_from_memory(model, memory, padding, max_codes=CODES, block_size=BLOCK).tokens
    codes = (tokens[:, 1:-1].unflatten(1, (CODES, BLOCK))[:, :, 0] != PAD_IDX).sum(dim=1)
    short = codes < CODES
    assert short.any()
    calls = []
    step = model.decoder.step
    monkeypatch.setattr(model.decoder, "step", lambda *args: calls.append(0) or step(*args))
    greedy_from_memory(model, memory[short], padding[short], max_codes=CODES, block_size=BLOCK)
    assert len(calls) == codes[short].max() * BLOCK + 1


def test_greedy_leaves_modes_and_gradients_alone():
    model = make_model(dropout=0.5).train()
    model.encoder.eval()
    ids, mask = texts()
    first, second = (greedy(model, ids, mask, max_codes=CODES, block_size=BLOCK) for _ in range(2))
    assert torch.equal(first.linear_logits, second.linear_logits)  # no dropout while decoding
    assert not first.linear_logits.requires_grad
    assert model.training and model.decoder.training and not model.encoder.training
    with pytest.raises(ValueError, match="positions"):
        greedy(model, ids, mask, max_codes=50, block_size=BLOCK)
    assert model.decoder.training and not model.encoder.training


def test_sets_of_codes_in_pieces_of_their_orders(monkeypatch):
    """Bounded memory, the same probability; of very many codes the order in which they stand alone."""
    model = make_model()
    memory, padding = memories(rows=3)
    blocks = torch.tensor([[[4 + i, 5], [6, 4 + i]] for i in range(3)])
    monkeypatch.setattr(decoding, "SEQUENCES_AT_ONCE", 256)
    both = set_probs(model, memory, padding, blocks)
    largest = []
    decode = type(model).decode
    monkeypatch.setattr(
        type(model),
        "decode",
        lambda self, memory, *rest: largest.append(len(memory)) or decode(self, memory, *rest),
    )
    monkeypatch.setattr(decoding, "SEQUENCES_AT_ONCE", 1)
    torch.testing.assert_close(set_probs(model, memory, padding, blocks), both)
    assert largest == [1] * 6
    monkeypatch.setattr(decoding, "MOST_IN_ANY_ORDER", 1)
    ways = [set_probs(model, memory, padding, each) for each in (blocks, blocks.flip(1))]
    torch.testing.assert_close(ways[0] + ways[1], both)

"""CANINE, a transformer that reads characters (Clark et al., 2021, arXiv 2103.06874), in plain torch.

    characters → hashed embeddings → one layer of local attention → every 4 positions become one molecule
    → deep stack over the molecules → back to one vector per character → one last layer over the characters

Parameter names are those of the published `google/canine-s` weights, so these load strictly.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocc.model import packed_attention
from histocc.model.layers import Dropout, Linear, attend, for_attention, product
from histocc.model.packed_attention import Group
from histocc.model.width_groups import joined, parted, product_of_groups
from histocc.runtime.parallel import full_tensor

# One multiplier per hash function; their order is part of the published weights.
PRIMES = (31, 43, 59, 61, 73, 97, 103, 113, 137, 149, 157, 173, 181, 193, 211, 223)

ACTIVATIONS = {"gelu": F.gelu, "gelu_new": partial(F.gelu, approximate="tanh"), "relu": F.relu}

MAX_SIZES = {  # of what the shapes of the weights do not limit
    "num_hidden_layers": 200,
    "num_hash_functions": len(PRIMES),
    "hidden_dropout_prob": 1,
    "attention_probs_dropout_prob": 1,
    "layer_norm_eps": 1,
}


@dataclass
class CanineConfig:
    """Sizes of the encoder, with the published field names; the defaults are those of `google/canine-s`.

    Dropouts are probabilities 0…1. Raises ValueError for values of another kind, out of range, or that do not
    go together.
    """

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 16384
    type_vocab_size: int = 16
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    downsampling_rate: int = 4
    upsampling_kernel_size: int = 4
    num_hash_functions: int = 8
    num_hash_buckets: int = 16384
    local_transformer_stride: int = 128

    def __post_init__(self):
        for field in fields(self):
            value, kind = getattr(self, field.name), type(field.default)
            if type(value) is not kind and (kind is not float or type(value) is not int):
                raise ValueError(f"{field.name}: found {value!r:.60}, expected a {kind.__name__}")
            least = int(kind is int and field.name != "num_hidden_layers")
            if kind is not str and not least <= value <= MAX_SIZES.get(field.name, 1 << 24):  # NaN is not
                most = MAX_SIZES.get(field.name, 1 << 24)
                raise ValueError(f"{field.name}: found {value}, expected {least} … {most:,}")
        for parts in ("num_attention_heads", "num_hash_functions"):
            if self.hidden_size % getattr(self, parts):
                raise ValueError(f"{parts}: hidden_size {self.hidden_size} is not a multiple of it")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act: found {self.hidden_act!r}, expected one of {', '.join(ACTIVATIONS)}"
            )

    def to_dict(self) -> dict:
        """All fields as a dict of plain Python types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "CanineConfig":
        """The encoder's fields in `values`: what `to_dict` gave, a published `config.json`, or a checkpoint's
        config.

        Such dicts also say things that are no part of the encoder; these are left aside, and fields that are
        not there keep their defaults. Raises ValueError for a `model_type` other than canine.
        """
        if values.get("model_type", "canine") != "canine":
            raise ValueError(f"model_type {values['model_type']!r} is not 'canine'")
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


class CharEmbeddings(nn.Module):
    """Sum of hashed character, position and segment embeddings (section 3.1 of the paper).

    The tables have far more rows than the characters of any data touch, and a gradient, a step and an
    all-reduce of whole tables would be paid for at every step. `train_rows_of` leaves the others out of
    training.
    """

    primes: Tensor
    place: Tensor
    first_bucket: Tensor

    def __init__(self, config: CanineConfig):
        super().__init__()
        self.width, self.tables = config.hidden_size // config.num_hash_functions, config.num_hash_functions
        for i in range(self.tables):
            self.add_module(
                f"HashBucketCodepointEmbedder_{i}", nn.Embedding(config.num_hash_buckets, self.width)
            )
        # As published, there are as many position vectors as hash buckets.
        self.char_position_embeddings = nn.Embedding(config.num_hash_buckets, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.buckets = config.num_hash_buckets
        self.max_positions = min(config.max_position_embeddings, config.num_hash_buckets)
        self.register_buffer("primes", torch.tensor(PRIMES[: self.tables]), persistent=False)
        self.register_load_state_dict_pre_hook(drop_position_ids)
        self.trained_rows: nn.Parameter | None = None
        self.trained_positions: nn.Parameter | None = None

    def hashed_tables(self) -> list[nn.Embedding]:
        tables = [self.get_submodule(f"HashBucketCodepointEmbedder_{i}") for i in range(self.tables)]
        return cast(list[nn.Embedding], tables)

    def hash(self, ids: Tensor) -> Tensor:
        """Rows of the tables, int64 [..., tables], for character ids int64 [...]."""
        return (ids.unsqueeze(-1) + 1) * self.primes % self.buckets

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        if length > self.max_positions:
            raise ValueError(f"{length} positions, but the encoder has only {self.max_positions}")
        hashed = self.hash(input_ids)  # [B, S, tables]
        if self.trained_rows is None:
            x, positions = self.whole_rows(hashed), self.char_position_embeddings.weight
        else:
            trained_rows, positions = self.in_training()
            x = self.rows_in_training(hashed, trained_rows)
            if length > len(positions):
                positions = torch.cat(
                    [positions, self.char_position_embeddings.weight[len(positions) : length]]
                )
        x = x + (positions[:length] + self.token_type_embeddings.weight[0])
        return self.dropout(self.LayerNorm(x))

    def whole_rows(self, hashed: Tensor) -> Tensor:
        # [B, S, H]
        return torch.cat([table(ids) for table, ids in zip(self.hashed_tables(), hashed.unbind(-1))], dim=-1)

    def in_training(self) -> tuple[nn.Parameter, nn.Parameter]:
        """What `train_rows_of` has made: rows [rows of all tables, H / tables], positions [positions, H]."""
        assert self.trained_rows is not None and self.trained_positions is not None
        return self.trained_rows, self.trained_positions

    def rows_in_training(self, hashed: Tensor, trained_rows: Tensor) -> Tensor:
        place = self.place[hashed + self.first_bucket]  # [B, S, tables]
        x = F.embedding(place.clamp(min=0), trained_rows).flatten(2)  # [B, S, H]
        outside = place < 0
        if outside.device.type == "cpu" and not outside.any():  # on a GPU asking would wait for it
            return x
        return torch.where(outside.repeat_interleave(self.width, dim=-1), self.whole_rows(hashed), x)

    def train_rows_of(self, ids: Tensor, positions: int) -> None:
        """From now on only the rows that the characters `ids` (int64 [N]) touch are trained, and the first
        `positions` positions.

        The others still count where they are asked for, but nothing changes them. State dicts stay as they
        were: whole tables.
        """
        tables = self.hashed_tables()
        rows = [bucket.unique() for bucket in self.hash(ids.to(self.primes.device)).unbind(-1)]
        place = torch.full((self.tables, self.buckets), -1)
        start = 0
        for i, bucket in enumerate(rows):
            place[i, bucket.cpu()] = torch.arange(start, start + len(bucket))
            start += len(bucket)
        device = self.primes.device
        self.row_numbers = rows
        self.register_buffer("place", place.flatten().to(device), persistent=False)
        self.register_buffer(
            "first_bucket", torch.arange(self.tables, device=device) * self.buckets, persistent=False
        )
        for whole in (*tables, self.char_position_embeddings):
            whole.weight.requires_grad_(False)
        self.trained_rows = nn.Parameter(
            torch.empty(start, self.width, device=device, dtype=tables[0].weight.dtype)
        )
        self.trained_positions = nn.Parameter(
            self.char_position_embeddings.weight[:positions].detach().clone()
        )
        self.take_from_tables()
        self.register_state_dict_post_hook(self.into_tables)
        self.register_load_state_dict_pre_hook(self.add_own_rows)
        self.register_load_state_dict_post_hook(lambda module, _: module.take_from_tables())

    @torch.no_grad()
    def take_from_tables(self) -> None:
        rows, positions = self.in_training()
        rows.copy_(
            torch.cat([table.weight[bucket] for table, bucket in zip(self.hashed_tables(), self.row_numbers)])
        )
        positions.copy_(self.char_position_embeddings.weight[: len(positions)])

    @staticmethod
    def add_own_rows(module: "CharEmbeddings", state: dict, prefix: str, *_) -> None:
        """State dicts hold whole tables alone, from which `take_from_tables` takes these afterwards."""
        state[prefix + "trained_rows"] = module.trained_rows
        state[prefix + "trained_positions"] = module.trained_positions

    @staticmethod
    @torch.no_grad()
    def into_tables(module: "CharEmbeddings", state: dict, prefix: str, _) -> None:
        """Trained rows go back to their places in the tables of a state dict. Where processes share them out
        (FSDP): all ranks.
        """
        trained, positions = (
            full_tensor(state.pop(prefix + name)) for name in ("trained_rows", "trained_positions")
        )
        for i, (bucket, part) in enumerate(
            zip(module.row_numbers, trained.split([len(bucket) for bucket in module.row_numbers]))
        ):
            name = f"{prefix}HashBucketCodepointEmbedder_{i}.weight"
            state[name] = state[name].clone().index_copy_(0, bucket.to(part.device), part)
        name = prefix + "char_position_embeddings.weight"
        state[name] = torch.cat([positions, state[name][len(positions) :]])


def drop_position_ids(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Older published weights hold a constant 0, 1, 2, …, which nothing here needs."""
    state_dict.pop(prefix + "position_ids", None)


class SelfAttention(nn.Module):
    """Multi-head attention; with a `stride`, chunks of that many positions attend only within themselves."""

    joined = {"query_key_value": ("query", "key", "value")}

    def __init__(self, config: CanineConfig, stride: int | None):
        super().__init__()
        self.query = Linear(config.hidden_size, config.hidden_size)
        self.key = Linear(config.hidden_size, config.hidden_size)
        self.value = Linear(config.hidden_size, config.hidden_size)
        self.heads = config.num_attention_heads
        self.dropout_prob = config.attention_probs_dropout_prob
        self.stride = stride

    def query_key_value(self) -> tuple[Tensor, Tensor]:
        """(weight [3 H, H], bias [3 H]): one large product is faster than several small ones."""
        layers = (self.query, self.key, self.value)
        return torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])

    def forward(self, x: Tensor, visible: Sequence[Tensor]) -> Tensor:
        """x [N, H], positions of groups of rows; visible: of each group bool [B, S], True where a position
        may be looked at → [N, H].
        """
        shapes = [seen.shape for seen in visible]
        projected = product(x, *self.query_key_value())
        chunked = self.stride is not None and max(length for _, length in shapes) > self.stride
        if packed_attention.applies(projected) and not chunked:
            groups = [self.packed(seen) for seen in visible]
            dropout_p = self.dropout_prob if self.training else 0.0
            return packed_attention.self_attention(projected, groups, self.heads, dropout_p)
        projected = parted(for_attention(projected), shapes)
        return joined([self.of_group(*each) for each in zip(projected, visible)], len(x))

    def packed(self, visible: Tensor) -> Group:
        """A group of rows, for bool [B, S]."""
        rows, length = visible.shape
        if self.stride is None:
            return Group(rows, length, length, visible[:, None, None])
        blank = ~visible.any(dim=1)  # [B], as in `attend_within`
        return Group(rows, length, length, (visible | blank[:, None])[:, None, None], (~blank).float())

    def of_group(self, projected: Tensor, visible: Tensor) -> Tensor:
        """projected [B, S, 3 H]; visible bool [B, S] → [B, S, H]."""
        # [B, heads, S, H / heads]
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in projected.chunk(3, dim=-1)
        )
        if self.stride is None:
            mixed = self.attend(q, k, v, visible)
        elif projected.shape[1] <= self.stride:
            mixed = self.attend_within(q, k, v, visible)
        else:
            starts = range(0, projected.shape[1], self.stride)
            chunks = [slice(start, start + self.stride) for start in starts]
            mixed = torch.cat(
                [self.attend_within(q[:, :, c], k[:, :, c], v[:, :, c], visible[:, c]) for c in chunks], dim=2
            )
        return mixed.transpose(1, 2).flatten(2)

    def attend_within(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        # A chunk of padding alone takes the plain mean of its values, as in the published model. It matters:
        # the convolutions carry the first positions of such a chunk over to the real positions before it.
        blank = ~visible.any(dim=1)  # [B]
        return self.attend(q * (~blank).to(q.dtype)[:, None, None, None], k, v, visible | blank[:, None])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        return attend(q, k, v, visible[:, None, None], self.dropout_prob if self.training else 0.0)


class Residual(nn.Module):
    """Linear, dropout, residual connection, layer norm."""

    def __init__(self, config: CanineConfig, width: int):
        super().__init__()
        self.dense = Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout.add(self.dense(x), residual))


class Attention(nn.Module):
    def __init__(self, config: CanineConfig, stride: int | None):
        super().__init__()
        self.self = SelfAttention(config, stride)
        self.output = Residual(config, config.hidden_size)

    def forward(self, x: Tensor, visible: Sequence[Tensor]) -> Tensor:
        return self.output(self.self(x, visible), x)


class Intermediate(nn.Module):
    def __init__(self, config: CanineConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.intermediate_size)
        self.activation = ACTIVATIONS[config.hidden_act]

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.dense(x))


class Layer(nn.Module):
    """Post-norm transformer layer: x [N, H] and visible as in `SelfAttention` → [N, H]."""

    def __init__(self, config: CanineConfig, stride: int | None):
        super().__init__()
        self.attention = Attention(config, stride)
        self.intermediate = Intermediate(config)
        self.output = Residual(config, config.intermediate_size)

    def forward(self, x: Tensor, visible: Sequence[Tensor]) -> Tensor:
        x = self.attention(x, visible)
        return self.output(self.intermediate(x), x)


class Stack(nn.Module):
    def __init__(self, config: CanineConfig, layers: int, stride: int | None = None):
        super().__init__()
        self.layer = nn.ModuleList(Layer(config, stride) for _ in range(layers))

    def forward(self, groups: Sequence[Tensor], visible: Sequence[Tensor]) -> list[Tensor]:
        """groups: [B, S, H] each; visible: bool [B, S] of each → [B, S, H] each."""
        x = joined(groups)
        for layer in self.layer:
            x = layer(x, visible)
        return parted(x, [group.shape for group in groups])


class CharsToMolecules(nn.Module):
    """Downsampling (section 3.2): position 0 as it is, then one molecule per block of characters, unless it
    is the last of all.
    """

    joined = {"of_blocks": ("conv",)}

    def __init__(self, config: CanineConfig):
        super().__init__()
        self.rate = config.downsampling_rate
        self.conv = nn.Conv1d(config.hidden_size, config.hidden_size, self.rate, stride=self.rate)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def of_blocks(self) -> tuple[Tensor, Tensor | None]:
        """(weight [H, rate · H], bias [H]) of the convolution, as one product."""
        return self.conv.weight.transpose(1, 2).flatten(1), self.conv.bias

    def forward(self, chars: Sequence[Tensor], more_follow: Sequence[bool]) -> list[Tensor]:
        """Characters [B, S, H] of each group, and whether more of them follow → molecules [B, M, H]."""
        blocks = [self.blocks(each) for each in chars]
        mixed = product_of_groups(blocks, *self.of_blocks())  # [B, M, H] each
        return [self.of_group(*each) for each in zip(chars, mixed, more_follow)]

    def blocks(self, chars: Tensor) -> Tensor:
        """[B, S, H] → [B, M, rate · H], without the positions behind the last whole block."""
        whole = chars.shape[1] // self.rate * self.rate
        return chars[:, :whole].unflatten(1, (-1, self.rate)).flatten(2)

    def of_group(self, chars: Tensor, mixed: Tensor, more_follow: bool) -> Tensor:
        mixed = self.activation(mixed)
        # The last block gives its place to position 0, as published.
        return self.LayerNorm(torch.cat([chars[:, :1], mixed if more_follow else mixed[:, :-1]], dim=1))


class Projection(nn.Module):
    """Upsampling (section 3.3): a convolution over the characters, each joined with the molecule of its
    block.
    """

    joined = {"of_characters": ("conv",), "of_molecules": ("conv",)}

    def __init__(self, config: CanineConfig):
        super().__init__()
        self.rate, self.taps = config.downsampling_rate, config.upsampling_kernel_size
        self.conv = nn.Conv1d(2 * config.hidden_size, config.hidden_size, config.upsampling_kernel_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def of_characters(self) -> tuple[Tensor, Tensor | None]:
        """(weight [H, taps · H], bias [H]) of the convolution's first half."""
        half = self.conv.weight[:, : self.conv.in_channels // 2]  # [H, H, taps]
        return half.transpose(1, 2).flatten(1), self.conv.bias

    def of_molecules(self) -> tuple[Tensor, None]:
        """(weight [taps · H, H], no bias) of its second half."""
        half = self.conv.weight[:, self.conv.in_channels // 2 :]  # [H, H, taps]
        return half.permute(2, 0, 1).flatten(0, 1), None

    def forward(self, chars: Sequence[Tensor], molecules: Sequence[Tensor]) -> list[Tensor]:
        """chars [B, S, H], molecules [B, M, H] of each group → [B, S, H] of each.

        The published convolution runs over [chars, molecules], joined; its halves are summed here, as matrix
        products. That of the molecules is worked out once for each of them and not for each of its
        characters.
        """
        windows = product_of_groups(list(map(self.windows, chars)), *self.of_characters())
        by_tap = product_of_groups(molecules, *self.of_molecules())
        return [self.of_group(*each) for each in zip(windows, by_tap)]

    def windows(self, chars: Tensor) -> Tensor:
        """What stands around each position: [B, S, H] → [B, S, taps · H]."""
        length, before = chars.shape[1], (self.taps - 1) // 2
        around = F.pad(chars, (0, 0, before, self.taps - 1 - before))  # [B, S + taps − 1, H]
        return torch.cat([around[:, tap : tap + length] for tap in range(self.taps)], dim=2)

    def of_group(self, x: Tensor, of_molecules: Tensor) -> Tensor:
        """x [B, S, H] of the characters, of_molecules [B, M, taps · H] → [B, S, H]."""
        length, before = x.shape[1], (self.taps - 1) // 2
        for tap, part in enumerate(of_molecules.unflatten(2, (self.taps, -1)).unbind(2)):
            # tap t reads position i + t − before
            x = x + F.pad(self.spread(part, length), (0, 0, before - tap, tap - before))
        return self.dropout(self.LayerNorm(self.activation(x)))

    def spread(self, molecules: Tensor, length: int) -> Tensor:
        """[B, M, H] → [B, length, H]: every block's molecule at its characters, the last one up to the end.
        The first is that of position 0 and of no block.
        """
        blocks = molecules[:, 1:].unsqueeze(2).expand(-1, -1, self.rate, -1).flatten(1, 2)[:, :length]
        if blocks.shape[1] == length:
            return blocks
        return torch.cat([blocks, molecules[:, -1:].expand(-1, length - blocks.shape[1], -1)], dim=1)


class Pooler(nn.Module):
    def __init__(self, config: CanineConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, molecules: Tensor) -> Tensor:
        return torch.tanh(self.dense(molecules[:, 0]))


class CanineEncoder(nn.Module):
    """CANINE encoder (Clark et al., 2021, arXiv 2103.06874, section 3).

    Weights start normal with standard deviation `initializer_range`, biases at zero, a function of torch's
    random state alone.
    """

    def __init__(self, config: CanineConfig):
        super().__init__()
        self.config = config
        self.char_embeddings = CharEmbeddings(config)
        self.initial_char_encoder = Stack(config, 1, stride=config.local_transformer_stride)
        self.chars_to_molecules = CharsToMolecules(config)
        self.encoder = Stack(config, config.num_hidden_layers)
        self.projection = Projection(config)
        self.final_char_encoder = Stack(config, 1)
        self.pooler = Pooler(config)
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Conv1d, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, (nn.Linear, nn.Conv1d)) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def say_nothing(self) -> None:
        """From now on, until it is trained, all vectors of characters are 0: what reads them starts with what
        else it has.
        """
        last = cast(Layer, self.final_char_encoder.layer[-1])
        nn.init.zeros_(last.output.LayerNorm.weight)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, padding_follows: bool = False
    ) -> tuple[Tensor, Tensor]:
        """One vector per character, and one for the whole text.

        input_ids: character ids int64 [B, S], [CLS] first. attention_mask: bool or 0/1 [B, S], 1 at real
        positions.
        padding_follows: the values at these positions are as if blocks of padding stood behind them, which is
        what most of the published model's 128 positions are; S is then a multiple of the block (4) and below
        the local stride. Returns (last_hidden_state [B, S, H], pooled [B, H]) in the dtype of the weights;
        rows of padding alone give finite values. Real positions do not depend on S where the block that holds
        the second position after the last real one is there and followed by another one (by
        `padding_follows`, if need be), and where S, if more than the local stride (128), is a multiple of it.
        Raises ValueError for fewer positions than one block (4), for more than the model has, or for a mask
        of another shape.
        """
        final, pooled = self.of_groups([input_ids], [attention_mask], [padding_follows])
        return final[0], pooled

    def of_groups(
        self,
        input_ids: Sequence[Tensor],
        attention_mask: Sequence[Tensor],
        padding_follows: Sequence[bool],
    ) -> tuple[list[Tensor], Tensor]:
        """`forward` of groups of rows, [B, S] each: (last_hidden_state of each [B, S, H], pooled [rows of
        all, H]).
        """
        visible = [mask.bool() for mask in attention_mask]
        chars, molecules = self._molecules(input_ids, visible, padding_follows)
        final = self.final_char_encoder(
            self.projection(chars, molecules), list(map(unmask_empty_rows, visible))
        )
        return final, self._pooled(molecules)

    def pooled(self, input_ids: Tensor, attention_mask: Tensor, padding_follows: bool = False) -> Tensor:
        """The vector of the whole text alone, [B, H]: what comes behind the molecules is not computed."""
        return self._pooled(self._molecules([input_ids], [attention_mask.bool()], [padding_follows])[1])

    def _pooled(self, molecules: list[Tensor]) -> Tensor:
        first = [each[:, :1] for each in molecules]
        return self.pooler(first[0] if len(first) == 1 else torch.cat(first))

    def _molecules(
        self, input_ids: Sequence[Tensor], visible: Sequence[Tensor], padding_follows: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(characters [B, S, H], molecules [B, M, H]) of each group."""
        for each in zip(input_ids, visible, padding_follows):
            self._check(*each)
        chars = self.initial_char_encoder(list(map(self.char_embeddings, input_ids)), visible)
        blocks = self.chars_to_molecules(chars, padding_follows)
        seen = [self._visible_blocks(*each) for each in zip(visible, padding_follows)]
        return chars, self.encoder(blocks, seen)

    def _check(self, input_ids: Tensor, attention_mask: Tensor, padding_follows: bool) -> None:
        rate = self.config.downsampling_rate
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"input_ids is {list(input_ids.shape)}, attention_mask {list(attention_mask.shape)}"
            )
        if padding_follows and (
            input_ids.shape[1] % rate or input_ids.shape[1] >= self.config.local_transformer_stride
        ):
            raise ValueError(
                f"{input_ids.shape[1]} positions: with padding_follows they must be whole blocks of {rate},"
                f" and fewer than {self.config.local_transformer_stride}"
            )
        if input_ids.shape[1] < rate:
            raise ValueError(f"{input_ids.shape[1]} positions, but the encoder needs at least {rate}")

    def _visible_blocks(self, visible: Tensor, padding_follows: bool) -> Tensor:
        """Which molecules have a real position, bool [B, M], for those of the characters, bool [B, S]; all
        of a row that has none.
        """
        rate = self.config.downsampling_rate
        blocks = visible.shape[1] // rate
        found = visible[:, : blocks * rate].unflatten(1, (blocks, rate)).any(dim=-1)  # [B, M]
        return unmask_empty_rows(F.pad(found, (0, 1)) if padding_follows else found)


def unmask_empty_rows(visible: Tensor) -> Tensor:
    """Attention over nothing is undefined, so a row with nothing to look at looks at everything. bool [B,
    L].
    """
    return visible | ~visible.any(dim=1, keepdim=True)

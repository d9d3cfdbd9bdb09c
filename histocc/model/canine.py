"""CANINE, a transformer that reads characters (Clark et al., 2021, arXiv 2103.06874), in plain torch.

    characters → hashed embeddings → one layer of local attention → every 4 positions become one molecule
    → deep stack over the molecules → back to one vector per character → one last layer over the characters

Parameters have the names of the published `google/canine-s` weights, which therefore load strictly.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from histocc.model.layers import (
    Dropout,
    Linear,
    attend,
    for_attention,
    pack,
    product,
    product_of_groups,
    unpack,
)
from histocc.runtime.parallel import full_tensor

# One multiplier per hash function. Their order is part of the published weights.
PRIMES = (31, 43, 59, 61, 73, 97, 103, 113, 137, 149, 157, 173, 181, 193, 211, 223)

# largest values of fields that the shapes of the weights do not limit
MAX_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps"), 1),
    "num_hidden_layers": 200,
    "num_hash_functions": len(PRIMES),
}


@dataclass
class CanineConfig:
    """Sizes of the encoder, with the published field names and the defaults of `google/canine-s`. Raises
    ValueError for a value of another type, out of range or inconsistent with the others.
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
            low = int(kind is int and field.name != "num_hidden_layers")
            high = MAX_SIZES.get(field.name, 1 << 24)
            if kind is not str and not low <= value <= high:  # false for NaN
                raise ValueError(f"{field.name}: found {value}, expected {low} … {high:,}")
        for name in ("num_attention_heads", "num_hash_functions"):
            if self.hidden_size % getattr(self, name):
                raise ValueError(f"{name}: hidden_size {self.hidden_size} is not a multiple of it")
        if self.hidden_act != "gelu":
            raise ValueError(f"hidden_act: {self.hidden_act!r} is not 'gelu'")

    def to_dict(self) -> dict:
        """Return all fields as a dict of plain Python types."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> "CanineConfig":
        """Read the encoder's fields from a published `config.json` or a checkpoint's config. Other entries
        are ignored and missing fields keep their defaults. Raises ValueError for a `model_type` other than
        canine.
        """
        if values.get("model_type", "canine") != "canine":
            raise ValueError(f"model_type {values['model_type']!r} is not 'canine'")
        return cls(**{field.name: values[field.name] for field in fields(cls) if field.name in values})


class CharEmbeddings(nn.Module):
    """Sum of hashed character, position and segment embeddings (section 3.1 of the paper). To save time in
    each step, `train_rows_of` excludes rows of the tables that the data never use from training.
    """

    primes: Tensor
    trained_row_of: Tensor
    first_bucket: Tensor

    def __init__(self, config: CanineConfig):
        super().__init__()
        self.num_tables, self.buckets = config.num_hash_functions, config.num_hash_buckets
        self.width = config.hidden_size // self.num_tables
        for i in range(self.num_tables):
            self.add_module(f"HashBucketCodepointEmbedder_{i}", nn.Embedding(self.buckets, self.width))
        # As published, there are as many position vectors as hash buckets.
        self.char_position_embeddings = nn.Embedding(config.num_hash_buckets, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.max_positions = min(config.max_position_embeddings, config.num_hash_buckets)
        self.register_buffer("primes", torch.tensor(PRIMES[: self.num_tables]), persistent=False)
        self.register_load_state_dict_pre_hook(_drop_position_ids)
        self.trained_rows: nn.Parameter | None = None
        self.trained_positions: nn.Parameter | None = None

    def tables(self) -> list[nn.Embedding]:
        names = [f"HashBucketCodepointEmbedder_{i}" for i in range(self.num_tables)]
        return cast(list[nn.Embedding], list(map(self.get_submodule, names)))

    def hash(self, ids: Tensor) -> Tensor:
        """Return rows of the tables, int64 [..., tables], for character ids int64 [...]."""
        return (ids.unsqueeze(-1) + 1) * self.primes % self.buckets

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        if length > self.max_positions:
            raise ValueError(f"{length} positions, but the encoder has only {self.max_positions}")
        hashed, positions = self.hash(input_ids), self.char_position_embeddings.weight  # [B, S, tables]
        if self.trained_rows is None or self.trained_positions is None:
            x = self.rows_of_tables(hashed)
        else:
            row = self.trained_row_of[hashed + self.first_bucket]  # [B, S, tables]
            x = F.embedding(row.clamp(min=0), self.trained_rows).flatten(2)  # [B, S, H]
            untrained = row < 0
            if untrained.device.type != "cpu" or untrained.any():  # on a GPU the check would wait for it
                at = untrained.repeat_interleave(self.width, dim=-1)
                x = torch.where(at, self.rows_of_tables(hashed), x)
            trained, others = self.trained_positions, positions[len(self.trained_positions) : length]
            positions = torch.cat([trained, others]) if len(others) else trained
        x = x + (positions[:length] + self.token_type_embeddings.weight[0])
        return self.dropout(self.LayerNorm(x))

    def rows_of_tables(self, hashed: Tensor) -> Tensor:
        # [B, S, H]
        return torch.cat([table(ids) for table, ids in zip(self.tables(), hashed.unbind(-1))], dim=-1)

    def train_rows_of(self, ids: Tensor, positions: int) -> None:
        """Train only the rows of characters `ids` (int64 [N]) and of the first `positions` positions from now
        on. The other rows are still used, and state dicts still hold whole tables.
        """
        tables, device = self.tables(), self.primes.device
        self.buckets_in_training = [bucket.unique() for bucket in self.hash(ids.to(device)).unbind(-1)]
        first_bucket = torch.arange(self.num_tables, device=device) * self.buckets
        trained = torch.cat([bucket + i for bucket, i in zip(self.buckets_in_training, first_bucket)])
        trained_row_of = torch.full((self.num_tables * self.buckets,), -1, device=device)
        trained_row_of[trained] = torch.arange(len(trained), device=device)
        self.register_buffer("trained_row_of", trained_row_of, persistent=False)
        self.register_buffer("first_bucket", first_bucket, persistent=False)
        for table in (*tables, self.char_position_embeddings):
            table.weight.requires_grad_(False)
        self.trained_rows = nn.Parameter(tables[0].weight.new_empty(len(trained), self.width))
        self.trained_positions = nn.Parameter(self.char_position_embeddings.weight[:positions].clone())
        self.copy_from_tables()
        self.register_state_dict_post_hook(self.add_to_tables)
        self.register_load_state_dict_pre_hook(self.add_trained)
        self.register_load_state_dict_post_hook(lambda module, _: module.copy_from_tables())

    @torch.no_grad()
    def copy_from_tables(self) -> None:
        assert self.trained_rows is not None and self.trained_positions is not None
        pairs = zip(self.tables(), self.buckets_in_training)
        self.trained_rows.copy_(torch.cat([table.weight[bucket] for table, bucket in pairs]))
        self.trained_positions.copy_(self.char_position_embeddings.weight[: len(self.trained_positions)])

    @staticmethod
    def add_trained(module: "CharEmbeddings", state: dict, prefix: str, *_) -> None:
        """Add trained rows to a state dict, which holds only tables. `copy_from_tables` then sets them."""
        state |= {prefix + name: getattr(module, name) for name in ("trained_rows", "trained_positions")}

    @staticmethod
    @torch.no_grad()
    def add_to_tables(module: "CharEmbeddings", state: dict, prefix: str, _) -> None:
        """Put trained rows back into the tables of a state dict. With FSDP: all ranks."""
        rows = full_tensor(state.pop(prefix + "trained_rows"))
        positions = full_tensor(state.pop(prefix + "trained_positions"))
        parts = rows.split([len(bucket) for bucket in module.buckets_in_training])
        for i, (bucket, part) in enumerate(zip(module.buckets_in_training, parts)):
            name = f"{prefix}HashBucketCodepointEmbedder_{i}.weight"
            state[name] = state[name].clone().index_copy_(0, bucket.to(part.device), part)
        name = prefix + "char_position_embeddings.weight"
        state[name] = torch.cat([positions, state[name][len(positions) :]])


def _drop_position_ids(module: nn.Module, state_dict: dict, prefix: str, *_) -> None:
    """Drop a constant 0, 1, 2, … of older published weights, which is not needed here."""
    state_dict.pop(prefix + "position_ids", None)


class SelfAttention(nn.Module):
    """Multi-head attention. With a `stride`, chunks of that many positions attend only within themselves."""

    fused = {"query_key_value": ("query", "key", "value")}  # see `int8.to_int8`

    def __init__(self, config: CanineConfig, stride: int | None):
        super().__init__()
        self.query = Linear(config.hidden_size, config.hidden_size)
        self.key = Linear(config.hidden_size, config.hidden_size)
        self.value = Linear(config.hidden_size, config.hidden_size)
        self.heads = config.num_attention_heads
        self.dropout_prob = config.attention_probs_dropout_prob
        self.stride = stride

    def query_key_value(self) -> tuple[Tensor, Tensor]:
        """Return (weight [3 H, H], bias [3 H]): one large product is faster than several small ones."""
        layers = (self.query, self.key, self.value)
        return torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])

    def forward(self, x: Tensor, visible: Sequence[Tensor]) -> Tensor:
        """Map x [N, H], packed groups, to [N, H]. visible: bool [B, S] of each group."""
        projected = for_attention(product(x, *self.query_key_value()))
        parts = unpack(projected, [mask.shape for mask in visible])
        return pack([self.attend_in_chunks(*pair) for pair in zip(parts, visible)], len(x))

    def attend_in_chunks(self, projected: Tensor, visible: Tensor) -> Tensor:
        """Map projected [B, S, 3 H] to [B, S, H]. visible: bool [B, S]. A chunk that is all padding takes the
        plain mean of its values, as published. Convolutions carry it into other chunks.
        """
        dropout_p = self.dropout_prob if self.training else 0.0
        size = self.stride or visible.shape[1]
        # [B, heads, S, H / heads], in chunks
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2).split(size, dim=2)
            for part in projected.chunk(3, dim=-1)
        )
        mixed = []
        for i, part in enumerate(visible.split(size, dim=1)):
            mask, query = part[:, None, None], q[i]
            if self.stride is not None:
                blank = ~mask.any(dim=3, keepdim=True)  # [B, 1, 1, 1]
                mask, query = mask | blank, query * (~blank).to(query.dtype)
            mixed.append(attend(query, k[i], v[i], mask, dropout_p))
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed, dim=2)).transpose(1, 2).flatten(2)


class Residual(nn.Module):
    """Linear, dropout, residual connection, layer norm."""

    def __init__(self, config: CanineConfig, width: int):
        super().__init__()
        self.dense = Linear(width, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


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

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


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
        """Map groups [B, S, H] to groups of the same shapes. visible: bool [B, S] of each."""
        x = pack(groups)
        for layer in self.layer:
            x = layer(x, visible)
        return unpack(x, [group.shape for group in groups])


class CharsToMolecules(nn.Module):
    """Downsampling (section 3.2): position 0 unchanged, then a molecule for each block of characters."""

    fused = {"block_weight": ("conv",)}

    def __init__(self, config: CanineConfig):
        super().__init__()
        self.rate = config.downsampling_rate
        self.conv = nn.Conv1d(config.hidden_size, config.hidden_size, self.rate, stride=self.rate)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def block_weight(self) -> tuple[Tensor, Tensor | None]:
        """Return (weight [H, rate · H], bias [H]) of the convolution, as one product."""
        return self.conv.weight.transpose(1, 2).flatten(1), self.conv.bias

    def forward(self, chars: Sequence[Tensor], padding_follows: Sequence[bool]) -> list[Tensor]:
        """Map characters [B, S, H] of each group to molecules [B, M, H], see `CanineEncoder.forward`."""
        blocks = []
        for group in chars:
            whole = group.shape[1] // self.rate * self.rate
            blocks.append(group[:, :whole].unflatten(1, (-1, self.rate)).flatten(2))  # [B, M, rate · H]
        molecules = []
        products = product_of_groups(blocks, *self.block_weight())
        for group, mixed, more in zip(chars, map(F.gelu, products), padding_follows):
            kept = mixed if more else mixed[:, :-1]  # position 0 replaces the last one, as published
            molecules.append(self.LayerNorm(torch.cat([group[:, :1], kept], dim=1)))
        return molecules


class Projection(nn.Module):
    """Upsampling (section 3.3): a convolution over the characters, each joined with its block's molecule.

    The published convolution runs over [chars, molecules]. Here its two halves are separate matrix products,
    which are then added. The second is computed once for each molecule, not for each of its characters.
    """

    fused = {"char_weight": ("conv",), "molecule_weight": ("conv",)}

    def __init__(self, config: CanineConfig):
        super().__init__()
        self.rate, self.taps = config.downsampling_rate, config.upsampling_kernel_size
        self.before = (self.taps - 1) // 2  # positions of a window before its own
        self.conv = nn.Conv1d(2 * config.hidden_size, config.hidden_size, config.upsampling_kernel_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def char_weight(self) -> tuple[Tensor, Tensor | None]:
        """Return (weight [H, taps · H], bias [H]) of the convolution's first half."""
        half = self.conv.weight[:, : self.conv.in_channels // 2]  # [H, H, taps]
        return half.transpose(1, 2).flatten(1), self.conv.bias

    def molecule_weight(self) -> tuple[Tensor, None]:
        """Return (weight [taps · H, H], None for the bias) of the convolution's second half."""
        half = self.conv.weight[:, self.conv.in_channels // 2 :]  # [H, H, taps]
        return half.permute(2, 0, 1).flatten(0, 1), None

    def forward(self, chars: Sequence[Tensor], molecules: Sequence[Tensor]) -> list[Tensor]:
        """Map chars [B, S, H], molecules [B, M, H] of each group to [B, S, H] of each."""
        of_chars = product_of_groups(list(map(self.windows, chars)), *self.char_weight())
        of_molecules = product_of_groups(molecules, *self.molecule_weight())  # [B, M, taps · H]
        return [self.sum_of_taps(*pair) for pair in zip(of_chars, of_molecules)]

    def windows(self, chars: Tensor) -> Tensor:
        """Join each position with its neighbors: [B, S, H] → [B, S, taps · H]."""
        length = chars.shape[1]
        around = F.pad(chars, (0, 0, self.before, self.taps - 1 - self.before))  # [B, S + taps − 1, H]
        return torch.cat([around[:, tap : tap + length] for tap in range(self.taps)], dim=2)

    def sum_of_taps(self, x: Tensor, of_molecules: Tensor) -> Tensor:
        """Add of_molecules [B, M, taps · H] to x [B, S, H] of the characters → [B, S, H]."""
        length = x.shape[1]
        for tap, part in enumerate(of_molecules.unflatten(2, (self.taps, -1)).unbind(2)):
            # each block's molecule at its characters, the last up to the end (the first has no block)
            spread = part[:, 1:].unsqueeze(2).expand(-1, -1, self.rate, -1).flatten(1, 2)[:, :length]
            if spread.shape[1] < length:
                last = part[:, -1:].expand(-1, length - spread.shape[1], -1)
                spread = torch.cat([spread, last], dim=1)
            x = x + F.pad(spread, (0, 0, self.before - tap, tap - self.before))  # reads i + tap − before
        return self.dropout(self.LayerNorm(F.gelu(x)))


class Pooler(nn.Module):
    def __init__(self, config: CanineConfig):
        super().__init__()
        self.dense = Linear(config.hidden_size, config.hidden_size)

    def forward(self, molecules: Sequence[Tensor]) -> Tensor:
        """Map [B, M, H] of each group to [rows of all, H]."""
        first = [group[:, :1] for group in molecules]
        return torch.tanh(self.dense((first[0] if len(first) == 1 else torch.cat(first))[:, 0]))


class CanineEncoder(nn.Module):
    """CANINE encoder (Clark et al., 2021, arXiv 2103.06874, section 3)."""

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

    def zero_output(self) -> None:
        """Make all character vectors 0 until the encoder is trained."""
        last = cast(Layer, self.final_char_encoder.layer[-1])
        nn.init.zeros_(last.output.LayerNorm.weight)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, padding_follows: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Encode characters and the whole text: (last_hidden_state [B, S, H], pooled [B, H]).

        Real positions do not depend on S if S includes the block of the second position after the last real
        one and one more block, and if S is at most the local stride (128) or a multiple of it.
        Rows of padding give finite values. Raises ValueError for impossible sizes.

        Args:
            input_ids, attention_mask: character ids int64 [B, S], [CLS] first, and bool or 0/1 [B, S].
            padding_follows: compute as if blocks of padding followed, as they do in the published model's 128
                positions. S must then be a multiple of the block (4) and below the local stride.
        """
        final, pooled = self.forward_groups([input_ids], [attention_mask], [padding_follows])
        return final[0], pooled

    def forward_groups(
        self, input_ids: Sequence[Tensor], attention_mask: Sequence[Tensor], padding_follows: Sequence[bool]
    ) -> tuple[list[Tensor], Tensor]:
        """Encode groups of rows, [B, S] each: (last_hidden_state of each, pooled [rows of all, H])."""
        visible = [mask.bool() for mask in attention_mask]
        chars, molecules = self._molecules(input_ids, visible, padding_follows)
        mixed = self.projection(chars, molecules)
        return self.final_char_encoder(mixed, list(map(unmask_empty_rows, visible))), self.pooler(molecules)

    def pooled(self, input_ids: Tensor, attention_mask: Tensor, padding_follows: bool = False) -> Tensor:
        """Return only the vector of the text, [B, H], and compute nothing after the molecules."""
        return self.pooler(self._molecules([input_ids], [attention_mask.bool()], [padding_follows])[1])

    def _molecules(
        self, input_ids: Sequence[Tensor], visible: Sequence[Tensor], padding_follows: Sequence[bool]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return (characters [B, S, H], molecules [B, M, H]) of each group."""
        rate, visible_blocks = self.config.downsampling_rate, []
        for ids, mask, more in zip(input_ids, visible, padding_follows):
            length = ids.shape[1]
            if mask.shape != ids.shape:
                raise ValueError(f"input_ids is {list(ids.shape)}, attention_mask {list(mask.shape)}")
            if length < rate:
                raise ValueError(f"the encoder needs at least {rate} positions, not {length}")
            blocks = length // rate
            seen = mask[:, : blocks * rate].unflatten(1, (blocks, rate)).any(dim=-1)  # [B, M]
            visible_blocks.append(unmask_empty_rows(F.pad(seen, (0, 1)) if more else seen))
        chars = self.initial_char_encoder(list(map(self.char_embeddings, input_ids)), visible)
        molecules = self.chars_to_molecules(chars, padding_follows)
        return chars, self.encoder(molecules, visible_blocks)


def unmask_empty_rows(visible: Tensor) -> Tensor:
    """Let rows that see nothing see everything, since attention over nothing is undefined. bool [B, L]."""
    return visible | ~visible.any(dim=1, keepdim=True)

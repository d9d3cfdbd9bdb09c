"""Formatters by their published names; import them from `histocc.formatter`."""

import string
from collections.abc import Sequence

from histocc.formatter import BlockyFormatter


class BlockyHISCOFormatter(BlockyFormatter):
    """The formatter "hisco". Raises ValueError for another number of codes than five, other tokens or another
    separator, which no published model has."""

    def __init__(self, max_num_codes: int = 5, map_char_idx=None, map_idx_char=None, sep_value: str = "&"):
        super().__init__("hisco")
        own = (5, self.map_char_idx, self.map_idx_char, self.sep_value)
        given = (max_num_codes, map_char_idx or own[1], map_idx_char or own[2], sep_value)
        if given != own:
            raise ValueError("HISCO models write up to five codes with the tokens -3 … 9, separated by '&'")


class BlockyOCC1950Formatter(BlockyFormatter):
    """The formatter "occ1950" with one code or two."""

    def __init__(self, max_num_codes: int = 2):
        if max_num_codes not in (1, 2):
            raise ValueError(f"max_num_codes: found {max_num_codes!r}, expected 1 or 2")
        super().__init__("occ1950", [f"OCC1950_{i}" for i in range(1, max_num_codes + 1)])
        self.max_num_codes = max_num_codes
        self.max_seq_len = max_num_codes * self.block_size + 2
        self.num_classes = self.num_classes[: self.max_seq_len]


def occ1950_blocky1() -> BlockyFormatter:
    """OCC1950 with one code."""
    return BlockyOCC1950Formatter(1)


def construct_finetune_formatter(
    block_size: int, target_cols: Sequence[str], chars: Sequence[str | int] | None = None
) -> BlockyFormatter:
    """A general-purpose formatter of `chars`, digits and the hyphen by default. A code that is shorter than
    its block is filled with EOS, not with PAD as published, where such a code was lost when it was read
    back. Raises ValueError."""
    names = [target_cols] if isinstance(target_cols, str) else target_cols
    return BlockyFormatter("gpf", names, block_size, allow_short=True, chars=chars or [*string.digits, "-"])

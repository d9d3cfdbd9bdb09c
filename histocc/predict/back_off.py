"""The longest prefix of a code that is sure enough: what can be said of a text where no code can."""

import numpy as np

from histocc.formatter import BlockyFormatter, cut


class Prefixes:
    """All prefixes of the codes of a key: their first tokens, one by one."""

    def __init__(self, codes: list[str], formatter: BlockyFormatter):
        self.block_size, self.separator = formatter.block_size, formatter.within_block_sep
        below: dict[str, list[int]] = {}
        for i, code in enumerate(codes):
            for prefix in dict.fromkeys(self.of(code)):
                below.setdefault(prefix, []).append(i)
        self.below = {prefix: np.array(each) for prefix, each in below.items()}

    def of(self, code: str) -> list[str]:
        """The code and its prefixes, the longest first; -1 and the like have none beside themselves."""
        return [cut(code, digits, self.separator) for digits in range(self.block_size, 0, -1)]

    def longest(self, code: str, probs: np.ndarray, least: float) -> tuple[str, float]:
        """(prefix, probability) of the longest prefix of the code whose codes have at least so much together;
        ("", 0) where none has. probs: of all codes of the key, float [C].
        """
        for prefix in self.of(code):
            found = float(probs[self.below[prefix]].sum(dtype=np.float64)) if prefix in self.below else 0.0
            if found >= least:
                return prefix, min(found, 1.0)
        return "", 0.0

"""Which samples of different widths go together, so that little of what is computed is padding."""


def best_cuts(widths: list[int], edges: list[int], groups: int) -> list[int]:
    """Which of the edges between widths bound at most `groups` groups with the fewest positions, padding and
    all.

    widths: ascending; edges[i]: samples narrower than widths[i]. A group is as wide as its widest.
    """
    best = {0: (0, [0])}  # widths covered → (positions, cuts)
    for _ in range(groups):
        more = dict(best)
        for begin, (positions, cuts) in best.items():
            for end in range(begin + 1, len(widths) + 1):
                cost = positions + (edges[end] - edges[begin]) * widths[end - 1]
                if end not in more or cost < more[end][0]:
                    more[end] = (cost, [*cuts, end])
        best = more
    return best[len(widths)][1]

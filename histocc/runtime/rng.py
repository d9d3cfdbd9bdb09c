"""Random numbers as a function of counters. They have no state to save, and are the same on every machine and
for any number of processes.
"""

import numpy as np

# Each stream of a run has one use: `derived_seed(args.seed, NOISE)`. A resumed run depends on these numbers.
WEIGHTS, ORDER, NOISE, DROPOUT, DESCRIPTIONS, NGRAM_FIT = 0, 1, 2, 3, 4, 6
GOLDEN_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd
MULTIPLIERS = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)


def mix(x: np.ndarray) -> np.ndarray:
    """Scramble uint64 values one to one (finalizer of splitmix64; Steele, Lea, Flood 2014, "Fast splittable
    pseudorandom number generators").
    """
    x = (x ^ (x >> np.uint64(30))) * MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))


def streams(seed: int, epoch: int, rows: np.ndarray) -> np.ndarray:
    """Return the start of each row's draws, uint64 [B]. In an epoch no two rows have the same start."""
    # numpy wraps arrays silently, but warns about scalars
    key = np.array([int(seed) % 2**64], dtype=np.uint64)
    for part in (int(epoch) % 2**64, 0):
        key = mix(key + GOLDEN_STEP) + np.uint64(part)
    return mix(key + np.asarray(rows, dtype=np.int64).astype(np.uint64) * GOLDEN_STEP)


def draw(stream: np.ndarray, number: int | np.ndarray) -> np.ndarray:
    """Return draw `number` of each stream, uint64: 64 uniform, independent bits. A stream's draws are
    splitmix64 from its start. Shapes broadcast: `draw(stream[:, None], numbers)` is a matrix [B, K].
    """
    return mix(stream + (np.atleast_1d(number).astype(np.uint64) + np.uint64(1)) * GOLDEN_STEP)


def chance(bits: np.ndarray, probability: float | np.ndarray) -> np.ndarray:
    """Return bool from draws, True with `probability`, which is a number or an array that broadcasts."""
    return (bits >> np.uint64(11)) * 2.0**-53 < probability


def below(bits: np.ndarray, n: int | np.ndarray) -> np.ndarray:
    """Return uniform whole numbers 0 … n−1, int64, from draws, for 0 ≤ n < 2^32 (0 gives 0)."""
    return (((bits >> np.uint64(32)) * np.asarray(n).astype(np.uint64)) >> np.uint64(32)).astype(np.int64)


def derived_seed(*parts: int) -> int:
    """Return one 63-bit seed from several whole numbers, whose order matters."""
    state = np.zeros(1, dtype=np.uint64)
    for part in parts:
        state = mix((state ^ np.uint64(part % 2**64)) + GOLDEN_STEP)
    return int(state[0] >> np.uint64(1))

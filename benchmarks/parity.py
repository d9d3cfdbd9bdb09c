"""Do published weights give the codes that the published program gives? Its plain reference and histocc on
the same rows, every decoder.

    python -m benchmarks.parity --size tiny
    python -m benchmarks.parity --size base --full 20 --every 8

Random weights in the published layout; the rows are the distinct texts of the real rows, as they are and,
every fourth, in Title Case and UPPER CASE, and made-up rows of six languages with capitals and accents. Needs
transformers and unidecode.
"""

import tempfile
import time
from pathlib import Path

import torch

from histocc.formatter import hisco_blocky5, hisco_key
from histocc.model.decoding import greedy_from_memory
from histocc.model.mixer import model_config
from histocc.predict.coder import Coder
from histocc.runtime.device import Precision

from .common import REAL, arguments, finish, read_csv, table, write_sample
from .published_program import PublishedProgram, cleaned

# Differences that rounding in float32 can turn: logits (greedy), probabilities (flat), their ratio (full).
TIE = 1e-4
HISCO_TOKENS = [str(number) for number in range(-3, 10)]
DECODERS = ("greedy", "flat", "full")


def hisco_program(size: str, kind: str = "mix") -> PublishedProgram:
    sizes = model_config(size).to_dict()
    with torch.random.fork_rng([]):
        torch.manual_seed(2)  # for the biases, which torch initialises
        return PublishedProgram(
            HISCO_TOKENS, list(hisco_key()), 5, 5, hisco=True, kind=kind, **sizes
        ).spread()


def rows_to_code(real: str | None, made_up: int) -> list[tuple[str, str]]:
    """Return pairs (text, language), each once."""
    pairs: list[tuple[str, str]] = []
    if real:
        texts = list(dict.fromkeys(row["occ1"] for row in read_csv(real)))
        written = [*texts, *(text.title() for text in texts[::4]), *(text.upper() for text in texts[1::4])]
        pairs += [(text, "en") for text in written]
    special = []
    if made_up:
        with tempfile.TemporaryDirectory() as folder:
            sample = read_csv(write_sample(f"{folder}/sample.csv", 20 * made_up, seed=3))
        texts = [(row["occ1"], row["lang"]) for row in sample if row["occ1"].strip()]
        special = [row for row in texts if not row[0].isascii() or row[0] != row[0].lower()]
    return list(dict.fromkeys(pairs + special[:made_up]))


def compared(
    program: PublishedProgram, coder: Coder, pairs: list[tuple[str, str]], batch: int, full: int
) -> dict:
    """Return by decoder: rows, rows with equal codes, rows with others whose decision hung on less than TIE
    or on the last bits of the encoding, and the largest difference of a probability; and seconds of both
    sides, and how many different answers there were.

    Args:
        batch: rows at once.
        full: on how many rows the probability of every code is compared.
    """
    rows, equal, ties = ({"greedy": 0, "flat": 0, "full": 0} for _ in range(3))
    furthest = {"greedy": 0.0, "flat": 0.0, "full": 0.0}
    answers: set[tuple[str, ...]] = set()
    taken = {"reference": 0.0, "histocc": 0.0}

    def count(decoder: str, theirs: list, ours: list, margin: torch.Tensor, difference: float) -> None:
        rows[decoder] += len(theirs)
        equal[decoder] += sum(a == b for a, b in zip(theirs, ours))
        ties[decoder] += sum(a != b and m < TIE for a, b, m in zip(theirs, ours, margin.tolist()))
        furthest[decoder] = max(furthest[decoder], difference)

    for start in range(0, len(pairs), batch):
        texts, languages = map(list, zip(*pairs[start : start + batch]))
        began = time.perf_counter()
        memory, pooled = program.encode(texts, languages)
        if program.decoder is not None:
            tokens, probs, margin = program.greedy(memory)
            middle = time.perf_counter()
            coded = coder.code(texts, languages, "greedy", in_any_order=False)
            taken["reference"] += middle - began
            taken["histocc"] += time.perf_counter() - middle
            codes = [program.codes_of(row) for row in tokens.tolist()]
            for i, (theirs, ours) in enumerate(zip(codes, coded)):
                if theirs != ours.codes and same_on_its_memory(coder, memory[i : i + 1], tokens[i]):
                    margin[i] = 0.0
            conf = torch.tensor([each.conf for each in coded], dtype=probs.dtype)
            count("greedy", codes, [each.codes for each in coded], margin, float((probs - conf).abs().max()))
            answers |= {tuple(row) for row in codes}
        if program.linear_decoder is not None:
            count("flat", *compared_flat(program, coder, texts, languages, pooled))
        some = min(len(texts), max(0, full - rows["full"]))
        if program.decoder is not None and some:
            count("full", *compared_full(program, coder, texts[:some], languages[:some], memory[:some]))
    counts = {"rows": rows, "equal": equal, "ties": ties, "difference": furthest}
    return {**counts, "seconds": taken, "distinct": len(answers)}


def compared_flat(
    program: PublishedProgram, coder: Coder, texts: list[str], languages: list[str], pooled: torch.Tensor
) -> tuple[list, list, torch.Tensor, float]:
    """Return (codes of the reference, those of histocc, margins, largest difference of a probability)."""
    codes, margin = program.flat(pooled, languages)
    ours = torch.from_numpy(coder.probabilities(texts, languages, "flat"))
    theirs = program.linear_decoder(pooled).sigmoid().detach()
    coded = [each.codes for each in coder.code(texts, languages, "flat")]
    return codes, coded, margin, float((theirs - ours).abs().max())


def compared_full(
    program: PublishedProgram, coder: Coder, texts: list[str], languages: list[str], memory: torch.Tensor
) -> tuple[list, list, torch.Tensor, float]:
    """Return the same of the five most probable codes of the key."""
    theirs = program.full(memory, [coder.formatter.encode_code(code).tolist() for code in coder.codes])
    ours = torch.from_numpy(coder.probabilities(texts, languages, "full"))
    best = theirs.topk(6)
    codes = [[coder.codes[i] for i in row[:5]] for row in best.indices.tolist()]
    margin = -(best.values.diff(dim=1) / best.values[:, 1:]).amax(1)
    coded = [each.codes for each in coder.code(texts, languages, "full")]
    return codes, coded, margin, float((theirs - ours).abs().max())


def same_on_its_memory(coder: Coder, memory: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Return whether histocc's decoder writes these tokens from the reference's own encoding: then the last
    bits of the encodings alone made the difference."""
    formatter = coder.formatter
    written = greedy_from_memory(
        coder.model, memory, None, max_codes=formatter.max_num_codes, block_size=formatter.block_size
    )
    return bool((written.tokens[0, 1:-1] == tokens).all())


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", choices=("tiny", "small", "base"), default="tiny")
    parser.add_argument("--made-up", type=int, default=2000)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th row alone")
    parser.add_argument("--full", type=int, default=100, help="rows on which every code is compared")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    pairs = rows_to_code(str(REAL) if REAL.exists() else None, args.made_up)[:: args.every]
    program = hisco_program(args.size)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "published.bin"
        torch.save({name: value for name, value in program.published().items() if name != "key"}, file)
        coder = Coder.load(str(file), batch_size=args.batch, precision=Precision("float32"))
    assert coder.formatter.to_dict() == hisco_blocky5().to_dict()
    found = compared(program, coder, pairs, args.batch, args.full)
    other = sum(cleaned(text) != text for text, _ in pairs)
    equal = {name: f"{found['equal'][name]:,} of {found['rows'][name]:,}" for name in DECODERS}
    rows = [[name, equal[name], found["ties"][name], f"{found['difference'][name]:.1e}"] for name in DECODERS]
    words = (
        f"{args.size}, {len(pairs):,} different rows, {other:,} of them not in lower-case ASCII;"
        f" {found['distinct']:,} different answers of the greedy decoder;"
        f" {found['seconds']['reference']:.0f} s by the reference, {found['seconds']['histocc']:.0f} s by"
        " histocc"
    )
    heads = ("decoder", "rows with equal codes", "other ties", "largest difference of a probability")
    finish({"size": args.size, **found}, f"{words}\n\n{table(heads, rows)}")


if __name__ == "__main__":
    main()

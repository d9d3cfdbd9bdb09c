"""Do published weights give the codes that the published program gives? Its plain reference and histocc on
the same rows, every decoder.

    python benchmarks/parity.py --size tiny --real ../shared/data/occupations_en.csv
    python benchmarks/parity.py --size base --real ../shared/data/occupations_en.csv --full 20

Random weights in the published layout; the rows are the distinct texts of --real, as they are and, every
fourth, in Title Case and UPPER CASE, and made-up rows of six languages with capitals and accents. Needs
transformers and unidecode.
"""

import argparse
import csv
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from published_program import PublishedProgram, cleaned

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from histocc.formatter import hisco_blocky5, hisco_key
from histocc.model.decoding import greedy_from_memory
from histocc.model.mixer import model_config
from histocc.predict.coder import Coder
from histocc.runtime.device import Precision
from histocc.sample.generate import rows as sample_rows

# What rounding in float32 can turn, of logits (greedy), of probabilities (flat), of their ratio (full).
TIE = 1e-4
HISCO_TOKENS = [str(number) for number in range(-3, 10)]


def hisco_program(size: str, kind: str = "mix") -> PublishedProgram:
    return PublishedProgram(
        HISCO_TOKENS, list(hisco_key()), 5, 5, hisco=True, kind=kind, **model_config(size).to_dict()
    ).spread()


def rows_to_code(real: str | None, made_up: int) -> list[tuple[str, str]]:
    """(text, language), each pair once."""
    found: list[tuple[str, str]] = []
    if real:
        with open(real, encoding="utf-8", newline="") as file:
            texts = list(dict.fromkeys(row["occ1"] for row in csv.DictReader(file)))
        found += (
            [(text, "en") for text in texts]
            + [(text.title(), "en") for text in texts[::4]]
            + [(text.upper(), "en") for text in texts[1::4]]
        )
    special = [
        (text, language)
        for text, language, *_ in sample_rows(20 * made_up, seed=3)
        if text.strip() and (not text.isascii() or text != text.lower())
    ]
    return list(dict.fromkeys(found + special[:made_up]))


def compared(
    program: PublishedProgram, coder: Coder, pairs: list[tuple[str, str]], batch: int, full: int
) -> dict:
    """Rows with equal codes, rows with others whose decision hung on less than TIE or on the last bits of the
    encoding, and the largest difference of a probability, by decoder; seconds of both sides."""
    equal, ties, rows = ({"greedy": 0, "flat": 0, "full": 0} for _ in range(3))
    furthest, seconds, different = {"greedy": 0.0, "flat": 0.0, "full": 0.0}, [0.0, 0.0], set()

    def count(
        name: str, expected: list[list[str]], got: list[list[str]], margin: torch.Tensor, difference: float
    ) -> None:
        rows[name] += len(expected)
        equal[name] += sum(a == b for a, b in zip(expected, got))
        ties[name] += sum(a != b and near < TIE for a, b, near in zip(expected, got, margin.tolist()))
        furthest[name] = max(furthest[name], difference)

    for start in range(0, len(pairs), batch):
        texts, languages = map(list, zip(*pairs[start : start + batch]))
        began = time.perf_counter()
        memory, pooled = program.encode(texts, languages)
        if program.decoder is not None:
            tokens, probs, margin = program.greedy(memory)
            codes = [program.codes_of(row) for row in tokens.tolist()]
        middle = time.perf_counter()
        if program.decoder is not None:
            coded = coder.code(texts, languages, "greedy", in_any_order=False)
            for i, (codes_of_row, each) in enumerate(zip(codes, coded)):
                if codes_of_row != each.codes and same_on_its_memory(coder, memory[i : i + 1], tokens[i]):
                    margin[i] = 0.0
            conf = torch.tensor([each.conf for each in coded], dtype=probs.dtype)
            count("greedy", codes, [each.codes for each in coded], margin, float((probs - conf).abs().max()))
            different |= {tuple(row) for row in codes}
        seconds = [seconds[0] + middle - began, seconds[1] + time.perf_counter() - middle]
        if program.linear_decoder is not None:
            count("flat", *compared_flat(program, coder, texts, languages, pooled))
        some = min(len(texts), max(0, full - rows["full"]))
        if program.decoder is not None and some:
            count("full", *compared_full(program, coder, texts[:some], languages[:some], memory[:some]))
    return {
        "rows": rows,
        "equal": equal,
        "ties": ties,
        "difference": furthest,
        "seconds": seconds,
        "distinct": len(different),
    }


def compared_flat(
    program: PublishedProgram, coder: Coder, texts: list[str], languages: list[str], pooled: torch.Tensor
) -> tuple[list, list, torch.Tensor, float]:
    """(codes of the reference, those of histocc, margins, largest difference of a probability)."""
    codes, margin = program.flat(pooled, languages)
    found = torch.from_numpy(coder.probabilities(texts, languages, "flat"))
    expected = program.linear_decoder(pooled).sigmoid().detach()
    got = [each.codes for each in coder.code(texts, languages, "flat")]
    return codes, got, margin, float((expected - found).abs().max())


def compared_full(
    program: PublishedProgram, coder: Coder, texts: list[str], languages: list[str], memory: torch.Tensor
) -> tuple[list, list, torch.Tensor, float]:
    """The same of the five most probable codes of the key."""
    expected = program.full(memory, [coder.formatter.encode_code(code).tolist() for code in coder.codes])
    found = torch.from_numpy(coder.probabilities(texts, languages, "full"))
    best = expected.topk(6)
    names = [[coder.codes[i] for i in row[:5]] for row in best.indices.tolist()]
    margin = -(best.values.diff(dim=1) / best.values[:, 1:]).amax(1)
    got = [each.codes for each in coder.code(texts, languages, "full")]
    return names, got, margin, float((expected - found).abs().max())


def same_on_its_memory(coder: Coder, memory: torch.Tensor, tokens: torch.Tensor) -> bool:
    """Whether histocc's decoder writes these tokens from the reference's own encoding: then the last bits of
    the encodings alone made the difference."""
    formatter = coder.formatter
    sizes = {"max_codes": formatter.max_num_codes, "block_size": formatter.block_size}
    return bool((greedy_from_memory(coder.model, memory, None, **sizes).tokens[0, 1:-1] == tokens).all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--size", choices=("tiny", "small", "base"), default="tiny")
    parser.add_argument("--real", default=None, metavar="FILE.csv", help="column occ1")
    parser.add_argument("--made-up", type=int, default=2000)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th row alone")
    parser.add_argument(
        "--full", type=int, default=100, help="rows on which the probability of every code is compared"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    pairs = rows_to_code(args.real, args.made_up)[:: args.every]
    plain = sum(cleaned(text) == text for text, _ in pairs)
    program = hisco_program(args.size)
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "published.bin")
        torch.save({name: value for name, value in program.published().items() if name != "key"}, file)
        coder = Coder.load(file, batch_size=args.batch, precision=Precision("float32"))
    assert coder.formatter.to_dict() == hisco_blocky5().to_dict()
    found = compared(program, coder, pairs, args.batch, args.full)
    print(
        f"{args.size}, {len(pairs):,} different rows, {len(pairs) - plain:,} of them not in lower-case "
        "ASCII; "
        f"{found['distinct']:,} different answers of the greedy decoder"
    )
    for name, rows in found["rows"].items():
        print(
            f"{name:7s} {found['equal'][name]:,} of {rows:,} rows with equal codes "
            f"({found['equal'][name] / max(rows, 1):.2%}; {found['ties'][name]} others are ties), "
            f"probabilities differ by at most {found['difference'][name]:.1e}"
        )
    print(f"greedy: {found['seconds'][0]:.0f} s by the reference, {found['seconds'][1]:.0f} s by histocc")


if __name__ == "__main__":
    main()

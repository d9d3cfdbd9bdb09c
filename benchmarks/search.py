#!/usr/bin/env python3
"""How fast the probability of every code, and the exact best five, are found, as ratios to the plain search
over the same key:

    python benchmarks/search.py                          # size small, two threads; trains on the sample first
    python benchmarks/search.py --model ./output         # a model that is there, over its own key

The plain search is the published one: from the empty prefix down, each next token of each prefix costs a pass
of its whole sequence through a decoder of torch's own layers, over a memory of 128 positions. It is taken on
a few descriptions only. All encode the text themselves. The search takes its key, all codes of HISCO, from
hisco_key.csv beside the repository, and ends without it. How fast the best five are found depends on how sure
the model is, so it is trained a while on the sample before. Prints a table and one JSON line.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO), str(REPO / "benchmarks")]

import torch
from reference_model import Reference

import finetune
from histocc.formatter import BOS_IDX
from histocc.model.search import CodeSearch, CodeTrie
from histocc.published import models
from histocc.sample.files import write
from histocc.sample.generate import rows
from histocc.text import encode

KEY = REPO.parent / "shared" / "data" / "hisco_key.csv"
WANTED = {"full": 80, "topk": 300}


def train(folder: str, size: str, steps: int, *more: str) -> str:
    """The folder of a run on the sample, inside `folder`."""
    path, run = str(Path(folder) / "sample.csv"), str(Path(folder) / "run")
    write(rows(20_000, 1), path)
    flags = [
        "--dataset",
        path,
        "--target-cols",
        "hisco_1",
        "hisco_2",
        "hisco_3",
        "--formatter",
        "hisco",
        "--language-col",
        "lang",
        "--model-size",
        size,
        "--batch-size",
        "64",
        "--learning-rate",
        "5e-4",
        "--empty-blocks",
        "first",
        "--ngrams",
        "none",
        "--max-steps",
        str(steps),
        "--schedule-steps",
        str(steps),
        "--share-val",
        "0.02",
        "--save-path",
        run,
        "--device",
        "cpu",
        *more,
    ]
    with contextlib.redirect_stdout(sys.stderr):
        finetune.main(flags)
    return run


@torch.no_grad()
def plain(
    model: Reference, tree: CodeTrie, ids: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """(probability of every code [codes], decoder calls) of one text, ids and mask [1, 128], as the published
    search finds them.
    """
    memory = model.encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    found, calls = torch.zeros(len(tree.codes)), 0
    open_prefixes = [(0, [BOS_IDX], torch.ones(()))]
    while open_prefixes:
        node, tokens, prob = open_prefixes.pop()
        for child in range(int(tree.first_child[node]), int(tree.first_child[node] + tree.children[node])):
            after = model.decoder(memory, torch.tensor([tokens]), ~mask)[0, -1].softmax(0)
            calls += 1
            below = prob * after[tree.token[child]]
            if child < tree.inner:
                open_prefixes.append((child, [*tokens, int(tree.token[child])], below))
            else:
                found[tree.code_of_leaf[child - tree.inner]] = below
    return found, calls


def seconds(work) -> tuple[float, object]:
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def measure(args, path: str) -> dict:
    model, formatter, state = models.load_model(path)
    started = time.perf_counter()
    tree = CodeTrie(list(state["key"]), formatter)
    search = CodeSearch(model, tree)
    once = time.perf_counter() - started
    reference = Reference(
        model.config, model.vocab_size, len(tree.codes), state["config"]["decoder_dim_feedforward"]
    ).eval()
    reference.load_state_dict(model.state_dict(), strict=False)
    found = list(dict.fromkeys((row[0], row[1]) for row in rows(4 * args.texts, 7)))[: args.texts]
    texts, languages = map(list, zip(*sorted(found, key=lambda row: len(row[0]))))
    wide = [torch.from_numpy(array) for array in encode(texts, languages, width=128)]
    batches = [
        [
            torch.from_numpy(array)
            for array in encode(texts[i : i + args.batch], languages[i : i + args.batch])
        ]
        for i in range(0, len(texts), args.batch)
    ]
    few = batches[len(batches) // 2]
    times: dict[str, list[float]] = {"plain": [], "full": [], "topk": []}
    difference, at = 0.0, len(batches) // 2 * args.batch
    search.full(*few), search.topk(*few, 5)  # warm
    for turn in range(args.plain):
        taken, (expected, calls) = seconds(
            lambda: plain(
                reference, tree, wide[0][at + turn : at + turn + 1], wide[1][at + turn : at + turn + 1]
            )
        )
        times["plain"].append(taken)
        taken, probs = seconds(lambda: search.full(*few))
        times["full"].append(taken / len(few[0]))
        difference = max(difference, float((probs[turn] - expected).abs().max()))
        taken, best = seconds(lambda: [search.topk(*batch, 5) for batch in batches])
        times["topk"].append(taken / len(texts))
        middle = best[len(batches) // 2]
        assert (middle[1] - probs.topk(5).values).abs().max() < 1e-5, "topk and full differ"
    figures = {name: statistics.median(values) for name, values in times.items()}
    sure = float(torch.cat([part[1][:, 0] for part in best]).mean())
    return {
        "seconds": figures,
        "ratio": {name: figures["plain"] / figures[name] for name in WANTED},
        "difference": difference,
        "calls": calls,
        "prefixes": tree.inner,
        "codes": len(tree.codes),
        "mean_best": sure,
        "once": once,
        "spread": {name: max(v) / min(v) for name, v in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default=None, help="a run of histocc instead of training one")
    parser.add_argument("--size", default="small", help="of the model that is trained")
    parser.add_argument("--steps", type=int, default=300, help="of that training")
    parser.add_argument(
        "--texts", type=int, default=128, help="descriptions for topk; full takes one batch of them"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--plain", type=int, default=3, help="descriptions for the plain search, and turns of all three"
    )
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.model is None and not KEY.exists():
        print(
            f"no hisco_key.csv in {KEY.parent}, the key that is searched; nothing measured (--model RUN takes"
            " the key of a run)"
        )
        return
    with tempfile.TemporaryDirectory(prefix="histocc-bench-") as folder:
        found = measure(
            args,
            args.model
            or train(folder, args.size, args.steps, "--all-codes-file", str(KEY), "--all-codes-col", "hisco"),
        )
    print(
        f"{found['codes']:,} codes, {found['prefixes']:,} prefixes, {found['calls']:,} decoder calls of the"
        " plain search; "
        + (f"model {args.model}" if args.model else f"size {args.size}, {args.steps} steps on the sample")
        + f", best code's probability {found['mean_best']:.2f} on average; {args.threads} threads; greatest"
        f" difference of a probability {found['difference']:.1e}; tree and first layer once:"
        f" {found['once']:.2f} s\n"
    )
    print("| search | ms per description | ratio | wanted | |\n|---|---|---|---|---|")
    print(f"| plain | {1000 * found['seconds']['plain']:,.0f} | 1 | | |")
    for name, wanted in WANTED.items():
        ratio = found["ratio"][name]
        print(
            f"| {name}{' 5' if name == 'topk' else ''} | {1000 * found['seconds'][name]:,.1f} | {ratio:,.0f}"
            f" | ≥ {wanted} | {'met' if ratio >= wanted else 'MISSED'} |"
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()

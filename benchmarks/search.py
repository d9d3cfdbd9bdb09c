"""How fast the probability of every code, and the exact best five, are found, as ratios to the plain search
over the same key:

    python -m benchmarks.search                          # size small, two threads; trains on the sample first
    python -m benchmarks.search --model ./output         # a model that is there, over its own key

The plain search is the published one: from the empty prefix down, each next token of each prefix costs a pass
of its whole sequence through a decoder of torch's own layers, over a memory of 128 positions. It is taken on
a few descriptions only. All encode the text themselves. How fast the best five are found depends on how sure
the model is, so it is trained a while on the sample before.
"""

import statistics
import tempfile

import torch

from histocc.formatter import BOS_IDX
from histocc.model.search import CodeSearch, CodeTrie
from histocc.published import models
from histocc.text import encode

from .common import arguments, finish, read_csv, seconds, table, trained, write_sample
from .reference_model import Reference


@torch.no_grad()
def plain(reference: Reference, tree: CodeTrie, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the probability of every code [codes] of one text, ids and mask [1, 128], as the published
    search finds them.
    """
    memory = reference.encoder(input_ids=ids, attention_mask=mask.long()).last_hidden_state
    probs, open_prefixes = torch.zeros(len(tree.codes)), [(0, [BOS_IDX], torch.ones(()))]
    while open_prefixes:
        node, tokens, prob = open_prefixes.pop()
        for child in range(int(tree.first_child[node]), int(tree.first_child[node] + tree.children[node])):
            logits = reference.decoder(memory, torch.tensor([tokens]), memory_padding=~mask)
            below = prob * logits[0, -1].softmax(0)[tree.token[child]]
            if child < tree.inner:
                open_prefixes.append((child, [*tokens, int(tree.token[child])], below))
            else:
                probs[tree.code_of_leaf[child - tree.inner]] = below
    return probs


def tensors(texts: list[str], languages: list[str], width: int | None = None) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in encode(texts, languages, width=width)]


def measure(args, path: str, folder: str) -> dict:
    model, formatter, state = models.load_model(path)
    tree = CodeTrie(list(state["key"]), formatter)
    search = CodeSearch(model, tree)
    width = state["config"]["decoder_dim_feedforward"]
    reference = Reference(model.config, model.vocab_size, len(tree.codes), width).eval()
    reference.load_state_dict(model.state_dict(), strict=False)
    sample = read_csv(write_sample(f"{folder}/texts.csv", 4 * args.texts, seed=7))
    pairs = list(dict.fromkeys((row["occ1"], row["lang"]) for row in sample))[: args.texts]
    pairs.sort(key=lambda pair: len(pair[0]))
    parts = [tuple(map(list, zip(*pairs[i : i + args.batch]))) for i in range(0, len(pairs), args.batch)]
    batches, middle = [tensors(*part) for part in parts], len(parts) // 2
    times: dict[str, list[float]] = {"plain": [], "full": [], "best five": []}
    difference, answers = 0.0, {}

    def full() -> None:
        answers["full"] = search.full(*batches[middle])

    def topk() -> None:
        answers["topk"] = [search.topk(ids, mask, 5) for ids, mask in batches]

    def published() -> None:
        texts, languages = parts[middle]
        ids, mask = tensors([texts[turn]], [languages[turn]], width=128)
        answers["plain"] = plain(reference, tree, ids, mask.bool())

    full()  # this pass warms up
    topk()
    for turn in range(args.plain):
        times["plain"].append(seconds(published))
        times["full"].append(seconds(full) / len(batches[middle][0]))
        times["best five"].append(seconds(topk) / len(pairs))
        difference = max(difference, float((answers["full"][turn] - answers["plain"]).abs().max()))
        best = answers["topk"][middle][1]
        assert (best - answers["full"].topk(5).values).abs().max() < 1e-5, "topk and full differ"
    sure = float(torch.cat([best[:, 0] for _, best in answers["topk"]]).mean())
    figures = {name: statistics.median(values) for name, values in times.items()}
    return {"seconds": figures, "difference": difference, "codes": len(tree.codes), "mean_best": sure}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", help="a run of histocc instead of training one")
    parser.add_argument("--size", default="small", help="of the model that is trained")
    parser.add_argument("--steps", type=int, default=300, help="of that training")
    parser.add_argument("--texts", type=int, default=128, help="for the best five; full takes one batch")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--plain", type=int, default=3, help="descriptions for the plain search, and turns")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or trained(folder, args.size, args.steps, "--empty-blocks first --key hisco")
        found = measure(args, model, folder)
    taken = found["seconds"]
    rows = [[name, f"{1000 * x:,.1f}", f"{taken['plain'] / x:,.0f}"] for name, x in taken.items()]
    words = (
        f"{found['codes']:,} codes; best code's probability {found['mean_best']:.2f} on average;"
        f" {args.threads} threads; greatest difference of a probability {found['difference']:.1e}"
    )
    finish(found, f"{words}\n\n{table(('search', 'ms a description', 'ratio'), rows)}")


if __name__ == "__main__":
    main()

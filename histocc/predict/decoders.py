"""The table of decoders that all other modules read. `Coder` has a method of each decoder's name."""

from typing import NamedTuple


class Decoder(NamedTuple):
    """A decoder. With a title it gives a set of codes, otherwise alternatives, the most probable first."""

    words: str  # for --help
    needs: set[str]  # parts of the model, see MODEL_PARTS
    in_report: str = ""  # its name in the report
    title: str = ""  # its title there. `auto` measures the decoders that have one
    confidence_of: str = ""  # the decoder whose map of confidence it shares
    published: tuple[str, ...] = ()  # more names for `OccCANINE.predict`


DECODERS = {
    "greedy": Decoder("writes the codes digit by digit", {"writing"}, "seq2seq", "Seq2seq decoder (greedy)"),
    "flat": Decoder(
        "the linear decoder's codes above --threshold: fast",
        {"linear"},
        "linear",
        "Linear decoder (probability above its threshold)",
    ),
    "both": Decoder(
        "as many as flat, of the linear decoder's 20 best, which both decoders rank: fast enough",
        {"linear", "tree"},
        "both",
        "Both decoders together",
    ),
    "topk": Decoder("the most probable codes of the key, one by one", {"tree"}, published=("greedy-topk",)),
    "full": Decoder("as topk, from the probability of every code", {"tree"}, confidence_of="topk"),
}
# Parts of a model by its kind. With linear, outputs above --threshold count. With writing, codes are
# written, in the key or not. With tree, codes of the key are ranked.
MODEL_PARTS = {"mixer": {"linear", "writing", "tree"}, "seq2seq": {"writing", "tree"}, "flat": {"linear"}}
BY_THRESHOLD = [name for name, decoder in DECODERS.items() if "linear" in decoder.needs]
RANKED = "topk"  # its map of confidence takes the most time to fit, and no answer of `auto` needs it
MEASURED = [name for name, decoder in DECODERS.items() if decoder.title]


def in_series(names: list[str], last: str = "and") -> str:
    return f" {last} ".join([", ".join(names[:-1]), names[-1]][-len(names) :])

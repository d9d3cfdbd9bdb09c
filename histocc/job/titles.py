"""The titles of `histocc.lexicon` beside few training rows, for the fit of n-grams alone."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np

from histocc import lexicon
from histocc.data.arrays import ARRAYS, JoinedRows, PreparedData, text_keys, thinned
from histocc.data.prepare import nothing
from histocc.formatter import BlockyFormatter
from histocc.job.config import FEW_ROWS, JobConfig, is_fit_alone, is_fitted
from histocc.model.ngrams import AUTO, NONE
from histocc.text import UNKNOWN_LANGUAGE, cleaner, code_points, text_hashes

WEIGHT = 0.1  # a title counts as much as a tenth of a distinct row


def with_titles(
    args: JobConfig, formatter: BlockyFormatter, data: PreparedData, say: Callable[[str], None] = nothing
) -> PreparedData:
    """Return the data with titles of the lists behind the training rows, if --lexicon asks for them, and
    these rows are few, have HISCO codes and a language of the lists; else the data as they are. The titles
    have codes of these rows, or of a key that was not made of rows, and texts that no row has. Those of these
    rows' codes are thinned to FEW_ROWS of both, for regression.
    """
    own = np.unique(text_keys(data.train.text_hash, data.train.language))
    is_wanted = is_fit_alone(args) if args.lexicon == AUTO else args.lexicon != NONE and is_fitted(args)
    if not is_wanted or formatter.kind != "hisco" or len(own) >= FEW_ROWS:
        return data
    if data.languages == [UNKNOWN_LANGUAGE]:
        names = ", ".join(lexicon.LANGUAGES)
        say(f"Note: with --language ({names}) histocc's own titles of these codes would join the fit")
    # Codes of rows that are kept out are not known here, or what is measured on these rows would flatter.
    is_given = args.key or args.all_codes_file or args.lexicon == "codes"
    of_rows, times = np.unique(data.train.codes[data.train.codes >= 0], return_counts=True)
    numbers = range(len(data.codes)) if is_given else of_rows.tolist()
    clean, place = cleaner(data.clean_text), {data.codes[i]: i for i in numbers}
    found = [
        (clean(title), number, place[code])
        for number, language in enumerate(data.languages)
        if language in lexicon.LANGUAGES
        for title, code in lexicon.titles(language).items()
        if code in place
    ]
    texts, numbers, _ = zip(*found) if found else ((), (), ())
    keys = text_keys(text_hashes([*texts]), np.array(numbers, dtype=np.int64))
    kept = np.flatnonzero(~np.isin(keys, own))
    kept = kept if is_given else thinned(kept, FEW_ROWS - len(own))
    if not len(kept):
        return data
    names = ", ".join(name for name in data.languages if name in lexicon.LANGUAGES)
    say(
        f"Lexicon: {len(kept):,} of {len(found):,} titles that histocc has for these codes ({names}) join"
        f" {len(own):,} distinct texts in the fit of n-grams; each counts {WEIGHT:g} times as much"
        " (--lexicon none leaves them out)"
    )
    if not is_given and (once := (times == 1).sum() / len(data.train)) > 0.3:  # by Good and Turing
        say(f"Note: about {once:.0%} of new rows have codes that no row here has; --lexicon codes adds these")
    texts, language, own_codes = map(list, zip(*(found[i] for i in kept)))
    codes = np.full((len(texts), data.train.codes.shape[1]), -1, dtype=ARRAYS["codes"])
    codes[:, 0] = own_codes
    titles = SimpleNamespace(
        chars=code_points("".join(texts)),
        offsets=np.cumsum([0, *map(len, texts)]),
        language=np.array(language, dtype=ARRAYS["language"]),
        codes=codes,
        text_hash=text_hashes(texts),
    )
    return replace(data, train=JoinedRows(data.train, titles, WEIGHT))

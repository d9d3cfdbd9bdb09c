"""Make the built-in model with an ordinary run in a folder:

    python -m histocc.sample.built_in FOLDER

Its rows are the titles of `histocc.lexicon`, names of towns (no occupation) and rows of the sample. Some
titles also occur abbreviated, or with words such as "retired". Texts of the lists get the list's code. About
a hundredth of the titles is left out, each with the other titles of its code with the same beginning or end
of a word. These and rows of another sample with several codes are the validation texts. The confidence is
fitted on them. If several processes start, the others wait for the first.
"""

import os
import shutil
import sys
import time
import zlib
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from histocc import lexicon
from histocc.data.learned import hashes_of, keys_of
from histocc.data.prepare import nothing
from histocc.data.rows import csv_text
from histocc.job import card, config, inputs, train
from histocc.predict import fitting
from histocc.published.built_in import is_made
from histocc.runtime import checkpoint, signals
from histocc.runtime.device import Precision
from histocc.runtime.files import OwnFiles, atomic_write, take_lock
from histocc.runtime.frame import start
from histocc.runtime.world import World
from histocc.sample.generate import HEADER, in_phrase, languages, pick, read, rows, shared_items, variants

SAMPLE_ROWS = 24_000
OTHER_ROWS = 2_400  # rows of another sample. Those with several codes are a tenth of all validation texts
LEFT_OUT_OF = 100  # one of so many beginnings and ends of words removes all titles of a code
# One title of so many also occurs with "retired", "deceased" and the like, with "wife of", or abbreviated.
FORMER, RELATION, SHORT = 10, 12, 3
CARD_NOTE = (
    "It learned from lists of titles, not from a register. Its validation texts are titles unlike those that"
    " it was trained on, and made-up rows with several codes (a tenth). Registers repeat common titles,"
    " and more of those are right."
)
# A second code counts from this probability: among 0.6 to 0.9 it gets most rows of another sample right.
THRESHOLD = 0.8


def ends(title: str) -> set[str]:
    """Return five letters from the beginning and from the end of each longer word."""
    return {end for word in title.split() if len(word) > 3 for end in (word[:5], word[-5:])}


@cache
def title_abbreviations(language: str) -> dict[str, list[str]]:
    """Return the abbreviations of each title, except those that another code could have."""
    titles, words = lexicon.titles(language), lexicon.abbreviations(language)
    rules = [(lambda new, title, old=old: title.replace(old, new), new) for old, new in words]
    short = {title: [text.strip() for text in variants(f" {title} ", rules)] for title in titles}
    shared = shared_items((text, titles[each]) for each, texts in short.items() for text in (each, *texts))
    return {title: [text for text in texts if text not in shared] for title, texts in short.items()}


def listed_answers(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the entry "answers" of a checkpoint for all titles and their abbreviations. Their `conf` is NaN:
    a list does not show how often a register agrees, so the model's conf is used.
    """
    rows = [
        (text, state["languages"].index(language), state["key"][code])
        for language in lexicon.LEXICON_LANGUAGES
        for title, code in lexicon.titles(language).items()
        for text in (title, *title_abbreviations(language)[title])
    ]
    texts, numbers, codes = zip(*rows)
    keys = keys_of(hashes_of([*texts], state["config"]["text"]), np.array(numbers))
    keys, first = np.unique(keys, return_index=True)
    answers = torch.tensor(codes, dtype=torch.int32)[first][:, None]
    return {"keys": torch.from_numpy(keys), "codes": answers, "conf": torch.full([len(keys)], torch.nan)}


def tables() -> dict[str, list[tuple[str, ...]]]:
    """Return the rows of train.csv and val.csv. Titles of a code with the same beginning or end of a word are
    left out together, except those that share one with a title of the sample.
    """
    parts: dict[str, list[tuple[str, ...]]] = {"train.csv": [], "val.csv": []}
    sample = read("occupations.csv")
    for speech in languages():
        language, titles = speech.tag, lexicon.titles(speech.tag)
        usual = {(row["hisco"], end) for row in sample for end in ends(row[language].replace("|", " "))}
        parts["train.csv"] += ((town.strip(" ,"), language, "-1", "", "") for town in speech.in_town)
        for title, code in titles.items():
            pairs = {(code, end) for end in ends(title)}
            is_drawn = any(zlib.crc32(repr(pair).encode()) % LEFT_OUT_OF == 0 for pair in pairs)
            is_left_out = is_drawn and pairs.isdisjoint(usual)
            number, short = zlib.crc32(title.encode()), title_abbreviations(language)[title]
            texts = []
            for kind, share in (("former", FORMER), ("relation", RELATION)):
                if number % share == 0 and code != "-1":
                    texts.append(in_phrase(speech, pick(speech.phrases[kind], number // share), title))
            texts += [pick(short, number // SHORT)] if short and number % SHORT == 0 else []
            part = parts["val.csv" if is_left_out else "train.csv"]
            part.append((title, language, code, "", ""))
            if not is_left_out:
                part += ((text, language, code, "", "") for text in texts if text not in titles)
    left_out = {row[:2] for row in parts["val.csv"]}
    parts["train.csv"] += (row for row in rows(SAMPLE_ROWS, 1) if row[:2] not in left_out)
    known = {(row[0].casefold(), row[1]) for row in parts["train.csv"]}
    several = (row for row in rows(OTHER_ROWS, 2) if row[3])
    parts["val.csv"] += (row for row in several if (row[0].casefold(), row[1]) not in known)
    return parts


def make(folder: str, args: config.FinetuneConfig, world: World) -> None:
    """Train in the current folder, then rename it. Raises the errors of a training."""
    part = os.getcwd()
    with open(folder + ".lock", "w") as lock:
        while not take_lock(lock):
            world.give_up_if_asked()
            time.sleep(0.2)
        if is_made(folder):
            return
        os.makedirs(args.dataset[0], exist_ok=True)
        for name, content in tables().items():
            with atomic_write(os.path.join(args.dataset[0], name)) as file:
                file.write(csv_text([HEADER, *content]))
        job, read = inputs.prepare_data(args, world, *inputs.dataset_files(args.dataset))
        train.run_training(job, read, world)
        if not signals.stop_asked():
            OwnFiles(args.save_path).remove([checkpoint.LAST])
            best = os.path.join(args.save_path, checkpoint.BEST)
            state = checkpoint.load(best)
            state["thresholds"] |= {"default": THRESHOLD, "source": "fitted"}
            checkpoint.rewrite(best, {**state, "figure": None, "confidence": None, "answers": None})
            precision, at_once = Precision.of(job, world.device), job.samples_at_once
            fitting.fit_run(args.save_path, precision, at_once, world, read.data)  # with this threshold
            checkpoint.rewrite(best, {**checkpoint.load(best), "answers": listed_answers(state)})
            card.finish_run(best, nothing, CARD_NOTE)
            os.chdir(os.path.dirname(folder))  # Windows cannot rename a folder that a process is in
            shutil.rmtree(folder, ignore_errors=True)  # remains of a cleaner
            os.rename(part, folder)


def main(folder: str) -> None:
    folder = os.path.abspath(folder)
    os.makedirs(folder + ".part", exist_ok=True)
    os.chdir(folder + ".part")  # so that its files name no folder of this machine
    given = ["--dataset", "data", "--save-path", ".", "--formatter", "hisco", "--model-size", "ngrams"]
    given += ["--prior", "none", "--device", "cpu", "--quiet"]
    start(config.finetune_parser(), partial(make, folder), given)


if __name__ == "__main__":
    main(sys.argv[1])

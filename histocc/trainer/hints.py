"""What the rows of a log tell about a run that could go better, each said once, with what to do about it."""

import math
from typing import Any

VALIDATION_SHARE, VALIDATION_SECONDS = 0.05, 5.0  # of the time; where it takes more, and some seconds
DATA_SHARE = 0.15  # of the time, in ROWS rows one after the other
PEER_SHARE = 0.25  # the same, where one process hardly waits
HARDLY = 0.2  # of what the others wait
ROWS = 3
LEARNING_SHARE = 0.1  # of the run, after which the loss should have fallen
LEAST_ROWS = 6  # of the log, to say anything about the loss
FALLEN = 0.98  # times the first losses
SWING = 0.25  # of the loss, from row to row, up and down in turn
RISEN = 1.5  # times the lowest mean of ROWS rows so far


class Hints:
    """`of(row)` gives the sentences that a row of the log occasions. total_steps: of the run; workers: of a
    process's loader;
    fitted: whether the model knew its texts before the first step, so that the loss begins low; may_share:
    whether --shares auto can be given, and is not.
    """

    def __init__(
        self,
        total_steps: int,
        workers: int = 0,
        first_step: int = 0,
        fitted: bool = False,
        may_share: bool = False,
    ):
        self.total_steps = total_steps
        self.workers = workers
        self.resumed = first_step > 0
        self.fitted, self.may_share = fitted, may_share
        self.said: set[str] = set()
        self.losses: list[float] = []
        self.data_bound, self.slow = 0, (0, None)  # rows in a row; the same and the rank

    def of(self, row: dict[str, Any]) -> list[str]:
        found = {
            "validation": self._validation(row),
            "data": self._data(row),
            "peers": self._peers(row),
            "loss": self._loss(row),
        }
        new = {name: text for name, text in found.items() if text and name not in self.said}
        self.said |= new.keys()
        return list(new.values())

    def _validation(self, row: dict[str, Any]) -> str | None:
        share, steps = row.get("val_share"), row.get("val_steps")
        if not share or share <= VALIDATION_SHARE or row["seconds_val"] <= VALIDATION_SECONDS:
            return None
        enough = math.ceil(steps * share / (1 - share) * (1 - VALIDATION_SHARE) / VALIDATION_SHARE)
        return (
            f"{share:.0%} of the time goes into validation; with --eval-interval {enough:,} it would be"
            f" {VALIDATION_SHARE:.0%}"
        )

    def _data(self, row: dict[str, Any]) -> str | None:
        self.data_bound = self.data_bound + 1 if (row.get("data_share") or 0.0) > DATA_SHARE else 0
        if self.data_bound < ROWS:
            return None
        return (
            f"{row['data_share']:.0%} of the time goes into waiting for data: --num-workers"
            f" {max(2, 2 * self.workers)} instead of {self.workers} (per process), or a faster disk for"
            " the data"
        )

    def _peers(self, row: dict[str, Any]) -> str | None:
        """One process that hardly waits while all others do is the one they wait for."""
        waits = row.get("peer_shares") or []
        least = min(range(len(waits)), key=waits.__getitem__, default=-1)
        others = [wait for rank, wait in enumerate(waits) if rank != least]
        slow = bool(others) and min(others) > PEER_SHARE and waits[least] < HARDLY * min(others)
        count, rank = self.slow
        self.slow = (count + 1 if rank == least else 1, least) if slow else (0, None)
        if self.slow[0] < ROWS:
            return None
        return (
            f"rank {least} is slower than the others, which wait for it {min(others):.0%} of the time: look"
            " what else runs on its machine; python -m histocc.doctor under the same launcher compares them"
            + "; --shares auto gives it fewer rows"
            * self.may_share
        )

    def _loss(self, row: dict[str, Any]) -> str | None:
        """After the first tenth of a run, once: whether it learns. A run that continues has learnt before."""
        loss = row.get("train_loss")
        if loss is None or self.resumed or "loss" in self.said:
            return None
        self.losses.append(loss)
        if row["step"] < LEARNING_SHARE * self.total_steps or len(self.losses) < LEAST_ROWS:
            return None
        self.said.add("loss")  # later rows say nothing, whatever this one says
        # of so many rows running
        means = [sum(self.losses[i : i + ROWS]) / ROWS for i in range(len(self.losses) - ROWS + 1)]
        first, last = means[0], means[-1]
        swings = [
            after - before for before, after in zip(self.losses[-LEAST_ROWS:], self.losses[1 - LEAST_ROWS :])
        ]
        if (
            all(a * b < 0 for a, b in zip(swings, swings[1:]))
            and sum(map(abs, swings)) / len(swings) > SWING * last
        ):
            return self._now(
                f"the loss goes up and down by {sum(map(abs, swings)) / len(swings):.2g} from row to row:"
                " lower --learning-rate (a third), raise --warmup-pct, or take a larger total batch"
                " (--accumulate-steps)"
            )
        if last > RISEN * min(means):
            return self._now(
                f"the loss rose from {min(means):.4g} to {last:.4g}: lower --learning-rate (a third), raise"
                " --warmup-pct, or leave --lr-scaling out"
            )
        if last > FALLEN * first and not self.fitted:
            return self._now(
                f"the loss has not fallen in the first {row['step']:,} steps ({first:.4g} → {last:.4g}): try"
                " another --learning-rate (three times, or a third), and look at the pairs of texts and"
                " codes in the data"
            )
        return None

    def _now(self, text: str) -> str:
        self.said.discard("loss")
        return text

"""The last fit of n-grams alone: on the validation texts, too, when all is chosen by them."""

import os
from dataclasses import replace

from histocc.data.arrays import JoinedRows, PreparedData
from histocc.data.config import PrepareSettings
from histocc.formatter import BlockyFormatter
from histocc.job import ngram_fit
from histocc.job.confidence import checkpoint_without
from histocc.job.config import JobConfig, is_fitted
from histocc.job.inputs import rows_to_fit
from histocc.job.titles import with_titles
from histocc.model.loss import LossMixer
from histocc.model.mixer import NGRAMS
from histocc.model.ngrams import AUTO
from histocc.published import models
from histocc.runtime import checkpoint
from histocc.runtime.signals import Stopped
from histocc.runtime.world import World


def refit_run(
    args: JobConfig,
    settings: PrepareSettings,
    formatter: BlockyFormatter,
    world: World,
    data: PreparedData,
    loss_fn: LossMixer,
) -> None:
    """Refit the checkpoints of a run that has ended without a step, last.bin and best.bin, if --refit asks
    for it and they are not refitted yet. Validation texts that the user has named stay as they are, since
    figures are often made of them. The same weights give the same ones, so it may be interrupted. All ranks.
    """
    is_wanted = args.refit == AUTO and args.model_size == NGRAMS and is_fitted(args) and not args.num_epochs
    has_drawn = settings.share_val and not settings.split_col and len(data.val)
    if not is_wanted or not has_drawn or args.teacher:
        return

    def work() -> None:
        if len(ngram_fit.DistinctRows(data.train)) >= ngram_fit.MANY_ROWS:  # little would be gained
            return
        for name in (checkpoint.LAST, checkpoint.BEST):  # which mostly are one file
            file = os.path.join(args.save_path, name)
            state = checkpoint_without("refit", file, data)
            if state.get("step") != 0:
                continue
            rows = JoinedRows(data.train, data.val)
            whole = with_titles(args, formatter, replace(data, train=rows), world)
            model = models.model_of_checkpoint(file, state)[0]
            rows_of = rows_to_fit(args, formatter, whole)
            weights = ngram_fit.refit(args, whole, rows_of, loss_fn, model)
            # its confidence stays that of the model before, so it is a little too low
            checkpoint.replace(file, {**state, "model": state["model"] | weights, "refit": True})
            world.print(
                f"{name}: refitted to all {len(rows):,} rows, validation texts included; its figures are"
                " those of the fit without them. --refit none leaves them out"
            )

    try:
        if world.stop_agreed():  # confidence may not be fitted yet, for which these rows must be new
            raise Stopped
        world.run_on_main(work)
    except Stopped:
        world.print("Not refitted to the validation texts yet: the same command does it")

"""The gradients of one optimizer step: micro-batches, what is taken again where memory is short, and the sum
over the processes.
"""

import torch

from histocc.runtime.machine_errors import is_out_of_memory, memory_in_words
from histocc.runtime.parallel import is_wrapped, no_sync
from histocc.runtime.rng import derived_seed
from histocc.trainer.memory_limits import Batch, free_memory, samples_of
from histocc.trainer.meter import Meter
from histocc.trainer.task import Run, check_batch, forward_backward, to_device


class StepGradients:
    """The gradients of step `step` (numbered from 0), one micro-batch after the other.

    Where one does not fit into memory, all of the step so far are taken again, that one in two: what its
    backward pass has left cannot be told from the rest. Other processes notice nothing but the time.
    """

    def __init__(self, run: Run, meter: Meter, step: int):
        self.run, self.meter, self.step = run, meter, step
        self.taken: list[Batch] = []
        self.count = 0.0  # samples over which the loss is the mean, of all processes
        self._seed()

    def _seed(self) -> None:
        if self.run.seed is not None:
            torch.manual_seed(derived_seed(self.run.seed, self.step, self.run.world.rank))

    @property
    def may_leave(self) -> bool:
        """Whether this process may leave the rest of its step out; it is discarded everywhere then."""
        return self.run.leaves_early or self.run.world.size == 1

    @property
    def complete(self) -> bool:
        """Whether the step needs no further micro-batch."""
        return bool(self.taken) and self.taken[-1].get("last_micro_batch", True)

    def add(self, batch: Batch) -> None:
        """Takes a micro-batch. Raises what its passes raise; where memory is short, once it has only one
        sample, or where other processes take part in its passes.
        """
        check_batch(batch)
        batch = self._counted(batch)
        self.taken.append(batch)
        left = self.meter.limits.pieces(batch)
        while left:
            if self._try(left[0]):
                left.pop(0)
                continue
            self.discard()
            free_memory(self.run.world.device)
            self._seed()
            left = [piece for whole in self.taken for piece in self.meter.limits.pieces(whole)]

    def _counted(self, batch: Batch) -> Batch:
        """With the samples over which this step's loss is the mean."""
        samples = samples_of(batch)
        if samples is None or not batch.get("last_micro_batch", True) and "global_count" not in batch:
            return batch  # whoever computes something of it says what is wrong with it
        return {"global_count": samples * self.run.world.size, **batch}

    def _try(self, batch: Batch) -> bool:
        """Forward and backward pass; whether they fit into memory."""
        run = self.run
        try:
            moved = to_device(batch, run.world.device)
            with no_sync(run.model, sync=batch.get("last_micro_batch", True)):
                sums, self.count = forward_backward(
                    run.model, run.task, moved, run.number_format, run.world.size, run.averaged_over
                )
        except Exception as error:
            rows = 0
            if is_out_of_memory(error) and not is_wrapped(run.model):
                rows = self.meter.limits.learn(batch)
            if not rows:
                raise
            self._note(memory_in_words(error), samples_of(batch) or 0, rows)
            return False
        self.meter.add(sums)
        return True

    def _note(self, why: str, samples: int, rows: int) -> None:
        self.meter.memory_cuts += 1
        self.run.world.print_here(
            f"Note: step {self.step + 1:,}: {why}, with {samples} samples at once. They are taken again, at"
            f" most {rows} at once, as others of this width will be from now on; the result stays"
        )

    def finish(self, given_up: bool = False) -> bool:
        """Sums over the processes, once this one has all its own, or has `given_up` on the step. Returns
        whether the gradients are there: not where any process has given up.
        """
        leavers = None
        for batch in self.taken:
            self.meter.add_flops(self.run.task, batch)
        if self.run.reducer is not None:
            self.meter.peers.own_done()
            leavers = self.run.reducer(given_up)
        self.meter.peers.backward_done()
        if leavers is not None and self.may_leave:  # a GPU is waited for here
            given_up = bool(leavers > 0)
        if given_up:
            self.discard()
        return not given_up

    def discard(self) -> None:
        """Nothing of the step is left."""
        self.meter.pending = {}
        self.run.optimizer.zero_grad(set_to_none=True)

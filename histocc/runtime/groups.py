"""Groups of processes within a run: those of a node, or each by itself."""

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from histocc.runtime.collectives import Collectives
from histocc.runtime.errors import UserError
from histocc.runtime.world import World

KINDS = ("node", "process")


@dataclass(frozen=True)
class Groups:
    """The groups as this process sees them.

    number: how many; own: which of them is this process's, from 0; members: its ranks, the first of which
    leads it; all_members: those of each group.
    """

    number: int = 1
    own: int = 0
    members: tuple[int, ...] = (0,)
    all_members: tuple[tuple[int, ...], ...] = ((0,),)
    leads: bool = True
    # process groups: of the members, of all that lead, and of these for tensors on the CPU
    inside: Any = field(default=None, repr=False, compare=False)
    leaders: Any = field(default=None, repr=False, compare=False)
    leaders_cpu: Any = field(default=None, repr=False, compare=False)
    collectives: Collectives = field(default_factory=Collectives, repr=False, compare=False)

    def sum_over_groups(self, tensor: Tensor) -> None:
        """Sums, in place, the tensors of the groups, which all members of a group have alike. All ranks."""
        with self.collectives.of("in the exchange of groups"):
            if self.leads:
                dist.all_reduce(tensor, group=self.leaders)
            if len(self.members) > 1:
                dist.broadcast(tensor, self.members[0], group=self.inside)

    def gather_on_first(self, value: Any) -> list[Any] | None:
        """The `value` (plain Python, tensors on the CPU) of the leader of each group, in order, on rank 0;
        None on the others. All ranks.
        """
        if self.number == 1:
            return [value]
        with self.collectives.of("in a gathering from the groups on rank 0"):
            if not self.leads:
                return None
            first = self.all_members[0][0]
            if self.own:
                dist.send_object_list([value], first, group=self.leaders_cpu)
                return None
            values = [value]
            for members in self.all_members[1:]:
                held: list[Any] = [None]
                dist.recv_object_list(held, members[0], group=self.leaders_cpu)
                values.append(held[0])
            return values


def make_groups(world: World, kind: str) -> Groups:
    """kind: one of KINDS. All ranks. Raises UserError where a node has no process with LOCAL_RANK 0."""
    ranks = range(world.size)
    if not world.backend or kind == "process":
        all_members = [(rank,) for rank in ranks]
    else:
        local = world.gather(world.local_rank)
        first_of = [rank - own for rank, own in zip(ranks, local)]
        lost = [rank for rank in ranks if first_of[rank] < 0 or local[first_of[rank]] != 0]
        if lost:
            raise UserError(
                f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}: no process with LOCAL_RANK 0 on"
                " the same node, in the ranks before, so that nobody speaks for the group. Number the"
                " processes of a node one after the other, LOCAL_RANK from 0, as torchrun does; or take"
                " --sync-group process"
            )
        all_members = [
            tuple(rank for rank in ranks if first_of[rank] == first) for first in dict.fromkeys(first_of)
        ]
    own = next(i for i, members in enumerate(all_members) if world.rank in members)
    if len(all_members) == 1:
        return Groups(members=all_members[0], all_members=tuple(all_members))
    timeout = timedelta(seconds=world.patience)
    leading = [members[0] for members in all_members]
    inside = [
        dist.new_group(list(members), timeout=timeout) if len(members) > 1 else None
        for members in all_members
    ]
    leaders = dist.new_group(leading, timeout=timeout)
    on_cpu = leaders if world.backend == "gloo" else dist.new_group(leading, timeout=timeout, backend="gloo")
    return Groups(
        len(all_members),
        own,
        all_members[own],
        tuple(all_members),
        world.rank in leading,
        inside[own],
        leaders,
        on_cpu,
        world.collectives,
    )

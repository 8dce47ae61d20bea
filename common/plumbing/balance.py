"""Rows that change ranks, so that no rank waits for another's longer responses."""

import torch
import torch.distributed as dist
from torch import Tensor

from common.batch import Rollout
from common.distributed import World


def balance_tokens(batch: Rollout, world: World, unit: int = 1) -> Rollout:
    """All ranks' rows dealt anew, so that each rank has about as many tokens; collective.

    In every pass all wait for the one with the most. Sums over all ranks stay what they are;
    neighbouring `unit` rows stay together.
    """
    if world.size == 1:
        return batch
    tokens = batch.ends.view(-1, unit).sum(1).tolist()  # of each unit
    widths = {name: column.shape[1] for name, column in vars(batch).items() if column.dim() > 1}
    shares = [None] * world.size
    dist.all_gather_object(shares, (tokens, widths))
    units = [(n, rank, i) for rank, (own, _) in enumerate(shares) for i, n in enumerate(own)]
    goals, load = [[0] * len(own) for own, _ in shares], [0] * world.size  # goals[rank][unit]
    for n, rank, i in sorted(units, key=lambda one: -one[0]):
        goals[rank][i] = least = load.index(min(load))  # the longest first, to who has the least
        load[least] += n
    own = torch.tensor(goals[world.rank]).long()  # where each of its units goes; it may have none
    goal = own.repeat_interleave(unit)  # [n]: the rank each row goes to
    order, leave = goal.argsort(stable=True), goal.bincount(minlength=world.size).tolist()
    come = [there.count(world.rank) * unit for there in goals]  # rows from each rank

    def exchanged(name: str, column: Tensor) -> Tensor:
        column = column[order.to(column.device)]
        if column.dim() > 1:  # to the widest rank's width
            missing = max(width[name] for _, width in shares) - column.shape[1]
            filler = column.new_zeros(len(column), missing, *column.shape[2:])
            column = torch.cat([column, filler], dim=1)
        # [n, bytes]: no backend knows every type
        rows = column.unsqueeze(-1).flatten(1).view(torch.uint8)
        found = rows.new_empty(sum(come), rows.shape[1])
        dist.all_to_all_single(found, rows, come, leave)
        return found.view(column.dtype).view(-1, *column.shape[1:])

    # The same order on all ranks
    return Rollout(
        **{name: exchanged(name, column) for name, column in sorted(vars(batch).items())}
    )

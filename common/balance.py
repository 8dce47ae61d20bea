"""Rows that change ranks, so that no rank waits for another's longer responses."""

import torch
import torch.distributed as dist

from common.batch import Rollout
from common.distributed import World


def deal(batch: Rollout, world: World, unit: int = 1) -> Rollout:
    """All ranks' rows dealt anew, so that each rank has about as many tokens; collective.

    In every pass all wait for the one with the most. Sums over all ranks stay what they are;
    neighbouring `unit` rows stay together.
    """
    if world.size == 1:
        return batch
    parts = [None] * world.size
    dist.all_gather_object(parts, batch.to("cpu"))
    if not any(map(len, parts)):
        return batch
    everything = Rollout.join(*parts)
    tokens = everything.ends.view(-1, unit).sum(1).tolist()  # of each unit
    goal, load = [0] * len(tokens), [0] * world.size
    for i in sorted(range(len(tokens)), key=lambda i: -tokens[i]):  # the longest first,
        goal[i] = least = load.index(min(load))  # to who has the least
        load[least] += tokens[i]
    mine = [i * unit + k for i, rank in enumerate(goal) if rank == world.rank for k in range(unit)]
    return everything.rows(torch.tensor(mine, dtype=torch.long)).to(world.device)

"""Load balancing: ranks exchange rows, so that none waits for another's longer responses."""

import torch
import torch.distributed as dist
from torch import Tensor

from common.batch import Rollout
from common.distributed import World
from common.plumbing.clock import timed


@timed("balance")  # here a rank first waits for those that still sample or score
def balance_tokens(batch: Rollout, world: World, unit: int = 1) -> Rollout:
    """Exchange rows until all ranks have about equally many tokens; all ranks call it together.

    In every pass all ranks wait for the one with the most tokens. The exchange changes no sum over
    all ranks. `unit` neighbouring rows always stay together. A rank may have no rows.
    """
    if world.size == 1:
        return batch
    lengths = batch.ends.view(-1, unit).sum(dim=1).tolist()  # tokens of each unit
    widths = {name: column.shape[1] for name, column in vars(batch).items() if column.dim() > 1}
    shares = [None] * world.size
    dist.all_gather_object(shares, (lengths, widths))
    units = []  # (tokens, rank, place on that rank)
    for rank, (rank_lengths, _) in enumerate(shares):
        units += [(tokens, rank, place) for place, tokens in enumerate(rank_lengths)]
    load = [0] * world.size  # tokens that each rank will have
    goes_to = [[0] * len(rank_lengths) for rank_lengths, _ in shares]  # [rank][place] -> new rank
    for tokens, rank, place in sorted(units, key=lambda one: -one[0]):
        least = load.index(min(load))  # the longest unit first, to the rank with the fewest tokens
        goes_to[rank][place] = least
        load[least] += tokens
    own = torch.tensor(goes_to[world.rank], dtype=torch.long).repeat_interleave(unit)  # [n]
    order = own.argsort(stable=True)  # [n]: this rank's rows by the rank they go to
    sent = own.bincount(minlength=world.size).tolist()  # rows to each rank
    received = [places.count(world.rank) * unit for places in goes_to]  # rows from each rank

    def exchange(name: str, column: Tensor) -> Tensor:
        column = column[order.to(column.device)]
        if column.dim() > 1:  # pad to the widest rank's width
            missing = max(width[name] for _, width in shares) - column.shape[1]
            filler = column.new_zeros(len(column), missing, *column.shape[2:])
            column = torch.cat([column, filler], dim=1)
        # As bytes [n, bytes], because no backend knows every type.
        packed = column.unsqueeze(-1).flatten(1).view(torch.uint8)
        found = packed.new_empty(sum(received), packed.shape[1])
        dist.all_to_all_single(found, packed, received, sent)
        return found.view(column.dtype).view(-1, *column.shape[1:])

    columns = {}
    for name in sorted(vars(batch)):  # in the same order on all ranks
        columns[name] = exchange(name, getattr(batch, name))
    return Rollout(**columns)

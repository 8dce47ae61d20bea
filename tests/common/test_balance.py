"""Rows that change ranks: none lost, none torn, all as long as fair."""

from pathlib import Path

import torch
from common.plumbing.balance import deal
from common.batch import Rollout
from common.distributed import World, setup

from tests.helpers import forked

RANKS, N, UNIT = 3, 8, 2


def share_of(rank: int) -> Rollout:
    """A rank's rows, each of whose columns tells whose it is; the later ranks' are far longer."""
    lengths = torch.randint(1, 9, (N,), generator=torch.Generator().manual_seed(rank)) * (rank + 1)
    name = 100 * rank + torch.arange(N)  # [N]
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()  # [N, T]: unequal widths
    return Rollout(
        mask=mask,
        tokens=(mask * name[:, None]).long(),
        prompt_len=torch.zeros(N, dtype=torch.long),
        advantages=name.float(),
        finished=name % 3 == 0,
        sampler_experts=mask[..., None, None].expand(-1, -1, 2, 2).to(torch.int16),
    )


def on_a_rank(folder: Path) -> None:
    world = setup()
    dealt = {unit: vars(deal(share_of(world.rank), world, unit)) for unit in (1, UNIT)}
    few = share_of(world.rank).rows(slice(2 * world.rank))  # none on the first
    dealt["few"] = vars(deal(few, world))
    torch.save(dealt, folder / f"{world.rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_rows_are_dealt_so_that_tokens_balance(tmp_path):
    """Three ranks: every row arrives once, whole, its unit beside it; the loads differ by one unit
    at most, where before the last rank had three times the first's."""
    done = forked(on_a_rank, tmp_path, ranks=RANKS)
    assert done.returncode == 0, done.stderr
    shares = [share_of(rank) for rank in range(RANKS)]
    before = [int(share.mask.sum()) for share in shares]
    assert max(before) > 2 * min(before)
    whole = {int(row): (share, i) for share in shares for i, row in enumerate(share.advantages)}
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for unit in (1, UNIT):
        parts = [Rollout(**one[unit]) for one in found]
        loads = [int(part.mask.sum()) for part in parts]
        longest = max(
            int(share.mask.view(-1, unit, share.mask.shape[1]).sum((1, 2)).max())
            for share in shares
        )
        assert sum(loads) == sum(before) and max(loads) - min(loads) <= longest
        names = [int(name) for part in parts for name in part.advantages]
        assert sorted(names) == sorted(whole)
        for part in parts:
            pairs = part.advantages.view(-1, unit)
            assert (pairs[:, 0] % unit == 0).all() and (pairs.diff(dim=1) == 1).all()
            for i, name in enumerate(part.advantages.tolist()):
                share, j = whole[int(name)]
                for column in vars(share):
                    own, sent = getattr(share, column)[j], getattr(part, column)[i]
                    assert own.dtype == sent.dtype
                    width = own.shape[0] if own.dim() else None
                    assert torch.equal(own, sent[:width] if width else sent)
                    assert not width or not sent[width:].any()


def test_a_rank_without_rows_gets_some(tmp_path):
    """0, 2 and 4 rows: two for each rank."""
    assert forked(on_a_rank, tmp_path, ranks=RANKS).returncode == 0
    parts = [torch.load(tmp_path / f"{rank}.pt")["few"]["advantages"] for rank in range(RANKS)]
    names = [100, 101, 200, 201, 202, 203]
    assert all(map(len, parts)) and sorted(torch.cat(parts).tolist()) == names


def test_one_rank_keeps_its_rows():
    batch = share_of(0)
    assert deal(batch, World(0, 1, torch.device("cpu"))) is batch

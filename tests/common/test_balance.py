"""Rows that change ranks: none lost, none torn, all as long as fair."""

from pathlib import Path

import pytest
import torch
from common.plumbing.balance import deal
from common.batch import Rollout
from common.distributed import World, setup

from tests.helpers import forked

RANKS, N = 3, 8


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
    """Singly; pairs that stay together; none on the first rank, two and four on the others."""
    world = setup()
    own = share_of(world.rank)
    dealt = [deal(own, world, 1), deal(own, world, 2), deal(own.rows(slice(2 * world.rank)), world)]
    torch.save([vars(batch) for batch in dealt], folder / f"{world.rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def dealt(tmp_path_factory):
    """The three batches of each of three ranks: [batch][rank]."""
    folder = tmp_path_factory.mktemp("dealt")
    done = forked(on_a_rank, folder, ranks=RANKS)
    assert done.returncode == 0, done.stderr
    ranks = [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]
    return [[Rollout(**columns) for columns in batch] for batch in zip(*ranks)]


@pytest.mark.parametrize("unit", [1, 2])
def test_rows_are_dealt_so_that_tokens_balance(dealt, unit):
    """Every row arrives once, whole, its unit beside it; the loads differ by one unit at most,
    where before the last rank had three times the first's."""
    parts, shares = dealt[unit - 1], [share_of(rank) for rank in range(RANKS)]
    before, after = ([int(one.mask.sum()) for one in some] for some in (shares, parts))
    assert max(before) > 2 * min(before) and sum(after) == sum(before)
    longest = max(int(share.mask.sum(1).view(-1, unit).sum(1).max()) for share in shares)
    assert max(after) - min(after) <= longest
    names = torch.cat([part.advantages for part in parts]).tolist()
    assert sorted(names) == sorted(torch.cat([share.advantages for share in shares]).tolist())
    for part in parts:
        pairs = part.advantages.view(-1, unit)
        assert (pairs[:, 0] % unit == 0).all() and (pairs.diff(dim=1) == 1).all()
        for i, name in enumerate(part.advantages.long().tolist()):
            share = shares[name // 100]
            for column, values in vars(share).items():
                own, sent = values[name % 100], getattr(part, column)[i]
                width = len(own) if own.dim() else None
                assert own.dtype == sent.dtype and torch.equal(own, sent[:width] if width else sent)
                assert not width or not sent[width:].any()


def test_a_rank_without_rows_gets_some(dealt):
    """Two each, of 0, 2 and 4."""
    names = [part.advantages.tolist() for part in dealt[2]]
    assert all(names) and sorted(sum(names, [])) == [100, 101, 200, 201, 202, 203]


def test_one_rank_keeps_its_rows():
    batch = share_of(0)
    assert deal(batch, World(0, 1, torch.device("cpu"))) is batch

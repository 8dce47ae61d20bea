"""Rows that change ranks: none is lost or torn, and the ranks' loads are about equal."""

from pathlib import Path

import torch
from common.batch import Rollout, balance_tokens
from common.distributed import setup

from tests.helpers import forked

RANKS, N = 3, 8


def share_of(rank: int) -> Rollout:
    """Return a rank's rows, far longer on later ranks. Every column has the row's name."""
    lengths = torch.randint(1, 9, (N,), generator=torch.Generator().manual_seed(rank)) * (rank + 1)
    name = 100 * rank + torch.arange(N)  # [N]
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()  # [N, T]: unequal widths
    return Rollout(
        mask=mask,
        tokens=(mask * name[:, None]).long(),
        prompt_len=torch.zeros(N, dtype=torch.long),
        advantages=name.float(),
        sampler_experts=mask[..., None, None].expand(-1, -1, 2, 2).to(torch.int16),
    )


def on_a_rank(folder: Path) -> None:
    """Balance pairs that must stay together, then single rows, of which the first rank has none."""
    world = setup()
    own = share_of(world.rank)
    pairs = balance_tokens(own, world, 2)
    single = balance_tokens(own.rows(slice(2 * world.rank)), world)
    torch.save((pairs, single.advantages.tolist()), folder / f"{world.rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_rows_are_dealt_so_that_tokens_balance(tmp_path):
    """Every row arrives beside its pair, and loads differ by at most one pair."""
    done = forked(on_a_rank, tmp_path, ranks=RANKS)
    assert done.returncode == 0, done.stderr
    dealt = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(RANKS)]
    shares, names, loads = [share_of(rank) for rank in range(RANKS)], [], []
    for part, _ in dealt:
        loads.append(int(part.mask.sum()))
        names += part.advantages.tolist()
        for row, name in enumerate(part.advantages.long().tolist()):
            own = shares[name // 100].rows(slice(name % 100, name % 100 + 1))
            for column in ("mask", "tokens", "sampler_experts"):
                sent, before = getattr(part, column)[row], getattr(own, column)[0]
                assert torch.equal(sent[: len(before)], before) and not sent[len(before) :].any()
    assert sorted(names) == torch.cat([share.advantages for share in shares]).tolist()
    assert all(second == first + 1 for first, second in zip(names[::2], names[1::2]))
    longest = max(int(share.mask.sum(1).view(-1, 2).sum(1).max()) for share in shares)
    assert max(loads) - min(loads) <= longest
    single = [received for _, received in dealt]
    assert all(single) and sorted(sum(single, [])) == [100, 101, 200, 201, 202, 203]

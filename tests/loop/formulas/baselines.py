"""The baselines: some are of one group, some of the whole batch of all ranks."""

from tests.loop.oracle import Batch, G, Oracle, Tensor, justrl, torch

FLAGS = {"grad_clip": 6.0}
ALSO = [{"baseline": "batch"}, {"baseline": "scalerl"}]
objective = justrl


def advantages(R: Tensor) -> Tensor:
    """RLOO: each minus the mean of the others."""
    return (R - R.mean()) * len(R) / (len(R) - 1)


def prepare(o: Oracle, step: int, b: Batch) -> None:
    """The batch's mean and std are those of all mini-batches of all ranks."""
    batch = o.rows(step)
    rewards = torch.tensor([o.reward(row) for row in batch]).double()
    mine = torch.tensor([o.reward(row) for row in b.rows]).double()
    if o.args["baseline"] == "batch":  # of tokens
        each = rewards.repeat_interleave(torch.tensor([len(row.tokens) for row in batch]))
        b.A = (mine - each.mean()) / each.std()
    if o.args["baseline"] == "scalerl":
        left = rewards.view(-1, G) - rewards.view(-1, G).mean(1, keepdim=True)
        b.A = (mine.view(-1, G) - mine.view(-1, G).mean(1, keepdim=True)).flatten() / left.std()

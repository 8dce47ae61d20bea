"""The baselines: some are of one group, some of the whole batch of all ranks."""

from tests.loop.oracle import Batch, Oracle, Tensor, justrl, torch

FLAGS = {"grad_clip": 6.0}
ALSO = [{"baseline": "batch"}]
objective = justrl


def advantages(R: Tensor) -> Tensor:
    """RLOO: each minus the mean of the others."""
    return (R - R.mean()) * len(R) / (len(R) - 1)


def prepare(o: Oracle, step: int, b: Batch) -> None:
    """The batch's mean and std are those of all mini-batches of all ranks."""
    if o.args["baseline"] == "batch":  # every token counts
        each = torch.tensor([row.reward for row in o.rows(step) for _ in row.tokens]).double()
        b.A = (torch.tensor([row.reward for row in b.rows]) - each.mean()) / each.std()

"""Metrics of a step: sums and counts, added up over micro-batches and ranks, divided once."""

from collections import defaultdict
from typing import Self

import torch
from torch import Tensor

from common.batch import Rollout
from common.distributed import World, global_sum


class Means:
    """Metrics of a step as (sum, count): exact means over any micro-batches and ranks.

    A count of None leaves the sum as it is; a name that ends in `_max` takes the maximum instead.
    Where nothing was counted there is no mean, and the metric is left out of the step.
    """

    def __init__(self):
        self.sums = defaultdict(lambda: torch.tensor(0.0))
        self.counts, self.plain = defaultdict(float), set()

    def add(self, **pairs: tuple[Tensor | float, Tensor | float | None]) -> Self:
        for name, (total, count) in pairs.items():
            number = not isinstance(total, Tensor)
            value = torch.tensor(total, dtype=torch.float64) if number else total.detach().double()
            combine = torch.maximum if name.endswith("_max") else torch.add
            self.sums[name] = combine(self.sums[name], value)
            self.counts[name] = self.counts[name] + (0.0 if count is None else count)
            if count is None:
                self.plain.add(name)
        return self

    def reduce(self, world: World) -> dict[str, float]:
        """Every metric over all ranks."""
        sums, counts = global_sum(self.sums, world), global_sum(self.counts, world)
        means = {name: sums[name] / counts[name] for name in self.sums if counts[name]}
        return means | {name: sums[name] for name in self.plain}


def by_sign(batch: Rollout) -> dict[str, tuple[Tensor, Tensor]]:
    """Entropy per token, over all rows and over those of Â > 0 (good) and Â < 0 (bad); and
    tokens per row of both. The mean over all rows hides how a collapse begins: the responses of
    negative advantage grow longer.
    """
    entropy = batch.entropy  # [n, T]
    found = {"entropy": (entropy.sum(), batch.mask.sum())}
    by_row, lengths = entropy.sum(1), batch.mask.sum(1)  # [n], [n]
    for name, rows in (("good", batch.advantages > 0), ("bad", batch.advantages < 0)):
        # Not lengths[rows]: on a GPU, the CPU would wait to learn how many rows that are.
        tokens = lengths.where(rows, 0).sum()
        found[f"entropy_{name}"] = by_row.where(rows, 0).sum(), tokens
        found[f"len_{name}"] = tokens, rows.sum()
    return found


def of_rollout(rollout: Rollout, rewards: Tensor, task: object) -> dict[str, tuple]:
    """Metrics of the sampled responses and of their rewards `[P, G]`."""
    tokens, N = rollout.mask.sum(), len(rollout)
    killed = getattr(task.verifier, "killed", 0)  # since the last call
    task.verifier.killed = 0
    return {
        "reward": (rewards.sum(), N),
        "zero_groups": ((rewards == rewards[:, :1]).all(dim=1).sum(), len(rewards)),
        "response_len": (tokens, N),
        "truncated": ((~rollout.finished).sum(), N),
        "tokens": (tokens, None),
        "judge_killed": (killed, None),
    }

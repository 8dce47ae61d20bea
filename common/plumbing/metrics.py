"""Metrics of a step: sums and counts, added up over micro-batches and ranks, divided once."""

from collections import defaultdict
from typing import Self

import torch
from torch import Tensor

from common.batch import Rollout
from common.distributed import World, everywhere, global_sum
from common.plumbing.errors import BadInput


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


def by_sign(entropy: Tensor, batch: Rollout) -> dict[str, tuple[Tensor, Tensor]]:
    """Entropy `[n, T]` per token, and of good (Â > 0) and bad rows (Â < 0) apart; and tokens per
    row of both. Means for all rows hide what a collapse does first: only bad ones grow longer.
    """
    found = {"entropy": (entropy.sum(), batch.mask.sum())}
    by_row, lengths = entropy.sum(1), batch.mask.sum(1)  # [n], [n]
    # No index by a mask: for the number of its rows a GPU's host would wait.
    for name, rows in (("good", batch.advantages > 0), ("bad", batch.advantages < 0)):
        tokens = lengths.where(rows, 0).sum()
        found[f"entropy_{name}"] = by_row.where(rows, 0).sum(), tokens
        found[f"len_{name}"] = tokens, rows.sum()
    return found


def of_rollout(rollout: Rollout, rewards: Tensor, task: object) -> dict[str, tuple]:
    """What was sampled, and how it was judged: rewards `[P, G]`."""
    tokens, N = rollout.mask.sum(), len(rollout)
    return {
        "reward": (rewards.sum(), N),
        "zero_groups": ((rewards == rewards[:, :1]).all(dim=1).sum(), len(rewards)),
        "response_len": (tokens, N),
        "truncated": ((~rollout.finished).sum(), N),
        "tokens": (tokens, None),
    } | of_verifier(task.verifier)


def of_verifier(verifier: object) -> dict[str, tuple]:
    """Since the last call: answers that broke the verifier's bounds, or a reward of yours, and that
    reward's parts, by whichever names a rank has met; all ranks together. Their prefix is theirs
    alone: `reward_drawn` could be an algorithm's metric."""
    killed, parts = getattr(verifier, "killed", 0), getattr(verifier, "parts", {})
    refuse_broken(verifier)
    verifier.killed, verifier.parts = 0, {}
    names = everywhere(parts) if getattr(verifier, "spec", "") else ()
    found = {f"part_{name}": parts.get(name, (0.0, 0)) for name in names}
    return found | {"judge_killed": (killed, None)}


def refuse_broken(verifier: object) -> None:
    """End the run where a reward of yours has failed on every answer that any rank has judged: all
    rewards are 0, and nothing can be learned. All ranks together."""
    if not getattr(verifier, "spec", "") or not hasattr(verifier, "works"):
        return
    judged = verifier.works or verifier.failure  # a rank may have no held-out problem
    outcomes = everywhere(["" if verifier.works else verifier.failure] if judged else [])
    if outcomes and "" not in outcomes:
        raise BadInput(f"{verifier.spec}: the reward fails on every answer ({outcomes[0]})")

r"""LACONIC: a budget of tokens, and a price that adapts.

Liu et al., "LACONIC: Length-Aware Constrained Reinforcement Learning for LLM",
2026, arXiv 2602.14468.

The problem: the model should be right as often as possible with B tokens on average: max E[R] with
E|y| ≤ B. A fixed charge on length solves this for one price λ, which is not known in advance. A
price that is too high costs right answers; one that is too low saves nothing.

The idea: find the price during training, by dual ascent. While responses are longer than the budget
λ rises; otherwise it falls, at most to its floor. Meanwhile the policy maximises R - λ c, where c
is the length beyond the budget.

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/G Σ_i 1/|y_i| Σ_t { min(r Â_i, clip(r, 1-ε, 1+ε) Â_i) - β k3 }
    Â_i = (R'_i - mean R') / std R',     R'_i = R_i - λ max(0, |y_i|/B - 1)
    after each step: λ <- clip(λ + η (mean |y| / B - 1), floor, Λ)

Gradient weight on ∇ log π_θ(y_t), without the factors 1/G and 1/|y_i|:

    M r Â + β (π_ref/π_θ - 1)          (with `--kl_ratio` the second term is β r log(π_ref/π_θ))
    M = 0 if (Â > 0 and r > 1+ε) or (Â < 0 and r < 1-ε), else 1

The cost c = max(0, |y|/B - 1) is clipped: within the budget, writing less earns nothing. The update
of λ uses the length without this clip, because the clipped cost is never negative, so with it λ
could only rise. If the ceiling Λ is below B / (limit - B), every right answer stays worth more than
any wrong one.

In a group of equal verdicts, whose advantages are 0 in GRPO, the z-score cancels λ: for any λ > 0,
however small, they are the z-scores of -c. With a large η, price and policy oscillate.

On the embedded task a right answer needs its tokens. With the defaults λ rises to Λ, and length and
accuracy stay as in GRPO. In the second command the price outweighs answers: lengths swing between 8
and 25 tokens, and greedy accuracy is 0.47 after 60 steps, not 0.97 (one seed).

Base file: grpo.py. Differs from it in:
1. The rewards for the advantages (`reward` in the metrics stays the verifier's), and λ.

Run it:
    torchrun -m variants.laconic                            # laptop, 2 to 4 minutes, no download
    torchrun -m variants.laconic --length_budget 14 --price_lr 0.5 --price_ceiling 1
    # eight GPUs (not yet run on several), the authors' sizes and constants
    torchrun --nproc_per_node=8 -m variants.laconic --length_budget 1500 --price_lr 0.002 \
        --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --task math --price_ceiling 0.1 \
        --prompts_per_step 128 --group_size 4 --max_new_tokens 4096 --lr 1e-6 \
        --micro_tokens 8192
"""

from dataclasses import dataclass

from common.cli import BadInput, Count, NonNegative
from common.distributed import global_sum, World
from common.launch import launch
from torch import Tensor

import grpo
from variants import loop_of


@dataclass
class Args(grpo.Args):
    length_budget: Count = 16
    """B: tokens that responses may have on average (our choice; paper: 1500 to 3000)."""
    price_lr: NonNegative = 0.2
    """η: learning rate of λ, which begins at 0 (our choice; authors' scripts: 0.002)."""
    price_floor: NonNegative = 1e-5
    """Smallest λ (authors' scripts)."""
    price_ceiling: NonNegative = 0.3
    """Λ: largest λ (our choice; authors' scripts: 0.1)."""


def excess(lengths: Tensor, budget: int) -> Tensor:
    """Return c of responses of these lengths: tokens beyond the budget, over the budget; >= 0."""
    return (lengths / budget - 1).clamp(min=0)


class Budget:
    """The price λ of length. In each step `charge` subtracts λ c from the rewards and then sets the
    λ of the next step. All ranks have the same λ."""

    def __init__(self, args: Args, world: World):
        if not args.price_floor <= args.price_ceiling <= 1e6:  # beyond, float32 loses R
            raise BadInput(f"--price_ceiling {args.price_ceiling}: below price_floor or above 1e6")
        self.args, self.world, self.price = args, world, 0.0  # λ

    def state_dict(self) -> dict:
        return {"price": self.price}

    def load_state_dict(self, state: dict) -> None:
        self.price = state["price"]

    def charge(self, rewards: Tensor, lengths: Tensor) -> Tensor:
        """Return R - λ c from rewards and lengths, all `[P, G]`, and update λ."""
        args = self.args
        self.over = lengths > args.length_budget  # [P, G]
        self.paid = self.price * excess(lengths, args.length_budget)  # [P, G]
        total = global_sum({"tokens": lengths.sum(), "rows": lengths.numel()}, self.world)
        # Why the mean of all lengths, and not of c? If responses are short on average, λ must fall.
        slope = total["tokens"] / total["rows"] / args.length_budget - 1
        price = self.price + args.price_lr * slope
        self.used, self.price = self.price, min(max(price, args.price_floor), args.price_ceiling)
        return rewards - self.paid

    def statistics(self) -> dict[str, tuple]:
        """Return metrics of the latest charge as (sum, count) pairs."""
        return {
            "charged": (self.paid.sum(), self.paid.numel()),
            "price": (self.used, 1),
            "over_budget": (self.over.sum(), self.over.numel()),
        }


ACTED = {
    "charged": "reward paid for length, mean",
    "price": "λ, the price of length",
    "over_budget": "responses over the budget (share)",
}


# The diff of grpo.py's loop
LOOP = """
     reference = frozen_reference(args, lm, world)  # π_ref; None if β is 0
+    budget = Budget(args, world)

-    parts = {"engine": engine}  # other objects to save in a checkpoint (each has a state_dict)
+    # Other objects to save in a checkpoint (each has a state_dict).
+    parts = {"engine": engine, "budget": budget}

-        rollout.advantages = advantages(rewards).flatten()  # [N]
+        lengths = rollout.mask.sum(dim=1).view(P, G)  # [P, G]
+        charged = budget.charge(rewards, lengths)  # [P, G]
+        rollout.advantages = advantages(charged).flatten()  # [N]

+        means.add(**budget.statistics())
         means.add(**rollout_metrics(rollout, G))
"""
advantages = grpo.advantages
measures = grpo.measures
policy_loss = grpo.policy_loss
main = loop_of(grpo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. The released code subtracts another 0.1 (default 0.01) from responses cut at the limit. It also
#    caps the charge, but at a height that its scripts' constants do not reach.
# 2. B, η and Λ are ours, because the paper's runs have hundreds of steps and thousands of tokens.
#
# Cost, update, their order and constants are from the authors' README and notes on the code; we
# have not read the code. We assume that the rest of the objective is GRPO's, with std.

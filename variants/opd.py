r"""OPD: on-policy distillation, a teacher scores every token of the student's own samples.

Agarwal et al., "On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes",
2023, arXiv 2306.13649.

The problem: a reward is one number for a whole response, so it says little about each token. A
teacher could say more, but a model that imitates a teacher's texts does not see its own mistakes in
training.

The idea: let the student write, and let a teacher, a frozen model that reads the same tokens, score
each of them. A token that the teacher finds more likely than the student does is pushed up, any
other token down.

Objective, over all response tokens y_t of a mini-batch, with w = π_θ(y_t) / μ(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t sg[min(w, C)] sg[Â_t] log π_θ(y_t)
    Â_t = β (log π_T(y_t) - log π_θ(y_t)) + α Â_i
    Â_i = (R_i - mean R) / std R

π_T is the teacher (column `teacher_logp`), μ the sampler, and sg[x] is x without gradient. By
default α is 0: training uses no reward and compares no group. The verifier still runs, so the
metrics show rewards.

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    min(w, C) { β log(π_T/π_θ) + α Â_i }

What does this weight maximise? In the mean over the next token that π_θ would draw, it is the
gradient of -KL(π_θ ‖ π_T) at this prefix; w corrects for tokens drawn by μ. It leaves out how a
token changes the prefixes after it. The gradient of the KL of whole responses has the sum of all
later differences, too. A teacher's advice may be worth little on a prefix that it would never have
written. `strayed` is the share of tokens that come after a very unlikely one under the teacher.

The advantage uses the current log π_θ, not π_old. So it goes to 0 by itself as the student
approaches the teacher. There is no clip: we guess that a signal that ends at its target needs none.
C bounds the weight of a token that was rare under the sampler.

What bounds a step: a bounded weight on log π.

Base file: grpo.py. Differs from it in:
1. The teacher's difference instead of the clipped ratio and k3. π_T is loaded and run as π_ref is
   there (--offload_reference).
2. The mean over all tokens of the mini-batch instead of the mean of response means.

Run it:
    torchrun -m variants.opd                                # laptop, 2 to 4 minutes, no download
    # eight GPUs (not yet run on several); the teacher's weights are sharded like the student's
    torchrun --nproc_per_node=8 -m variants.opd --model Qwen/Qwen3-1.7B-Base --task dapo-math-17k \
        --teacher Qwen/Qwen3-8B --eval_task math500 --prompts_per_step 64 --max_new_tokens 4096 \
        --lr 1e-6 --gradient_checkpointing
"""

from dataclasses import dataclass
from typing import Literal

from common.batch import Rollout
from common.cli import BadInput, NonNegative, Positive
from common.distributed import World, shard
from common.launch import launch
from common.logprobs import Policy
from common.model import load_model
import torch
from torch import Tensor

import grpo
from variants import Trunk, loop_of
from transformers import PreTrainedTokenizerBase


@dataclass
class Args(Trunk):
    teacher: str = "tiny-teacher"
    """π_T: hub name or folder of a model that has the student's tokens, or `tiny-teacher`."""
    beta: NonNegative = 1.0
    """β: weight of the teacher's difference; 0 loads no teacher (slime, verl, prime-rl: 1)."""
    reward_weight: NonNegative = 0.0
    """α: weight of the reward's advantage (our choice; 1 with beta 1 is slime's mix with GRPO)."""
    weights: Literal["mu", "none"] = "mu"
    """w: π_θ/μ, or 1, as if every token came from the current policy."""
    is_cap: Positive = 5.0
    """C: largest weight (our choice; minirl.py's)."""

    def compares(self) -> bool:
        return self.reward_weight > 0  # the teacher scores single tokens


# log 0.01: we assume that the teacher would not write a token below this probability.
FOREIGN = -4.6


def advantages(rewards: Tensor) -> Tensor:
    """Return group z-scores `[P, G]`. Rewards [1, 0, 0, 0] give about [1.5, -0.5, -0.5, -0.5]."""
    if rewards.shape[1] == 1:  # nothing to compare with; α is 0, so Â is not used
        return torch.zeros_like(rewards)  # [P, 1]
    return grpo.advantages(rewards)


def frozen_teacher(args: Args, tokenizer: PreTrainedTokenizerBase, world: World) -> Policy | None:
    """Load π_T like a reference model. Raise BadInput if it cannot read the student's tokens."""
    if args.beta <= 0:
        return None
    lm, its_tokenizer = load_model(args.teacher, world, "--teacher")
    # Tokens are passed by number. With another tokenizer they would be other words.
    if not tokenizer.get_vocab().items() <= its_tokenizer.get_vocab().items():
        raise BadInput(f"--teacher {args.teacher}: its tokens are not the student's")
    longest = min(args.max_prompt_tokens + args.max_new_tokens, tokenizer.model_max_length)
    reads = its_tokenizer.model_max_length  # tokens
    if reads < longest:
        limits = f"reads {reads} tokens, prompt and response may have {longest}"
        raise BadInput(f"--teacher {args.teacher}: {limits}")
    teacher = shard(Policy(lm), args, world, args.offload_reference)
    return teacher.requires_grad_(False).eval()


def importance_weight(args: Args, logp: Tensor, batch: Rollout) -> Tensor:
    """Return min(w, C) `[n, T]`, without gradient; 1 with `--weights none`."""
    if args.weights == "none":
        return torch.ones_like(logp)
    return (logp.detach() - batch.rollout_logp).exp().clamp(max=args.is_cap)  # [n, T]


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = args.reward_weight * batch.advantages[:, None].expand_as(mask)  # [n, T]: α Â_i
    if args.beta > 0:
        # Detached: no gradient flows through an advantage.
        A = A + args.beta * (batch.teacher_logp - logp.detach())  # [n, T]: 0 where they agree
    objective = importance_weight(args, logp, batch) * A * logp  # [n, T]
    return -(objective * mask).sum(), mask.sum()  # the mean over all tokens


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    mask = batch.mask  # [n, T]
    uncapped = (logp - batch.rollout_logp).exp()  # [n, T]: w
    stats = {
        "weight": ((importance_weight(args, logp, batch) * mask).sum(), mask.sum()),
        "weight_max": (torch.cat([mask.new_zeros(1), uncapped[mask > 0]]).max(), "max"),
    }
    if args.beta > 0:
        foreign = (batch.teacher_logp < FOREIGN) * mask  # [n, T]
        strayed = (foreign.cumsum(dim=1) - foreign > 0) * mask  # [n, T]: after such a token
        stats["teacher_kl"] = ((logp - batch.teacher_logp) * mask).sum(), mask.sum()
        stats["strayed"] = strayed.sum(), mask.sum()
    return stats


ACTED = {"teacher_kl": "KL to the teacher (nats per token)"}


# The diff of grpo.py's loop
LOOP = """
-    reference = frozen_reference(args, lm, world)  # π_ref; None if β is 0
+    reference = frozen_teacher(args, tokenizer, world)

-                minibatch.ref_logp = all_logprobs(reference, minibatch, args, world).logp  # [n, T]
+                passed = all_logprobs(reference, minibatch, args, world)
+                minibatch.teacher_logp = passed.logp  # [n, T]
"""
main = loop_of(grpo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper, and from public code, in:
# 1. The paper uses whole distributions and their derivatives (KL in either direction, or between).
#    Here the sampled token is an action, as in Thinking Machines' blog (2025). This needs only one
#    number from the teacher for each token.
# 2. slime adds β times the difference, with π_old's log-probs, to any advantage (β 1) and passes
#    the sum to PPO's clip. verl uses the student's current log-probs, can bound the difference (its
#    scripts: 10), and clips as well; or it derives a divergence over the teacher's top tokens.
#    prime-rl has w without a bound, adds 1e-3 log² w, and leaves out all tokens with π_θ - μ below
#    -0.2 (its code of 21 August 2026).
# 3. β, α, C and the learning rate are ours. Groups are needed only if α > 0; without a reward
#    `--group_size 1` is enough.
#
# The three projects' formulas are from their code of 2026. We read only the paper's abstract.

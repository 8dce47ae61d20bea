r"""DAPO: Decoupled Clip and Dynamic sAmpling Policy Optimization.

Yu et al. (ByteDance Seed, Tsinghua), "DAPO: An Open-Source LLM Reinforcement Learning System at
Scale", 2025, arXiv 2503.14476.

The problem: a zero-variance group, all right or all wrong, has no gradient. As the model improves,
most groups become all right, and the gradient of the other groups has more noise. In the token mean
it is also smaller, because tokens of zero-variance groups are counted, too. And a response that is
cut at the length limit counts as wrong, even if its reasoning is good.

The idea: replace zero-variance groups with the next prompts of the stream (dynamic sampling), and
warn a response before it reaches the limit, with a soft punishment.

Objective, over all tokens y_t of groups with right and wrong answers, r = π_θ(y_t) / π_old(y_t):

    J = 1/(Σ_i |y_i|) Σ_i Σ_t min(r Â_i, clip(r, 1-ε_low, 1+ε_high) Â_i)
    Â_i = (R_i - mean R) / std R,     R_i = the verifier's verdict - 1/2 o_i
    o_i: from 0 to 1 over the last tokens before the length limit

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M r Â
    M = 0 if (Â > 0 and r > 1+ε_high) or (Â < 0 and r < 1-ε_low), else 1

Dynamic sampling costs tokens that are sampled and dropped (`extra_tokens`), more as the model gets
better. `reward_drawn` counts these responses, too.

The punishment grows over the last `--overlong_buffer` tokens, to half of the reward of a right
answer. So shorter right answers score more than longer ones, and a right answer never scores less
than a wrong one.

What bounds a step: a clip of the token's ratio.

Base file: justrl.py, which has the token mean and clip-higher. Differs from it in:
1. Dynamic sampling, at most `--max_draws` rounds a step. Zero-variance groups that are left then
   stay, without gradient. The position in the stream of prompts no longer follows from the step, so
   it is saved.
2. The punishment is added to the rewards for the advantages. The filter uses the verdicts alone,
   and zero-variance groups get no punishment. In such a group the z-score would make the smallest
   punishment as large as a wrong answer.
3. `--mask_truncated` leaves cut responses out of the loss.

Run it:
    torchrun -m variants.dapo                               # laptop, three minutes, no download
    torchrun -m variants.dapo --max_draws 1                 # the same without dynamic sampling
    # eight GPUs (not yet run on several); the paper's sizes, but it has 32B, on 128 GPUs
    torchrun --nproc_per_node=8 -m variants.dapo --model Qwen/Qwen2.5-7B --task dapo-math-17k \
        --eval_task aime24 --prompts_per_step 512 --group_size 16 --minibatches 16 --lr 1e-6 \
        --max_new_tokens 20480 --overlong_buffer 4096 --warmup 20 --gradient_checkpointing \
        --vllm_sleep --vllm_memory 0.7
"""

from dataclasses import dataclass

from common.batch import Rollout
from common.cli import BadInput, Count, CountOrZero, NonNegative
from common.clock import timed
from common.data import Problem, Task
from common.distributed import gather, global_sum, World
from common.launch import launch
import torch
from torch import Tensor

from variants import justrl, loop_of


@dataclass
class Args(justrl.Args):
    max_draws: Count = 10
    """Rounds of sampling in a step, including the first; 1: no dynamic sampling (verl's recipe)."""
    overlong_buffer: CountOrZero = 24
    """The penalty grows over this many tokens before the limit (ours; paper: 4096 of 20480)."""
    overlong_penalty: NonNegative = 0.5
    """Punishment of a response of full length (paper: half of right minus wrong)."""
    mask_truncated: bool = False
    """Leave responses cut by the length limit out of the loss (verl: not in the best runs)."""


def overlong(lengths: Tensor, args: Args) -> Tensor:
    """Return what is added to the verdict of responses of these lengths, `[N]` -> `[N]`: 0 up to
    the buffer, then linearly down to -overlong_penalty at the limit."""
    beyond = (lengths - (args.max_new_tokens - args.overlong_buffer)).clamp(min=0)  # [N]
    return -args.overlong_penalty * beyond / max(1, args.overlong_buffer)  # [N]


def punished(rewards: Tensor, rollout: Rollout, args: Args) -> Tensor:
    """Return the rewards for the advantages: verdicts `[P, G]` plus the punishment, but in
    zero-variance groups the verdicts alone."""
    mixed = (rewards != rewards[:, :1]).any(dim=1, keepdim=True)  # [P, 1]: right and wrong answers
    return rewards + mixed * overlong(rollout.mask.sum(dim=1), args).view_as(rewards)  # [P, G]


def trained(args: Args, batch: Rollout) -> Rollout:
    """Return the batch. With `--mask_truncated` its mask is 0 on responses that were cut."""
    if not args.mask_truncated:
        return batch
    mask = batch.mask * batch.finished[:, None]  # [n, T]
    return Rollout(**vars(batch) | {"mask": mask})


class Draws:
    """Dynamic sampling. In each step `problems` returns the first prompts, and then `refill`
    samples new groups for the slots of zero-variance groups (`idle`).

    All ranks read one stream of prompts, in the batch's order, so the prompts do not depend on the
    number of ranks. A rank without idle slots takes part in the others' rounds, with no prompt.
    """

    def __init__(self, args: Args, engine: object, task: Task, world: World):
        if args.overlong_buffer > (limit := args.max_new_tokens):
            wrong = f"--overlong_buffer {args.overlong_buffer}: is above --max_new_tokens {limit}"
            raise BadInput(wrong)
        self.args, self.engine, self.task, self.world = args, engine, task, world
        self.drawn = 0  # prompts read so far, by all ranks

    def state_dict(self) -> dict:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: dict) -> None:
        self.drawn = state["drawn"]

    def problems(self, count: int) -> list[Problem]:
        """Return the next `count` problems for this rank. All ranks must call it together."""
        counts = gather(torch.tensor([count]), self.world).tolist()  # every rank's
        first = self.drawn + sum(counts[: self.world.rank])
        self.drawn += sum(counts)
        return [self.task.train(first + i) for i in range(count)]

    @timed("redraw")
    def refill(self, rollout: Rollout, rewards: Tensor) -> tuple[Rollout, Tensor]:
        """Return rollout and rewards `[P, G]` with new groups in place of zero-variance groups."""
        args, (P, G) = self.args, rewards.shape
        self.rounds, self.groups = 1, P
        self.tokens, self.sum = rollout.mask.sum(), rewards.sum()
        while self.rounds < args.max_draws:
            idle = (rewards == rewards[:, :1]).all(dim=1)  # [P]: all right or all wrong
            if not global_sum({"idle": idle.sum()}, self.world)["idle"]:
                break
            problems = self.problems(int(idle.sum()))  # F, on some ranks 0
            prompts = [problem.prompt_ids for problem in problems]
            fresh = self.engine.generate(prompts, G, args.max_new_tokens, args.temperature)
            verdicts = self.task.score(fresh, problems, G)  # [F, G]
            rewards[idle] = verdicts
            # New rows are appended; their indices replace those of the idle groups.
            rows = torch.arange(P * G + len(fresh), device=rewards.device).view(-1, G)  # [P + F, G]
            rows[:P][idle] = rows[P:]
            rollout = Rollout.join(rollout, fresh).rows(rows[:P].flatten())
            self.rounds, self.groups = self.rounds + 1, self.groups + len(problems)
            self.tokens, self.sum = self.tokens + fresh.mask.sum(), self.sum + verdicts.sum()
        return rollout, rewards

    def statistics(self, rollout: Rollout) -> dict[str, tuple]:
        """Return metrics of the step's rounds as (sum, count) pairs. `rollout` is their result."""
        used, N, G = rollout.mask.sum(), len(rollout), self.args.group_size
        return {
            "rounds": (self.rounds, 1),
            "drawn_per_used": (self.groups * G, N),
            "extra_tokens": (self.tokens - used, used),
            "reward_drawn": (self.sum, self.groups * G),
            "overlong": (-overlong(rollout.mask.sum(dim=1), self.args).sum(), N),
            "tokens": (self.tokens - used, "sum"),  # added to the batch's
        }


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return justrl.py's loss of the tokens that are trained, as sum and count."""
    return justrl.policy_loss(args, logp, trained(args, batch))


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    return justrl.measures(args, logp, trained(args, batch))


ACTED = {
    "extra_tokens": "tokens sampled and dropped, per token trained on",
    "reward_drawn": "reward of all sampled responses",
    "overlong": "punishment of long responses, mean",
}


# The diff of justrl.py's loop
LOOP = """
     engine = make_engine(args, lm, world)
+    draws = Draws(args, engine, task, world)

-    parts = {"engine": engine}  # other objects to save in a checkpoint (each has a state_dict)
+    # Other objects to save in a checkpoint (each has a state_dict).
+    parts = {"engine": engine, "draws": draws}

-        # 1. Rollout: this rank's P prompts, G responses each. The step number alone decides which
-        # prompts are used, so a checkpoint need not save a position in the data.
-        cursor = (step - 1) * args.prompts_per_step + world.rank * P
-        problems = [task.train(cursor + i) for i in range(P)]
+        # 1. Rollout: this rank's P prompts, G responses each.
+        problems = draws.problems(P)

-        rollout.advantages = advantages(rewards).flatten()  # [N]
+        rollout, rewards = draws.refill(rollout, rewards)
+        rollout.advantages = advantages(punished(rewards, rollout, args)).flatten()

+        means.add(**draws.statistics(rollout))
         means.add(**rollout_metrics(rollout, G))
"""
advantages = justrl.advantages
main = loop_of(justrl, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. A round draws one prompt for each zero-variance group. verl's recipe draws three batches and
#    drops zero-variance and surplus groups, which takes fewer rounds and more samples. It stops the
#    run after ten rounds, so its batch never has such a group. Here groups that are left after
#    `--max_draws` rounds stay. Their tokens have no gradient, but count in Σ_i |y_i|.
# 2. Rewards are 0 and 1; in the paper they are -1 and 1. Under the z-score, the paper's punishment
#    of 1 is 1/2 here.
# 3. The released script also has weight decay 0.1 and clip_ratio_c 10 (see justrl.py).
#
# Filter, punishment and sizes are from the authors' recipe for verl. The formula and the warm-up of
# 20 (the script: 10) are second hand.

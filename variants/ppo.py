r"""PPO: Proximal Policy Optimization, with the critic that GRPO removed.

Schulman et al., "Proximal Policy Optimization Algorithms",
2017, arXiv 1707.06347.

The problem: a policy gradient has to compare the reward that came with the expected reward, if
possible after each token. GRPO's group only says what to expect of a whole response.

The idea: train a second model, the critic, to predict the reward that is still to come after each
token. A token's advantage is how much better things look after it than before it.

Objective, over all response tokens y_t, with r = π_θ(y_t) / π_old(y_t) for each token y_t:

    J = 1/(Σ_i |y_i|) Σ_i Σ_t min(r Â_t, clip(r, 1-ε, 1+ε) Â_t)
    Â_t = δ_t + γλ Â_{t+1},    δ_t = ρ_t + γ V(s_{t+1}) - V(s_t)      (then whitened over the batch)
    ρ_t = -β log(π_old/π_ref), and at the last token + R;    V behind it is 0
    V is fitted to V̂_t = Â_t + V_old(s_t), where Â is not whitened and λ may be another one, by
        1/2 max{(V - V̂)², (clip(V, V_old ± ε_V) - V̂)²}

Gradient weight on ∇ log π_θ(y_t), before the average over tokens:

    M r Â_t
    M = 0 if (Â_t > 0 and r > 1+ε) or (Â_t < 0 and r < 1-ε), else 1

s_t is the prompt with the tokens before y_t. V(s_t) is the critic: another language model, whose
output is one number. With λ = 1 the δ_t add up to R - V(s_t), so the critic is a baseline. With
λ = 0 only δ_t is left, which has little noise but all mistakes of V.

What did GRPO change? It removed the critic, a second model to train, save and keep in memory, and
with it GAE (the sum of δ_t above), its flags, a warm-up and a loss. It added the group's mean as
the baseline, one advantage for all tokens of a response, a mean over responses, and the KL term in
the loss instead of the reward.

VAPO (arXiv 2504.05118) brought the critic back for long responses, on which λ = 0.95 loses the
reward (0.95^100 = 0.006). The critic learns from λ = 1 (`--lam_critic`), the policy's λ is 1 -
1/(α|y|) (`--lam_length` is α), and the critic begins before the policy (`--critic_warmup`).

Two papers of 2026 say why critics learn little. SP3O (arXiv 2609.18708): all tokens of a response
have the same target, so the loss itself makes V flat over a response. BPCO (arXiv 2608.23566)
bounds V to the range of the rewards. In some of BPCO's runs the critic also reads the reference answer,
which the policy never sees (`--privileged`). Their other changes are not here.

Base file: grpo.py. Differs from it in:
1. One advantage per token, from a critic. KL in the reward. The mean over all tokens.
2. The critic is a second model with its optimiser, sharded and saved like the policy. It starts
   from the policy's weights with an output of 0. In the first steps it trains alone, as in verl.
3. No group is needed: `--group_size 1` is PPO's usual rollout. A group that is all right or all
   wrong has a gradient, too. The default 8 keeps grpo.py's rollout.

Run it:
    torchrun -m variants.ppo                                # laptop, 2 to 4 minutes, no download
    torchrun -m variants.ppo --lam 1                        # the critic as a baseline only
    torchrun -m variants.ppo --privileged                   # a critic that knows the answer
    # eight GPUs (not yet run on several), VAPO's λs and ε; batch, rates and warm-up are ours
    torchrun --nproc_per_node=8 -m variants.ppo --model Qwen/Qwen3-1.7B-Base --task dapo-math-17k \
        --eval_task aime24 --prompts_per_step 512 --group_size 16 --minibatches 16 --lr 1e-6 \
        --critic_lr 1e-5 --lam_critic 1 --lam_length 0.05 --critic_warmup 50 --beta 0 \
        --clip_high 0.28 --max_new_tokens 8192 --gradient_checkpointing
"""

import copy
from dataclasses import dataclass
import math

from common.batch import Rollout
from common.cli import CountOrZero, Fraction, NonNegative, Positive, PositiveFraction
from common.clock import timed
from common.distributed import clip_gradients, divide_gradients, global_sum, shard
from common.distributed import total_count, World
from common.launch import launch
from common.logprobs import all_logprobs, micro_batches, Pair, Policy, response_logprobs
from common.metrics import clip_shares
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase as Tokenizer

import grpo
from variants import Trunk, loop_of


@dataclass
class Args(Trunk):
    clip_low: NonNegative = 0.2
    """ε of the lower clip, which is at 1 - ε (PPO's value; DeepSeekMath gives none)."""
    clip_high: NonNegative = 0.2
    """ε of the upper clip, which is at 1 + ε (our choice; DAPO, STAPO: 0.28; DeepSeek-R1: 10)."""
    beta: NonNegative = 0.01
    """β of the KL in the reward; 0 loads no reference model (our choice; TRL: 0.05)."""
    gamma: PositiveFraction = 1.0
    """γ: discount of a reward per token (verl, TRL; PPO's paper: 0.99)."""
    lam: Fraction = 0.95
    """λ of the policy's advantages: 1 trusts the rewards, 0 the critic (paper; verl: 1)."""
    lam_critic: Fraction = 0.95
    """λ of the critic's targets (paper: the policy's; VAPO's paper: 1)."""
    lam_length: NonNegative = 0.0
    """α: the policy's λ of a response is 1 - 1/(α|y|) instead of `lam`; 0: off (VAPO's paper:
    0.05)."""
    value_clip: Positive = 0.2
    """ε_V: how far V may move in a step without losing its gradient (TRL, PPO's authors' code;
    verl: 0.5)."""
    critic_lr: Positive = 1e-3
    """AdamW's learning rate for the critic, without warm-up (our choice; verl: ten times the
    policy's)."""
    critic_warmup: CountOrZero = 5
    """First steps train only the critic; the policy's warm-up follows (our choice; verl: 0)."""

    privileged: bool = False
    """The critic reads the reference answer before the prompt (BPCO+Ans)."""
    whiten: bool = True
    """Advantages of mean 0 and variance 1 over the rollout's tokens (verl; BPCO: not)."""

    def compares(self) -> bool:
        return False  # the baseline is the critic, not the group


def advantages(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return GAE's advantages Â (arXiv 1506.02438) and the critic's targets Â + V: two `[N, T]`.

    `rewards`, `values` and `mask` are `[N, T]`; `lam` is one number, or `[N]`, one for each row.
    Positions with mask 0 (padding, or text that the policy did not write) are not steps.
    """
    A = torch.zeros_like(values)  # [N, T]
    ahead = values.new_zeros(len(values))  # [N]: Â of the next token
    following = values.new_zeros(len(values))  # [N]: V of the next token
    for t in reversed(range(values.shape[1])):  # later tokens first
        here = mask[:, t] > 0  # [N]
        surprise = rewards[:, t] + gamma * following - values[:, t]  # [N]: δ_t
        ahead = torch.where(here, surprise + gamma * lam * ahead, ahead)  # [N]
        following = torch.where(here, values[:, t], following)  # [N]
        A[:, t] = ahead
    return A * mask, (A + values) * mask


def token_rewards(batch: Rollout, beta: float) -> Tensor:
    """Return ρ_t `[n, T]`: R at the last token, minus β log(π_old/π_ref) at every token."""
    ends = batch.mask * (batch.mask.cumsum(1) == batch.mask.sum(1, keepdim=True))  # [n, T]
    rewards = ends * batch.rewards[:, None]  # [n, T]
    if beta > 0:  # in the reward, the plain log-ratio gives the gradient of the KL
        rewards = rewards - beta * (batch.old_logp - batch.ref_logp) * batch.mask  # [n, T]
    return rewards


def moments(columns: list[Tensor], masks: list[Tensor], world: World) -> tuple[float, float]:
    """Return mean and sample variance over the tokens `[n, T]` of all parts and ranks."""
    sums = {"n": 0.0, "x": 0.0, "xx": 0.0}
    for column, mask in zip(columns, masks):
        x = (column * mask).double()  # [n, T]
        for name, part in {"n": mask, "x": x, "xx": x.square()}.items():
            sums[name] = sums[name] + part.sum()
    total = global_sum(sums, world)
    mean = total["x"] / total["n"]
    return mean, max(0.0, total["xx"] - total["n"] * mean**2) / max(1.0, total["n"] - 1)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Return 1/2 max{(V - V̂)², (clip(V) - V̂)²}, summed over the tokens `[n, T]`, and how many
    tokens the clip leaves without a gradient."""
    near = old_values + (values - old_values).clamp(-clip, clip)  # [n, T]
    free = (values - returns).square()  # [n, T]
    held = (near - returns).square()  # [n, T]
    # The larger of two errors: a V that has moved towards V̂ by more than ε_V has no gradient, but
    # a V that has moved away from V̂ still has one.
    loss = 0.5 * (torch.maximum(free, held) * mask).sum()
    return loss, ((held > free) * mask).sum()


def show_answers(rollout: Rollout, problems: list, G: int, tokenizer: Tokenizer) -> None:
    """Write two columns for a critic that knows the answer: its sequences `told [N, S']`, with the
    reference answer and EOS before each prompt, and the number of added tokens `told_len [N]`."""
    rows, added = [], []
    starts = [problem for problem in problems for _ in range(G)]
    for problem, sequence, end in zip(starts, rollout.sequences, rollout.ends.tolist()):
        answer = tokenizer(str(problem.answer), add_special_tokens=False)["input_ids"]
        answer = sequence.new_tensor(answer + [tokenizer.eos_token_id])
        rows.append(torch.cat([answer, sequence[:end]]))
        added.append(len(answer))
    rollout.told = pad_sequence(rows, batch_first=True)  # [N, S']
    rollout.told_len = rollout.prompt_len.new_tensor(added)  # [N]


class Value(Policy):
    """A language model whose output is one number: V(s_t) instead of log π(y_t).

    It has a policy's interface, so `all_logprobs` and `response_logprobs` work on it, too.
    """

    def __init__(self, lm: nn.Module):
        super().__init__(lm.base_model)
        self.head = nn.Linear(lm.config.hidden_size, 1, bias=False)
        # At first V is 0 everywhere, and Â is R, discounted by λ.
        nn.init.zeros_(self.head.weight)

    def forward(self, sequences: Tensor, predicts: Tensor, *of_a_policy: object) -> Pair:
        """Return V `[M]` of the states in which the next tokens marked by `predicts [n, S]` are
        drawn, and zeros `[M]`. The further arguments of a policy are ignored."""
        output = self.lm(input_ids=sequences, use_cache=False)
        hidden = output.last_hidden_state[predicts]  # [M, H]
        # In float32: bfloat16 could not tell 0.500 from 0.501.
        values = nn.functional.linear(hidden.float(), self.head.weight.float())  # [M, 1]
        return values[:, 0], torch.zeros_like(values[:, 0])


class Critic:
    """V and its optimiser: `judge` a rollout before the updates, `learn` from each mini-batch."""

    def __init__(self, args: Args, lm: nn.Module, world: World):
        self.args, self.world = args, world
        self.value = shard(Value(copy.deepcopy(lm)), args, world)
        how = {"betas": args.betas, "weight_decay": args.weight_decay, "fused": True}
        self.optimizer = torch.optim.AdamW(self.value.parameters(), args.critic_lr, **how)

    def reads(self, batch: Rollout) -> Rollout:
        """Return the batch with the sequences that the critic reads."""
        if not self.args.privileged:
            return batch
        told = {"sequences": batch.told, "prompt_len": batch.prompt_len + batch.told_len}
        return Rollout(**vars(batch) | told)

    @timed("critic")
    def judge(self, batches: list[Rollout]) -> dict[str, tuple]:
        """Give every mini-batch its `values`, `returns` and `token_advantages` `[n, T]`, and
        `advantages [n]`, by which metrics separate good from bad responses. Return metrics as
        pairs (sum, count)."""
        args, world = self.args, self.world
        masks = [batch.mask for batch in batches]
        earned, errors = [], []  # [n, T] of each mini-batch
        paid = 0.0
        for batch in batches:
            seen = self.reads(batch)
            batch.values = all_logprobs(self.value, seen, args, world).logp  # [n, T]: V_old
            rewards = token_rewards(batch, args.beta)  # [n, T]
            known = rewards, batch.values, batch.mask, args.gamma
            lam = args.lam
            if args.lam_length > 0:  # λ grows with the response's length
                lam = (1 - 1 / (args.lam_length * batch.mask.sum(1))).clamp(min=0)  # [n]
            batch.token_advantages, _ = advantages(*known, lam)  # [n, T]
            _, batch.returns = advantages(*known, args.lam_critic)  # [n, T]
            _, came = advantages(*known, 1.0)  # [n, T]: the rewards that came (λ = 1)
            batch.advantages = (came - batch.values)[:, 0]  # [n]
            earned.append(came)
            errors.append(came - batch.values)
            paid = paid + (batch.rewards - rewards.sum(dim=1)).double().sum()
        if args.whiten:  # so that the scale of rewards does not matter
            mean, variance = moments([batch.token_advantages for batch in batches], masks, world)
            for batch in batches:
                centred = (batch.token_advantages - mean) * batch.mask  # [n, T]
                batch.token_advantages = centred / (variance**0.5 + 1e-8)  # [n, T]
        _, unknown = moments(errors, masks, world)
        _, spread = moments(earned, masks, world)
        values = sum((batch.values * batch.mask).double().sum() for batch in batches)
        return {
            "value": (values, sum(mask.sum() for mask in masks)),
            "kl_paid": (paid, sum(map(len, batches))),
            "explained_variance": (1 - unknown / spread if spread else 0.0, spread > 0),
        }

    def learn(self, batch: Rollout) -> dict[str, tuple]:
        """Take one optimiser step of V towards its targets, on one mini-batch, and return
        metrics."""
        args = self.args
        tokens, squares, clipped = 0.0, 0.0, 0.0
        seen = self.reads(batch)
        for rows in micro_batches(self.value, seen, args.micro_tokens, self.world):
            micro = seen.rows(rows)
            values, _ = response_logprobs(self.value, micro, args.temperature)  # [n, T]
            mask, bound = micro.mask, args.value_clip  # [n, T]
            loss, cut = value_loss(values, micro.values, micro.returns, mask, bound)
            loss.backward()
            tokens = tokens + mask.sum()
            squares = squares + loss.detach().double()
            clipped = clipped + cut
        divide_gradients(self.value, total_count(tokens, self.world), self.world)
        norm = clip_gradients(self.value, args.grad_clip)
        finite = math.isfinite(norm)
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "value_loss": (squares, tokens),
            "value_clipped": (clipped, tokens),
            "critic_norm": (norm if finite else 0.0, finite),
        }


def policy_loss(args: Args, logp: Tensor, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Return the loss as sum and count, as `grpo.policy_loss` does."""
    mask = batch.mask  # [n, T]: 1 on response tokens, 0 on padding
    A = batch.token_advantages  # [n, T]: one advantage for each token
    ratio = (logp - batch.old_logp).exp()  # [n, T]: r; 1 until the rollout's first optimiser step
    clipped = ratio.clamp(1 - args.clip_low, 1 + args.clip_high)  # [n, T]
    # Why min, and not the clip alone? A token that moved in the wrong direction must keep its
    # gradient, so that it can come back.
    objective = torch.minimum(ratio * A, clipped * A)  # [n, T]
    return -(objective * mask).sum(), mask.sum()  # the mean over all tokens


def measures(args: Args, logp: Tensor, batch: Rollout) -> dict[str, tuple]:
    """Return metrics of the loss, pairs (sum, count) without gradient."""
    A = batch.token_advantages  # [n, T]
    return clip_shares(logp, batch, args.clip_low, args.clip_high, A=A)


ACTED = {
    "explained_variance": "share of the returns' variance explained by V",
    "value_loss": "squared error of V, halved",
    "clip_share": "tokens clipped (share)",
}


# The diff of grpo.py's loop
LOOP = """
     reference = frozen_reference(args, lm, world)  # π_ref; None if β is 0
+    critic = Critic(args, lm, world)

     optimizer = torch.optim.AdamW(policy.parameters(), args.lr, fused=True, **adam)
+    both = nn.ModuleList([policy, critic.value])
+    optimizers = [optimizer, critic.optimizer]

-    done = load_checkpoint(run.checkpoint, policy, optimizer, parts, world)  # steps; 0: a new run
+    done = load_checkpoint(run.checkpoint, both, optimizers, parts, world)

-        # 2. Reward and advantages. A group is on one rank: its mean needs no communication.
+        # 2. Reward. The critic computes advantages from it below.

-        rollout.advantages = advantages(rewards).flatten()  # [N]
+        rollout.advantages = rewards.flatten()  # [N]: R, replaced by `judge`
+        if args.privileged:
+            show_answers(rollout, problems, G, tokenizer)

-        # The first mini-batch needs no pass: until the first optimiser step π_θ is π_old.
-        for minibatch in minibatches[1:]:
+        for minibatch in minibatches:  # of all: the KL term is part of the reward

             minibatch.old_logp = all_logprobs(policy, minibatch, args, world).logp  # [n, T]
+        # Stop if the sampler's log-probs, μ, are far from π_old: then one of the two is broken.
+        means.add(**run.check_sampler(minibatches))

+        # Values and advantages, from the critic before this step's updates.
+        means.add(**critic.judge(minibatches))
+
         # 4. Update: one optimiser step per mini-batch, in as many micro-batches as memory requires.

-        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
+        begun = max(0, step - args.critic_warmup)  # steps of the policy
+        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, begun / max(1, args.warmup))

-            first = minibatch is minibatches[0]
+            means.add(**critic.learn(minibatch))
+            # An untrained critic gives bad advantages, which would stay in Adam's moments.
+            if step <= args.critic_warmup:
+                continue

-                if first:
-                    micro.old_logp = logp.detach()  # [n, T]: these ratios are exactly 1
-                    minibatch.put(rows, old_logp=micro.old_logp)

-            if first:  # stop if sampler (μ) and trainer (π_old) are far apart: one must be wrong
-                means.add(**run.check_sampler(minibatches))

-            save_checkpoint(run.folder, step, policy, optimizer, parts, world, args.keep)
+            save_checkpoint(run.folder, step, both, optimizers, parts, world, args.keep)
"""
main = loop_of(grpo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. The paper is about games and robots. Its authors' code also clips the value, and whitens each
#    mini-batch; here, as in verl, all tokens of the rollout are whitened at once. Tokens as
#    actions, KL in the reward and R at the last token became known through InstructGPT (arXiv
#    2203.02155). They are from Ziegler et al. (2019, arXiv 1909.08593) and Stiennon et al. (2020,
#    arXiv 2009.01325).
# 2. One pass over a rollout (the paper takes several), no entropy bonus, no shared backbone.
# 3. γ is 1 (paper: 0.99), so that a reward is worth the same after more words.
# 4. A response that the length limit cuts ends there like any other, with V = 0 after it.
# 5. VAPO also has ε 0.28 above (`--clip_high`), and a likelihood term on right responses, which is
#    not here. On responses of fewer than 1/α = 20 tokens its λ would be below 0; here it is then 0.
#    (BPCO's code leaves it below 0, which concerns responses of two tokens.)
# 6. With `--privileged` the answer stands before the prompt. BPCO's critic reads it in a template of
#    its own, in some runs a solution instead.
#
# PPO, GAE and the clipped value loss agree with public code. VAPO's λs and α are as in its listing
# and in summaries; we do not know its rates and steps of pre-training.

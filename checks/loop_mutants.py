"""Damages to the loops and to what they call: name -> what it is. For every check of
tests/loop/test_loop.py there is one for each kind of fault that it must see."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Damage:
    algorithm: str
    check: str  # of test_loop.py, which must turn red
    old: str  # what stands in the file once
    new: str  # what it becomes
    where: str = ""  # the module, if it is not the algorithm's own
    ranks: int = 1
    flags: dict = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, str, str]:
        return self.where or self.algorithm, self.old, self.new


LOSS = "loss, count, stats = policy_loss"
OF_THE_PART = "choose_tokens(args, micro, logp.detach(), entropy, World(0, 1, world.device)); "

DAMAGES = {
    # The columns of the loss
    "update at temperature 1": Damage(
        "grpo", "gradients", "micro, args.temperature)", "micro, 1.0)"
    ),
    "π_old at temperature 1": Damage(
        "grpo",
        "gradients",
        "micro, args.temperature, readout)",
        "micro, 1.0, readout)",
        where="common.logprobs",
    ),
    "π_old is π_θ": Damage(
        "grpo",
        "gradients",
        "if first:\n                    micro.old_logp",
        "if True:\n                    micro.old_logp",
    ),
    "μ is π_old": Damage(
        "minirl", "gradients", LOSS, f"micro.rollout_logp = micro.old_logp; {LOSS}"
    ),
    "reference is the policy": Damage(
        "grpo",
        "gradients",
        "all_logprobs(reference, minibatch",
        "all_logprobs(policy, minibatch",
        flags={"steps": 2},
    ),
    "rewards as [G, P]": Damage(
        "grpo",
        "gradients",
        "rewards = task.score(rollout, problems, G, means)",
        "rewards = task.score(rollout, problems, G, means).reshape(G, P).T",
    ),
    # From the loss to the optimiser
    "last micro-batch's count": Damage(
        "grpo", "gradients", "denominator = denominator + count", "denominator = count"
    ),
    "gradients of the last mini-batch stay": Damage(
        "grpo", "gradients", "            optimizer.zero_grad()\n", ""
    ),
    "no gradient clipping": Damage(
        "grpo",
        "gradients",
        "clip_gradients(policy, args.grad_clip)",
        'clip_gradients(policy, float("inf"))',
        flags={"steps": 2},
    ),
    "the own rank's count": Damage(
        "maspo",
        "gradients",
        "gradient.mul_(averaged / total)",
        "gradient.mul_(1 / count)",
        where="common.distributed",
        ranks=2,
    ),
    "whole models, each with its own gradient": Damage(
        "grpo",
        "gradients",
        "elif world.size > 1:",
        "elif world.size > 2:",
        where="common.distributed",
        ranks=2,
        flags={"shard_ranks": 1},
    ),
    "advantages stay on their rank": Damage(
        "grpo",
        "gradients",
        "column = column[order.to(column.device)]",
        'column = column if name == "advantages" else column[order.to(column.device)]',
        where="common.batch",
        ranks=2,
    ),
    "no warm-up": Damage(
        "grpo", "rates", "args.lr * min(1.0, step / max(1, args.warmup))", "args.lr"
    ),
    "betas not handed on": Damage("grpo", "rates", '"betas": args.betas, ', ""),
    # Around the update
    "the same prompts in every step": Damage(
        "grpo", "prompts", "cursor = (step - 1) * args", "cursor = 0 * args"
    ),
    "the same prompts on every rank": Damage(
        "grpo",
        "prompts",
        "args.prompts_per_step + world.rank * P",
        "args.prompts_per_step",
        ranks=2,
    ),
    "engine not synced": Damage(
        "grpo",
        "sync",
        "            means.add(**metrics_by_sign(minibatch))\n        engine.sync(policy)\n",
        "            means.add(**metrics_by_sign(minibatch))\n",
    ),
    "greedy at the sampling temperature": Damage(
        "grpo",
        "evaluation",
        '("greedy", 1, 0.0)',
        '("greedy", 1, args.temperature)',
        where="common.metrics",
    ),
    "mean of micro-batch means": Damage(
        "grpo",
        "metrics",
        "self.counts[name] = self.counts[name] + (0.0 if count is None else count)",
        "self.counts[name] = 0.0 if count is None else count",
        where="common.metrics",
    ),
    "metrics of one rank": Damage(
        "grpo",
        "metrics",
        "sums, counts = global_sum(self.sums, world), global_sum(self.counts, world)",
        "sums, counts = ({k: float(v) for k, v in x.items()} for x in (self.sums, self.counts))",
        where="common.metrics",
        ranks=2,
    ),
    # What some files add to the loop
    "threshold of the micro-batch": Damage("stapo", "gradients", LOSS, OF_THE_PART + LOSS),
    "threshold of one rank": Damage(
        "stapo",
        "gradients",
        "gather(entropy[among], world)",
        "entropy[among]",
        ranks=2,
        flags={"steps": 2},
    ),
    "no replay in the update": Damage(
        "minirl",
        "gradients",
        'if hasattr(batch, "replayed_experts"):',
        'if hasattr(batch, "replayed_experts") and not torch.is_grad_enabled():',
        where="common.logprobs",
        flags={"routing_replay": "r3", "model": "model-moe", "grad_clip": 1e9},
    ),
    "lr not scaled": Damage("vcpo", "rates", "warm_lr * scale", "warm_lr"),
    "norms of the next response": Damage(
        "vcpo", "gradients", "norms.view(-1, A.shape[1])", "norms.roll(1).view(-1, A.shape[1])"
    ),
    "the newest batch first": Damage("vcpo", "metrics", "queue.popleft()", "queue.pop()"),
    "the wrong targets": Damage(
        "goldilocks",
        "teacher",
        "learning_value(rewards), self.world).cpu()",
        "0.5 - learning_value(rewards), self.world).cpu()",
    ),
    "the fit is not used": Damage(
        "deep_grpo", "pivots", "fit_success(self.feedback)", "fit_success([])"
    ),
    "branches in the wrong mini-batch": Damage(
        "deep_grpo",
        "gradients",
        "failed.repeat_interleave(K)",
        "failed.flip(0).repeat_interleave(K)",
    ),
    "the critic learns the policy's λ": Damage(
        "ppo", "critic", "advantages(*known, args.lam_critic)", "advantages(*known, lam)"
    ),
}

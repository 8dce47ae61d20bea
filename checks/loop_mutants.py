"""Damages to the loops and to what they call, by name. tests/loop/test_loop.py must see each of
them."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Damage:
    old: str  # what stands in the file once
    new: str  # what it becomes
    algorithm: str = "grpo"
    where: str = ""  # the module, if it is not the algorithm's own
    flags: dict = field(default_factory=dict)

    @property
    def place(self) -> tuple[str, str, str]:
        return self.where or self.algorithm, self.old, self.new


LOSS = "loss, count = policy_loss"
OF_THE_PART = "choose_tokens(args, micro, World(0, 1, world.device)); "
SCORE = "rewards = task.score(rollout, problems, G)"
CLIP = "clip_gradients(policy, args.grad_clip)"
FIRST = "if first:\n                    micro.old_logp"
COUNT = "self.counts[name] = self.counts.get(name, 0.0) + count"
SUMS = "sums, counts = global_sum(self.sums, world), global_sum(self.counts, world)"
OWN_SUMS = "sums, counts = ({k: float(v) for k, v in x.items()} for x in (self.sums, self.counts))"
COLUMN = "column = column[order.to(column.device)]"
REPLAYED = 'if hasattr(batch, "replayed_experts")'
MOE = {"routing_replay": "r3", "model": "model-moe", "grad_clip": 1e9}

DAMAGES = {
    # The columns of the loss
    "update at temperature 1": Damage("micro, args.temperature)", "micro, 1.0)"),
    "π_old at temperature 1": Damage(
        "micro, args.temperature, readout)", "micro, 1.0, readout)", where="common.logprobs"
    ),
    "π_old is π_θ": Damage(FIRST, FIRST.replace("first", "True")),
    "μ is π_old": Damage(LOSS, f"micro.rollout_logp = micro.old_logp; {LOSS}", "minirl"),
    "reference is the policy": Damage(
        "all_logprobs(reference, minibatch", "all_logprobs(policy, minibatch"
    ),
    "rewards as [G, P]": Damage(SCORE, f"{SCORE}.reshape(G, P).T"),
    # From the loss to the optimiser
    "last micro-batch's count": Damage("denominator = denominator + count", "denominator = count"),
    "gradients of the last mini-batch stay": Damage("            optimizer.zero_grad()\n", ""),
    "no gradient clipping": Damage(CLIP, 'clip_gradients(policy, float("inf"))'),
    "one rank's count": Damage(
        'return global_sum({"count": count}, world)["count"] or 1.0',
        "return float(count)",
        "maspo",
        where="common.distributed",
    ),
    "whole models, each with its own gradient": Damage(
        "if averaged < world.size:",
        "if averaged < world.size - 1:",
        where="common.distributed",
        flags={"shard_ranks": 1},
    ),
    "advantages stay on their rank": Damage(
        COLUMN, f'if name != "advantages": {COLUMN}', where="common.batch"
    ),
    # Around the update
    "mean of micro-batch means": Damage(COUNT, "self.counts[name] = count", where="common.metrics"),
    "metrics of one rank": Damage(SUMS, OWN_SUMS, where="common.metrics"),
    # What some files add to the loop
    "threshold of the micro-batch": Damage(LOSS, OF_THE_PART + LOSS, "stapo"),
    "threshold of one rank": Damage(
        "gather(batch.entropy[among], world)", "batch.entropy[among]", "stapo"
    ),
    "no replay in the update": Damage(
        f"{REPLAYED}:",
        f"{REPLAYED} and not torch.is_grad_enabled():",
        "minirl",
        where="common.logprobs",
        flags=MOE,
    ),
    "norms of the next response": Damage(
        "norms.view_as(log_w)", "norms.roll(1).view_as(log_w)", "vcpo"
    ),
    "the newest batch first": Damage("queue.popleft()", "queue.pop()", "vcpo"),
    "the wrong targets": Damage(
        "self.learning_value(rewards), self.world).cpu()",
        "0.5 - self.learning_value(rewards), self.world).cpu()",
        "goldilocks",
    ),
    "the fit is not used": Damage("fit_success(self.feedback)", "fit_success([])", "deep_grpo"),
    "branches in the wrong mini-batch": Damage(
        "failed.repeat_interleave(K)", "failed.flip(0).repeat_interleave(K)", "deep_grpo"
    ),
    "the critic learns the policy's λ": Damage(
        "advantages(*known, args.lam_critic)", "advantages(*known, lam)", "ppo"
    ),
}

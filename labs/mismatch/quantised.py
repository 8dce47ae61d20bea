"""A sampler of three bits, and an evaluation of both sampler and policy (for the lab mismatch).

This module replaces `make_engine` and `evaluate` in a copy of minirl.py. The parameters of every
layer become whole numbers from -3 to 3 times their row's scale. (Routers stay as they are, as under
`--rollout_dtype float8`.) With `--rollout_dtype float32` this is the whole gap. Held-out problems
are answered by this sampler (`greedy`, `sampled`) and by the policy (`policy_greedy`,
`policy_sampled`).
"""

from common import metrics, rollout
from torch import Tensor, nn


def three_bits(weight: Tensor) -> Tensor:
    """Each row rounded to -3 ... 3 times its own scale."""
    scale = weight.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 3
    return (weight / scale).round() * scale


def make_engine(*args: object, **named: object) -> object:
    """The engine that the flags ask for. Its `sync` rounds after it has copied."""
    engine = rollout.make_engine(*args, **named)
    copy = engine.sync

    def sync(policy: nn.Module, rounded: bool = True) -> None:
        copy(policy)
        engine.policy = policy
        for name, weight in engine.lm.named_parameters():
            if rounded and weight.dim() >= 2 and ".layers." in name:
                if not name.endswith(rollout.ROUTERS):
                    weight.copy_(three_bits(weight))

    engine.sync = sync
    return engine


def evaluate(engine: object, *args: object) -> dict:
    """Both accuracies of the sampler, and both of the policy."""
    found = metrics.evaluate(engine, *args)
    engine.sync(engine.policy, rounded=False)
    itself = metrics.evaluate(engine, *args)
    engine.sync(engine.policy)
    return found | {f"policy_{name}": value for name, value in itself.items() if name != "example"}

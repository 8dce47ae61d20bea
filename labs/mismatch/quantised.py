"""A sampler with few levels, and an evaluation of both sampler and policy, for the lab mismatch.

`engine_of(levels)` and `evaluate` replace `make_engine` and `evaluate` in a copy of a file. The
parameters of every layer become whole numbers from -levels to levels times their row's scale, but
routers stay as they are, as with `--rollout_dtype float8`. With `--rollout_dtype float32` there is
no other gap. Both this sampler (`greedy`, `sampled`) and the policy (`policy_greedy`,
`policy_sampled`) answer the held-out problems.
"""

from collections.abc import Callable

from common import metrics, rollout
from torch import nn

from labs.stresses import quantise


def engine_of(levels: int) -> Callable:
    """Make a `make_engine` whose engine rounds weights after each sync; 3 levels need 3 bits."""

    def make_engine(*args: object, **named: object) -> object:
        engine = rollout.make_engine(*args, **named)
        copy = engine.sync

        def sync(policy: nn.Module, rounded: bool = True) -> None:
            copy(policy)
            engine.policy = policy
            if rounded:
                quantise(engine.lm, levels)

        engine.sync = sync
        return engine

    return make_engine


def evaluate(engine: object, *args: object) -> dict:
    """Measure both accuracies of the sampler, and both of the policy."""
    of_sampler = metrics.evaluate(engine, *args)
    engine.sync(engine.policy, rounded=False)
    of_policy = metrics.evaluate(engine, *args)
    engine.sync(engine.policy)
    of_policy.pop("example", None)
    return of_sampler | {f"policy_{name}": value for name, value in of_policy.items()}

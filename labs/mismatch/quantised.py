"""A sampler of a few levels, and an evaluation of both sampler and policy, for the labs mismatch
and drift.

    python -m labs.mismatch.quantised LEVELS FILE FLAGS...

`engine_of(levels)` and `evaluate` replace `make_engine` and `evaluate` in a copy of a file. The
parameters of every layer become whole numbers from -levels to levels times their row's scale.
(Routers stay as they are, as under `--rollout_dtype float8`.) With `--rollout_dtype float32` this
is the whole gap. Held-out problems are answered by this sampler (`greedy`, `sampled`) and by the
policy (`policy_greedy`, `policy_sampled`).
"""

import sys
from collections.abc import Callable
from pathlib import Path

from checks.files import PATHS
from common import metrics, rollout
from common.launch import launch
from torch import nn

from labs.race.stresses import load, quantise


def engine_of(levels: int) -> Callable:
    """A `make_engine`, whose engine rounds after it has copied: three levels need three bits."""

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
    """Both accuracies of the sampler, and both of the policy."""
    found = metrics.evaluate(engine, *args)
    engine.sync(engine.policy, rounded=False)
    itself = metrics.evaluate(engine, *args)
    engine.sync(engine.policy)
    return found | {f"policy_{name}": value for name, value in itself.items() if name != "example"}


if __name__ == "__main__":  # one run of a file with such a sampler
    levels, file, *flags = sys.argv[1:]
    module = load(PATHS[Path(file).stem])
    module.make_engine, module.evaluate = engine_of(int(levels)), evaluate
    sys.argv = [file, *flags]
    launch(module.main, module.Args)

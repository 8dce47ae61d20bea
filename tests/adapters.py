"""The one door through which numbers computed elsewhere are checked against the algorithm files."""

import functools
import importlib
from dataclasses import replace

from common.tasks.reward import Verifier
from common.tiny.arithmetic import arithmetic_reward
from checks.harness import measured, terms
from checks.files import ALGORITHMS, MODULES, NINE, PATHS, VARIANTS  # noqa: F401  (offered, too)
from torch import Tensor

math_verifier = functools.cache(functools.partial(Verifier, workers=1))


def policy_loss(
    algorithm: str,
    *,
    logp: Tensor,
    old_logp: Tensor,
    rollout_logp: Tensor,
    entropy: Tensor,
    advantages: Tensor,
    mask: Tensor,
    ref_logp: Tensor | None = None,
    **hparams: float,
) -> tuple[Tensor, dict[str, float]]:
    """Return the exact objective over the whole batch, as a scalar to minimise, and its statistics
    as means (NaN if nothing is counted).

    `logp, old_logp, rollout_logp, entropy, mask` are `[N, T]`, `advantages` is `[N]`. The result is
    differentiable in `logp` and computed in the given dtype. `hparams` are fields of the file's own
    `Args`; an unknown one raises TypeError. Without `ref_logp` the KL term is off, unless `beta` is
    given.
    """
    module = importlib.import_module(MODULES[algorithm])
    args = module.Args()
    if hasattr(args, "beta") and ref_logp is None:
        args.beta = 0.0
    columns = {"logp": logp, "old_logp": old_logp, "rollout_logp": rollout_logp}
    columns |= {"ref_logp": ref_logp, "entropy": entropy, "advantages": advantages, "mask": mask}
    args = replace(args, **hparams)
    loss, count = terms(module, args, **columns)
    means = {}
    for name, (total, number) in measured(module, args, **columns).items():
        means[name] = float(total if isinstance(number, str) else total / number)
    return loss / count, means


def advantages(algorithm: str, rewards: Tensor) -> Tensor:
    """Return the file's advantages `[P, G]` for rewards `[P, G]`."""
    return importlib.import_module(MODULES[algorithm]).advantages(rewards)


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return ppo's unwhitened advantages, and returns, from rewards by token: all `[N, T]`."""
    return importlib.import_module(MODULES["ppo"]).advantages(rewards, values, mask, gamma, lam)


def reward(task: str, completion: str, answer: str) -> float:
    """Return the reward of one completion; `task` is `arithmetic` or `math`."""
    if task == "arithmetic":
        return arithmetic_reward(completion, answer)
    if task == "math":
        return math_verifier()([completion], [answer])[0].score
    raise ValueError(f"task {task!r}: use arithmetic or math")

"""π_old is evaluated in the same way as π_θ."""

import pytest
import torch
from common.batch import Rollout

from tests.helpers import SMALL, module_of, run_here

# The others have grpo's lines
OWN = [pytest.param(n, marks=pytest.mark.slow) for n in "minirl vcpo ppo".split()]


@pytest.mark.parametrize("name", ["grpo", *OWN])
def test_the_first_ratios_are_exactly_one(tmp_path, monkeypatch, name):
    """In a rollout's first update log π_θ = log π_old to the bit. (No update changes a weight,
    because lr is next to 0.) Other micro-batches would have other matrix shapes, whose sums round
    in another way. In bfloat16 that alone carries tokens over the edge of a clip."""
    module, equal = module_of(name), []
    loss = module.policy_loss

    def spy(args: object, logp: torch.Tensor, batch: Rollout) -> tuple:
        equal.append(torch.equal(logp, batch.old_logp))
        return loss(args, logp, batch)

    monkeypatch.setattr(module, "policy_loss", spy)
    flags = [*SMALL, "--steps", 1, "--micro_tokens", 60, "--lr", 1e-30]
    for waits in ("lag", "critic_warmup"):  # the policy of the first step, at once
        flags += [f"--{waits}", 0] if hasattr(module.Args, waits) else []
    assert run_here(module.main, *flags, "--run_dir", tmp_path / "run") == 0
    assert len(equal) > 4 and all(equal)

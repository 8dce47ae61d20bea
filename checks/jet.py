"""Jet-RL: MiniRL's loss; weights of 8 bits in the passes, float32 masters in the steps."""

from types import ModuleType

import torch
from common.logprobs import Policy
from common.model import ALONE, load_model
from common.rollout import HFEngine
from torch import Tensor

from . import Run, minirl
from .harness import CENTRED, near

objective, statistics, CASES = minirl.objective, minirl.statistics, minirl.CASES

Weights = dict[str, Tensor]


def embedded(module: ModuleType, model: str = "tiny") -> tuple[Policy, Weights, object]:
    """Return the embedded policy with its weights rounded, their masters, and the object that
    rounded them."""
    policy = Policy(load_model(model)[0])
    masters = weights_of(policy)
    return policy, masters, module.EightBits(policy)


def weights_of(policy: Policy) -> Weights:
    return {name: weight.detach().clone() for name, weight in policy.lm.named_parameters()}


def same(weights: Weights, other: Weights) -> bool:
    return all(torch.equal(weights[name], other[name]) for name in other)


def check_what_is_rounded(module: ModuleType) -> None:
    """The layers' matrices are rounded, experts included. Norms, embedding and head are not, nor
    routers, which would choose other experts. The values equal the sampler's float8 copy."""
    for model in ("tiny", "tiny-moe"):
        policy, masters, _ = embedded(module, model)
        rounded = weights_of(policy)
        changed = {name for name in masters if not torch.equal(masters[name], rounded[name])}
        kinds = ("_proj.weight", "experts.gate_up_proj", "experts.down_proj")
        assert changed == {name for name in masters if name.endswith(kinds)}
        engine = HFEngine(load_model(model)[0], ALONE, 0, "float8", 8, experts=True)
        engine.sync(Policy(load_model(model)[0]))
        copied = dict(engine.lm.named_parameters())
        assert all(torch.equal(copied[name], rounded[name].bfloat16()) for name in copied)


def check_the_masters_take_the_step(module: ModuleType) -> None:
    """The gradient at the rounded weights changes the masters. Weights that are not rounded change
    as usual. Then all matrices are rounded again. `rounding` is Σ |ŵ - w| / Σ |w| over them."""
    policy, masters, weights = embedded(module)
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    apart, size = weights.step(torch.optim.SGD(policy.parameters(), lr=1.0))
    expected = {name: weight - 0.01 for name, weight in masters.items()}
    rounded = weights_of(policy)
    changed = [name for name in masters if name.endswith("_proj.weight")]
    near(apart, sum((rounded[n] - expected[n]).abs().sum() for n in changed), "Σ |ŵ - w|", 1e-2)
    near(size, sum(expected[n].abs().sum() for n in changed), "Σ |w|", 1e-2)
    with weights.lifted():
        assert same(weights_of(policy), expected)
    again = Policy(load_model("tiny")[0])
    again.lm.load_state_dict(expected, strict=False)
    module.EightBits(again)
    assert same(rounded, weights_of(again))


SHARED = CENTRED


RUN = Run(needs={"routing_replay": {"model": "model-moe"}})

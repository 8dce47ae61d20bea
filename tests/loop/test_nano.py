"""nano.py has the gradient of grpo.py and common: on one rollout, with clipped tokens and KL."""

import copy
from types import ModuleType

import grpo
import nano
import pytest
import torch
from common.batch import Rollout
from common.distributed import ALONE, divide_gradients
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from torch import Tensor, nn

from checks import mutate

PROMPTS = ["7*8-9+6=", "1+2=", "5*5-5+8*3=", "9-9="]
REWARDS = torch.tensor([[1.0] * 8, [1.0] * 3 + [0.0] * 5, [0.0] * 7 + [1.0], [1.0, 0.0] * 4])
ARGS = grpo.Args(micro_tokens=300)  # several micro-batches


@pytest.fixture(scope="module")
def policies() -> dict[str, nn.Module]:
    """π_old, and at some distance from it π_ref and π_θ."""
    nano.set_seed(1)
    old = nano.AutoModelForCausalLM.from_pretrained(nano.MODEL)
    moved = {"old": old}
    for name in ("ref", "new"):
        moved[name] = copy.deepcopy(old)
        for parameter in moved[name].parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
    return moved


def nano_gradient(module: ModuleType, policies: dict[str, nn.Module]) -> tuple[Tensor, Tensor]:
    """The gradient that nano.py gives to π_θ after a rollout of π_old, and the rollout."""
    module.set_seed(1)
    sequences, mask = module.sample(policies["old"], PROMPTS)  # [N, S], [N, S-1]
    A = module.advantages(REWARDS).view(-1, 1)  # [N, 1]
    logp = {name: module.log_probs(policy, sequences) for name, policy in policies.items()}
    policies["new"].zero_grad()
    module.policy_loss(logp["new"], logp["old"].detach(), logp["ref"].detach(), A, mask).backward()
    return whole_gradient(policies["new"]), sequences


def grpo_gradient(
    module: ModuleType, policies: dict[str, nn.Module], sequences: Tensor
) -> tuple[Tensor, float]:
    """What grpo.py and common give for these sequences; the share of clipped tokens."""
    prompts = [nano.tokenizer.encode(prompt) for prompt in PROMPTS]
    eos, responses = nano.tokenizer.eos_token_id, []
    for row, sequence in enumerate(sequences.tolist()):
        response = sequence[len(prompts[row // 8]) :]
        end = response.index(eos) + 1 if eos in response else len(response)
        responses.append(response[:end])
    unused = [[0.0] * len(response) for response in responses]  # grpo.py never reads log μ
    batch = Rollout.pack(
        prompts=prompts, tokens=responses, logps=unused, eos=[eos], device=ALONE.device
    )
    batch.advantages = module.advantages(REWARDS).flatten()  # [N]
    policy = Policy(policies["new"])
    batch.old_logp = all_logprobs(Policy(policies["old"]), batch, ARGS, ALONE).logp  # [N, T]
    batch.ref_logp = all_logprobs(Policy(policies["ref"]), batch, ARGS, ALONE).logp  # [N, T]
    policy.zero_grad()
    denominator, clipped, tokens = 0.0, 0.0, 0.0
    for rows in micro_batches(policy, batch, ARGS.micro_tokens, ALONE):
        micro = batch.rows(rows)
        logp, _ = response_logprobs(policy, micro, ARGS.temperature)  # [n, T]
        loss, count = module.policy_loss(ARGS, logp, micro)
        stats = module.measures(ARGS, logp.detach(), micro)
        loss.backward()
        denominator += count
        clipped += stats["clip_share"][0]
        tokens += stats["clip_share"][1]
    divide_gradients(policy, denominator, ALONE)
    return whole_gradient(policies["new"]), float(clipped / tokens)


def whole_gradient(policy: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def difference(one: Tensor, other: Tensor) -> float:
    """Relative to the length of the second."""
    return float((one - other).norm() / other.norm())


def test_the_page_has_the_gradient_of_grpo(policies):
    found, sequences = nano_gradient(nano, policies)
    expected, clip_share = grpo_gradient(grpo, policies, sequences)
    assert 0.05 < clip_share < 0.5
    assert difference(found, expected) < 1e-6


NANO = {
    "each place predicts its own token": ("sequences[:, 1:, None]", "sequences[:, :-1, None]"),
    "EOS is left out": ("mask[rows, last] = 1.0", "mask[rows, last] = 1.0 * (next_token > 1)"),
    "clip without min": ("torch.minimum(ratio * A, clipped * A)", "clipped * A"),
    "KL the other way": ("(ref_logp - logp).exp() - (ref_logp - logp)", "(logp - ref_logp).exp()"),
    "token mean": ("(objective * mask).sum(dim=1) / mask.sum(dim=1)", "objective[mask > 0]"),
}


@pytest.mark.parametrize("damage", NANO)
def test_a_damage_of_the_page_shows(policies, damage):
    found, sequences = nano_gradient(mutate(nano, *NANO[damage]), policies)
    expected, _ = grpo_gradient(grpo, policies, sequences)
    assert difference(found, expected) > 1e-3

"""nano.py has the gradient of grpo.py and common: on one rollout, with clipped tokens and KL."""

import copy

import grpo
import nano
import torch
from common.batch import Rollout
from common.distributed import ALONE, divide_gradients
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs
from torch import Tensor, nn

PROMPTS = ["7*8-9+6=", "1+2=", "5*5-5+8*3=", "9-9="]
REWARDS = torch.tensor([[1.0] * 8, [1.0] * 3 + [0.0] * 5, [0.0] * 7 + [1.0], [1.0, 0.0] * 4])
ARGS = grpo.Args(micro_tokens=300)  # several micro-batches


def three_policies() -> dict[str, nn.Module]:
    """Return π_old, and at some distance from it π_ref and π_θ."""
    nano.set_seed(1)
    policies = {"old": nano.AutoModelForCausalLM.from_pretrained(nano.MODEL)}
    for name in ("ref", "new"):
        policies[name] = copy.deepcopy(policies["old"])
        for parameter in policies[name].parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
    return policies


def grpo_gradient(policies: dict[str, nn.Module], sequences: Tensor) -> tuple[Tensor, float]:
    """Return what grpo.py and common give for these sequences, and the share of clipped tokens."""
    prompts = [nano.tokenizer.encode(prompt) for prompt in PROMPTS]
    eos, responses = nano.tokenizer.eos_token_id, []
    for row, sequence in enumerate(sequences.tolist()):
        response = sequence[len(prompts[row // 8]) :]
        end = response.index(eos) + 1 if eos in response else len(response)
        responses.append(response[:end])
    unused = [[0.0] * len(response) for response in responses]  # grpo.py never reads log μ
    how = {"logps": unused, "eos": [eos], "device": ALONE.device}
    batch = Rollout.pack(prompts=prompts, tokens=responses, **how)
    batch.advantages = grpo.advantages(REWARDS).flatten()  # [N]
    batch.old_logp = all_logprobs(Policy(policies["old"]), batch, ARGS, ALONE).logp  # [N, T]
    batch.ref_logp = all_logprobs(Policy(policies["ref"]), batch, ARGS, ALONE).logp  # [N, T]
    policy = Policy(policies["new"])
    policy.zero_grad()
    denominator, clipped, tokens = 0.0, 0.0, 0.0
    for rows in micro_batches(policy, batch, ARGS.micro_tokens, ALONE):
        micro = batch.rows(rows)
        logp, _ = response_logprobs(policy, micro, ARGS.temperature)  # [n, T]
        loss, count = grpo.policy_loss(ARGS, logp, micro)
        loss.backward()
        denominator += count
        cut, of = grpo.measures(ARGS, logp.detach(), micro)["clip_share"]
        clipped, tokens = clipped + cut, tokens + of
    divide_gradients(policy, denominator, ALONE)
    return whole_gradient(policies["new"]), float(clipped / tokens)


def whole_gradient(policy: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def test_the_page_has_the_gradient_of_grpo():
    policies = three_policies()
    nano.set_seed(1)
    sequences, mask = nano.sample(policies["old"], PROMPTS)  # [N, S], [N, S-1]
    A = nano.advantages(REWARDS).view(-1, 1)  # [N, 1]
    logp = {name: nano.log_probs(policy, sequences) for name, policy in policies.items()}
    nano.policy_loss(logp["new"], logp["old"].detach(), logp["ref"].detach(), A, mask).backward()
    found = whole_gradient(policies["new"])
    expected, clip_share = grpo_gradient(policies, sequences)
    assert 0.05 < clip_share < 0.5
    assert (found - expected).norm() < 1e-6 * expected.norm()

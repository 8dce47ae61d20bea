"""nano.py has the numbers of grpo.py and common: log-probs and mask of one rollout, advantages, and
the loss with its gradient, with clipped tokens and KL."""

import grpo
import nano
import torch
from common.batch import Rollout
from common.logprobs import Policy, response_logprobs

from tests import adapters

PROMPTS = ["7*8-9+6=", "1+2=", "5*5-5+8*3=", "9-9="]
REWARDS = torch.tensor([[1.0] * 8, [1.0] * 3 + [0.0] * 5, [0.0] * 7 + [1.0], [1.0, 0.0] * 4])


def test_the_page_has_the_numbers_of_grpo():
    nano.set_seed(1)
    policy = nano.AutoModelForCausalLM.from_pretrained(nano.MODEL)
    sequences, mask = nano.sample(policy, PROMPTS)  # [N, S], [N, S-1]
    old_logp = nano.log_probs(policy, sequences).detach()  # [N, S-1]

    prompts = [nano.tokenizer.encode(prompt) for prompt in PROMPTS]
    eos, responses = nano.tokenizer.eos_token_id, []
    for row, sequence in enumerate(sequences.tolist()):
        response = sequence[len(prompts[row // 8]) :]
        end = response.index(eos) + 1 if eos in response else len(response)
        responses.append(response[:end])
    unused = [[0.0] * len(response) for response in responses]  # log μ
    batch = Rollout.pack(prompts=prompts, tokens=responses, logps=unused, eos=[eos], device="cpu")
    expected, _ = response_logprobs(Policy(policy), batch, 1.0)  # [N, T]
    torch.testing.assert_close(old_logp[mask > 0], expected.detach()[batch.mask > 0])

    A = nano.advantages(REWARDS)  # [P, G]
    torch.testing.assert_close(A, grpo.advantages(REWARDS))

    logp, ref_logp = (old_logp + 0.2 * torch.randn_like(old_logp) for _ in range(2))
    logp.requires_grad_()
    columns = {"logp": logp, "old_logp": old_logp, "ref_logp": ref_logp, "mask": mask}
    loss = nano.policy_loss(**columns, A=A.view(-1, 1))
    columns |= {"rollout_logp": old_logp, "entropy": 0 * old_logp, "advantages": A.flatten()}
    expected, means = adapters.policy_loss("grpo", **columns)
    assert 0.05 < means["clip_share"] < 0.5
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(x, logp)[0] for x in (loss, expected)]
    torch.testing.assert_close(*gradients)

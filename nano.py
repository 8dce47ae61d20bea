"""GRPO from prompt to gradient on one page: python nano.py (half a minute on one core).

A model samples a group of responses to each prompt. A verifier gives 1 point for a right answer.
A response above the mean of its group becomes more likely, and a response below it less likely.
grpo.py computes the same loss and adds what a real run needs: flags, ranks, vLLM, resume and more.
1. Kept: the clip and the KL term of the loss.
2. Kept: z-scores within groups as advantages, and several updates per rollout.
3. Left out: ranks and sharding, vLLM, resume and logging to files.
4. Left out: exact sums over micro-batches, because a mini-batch fits into one pass.
"""

import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, set_seed

MODEL = Path(__file__).parent / "common/tiny/model"  # 124k parameters; a token is a character
P, G = 16, 8  # prompts per rollout, and responses to each: N = P·G rows
S = 14 + 64  # positions per row: at most 14 for the prompt, and 64 or more for the response
tokenizer = AutoTokenizer.from_pretrained(MODEL)


def draw_problem() -> tuple[str, str]:
    """Return a prompt, like `7*8-9+6=`, and its answer, `53`, worked left to right, modulo 100."""
    prompt = value = random.choice("0123456789")
    for _ in range(random.randint(1, 6)):
        prompt += random.choice("+-*") + random.choice("0123456789")
        value = str(eval(value + prompt[-2:]) % 100)  # 7*8 is 56, 56-9 is 47, 47+6 is 53
    return prompt + "=", value  # a good response is 7*8=56;56-9=47;47+6=53#53: working, #, answer


@torch.no_grad()
def sample(policy: PreTrainedModel, prompts: list[str]) -> tuple[Tensor, Tensor]:
    """Return N sampled sequences `[N, S]`, and a mask `[N, S-1]`: 1 if the next one is sampled."""
    padded = tokenizer(prompts, padding="max_length", max_length=S, return_tensors="pt")
    sequences = padded["input_ids"].repeat_interleave(G, dim=0)  # [N, S]: padded on the right
    ends = padded["attention_mask"].sum(dim=1).repeat_interleave(G)  # [N]: tokens so far
    mask = torch.zeros(len(sequences), S - 1)  # [N, S-1]
    rows = torch.arange(len(sequences))  # [n]: the rows that are not finished
    while len(rows) > 0:  # each pass computes all positions again: a cache would need more code
        last = ends[rows] - 1  # [n]: the position that predicts the next token
        logits = policy(sequences[rows, : ends[rows].max()]).logits  # [n, positions, V]
        probabilities = logits[torch.arange(len(rows)), last].softmax(dim=-1)  # [n, V]
        next_token = torch.multinomial(probabilities, 1)[:, 0]  # [n]
        sequences[rows, last + 1] = next_token
        mask[rows, last] = 1.0
        ends[rows] += 1
        rows = rows[(next_token != tokenizer.eos_token_id) & (ends[rows] < S)]
    return sequences, mask


def log_probs(policy: PreTrainedModel, sequences: Tensor) -> Tensor:
    """Return log π of each next token `[n, S-1]`. Attention is causal, so pads do not matter."""
    logp = policy(sequences).logits.log_softmax(dim=-1)  # [n, S, V]
    return logp[:, :-1].gather(-1, sequences[:, 1:, None])[..., 0]  # [n, S-1]


def advantages(rewards: Tensor) -> Tensor:
    """Return group z-scores `[P, G]`. Rewards [1, 0, 0, 0] give about [1.5, -0.5, -0.5, -0.5]."""
    centred = rewards - rewards.mean(dim=1, keepdim=True)  # [P, G]; 0 if all are right, or wrong
    return centred / (rewards.std(dim=1, keepdim=True) + 1e-6)  # [P, G]


def policy_loss(
    logp: Tensor, old_logp: Tensor, ref_logp: Tensor, A: Tensor, mask: Tensor
) -> Tensor:
    """Return minus the objective, averaged over each response's tokens, then over responses."""
    ratio = (logp - old_logp).exp()  # [n, S-1]: r; 1 until the rollout's first optimiser step
    clipped = ratio.clamp(1 - 0.2, 1 + 0.2)  # [n, S-1]; outside 1 ± ε a constant: no gradient
    k3 = (ref_logp - logp).exp() - (ref_logp - logp) - 1  # [n, S-1]: estimates the KL to π_ref
    objective = torch.minimum(ratio * A, clipped * A) - 0.01 * k3  # [n, S-1]: β = 0.01
    return -((objective * mask).sum(dim=1) / mask.sum(dim=1)).mean()


def main() -> None:
    set_seed(1)
    policy = AutoModelForCausalLM.from_pretrained(MODEL)  # π_θ, which is trained
    reference = AutoModelForCausalLM.from_pretrained(MODEL)  # π_ref, the model before training
    optimizer = torch.optim.AdamW(policy.parameters(), 3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(1, 21):
        # 1. Rollout
        problems = [draw_problem() for _ in range(P)]
        sequences, mask = sample(policy, [prompt for prompt, _ in problems])  # [N, S], [N, S-1]
        # 2. Reward and advantages
        texts = tokenizer.batch_decode(sequences, skip_special_tokens=True)
        scores = [float(text.endswith("#" + problems[i // G][1])) for i, text in enumerate(texts)]
        rewards = torch.tensor(scores).view(P, G)
        A = advantages(rewards).view(-1, 1)  # [N, 1]: one for all tokens of a response
        # 3. Log-probs
        old_logp = log_probs(policy, sequences).detach()  # [N, S-1]: π_old, the policy that sampled
        ref_logp = log_probs(reference, sequences).detach()  # [N, S-1]
        # 4. Update: four optimiser steps, on four groups each
        for rows in torch.arange(P * G).chunk(4):
            logp = log_probs(policy, sequences[rows])  # [n, S-1]
            policy_loss(logp, old_logp[rows], ref_logp[rows], A[rows], mask[rows]).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        # 5. Log
        print(f"step {step}: reward {rewards.mean():.2f}, tokens {mask.sum(dim=1).mean():.1f}")
    for when, model in (("before", reference), ("after", policy)):
        sequences, _ = sample(model, ["7*8-9+6="])
        print(f"a sample {when}: {tokenizer.decode(sequences[0], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()

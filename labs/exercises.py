"""Six exercises beyond the losses, solved. `python -m labs.blank NAME` prints one without its body;
what is held of it stands in exercise_checks.py."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def sampler_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log μ of sampled tokens: `logits [N, V]` as the model gave them, `tokens [N]` -> `[N]`.

    Of the policy that was sampled, at this temperature, over the full vocabulary; in float32 or
    better, and finite for logits of any size.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()  # [N, V]
    return (wide / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def rank_advantages(
    rewards: Tensor, groups: Tensor, count: int, all_sum: Callable[[Tensor], Tensor]
) -> Tensor:
    """Group z-scores where a group is spread over ranks: this rank's `rewards [n]`, each of group
    `groups [n]` (0 to count - 1), of any size -> its advantages `[n]`.

    `all_sum(x)` is the sum over all ranks of their `x`; every rank must call it equally often, with
    the same shapes. Sample standard deviation (divide by the size - 1) plus 1e-6; equal rewards, be
    they part marks in float32, and a group of one give 0 to 1e-6. A rank may lack rows of a group.
    """
    exact = rewards.double()  # [n]: the float32 mean of eight 0.7 is not 0.7
    zero = exact.new_zeros(count)
    size = all_sum(zero.index_add(0, groups, torch.ones_like(exact)))  # [count]
    mean = all_sum(zero.index_add(0, groups, exact)) / size  # [count]
    centred = exact - mean[groups]  # [n]: squares of what is centred cancel nothing
    variance = all_sum(zero.index_add(0, groups, centred**2)) / (size - 1).clamp(min=1)  # [count]
    return (centred / (variance.sqrt()[groups] + 1e-6)).to(rewards.dtype)


def accumulate(parameter: Tensor, micros: list[Callable[[], tuple[Tensor, Tensor]]]) -> float:
    """The mean loss over all tokens of a mini-batch, and its gradient, micro-batch by micro-batch.

    Each of `micros`, called, gives the sum of its tokens' losses, with a graph, and their number;
    two graphs do not fit into memory at once. Afterwards `parameter.grad` is the gradient of the
    mean over all tokens (it was None), however they are divided into micro-batches.
    """
    total, tokens = 0.0, 0.0
    for micro in micros:
        loss, count = micro()
        loss.backward()
        total, tokens = total + loss.item(), tokens + float(count)
    parameter.grad /= tokens
    return total / tokens


def ess_ratio(log_w: Tensor) -> Tensor:
    """(Σ w)² / (B Σ w²) of importance weights w, from their logarithms `[B]`: between 1/B and 1.

    Finite for any of them: after a thousand tokens log w is a hundred, and w is inf or 0.
    """
    return (2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp() / len(log_w)


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate, from n samples of which c are right, of the chance that at least one
    of k new samples is right; k <= n, and n may be 10,000."""
    # C(n-c, k) / C(n, k), without the factors that both have; 0 where fewer than k are wrong
    return 1 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))


def shift(sequences: Tensor, prompt_len: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Which column predicts which token: `sequences [n, S]` are prompt, response, padding; the
    response of row i is columns prompt_len[i] to ends[i] - 1 (its EOS the last of them).

    -> `predicts [n, S]` of bool, True on the columns whose logits predict a response token, and the
    tokens that they predict, `[M]`, in the order of `predicts.nonzero()`. Any id may be padding's.
    """
    after = torch.arange(1, sequences.shape[1] + 1)  # [S]: the column that each one predicts
    predicts = (after >= prompt_len[:, None]) & (after < ends[:, None])  # [n, S]
    return predicts, sequences.roll(-1, dims=1)[predicts]

"""Six exercises beyond the losses, with solutions. `python -m labs.blank NAME` prints one without
its body; exercise_checks.py has the checks."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


def sampler_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return log μ of sampled tokens: the model's `logits [N, V]` and `tokens [N]` -> `[N]`.

    μ is the policy that was sampled, at this temperature and over the full vocabulary. The result
    is in float32 or better, and finite for logits of any size.
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()  # [N, V]
    return (wide / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def rank_advantages(
    rewards: Tensor, groups: Tensor, count: int, all_sum: Callable[[Tensor], Tensor]
) -> Tensor:
    """Compute group z-scores when groups are spread over ranks: this rank's `rewards [n]`, and the
    group of each, `groups [n]` (0 to count - 1) -> its advantages `[n]`. Groups have any size.

    `all_sum(x)` sums `x` over all ranks; every rank must call it equally often, with the same
    shapes. Divide by the sample standard deviation (size - 1) plus 1e-6. Equal rewards, also part
    marks in float32, and a group of one give 0 to 1e-6. A rank may lack rows of a group.
    """
    exact = rewards.double()  # [n], because the float32 mean of eight 0.7 is not 0.7
    zero = exact.new_zeros(count)
    size = all_sum(zero.index_add(0, groups, torch.ones_like(exact)))  # [count]
    mean = all_sum(zero.index_add(0, groups, exact)) / size  # [count]
    centred = exact - mean[groups]  # [n]: the squares of centred rewards lose no digits
    variance = all_sum(zero.index_add(0, groups, centred**2)) / (size - 1).clamp(min=1)  # [count]
    return (centred / (variance.sqrt()[groups] + 1e-6)).to(rewards.dtype)


def accumulate(parameter: Tensor, micros: list[Callable[[], tuple[Tensor, Tensor]]]) -> float:
    """Compute the mean loss over all tokens of a mini-batch and its gradient, in micro-batches.

    Calling one of `micros` returns the sum of its tokens' losses, with a graph, and their number.
    Two graphs do not fit into memory at once. Afterwards `parameter.grad`, which was None, is the
    gradient of the mean over all tokens, however they are divided into micro-batches.
    """
    total, tokens = 0.0, 0.0
    for micro in micros:
        loss, count = micro()
        loss.backward()
        total, tokens = total + loss.item(), tokens + float(count)
    parameter.grad /= tokens
    return total / tokens


def ess_ratio(log_w: Tensor) -> Tensor:
    """Compute (Σ w)² / (B Σ w²) of importance weights w from their logarithms `[B]`.

    It is between 1/B and 1, and finite for any log w: after a thousand tokens w may be inf or 0.
    """
    return (2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0)).exp() / len(log_w)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Compute the unbiased estimate of the chance that at least one of k new samples is right, from
    n samples of which c are right; k <= n, and n may be 10,000."""
    # C(n-c, k) / C(n, k), without their common factors; 0 if fewer than k are wrong.
    return 1 - math.prod(1 - k / i for i in range(n - c + 1, n + 1))


def shift(sequences: Tensor, prompt_len: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Find which column predicts which token. `sequences [n, S]` are prompt, response and padding.
    The response of row i is in columns prompt_len[i] to ends[i] - 1, with its EOS as the last.

    Return `predicts [n, S]`, bool, True on the columns whose logits predict a response token, and
    these tokens, `[M]`, in the order of `predicts.nonzero()`. Padding may have any id.
    """
    after = torch.arange(1, sequences.shape[1] + 1)  # [S]: the column that each column predicts
    predicts = (after >= prompt_len[:, None]) & (after < ends[:, None])  # [n, S]
    return predicts, sequences.roll(-1, dims=1)[predicts]

"""The losses of stapo.py, maspo.py and minirl.py for another framework, token by token.

Each function returns two tensors `[N, T]`: the loss of every token, before the mask, and where the
method acted. AVERAGE has verl's name of the average that the method takes over the tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tokens(NamedTuple):
    logp: Tensor  # [N, T]: log π_θ, the only one with a gradient
    old_logp: Tensor  # [N, T]: log π_old
    gap: Tensor  # [N, T]: π_old/μ
    A: Tensor  # [N, T] or [N, 1]: Â
    mask: Tensor  # [N, T]
    entropy: Tensor  # [N, T]


def stapo(t: Tokens) -> tuple[Tensor, Tensor]:
    ratio = (t.logp - t.old_logp).exp()
    objective = torch.minimum(ratio * t.A, ratio.clamp(0.8, 1.28) * t.A)
    # τ_h: a quantile over the tokens that the framework hands over, those of a micro-batch.
    sure = t.entropy < torch.quantile(t.entropy[t.mask.bool()].float(), 0.8) - 1e-5
    spurious = (t.A > 0) & (t.logp.detach().exp() < 0.002) & sure
    return -objective * ~spurious, spurious


def maspo(t: Tokens) -> tuple[Tensor, Tensor]:
    ratio = (t.logp - t.old_logp).exp()
    distance = ratio.detach() - 1
    width = (1 / t.old_logp.exp() ** 0.3).clamp(1, 10)
    risk = torch.where(t.A > 0, 1 + 0.03 * t.A, 1 / (1 - 0.03 * t.A)).clamp(0.1, 10)
    sigma = width * risk
    outward = t.A * distance > 0
    gate = torch.where(outward, (-(distance**2) / (2 * sigma**2)).exp(), 1.0)
    return -gate * ratio * t.A, gate < 1


def minirl(t: Tokens) -> tuple[Tensor, Tensor]:
    ratio = (t.logp.detach() - t.old_logp).exp()
    cut = ((t.A > 0) & (ratio > 1.27)) | ((t.A < 0) & (ratio < 0.8))
    weight = (ratio * t.gap).clamp(max=5)  # π_θ/μ
    return -(~cut * weight * t.A * t.logp), cut


AVERAGE = {stapo: "token-mean", maspo: "token-mean", minirl: "seq-mean-token-sum"}

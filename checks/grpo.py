"""GRPO: outside numbers, closed forms, exact enumerations."""

from dataclasses import replace
import itertools
from types import ModuleType

import torch
from torch import Tensor

from . import Run
from .formulas import Batch, clip_statistics, k3, response_mean, surrogate
from .harness import POLICIES, ZSCORES, every_sample, loss_and_gradient, loss_of, near, no_kl


def objective(b: Batch) -> tuple[Tensor, int]:
    """DeepSeekMath's objective; with `--kl_ratio` DeepSeek-V3.2's, whose k3 is multiplied by r."""
    kl = b.args.beta * k3(b) if b.args.beta else 0.0
    return response_mean(surrogate(b) - kl, b.mask)


statistics = clip_statistics
CASES = [
    {"clip_low": 0.2, "clip_high": 0.28, "beta": 0.3},
    {"clip_low": 0.3, "clip_high": 0.2, "beta": 0.3, "kl_ratio": True},
    {"beta": 0.0},
]


RATIOS = (1.0, 1.1, 1.21, 1.25, 1.5, 2.0, 20.0, 0.9, 0.81, 0.75, 0.5)


def check_coefficients(module: ModuleType) -> None:
    """The gradient weight of a one-token response is r Â, or 0 if the clip acts: r > 1 + clip_high
    with Â > 0, or r < 1 - clip_low with Â < 0."""
    pairs = torch.tensor([*itertools.product(RATIOS, (1.0, -1.0, 6.0))], dtype=torch.float64)
    r, A = pairs.T  # [n], [n]: a response each
    old = torch.full((len(r), 1), -3.0, dtype=torch.float64)
    batch = {"logp": old + r.log()[:, None], "old_logp": old, "advantages": A, "mask": old / old}
    for low, high in ((0.2, 0.2), (0.3, 0.6)):
        args = no_kl(module, clip_low=low, clip_high=high)
        acts = (A > 0) & (r > 1 + high) | (A < 0) & (r < 1 - low)
        expected = torch.where(acts, 0.0, r * A)
        weights = -len(r) * loss_and_gradient(module, args, **batch)[1][:, 0]
        for (ratio, advantage), ours, theirs in zip(pairs.tolist(), weights, expected):
            told = f"r = {ratio}, Â = {advantage}, --clip_low {low} --clip_high {high}"
            near(ours, theirs, f"the weight at {told}")


def check_eos_counts(module: ModuleType) -> None:
    """At r = 1 the gradient weight of every token is Â / |y|, divided by the number of responses,
    also of the last one, the EOS; that of padding is 0."""
    mask = torch.tensor([[1.0, 1, 1, 0], [1, 0, 0, 0]], dtype=torch.float64)
    A = torch.tensor([1.0, 2.0], dtype=torch.float64)
    batch = {"logp": -mask, "old_logp": -mask, "advantages": A, "mask": mask}
    _, gradient = loss_and_gradient(module, no_kl(module), **batch)
    expected = -A[:, None] * mask / mask.sum(1, keepdim=True) / 2
    near(gradient, expected, "∂ loss / ∂ log π of responses of 3 tokens and of 1")


def kl_term(module: ModuleType, logp: Tensor, ref: Tensor, draws: list, **flags: object) -> Tensor:
    """Return the loss with Â = 0, divided by β, over all samples of π_old. `logp` and `ref` are
    the log-probs of the six outcomes."""
    rows, old = every_sample(draws)
    columns = {"logp": logp, "old_logp": old, "ref_logp": ref}
    batch = {name: x[rows][:, None] for name, x in columns.items()}  # [n, 1]
    ones = torch.ones(len(rows), 1, dtype=torch.float64)
    args = replace(module.Args(), beta=0.5, **flags)
    return loss_of(module, args, **batch, mask=ones, advantages=0 * ones[:, 0]) / 0.5


def check_kl(module: ModuleType) -> None:
    """Over all samples of π_θ the value of the KL term is KL(π_θ ‖ π_ref). Its weight on ∇ log π is
    β (π_ref/π_θ - 1), which is the gradient of KL(π_ref ‖ π_θ)."""
    for draws, other in zip(POLICIES, POLICIES[1:]):
        logp, ref = every_sample(draws)[1].requires_grad_(), every_sample(other)[1]
        term = kl_term(module, logp, ref, draws)
        near(term, (logp.exp() * (logp - ref)).sum(), "the KL term, over all samples of π_θ")
        (gradient,) = torch.autograd.grad(term, logp)
        weight = -gradient / logp.exp()
        near(weight, (ref - logp).exp() - 1, "the KL term's weight on ∇ log π, divided by β")


def check_kl_ratio(module: ModuleType) -> None:
    """With kl_ratio, over all samples of π_old, the KL term is KL(π_θ ‖ π_ref) in value and
    gradient, although π_θ is another policy. Without the flag it is so in neither."""
    draws, other, third = POLICIES
    theta, ref = every_sample(other)[1].requires_grad_(), every_sample(third)[1]
    logp = theta.log_softmax(0)
    kl = (logp.exp() * (logp - ref)).sum()
    (truth,) = torch.autograd.grad(kl, theta, retain_graph=True)
    terms = {}
    for weighed in (True, False):
        loss = kl_term(module, logp, ref, draws, kl_ratio=weighed)
        terms[weighed] = loss, torch.autograd.grad(loss, theta, retain_graph=True)[0]
    near(terms[True][0], kl, "with kl_ratio the KL term, over all samples of π_old")
    near(terms[True][1], truth, "its gradient by the logits, against KL(π_θ ‖ π_ref)'s")
    assert abs(terms[False][0] - kl) > 1e-3, "without kl_ratio k3 is weighed by r, too"
    assert not torch.allclose(terms[False][1], truth, rtol=1e-2)


FIXTURES = {"grpo_eps0.2_seqmean": {}}
SHARED = ZSCORES
LOG_RATIO = "(logp - batch.old_logp)"
RATIO = f"ratio = {LOG_RATIO}.exp()"
SURROGATE = "torch.minimum(ratio * A, clipped * A)"
MAXIMUM = "torch.maximum(ratio * A, clipped * A)"
AVERAGE = "(objective * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)"
K3 = "log_ref_ratio.exp() - log_ref_ratio - 1"
WEIGHED = f"kl = {LOG_RATIO}.exp() * kl"
RETURN = "return -per_response.sum(), mask.new_tensor(len(mask))"
STD = "rewards.std(dim=1, keepdim=True)"
NO_EOS = "(objective * (e := mask * (mask.cumsum(1) < mask.sum(1)[:, None]))).sum(1)"
SUM = f"({LOG_RATIO} * mask).sum(1, keepdim=True)"
LENGTH = "mask.sum(1, keepdim=True).clamp(min=1)"
ADVANTAGE = "A = batch.advantages[:, None]"
WHITENED = f"{ADVANTAGE}\n    A = (A - A.mean()) / (A.std() + 1e-8)"
CLIP = "ratio.clamp(1 - args.clip_low, 1 + args.clip_high)"
BOUNDS = "-args.clip_low, args.clip_high"
# Mistakes that students and public code make: the judge (labs/judge.py) and `labs.bug` name them
MUTANTS = {
    "equal rewards not made 0": ("rewards = rewards - rewards[:, :1]", "rewards = 1.0 * rewards"),
    "mean of the batch": ("rewards.mean(dim=1, keepdim=True)", "rewards.mean()"),
    "population std": (STD, "rewards.std(dim=1, keepdim=True, correction=0)"),
    "sequence ratio": (RATIO, f"ratio = {SUM}.exp().expand_as(logp)"),
    "GSPO's ratio": (RATIO, f"ratio = ({SUM} / {LENGTH}).exp().expand_as(logp)"),
    "log-ratio divided by the length": (RATIO, f"ratio = ({LOG_RATIO} / {LENGTH}).exp()"),
    "π_old/π_θ for π_θ/π_old": (RATIO, "ratio = (batch.old_logp - logp).exp()"),
    "log r for r": (RATIO, f"ratio = {LOG_RATIO}"),
    "μ for π_old": (RATIO, RATIO.replace("old_logp", "rollout_logp")),
    "r itself clamped, as log r at ±ε": (RATIO, f"ratio = {LOG_RATIO}.clamp({BOUNDS}).exp()"),
    "clip of log r at ±ε": (CLIP, f"{LOG_RATIO}.clamp({BOUNDS}).exp()"),
    "ε at its default": (CLIP, "ratio.clamp(0.8, 1.2)"),
    "bounds swapped": (CLIP, "ratio.clamp(1 - args.clip_high, 1 + args.clip_low)"),
    "max for min": (SURROGATE, MAXIMUM),
    "max for min where Â < 0": (SURROGATE, f"torch.where(A < 0, {MAXIMUM}, {SURROGATE})"),
    "clip without min": (SURROGATE, "clipped * A"),
    "no clip": (SURROGATE, "ratio * A"),
    "a dual clip at 3": (SURROGATE, f"torch.where(A < 0, {SURROGATE}.maximum(3 * A), {SURROGATE})"),
    "Â whitened again": (ADVANTAGE, WHITENED),
    "KL to π_old": ("batch.ref_logp - logp", "batch.old_logp - logp"),
    "KL direction": ("batch.ref_logp - logp", "logp - batch.ref_logp"),
    "k1 for k3": (K3, "-log_ref_ratio"),
    "k2 for k3": (K3, "log_ref_ratio**2 / 2"),
    "KL without gradient": (K3, f"({K3}).detach()"),
    "--beta ignored": ("args.beta * k3", "k3"),
    "KL added to the objective": ("objective - args.beta", "objective + args.beta"),
    "--kl_ratio ignored": ("    if args.kl_ratio:", "    if False:"),
    "k3 times r, a number": (WEIGHED, WEIGHED.replace("logp -", "logp.detach() -")),
    "dropped EOS": (AVERAGE, f"{NO_EOS} / e.sum(1).clamp(min=1)"),
    "dropped EOS, counted in |y|": (AVERAGE, f"{NO_EOS} / mask.sum(1).clamp(min=1)"),
    "sum over a response's tokens": (AVERAGE, "(objective * mask).sum(1)"),
    "token-mean": (RETURN, "return -(objective * mask).sum(), mask.sum()"),
    "a mean where the sum is asked": (RETURN, RETURN.replace("sum()", "mean()")),
    "mean of the part": (RETURN, "return -per_response.mean(), mask.new_tensor(1.0)"),
}


RUN = Run(stored={"beta": 0.1, "grad_clip": 6.0}, learns_in=8)

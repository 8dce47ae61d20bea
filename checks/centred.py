"""Score centering: outside numbers."""

from types import ModuleType

import torch
from torch import Tensor

from . import Run
from .formulas import Batch, share
from .harness import CENTRED, FIXTURE, near, no_kl


def bounded(args: object, ratio: Tensor) -> Tensor:
    """Return w as a function of π/μ."""
    if args.weight == "tis":
        return ratio.clip(max=args.w_high)
    if args.weight == "icepop":
        return ratio * ((args.w_low <= ratio) & (ratio <= args.w_high))
    return 0 * ratio + 1


def inside(args: object, pi: Tensor, mu: Tensor, A: Tensor) -> Tensor:
    """Return DPPO's M: 0 where π is beyond δ of μ in the direction of A (or in both); 1 without
    δ."""
    if args.two_sided:
        return ((pi - mu).abs() <= (args.delta or torch.inf)).double()
    return (A.sign() * (pi - mu) <= (args.delta or torch.inf)).double()


def coefficients(b: Batch) -> Tensor:
    """Return c `[n, T, K]`: μ w - α π on the K tokens, with α π equal to μ w in the tail."""
    p, q = b.top_logp.detach().exp(), b.sampler_top.exp()
    rho = (1 - q.sum(-1)).clip(1e-6) / (1 - p.sum(-1)).clip(1e-6)
    alpha = rho * bounded(b.args, rho.reciprocal())
    w = bounded(b.args, p / q) * inside(b.args, p, q, b.A[:, None, None])
    return q * w - alpha[..., None] * p


def sampled_weight(b: Batch) -> Tensor:
    p, mu = b.logp.detach().exp(), b.mu.exp()
    return bounded(b.args, p / mu) * inside(b.args, p, mu, b.A[:, None])


def objective(b: Batch) -> tuple[Tensor, int]:
    """J is the sum over tokens of Â (w log π - Σ c log π), without a gradient through w and c."""
    score = sampled_weight(b) * b.logp
    if b.args.centre_top > 0:
        score = score - (coefficients(b) * b.top_logp).sum(-1)
    return (b.A[:, None] * score * b.mask).sum(1).mean(), len(b.mask)


def statistics(b: Batch) -> dict[str, tuple]:
    """Means are over all response tokens. weight_max is the largest π/μ before its bound, centred
    half of the sum of |c|, tail the sampler's probability of other tokens than its K."""
    ratio = (b.logp.detach() - b.mu).exp()
    pairs = {
        "weight": share(sampled_weight(b), b.mask),
        "weight_max": (ratio[b.mask > 0].max(), "max"),
    }
    if b.args.centre_top > 0:
        pairs["centred"] = share(coefficients(b).abs().sum(-1) / 2, b.mask)
        pairs["tail"] = share(1 - b.sampler_top.exp().sum(-1), b.mask)
    return pairs


BOUNDS = {"w_low": 0.8, "w_high": 1.2}
CASES = [{}, {"centre_top": 0}, {"weight": "tis"} | BOUNDS, {"weight": "icepop"} | BOUNDS]
CASES += [{"weight": "tis", "w_high": 20.0, "delta": 0.03}]
CASES += [{"weight": "tis", "w_high": 20.0, "delta": 0.03, "two_sided": True}]


def check_published(module: ModuleType) -> None:
    """The term and its gradient are those of vime's function (losses.json)."""
    numbers = FIXTURE["score_centering"]
    mu = torch.tensor(numbers["sampler_logp"], dtype=torch.float64)[None]  # [1, T, K]
    for case, flags in numbers["flags"].items():
        top = torch.tensor(numbers["logp"], dtype=torch.float64)[None].requires_grad_()
        b = Batch(args=no_kl(module, **flags), top_logp=top, sampler_top=mu)
        b.advantages = torch.ones(1, dtype=torch.float64)
        c = module.centring(b.args, b)
        near((c * top).sum(-1)[0], numbers["cases"][case]["term"], f"the term, {case}", 1e-6)
        near(c[0], numbers["cases"][case]["gradient"], f"its gradient, {case}", 1e-6)


SHARED = CENTRED


RUN = Run(
    stored={"weight": "tis", "w_high": 1.2, "grad_clip": 25.0},
    needs={
        "centre_top": {"centre_top": 2},
        "two_sided": {"delta": 0.01},
        "w_low": {"weight": "icepop", "w_low": 0.9},
    },
)

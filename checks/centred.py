"""Score centering: what is left of the gradient's mean, with every token enumerated."""

from types import ModuleType

import torch
from torch import Tensor

from . import Run
from .formulas import Batch, share
from .harness import CENTRED, FIXTURE, near, no_kl, terms


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
        "weight_max": (ratio[b.mask > 0].max(), None),
    }
    if b.args.centre_top > 0:
        pairs["centred"] = share(coefficients(b).abs().sum(-1) / 2, b.mask)
        pairs["tail"] = share(1 - b.sampler_top.exp().sum(-1), b.mask)
    return pairs


BOUNDS = {"w_low": 0.8, "w_high": 1.2}
CASES = [{}, {"centre_top": 0}, {"weight": "tis"} | BOUNDS, {"weight": "icepop"} | BOUNDS]
CASES += [{"weight": "tis", "w_high": 20.0, "delta": 0.03}]
CASES += [{"weight": "tis", "w_high": 20.0, "delta": 0.03, "two_sided": True}]
WEIGHTS = CASES[:1] + CASES[2:]
V = 8  # tokens at the enumerated position


def place(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for V tokens at one prefix, the logits of π with gradient, μ, and rewards."""
    generator = torch.Generator().manual_seed(seed)
    logits, noise, A = torch.randn(3, V, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), (logits.detach() + noise).softmax(0), A + 0.7


def mean_gradient(
    module: ModuleType, logits: Tensor, mu: Tensor, A: Tensor, K: int, **flags: object
) -> Tensor:
    """Return the file's gradient with respect to the logits, in the mean over all tokens that μ may
    sample. Each token is a row, which counts with its probability."""
    log_pi, ids = logits.log_softmax(0), mu.topk(K).indices
    columns = {
        "logp": log_pi[:, None],
        "old_logp": log_pi.detach()[:, None],
        "rollout_logp": mu.log()[:, None],
        "advantages": mu * A,
        "mask": torch.ones(V, 1, dtype=torch.float64),
        "top_logp": log_pi[ids].expand(V, 1, K),
        "sampler_top": mu[ids].log().expand(V, 1, K),
    }
    total, _ = terms(module, no_kl(module, **flags), **columns)
    return torch.autograd.grad(-total, logits)[0]


def parts(logits: Tensor, mu: Tensor, A: Tensor, args: object) -> tuple[Tensor, Tensor]:
    """Return drift and covariance of A and the scores s = w ∇ log π under μ: E_y[A(y) E_v[s(v)]],
    and E_y[A(y) (s(y) - E_v[s(v)])]. Without δ they are E[A] E[s] and E[(A - E[A]) s]. With δ,
    w(v) depends on the sign of A(y)."""
    pi = logits.detach().softmax(0)
    drift = covariance = 0.0
    for y in range(V):
        w = bounded(args, pi / mu) * inside(args, pi, mu, A[y])
        scores = w[:, None] * (torch.eye(V, dtype=torch.float64) - pi)
        drift = drift + mu[y] * A[y] * (mu @ scores)
        covariance = covariance + mu[y] * A[y] * (scores[y] - mu @ scores)
    return drift, covariance


def check_drift_and_covariance(module: ModuleType) -> None:
    """With K = vocabulary, the mean gradient is drift + covariance without centring, and the
    covariance alone with it. This holds for every weight."""
    for seed in range(5):
        for flags in WEIGHTS:
            case = f" {flags}, seed {seed}"
            drift, covariance = parts(*place(seed), no_kl(module, **flags))
            plain = mean_gradient(module, *place(seed), V, **flags | {"centre_top": 0})
            near(plain, drift + covariance, f"the mean gradient, not centred{case}", 1e-10)
            ours = mean_gradient(module, *place(seed), V, **flags)
            near(ours, covariance, f"the mean gradient, centred{case}", 1e-10)


def check_drift_of_the_mask(module: ModuleType) -> None:
    """With w = π/μ inside DPPO's mask, the drift is the mean gradient of the masked tokens alone.
    It moves them back to μ, and this is what the centring removes."""
    flags = {"weight": "tis", "w_high": 1e9, "delta": 0.03}
    for seed, sign in ((0, 1.0), (1, -1.0), (2, 1.0)):
        logits, mu, A = place(seed)
        A = torch.full_like(A, sign)  # nothing to learn from: all is drift
        pi = logits.detach().softmax(0)
        cut = inside(no_kl(module, **flags), pi, mu, A) == 0
        plain = mean_gradient(module, logits, mu, A, V, **flags | {"centre_top": 0})
        scores = torch.eye(V, dtype=torch.float64) - pi
        near(plain, -sign * (pi * cut) @ scores, f"the mask's drift, seed {seed}", 1e-10)
        moved = scores @ plain  # the change of log π of each token
        assert 0 < cut.sum() < V and (moved * sign)[cut].sum() < 0, f"seed {seed}"
        near(mean_gradient(module, logits, mu, A, V, **flags), 0 * pi, f"centred, {seed}", 1e-10)


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

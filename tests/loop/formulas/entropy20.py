"""80/20, Clip-Cov and KL-Cov."""

import torch

from tests.loop.oracle import Batch, Tensor, clipped_surrogate, share, sides, token_mean, tokens

FLAGS = {"grad_clip": 8.0}
OFF = {"top_entropy": 1.0}
# More of them, so that they matter; in this batch few covariances are above 1
ALSO = [
    {"tokens": "clip_cov"},
    {"tokens": "clip_cov", "clip_cov_share": 0.1, "clip_cov_low": 0.2, "clip_cov_high": 3.0},
    {"tokens": "kl_cov"},
    {"tokens": "kl_cov", "kl_cov_share": 0.3, "kl_cov_coef": 2.0},
]


def prepare(o: object, step: int, b: Batch) -> None:
    b.step = step + 1  # it seeds Clip-Cov's draw


def quantile(values: Tensor, q: float) -> Tensor:
    ordered = values.sort().values
    place = q * (len(ordered) - 1)  # between two of them
    low, part = int(place), place - int(place)
    return ordered[low] + part * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def objective(b: Batch) -> tuple[Tensor, dict]:
    surrogate, beyond = clipped_surrogate(b, b.args["clip_low"], b.args["clip_high"])
    on = b.mask > 0
    stats = sides("clip", beyond, b)
    if b.args["tokens"] != "entropy":
        return by_covariance(b, surrogate, beyond, on)
    forks = (b.entropy >= quantile(b.entropy[on], 1 - b.args["top_entropy"]) - 1e-5) & on
    b.count = tokens(forks)
    stats |= {"left_out": share(~forks, b.mask)}
    stats["fork_entropy"] = float(b.entropy[forks].sum()), tokens(forks)
    return token_mean(surrogate, forks.double()), stats


def by_covariance(b: Batch, surrogate: Tensor, beyond: Tensor, on: Tensor) -> tuple[Tensor, dict]:
    logp, A = b.logp.detach(), b.A[:, None].expand_as(b.logp)
    c = (logp - logp[on].mean()) * (A - A[on].mean())
    b.count = tokens(b.mask)
    if b.args["tokens"] == "kl_cov":
        held = c >= quantile(c[on], 1 - b.args["kl_cov_share"]) - 1e-5
        distance = (b.logp - b.old).abs()
        pull = b.args["kl_cov_coef"] * distance * held
        stats = sides("clip", beyond & ~on, b) | {"held_share": share(held, b.mask)}
        stats["held_pull"] = float((pull.detach() * b.mask).sum()), tokens(held & on)
        return token_mean((b.logp - b.old).exp() * A - pull, b.mask), stats
    live = on & ~beyond
    within = live & (c > b.args["clip_cov_low"]) & (c < b.args["clip_cov_high"])
    band = c[within].sort().values.tolist()
    generator = torch.Generator().manual_seed(b.step)
    n = max(1, int(b.args["clip_cov_share"] * b.count))
    drawn = [band[i] for i in torch.randperm(len(band), generator=generator).tolist()[:n]]
    lost = live & torch.stack([(c - x).abs() < 1e-5 for x in drawn] or [~on & on]).any(0)
    stats = sides("clip", beyond, b) | {"left_out": share(lost, b.mask)}
    stats["fork_entropy"] = float(b.entropy[on & ~lost].sum()), tokens(on & ~lost)
    return token_mean(surrogate * ~lost, b.mask), stats

"""The recipe: one J for any choice of its layers."""

from tests.loop.oracle import (
    Batch,
    G,
    K,
    Oracle,
    P,
    Tensor,
    as_recorded,
    clipped_surrogate,
    in_order,
)
from tests.loop.oracle import numpy, respond, share, sides, token_mean, tokens, torch

FLAGS = {"tau_p": 0.9, "lag": 1, "rho_on": 0.5, "branches": K, "branch_weight": 0.7}
FLAGS |= {"candidates": 5, "teacher_batch": P, "window": P, "teacher_updates": 1, "explore": 0.0}
FLAGS |= {"lr": 3e-4, "grad_clip": 12.0}
STORED = {"lag": 0, "candidates": 1, "branches": 4, "tau_p": 0.9, "entropy_quantile": 0.95}
SMALL = "--lag 1 --candidates 4 --teacher_batch 8 --window 20".split()


def rounds(o: Oracle) -> list[list[dict[int, str]]]:
    return as_recorded(o) if o.args["curriculum"] else in_order(o)


def age(b: Batch) -> tuple[Tensor, dict]:
    """Layer 5: each response's weight; b is taken from the advantages, ρ noted."""
    if not b.args["lag"]:
        return torch.ones(len(b.rows)), {}
    mu, now = (b.mu * b.mask).sum(1), (b.logp * b.mask).sum(1)
    shifts = []
    for group in torch.arange(int((~b.branch).sum())).split(G):  # main rows come first
        norms = []
        for row in group:  # g_i = ∇ Σ_t log π: a backward pass for each response
            parts = torch.autograd.grad(now[row], list(b.lm.parameters()), retain_graph=True)
            norms.append(torch.cat([part.flatten() for part in parts]).norm())
        heavy = (2 * (now - mu)[group]).exp().detach() * torch.stack(norms) ** 2
        b.A[group] = b.A[group] - (shift := (heavy * b.A[group]).sum() / heavy.sum())
        shifts.append(abs(float(shift)))
    w = (now - mu).exp().detach()
    b.rho = float(w.sum() ** 2 / (w**2).sum() / len(w))
    w = ((b.old * b.mask).sum(1) - mu).exp()
    stats = {"ess_ratio": (b.rho, 1), "baseline_shift": (sum(shifts), len(shifts))}
    stats |= {"weight": (float(w.clip(max=8).sum()), len(w)), "weight_max": (float(w.max()), None)}
    return w.clip(max=b.args["is_cap"]), stats


def gated(b: Batch) -> tuple[Tensor, Tensor, dict]:
    """Layers 1 and 2: what a token adds to J, and which of them count."""
    a, A, r = b.args, b.A[:, None], (b.logp - b.old).exp()
    if a["tokens"] == "maspo":
        width = (a["sigma_base"] / b.old.exp() ** a["alpha"]).clip(a["sigma_base"], a["sigma_high"])
        risk = torch.where(A > 0, 1 + a["beta_pos"] * A, 1 / (1 - a["beta_neg"] * A)).clip(0.1, 10)
        out = ((A > 0) & (r > 1)) | ((A < 0) & (r < 1))
        gate = torch.where(out, (-((r - 1) ** 2) / (2 * (width * risk) ** 2)).exp(), 1.0).detach()
        return gate * r * A, b.mask, {"gate_closed": share(1 - gate, b.mask)}
    surrogate, beyond = clipped_surrogate(b, a["clip_low"], a["clip_high"])
    stats = sides("clip", beyond, b)
    if a["tokens"] == "none":
        return surrogate, b.mask, stats
    rare = (b.mask > 0) & (b.logp.detach().exp() < a["tau_p"]) & (A > 0)
    height = numpy.quantile(b.entropy[b.mask > 0].numpy(), a["entropy_quantile"])
    silent = rare & (b.entropy < height - 1e-5)
    return surrogate, b.mask * ~silent, stats | {"silenced_share": share(silent, b.mask)}


def mean_of_means(x: Tensor, kept: Tensor) -> Tensor:
    """A response that is silenced as a whole is one of them, and adds 0."""
    return ((x * kept).sum(1) / kept.sum(1).clip(min=1)).mean()


def objective(b: Batch) -> tuple[Tensor, dict]:
    weight, stats = age(b)
    value, kept, more = gated(b)
    mean, total = token_mean if b.args["token_mean"] else mean_of_means, 0.0
    for stream, factor in ((~b.branch, 1.0), (b.branch, b.args["branch_weight"])):
        if stream.any():
            total = total + factor * mean((weight[:, None] * value)[stream], kept[stream])
    b.count = tokens(kept[~b.branch]) if b.args["token_mean"] else int((~b.branch).sum())
    return total, stats | more


def metrics(o: Oracle, step: int) -> dict[str, float]:
    """Tokens are those sampled in the step, branches' included."""
    step, rows = step + o.args["lag"], []
    for one in o.records:
        rows += [row for p in one.training[step]["prompts"] for row in respond(p, G)]
    for one in o.records if o.args["branches"] else ():
        call = one.branching[step]
        for prompt, prefix in zip(call["prompts"], call["prefixes"]):
            rows += respond(prompt, K, prefix)
    return {"tokens": sum(len(row.tokens) for row in rows)}

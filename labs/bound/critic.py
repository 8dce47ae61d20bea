"""What is a critic worth, at which λ, and what does a wrong one cost?

The lab uses the tree of labs/bound/tree.py and enumerates every response with its probability, so
it does not sample. variants/ppo.py's own `advantages` (GAE, γ = 1, not whitened) and `policy_loss`
weigh the tokens, with one of four critics:

    right       V(s), the present policy's probability of a right answer after the prefix s
    late        the same of older parameters, a random step of 0.7 in every logit away
    wrong       V(s) and normal noise of 0.3 for each prefix
    untrained   0 everywhere, as ppo.py's critic begins

*Stale*: responses were sampled by those older parameters, and each token has the ratio π_θ/π_old,
with PPO's clip of 0.2 or without. The samples then teach the late critic. The lab compares the
critics with the exact estimators.

    python -m labs.bound --part critic
"""

import numpy as np
import torch
import checks

from labs import lab, toy
from labs.bound import tree

TITLE = (
    "A wrong critic turns the gradient below λ = 1; at λ = 1 it adds noise only, unless a clip acts"
)
SEEDS = 40
LAMBDAS, SIZES = (0.0, 0.5, 0.8, 0.95, 1.0), (4, 512)
CRITICS = {"right": lab.BLACK, "late": lab.BLUE, "wrong": lab.ORANGE, "untrained": lab.GREY}
HOW = {"on-policy": {}, "stale, no clip": {"clip_low": 1.0, "clip_high": 1e9}, "stale, clip": {}}
EXACT = (
    *("R - best constant", "R - best b(s)", "R - V(s)", "V(s') - V(s), λ = 0"),
    "Q(s, a) - best b(s)",
)
ARMS = {f"{how}: {critic}": (how, critic) for how in HOW for critic in CRITICS}
ARMS |= {f"exact, {how}: {name}": (how, name) for how in ("on-policy", "stale") for name in EXACT}


def values(pi: torch.Tensor, R: torch.Tensor) -> torch.Tensor:
    """V `[7]` of the prefixes: the mean of R `[S]` after each, under the probabilities `[S]`."""
    behind = torch.zeros(2, 7, dtype=torch.float64)
    for t in range(tree.T):
        behind[0].index_add_(0, tree.NODES[:, t], pi * R)
        behind[1].index_add_(0, tree.NODES[:, t], pi)
    return behind[0] / behind[1]


def measure(arm: str, seed: int, quick: bool) -> dict:
    """For each λ: the angle between the estimator's mean and ∇J, and its noise, the variance of a
    mean of four responses over |∇J|² when that mean has the right length along ∇J."""
    how, critic = ARMS[arm]
    generator = torch.Generator().manual_seed(seed)
    logits, older, R = tree.problem(generator)
    (logp, score), (late, _) = tree.policy(logits), tree.policy(older)
    old = logp if how == "on-policy" else late  # [S, T]
    pi, mu = logp.sum(1).exp(), old.sum(1).exp()  # [S], [S]
    true = (pi * R) @ score.sum(1)  # [14]: ∇J
    if arm.startswith("exact"):
        mean, spread = tree.exact(critic, logp, old, score, R)
        return {"noise": (spread / (mean @ true / true.norm()) ** 2).item()}
    error = 0.3 * torch.randn(7, generator=generator, dtype=torch.float64)  # [7]
    right = values(pi, R)  # [7]
    V = {"right": right, "late": values(late.sum(1).exp(), R), "wrong": right + error}
    V["untrained"] = 0 * right
    rewards, mask, ppo = torch.zeros_like(logp), torch.ones_like(logp), toy.load("ppo")
    rewards[:, -1] = R  # [S, T]

    def estimate(V: torch.Tensor, lam: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Each response's estimate `[S, 14]`, and their mean."""
        A, _ = ppo.advantages(rewards, V[tree.NODES], mask, 1.0, lam)  # [S, T]
        now = logp.detach().requires_grad_()  # [S, T]
        given = {"logp": now, "old_logp": old, "advantages": A, "mask": mask}
        loss = checks.terms(ppo, checks.no_kl(ppo, **HOW[how]), **given)[0]
        c = -torch.autograd.grad(loss, now)[0]  # [S, T]: the weight on each ∇ log π
        single = torch.einsum("st,std->sd", c, score)  # [S, 14]
        return single, mu @ single

    found = {}
    for lam in LAMBDAS:
        single, mean = estimate(V[critic], lam)
        along = mean @ true / true.norm()
        spread = (mu @ (single**2).sum(1) - mean @ mean) / tree.G
        found[f"angle {lam}"] = degrees(mean, true)
        found[f"noise {lam}"] = (spread / along**2).item()
    found["moved"] = degrees(mean, estimate(right, 1.0)[1])  # at λ = 1, the last
    return found


def degrees(a: torch.Tensor, b: torch.Tensor) -> float:
    """The angle between two vectors. Below 0.01 it is rounding error."""
    angle = (a @ b / a.norm() / b.norm()).clamp(-1, 1).arccos().rad2deg().item()
    return angle if angle > 0.01 else 0.0


def error(run: dict, lam: float, n: int) -> float:
    """Squared distance of a mean of n responses from ∇J, over |∇J|², after the estimator's length
    along ∇J is made right. It is infinite if the estimator points away from ∇J."""
    if run[f"angle {lam}"] >= 90:
        return np.inf
    beside = np.tan(np.radians(run[f"angle {lam}"]))
    return beside**2 + run[f"noise {lam}"] * tree.G / n


def rows(results: dict) -> list[list[str]]:
    head = ["arm", *(f"angle, λ = {lam:g}" for lam in LAMBDAS)]
    head += [f"noise, λ = {lam:g}" for lam in LAMBDAS]
    head += [f"best λ for {n} responses" for n in SIZES]
    table = [[*head, "angle to the right critic's, λ = 1", "noise, exact"]]
    for arm, runs in results.items():
        if arm.startswith("exact"):
            table.append([arm, *["–"] * len(head), lab.cell(runs, "noise")])
            continue
        cells = [lab.cell(runs, f"angle {lam}", ".0f") for lam in LAMBDAS]
        cells += [lab.cell(runs, f"noise {lam}") for lam in LAMBDAS]
        for n in SIZES:  # by the median policy's error
            errors = [np.median([error(run, lam, n) for run in runs]) for lam in LAMBDAS]
            cells.append(f"{LAMBDAS[int(np.argmin(errors))]:g}")
        table.append([arm, *cells, lab.cell(runs, "moved", ".0f"), "–"])
    return table


def draw(results: dict) -> object:
    panels = [("on-policy", "angle"), ("on-policy", "noise")]
    panels += [("stale, no clip", "angle"), ("stale, clip", "angle")]
    words = {"angle": "angle to ∇J (°)", "noise": "variance / |∇J|², four responses"}
    titles = [f"{how}: {words[what]}" for how, what in panels]
    figure, axes = lab.sheet(TITLE, *titles, width=13, height=4.2)
    places = np.arange(len(LAMBDAS))
    for axis, (how, what) in zip(axes, panels):
        for shift, (critic, colour) in enumerate(CRITICS.items()):
            runs = results[f"{how}: {critic}"]
            numbers = [lab.over(runs, f"{what} {lam}") for lam in LAMBDAS]
            middle, low, high = map(np.array, zip(*numbers))
            x = places + 0.09 * (shift - 1.5)
            axis.vlines(x, low, high, color=colour, alpha=0.35, linewidth=2.5)
            axis.plot(x, middle, "o-", color=colour, linewidth=1.6, markersize=5)
        axis.set_xticks(places, labels=[f"{lam:g}" for lam in LAMBDAS])
        axis.set_xlabel("λ")
        if what == "angle":
            axis.set(ylim=(-3, 103), yticks=(0, 30, 60, 90))
    lab.plain_ticks(axes[1], "y", (0.1, 0.3, 1, 3, 10))
    axes[1].set(ylim=(0.1, 12), xlim=(-0.35, 6.7))
    for name, words in (("R - best constant", "best constant"), EXACT[-1:] * 2):
        level = lab.over(results[f"exact, on-policy: {name}"], "noise")[0]
        axes[1].axhline(level, color=lab.GREEN, linewidth=1.2, linestyle="--")
        lab.label(axes[1], 4.25, level * 0.87, words, lab.GREEN, fontsize=8.5)
    for place, (critic, colour) in enumerate(CRITICS.items()):
        words = {"late": "late: of older parameters", "untrained": "untrained: V = 0"}
        where = {"xycoords": "axes fraction"}
        lab.label(axes[0], 0.35, 0.95 - 0.065 * place, words.get(critic, critic), colour, **where)
    return figure

"""How noisy is each estimator of the gradient, and which baseline or critic would reduce the noise?

The lab uses the tree of labs/bound/tree.py, which has 8 possible responses of three tokens. It
enumerates all 4096 groups of four with their probabilities. Each file's own `advantages` and
`policy_loss` weigh the tokens. *Stale*: the group was sampled by older parameters, a random step of
0.7 in every logit away.

The lab compares the files with estimators that see the policy: with constants, and with a perfect
critic. That critic has V(s), the probability of a right answer after the prefix s, or Q(s, a), the
probability after one more token.

    python -m labs.bound
    python -m labs.bound --part critic
"""

import sys

import torch
import checks

from labs import lab, toy
from labs.bound import critic, tree

TITLE = "A perfect V(s) is only as good a baseline as one constant; Q(s, a) is far better"
SEEDS = 40
FILES = toy.given(
    {
        "GRPO": ("grpo", {}),
        "GSPO": ("gspo", {}),
        "SAPO": ("sapo", {}),
        "MASPO": ("maspo", {}),
        "MiniRL": ("minirl", {}),
        "VCPO": ("vcpo", {}),
        "CISPO": ("cispo", {}),
        "DPPO": ("dppo", {}),
        "VESPO": ("vespo", {}),
        "Dr. GRPO": ("dr_grpo", {}),
    }
)
ARMS = {
    f"{how}: {name}": (how, name)
    for how in ("on-policy", "stale")
    for name in [*(f"{file}{b}" for file in FILES for b in ("", ", no baseline")), *tree.BOUNDS]
}
GROUPS = torch.cartesian_prod(*[torch.arange(len(tree.SEQUENCES))] * tree.G)  # [M, G]


def measure(arm: str, seed: int, quick: bool) -> dict:
    """The noise, and the angle between the estimator's mean and ∇J. The noise is the variance over
    |∇J|² after scaling, which gives the mean the right length along ∇J."""
    how, name = ARMS[arm]
    generator = torch.Generator().manual_seed(seed)
    logits, older, R = tree.problem(generator)
    logp, score = tree.policy(logits)
    old = tree.policy(older)[0] if how == "stale" else logp
    pi, mu, full = logp.sum(1).exp(), old.sum(1).exp(), score.sum(1)  # [S], [S], [S, 14]
    true = (pi * R) @ full  # [14]: ∇J
    if name in tree.BOUNDS:
        mean, spread = tree.exact(name, logp, old, score, R)
    else:
        stem, flags = FILES[name.removesuffix(", no baseline")]
        module, chance = toy.load(stem), mu[GROUPS].prod(1)  # [M]
        A = R[GROUPS] if "no baseline" in name else module.advantages(R[GROUPS])  # [M, G]
        if name == "VCPO":
            log_w = (logp - old).sum(1)  # [S]
            norms = full.norm(dim=1)  # [S]
            A = A - module.baseline_shift(log_w[GROUPS], norms[GROUPS], A)[:, None]
        rows = GROUPS.flatten()  # [M·G]
        logits = logp[rows].requires_grad_()  # [M·G, T]
        held = {"old_logp": old[rows], "advantages": A.flatten()}
        held["mask"] = torch.ones_like(logits)
        loss = checks.terms(module, checks.no_kl(module, **flags), logp=logits, **held)[0]
        c = -torch.autograd.grad(loss, logits)[0]  # [M·G, T]: the weight on each ∇ log π
        each = torch.einsum("rt,rtd->rd", c, score[rows]).view(-1, tree.G, score.shape[-1]).mean(1)
        mean = chance @ each  # [14]
        spread = chance @ (each**2).sum(1) - mean @ mean
    along = mean @ true / true.norm()
    angle = (along / mean.norm()).clamp(-1, 1).arccos().rad2deg().item()
    if name in tree.BOUNDS:  # unbiased: the rest is rounding
        angle = 0.0
    return {"noise": (spread / along**2).item(), "angle": angle}


def compared(results: dict, arm: str) -> list[str]:
    """The share of the best constant's saving that an unbiased arm has, and the number of policies
    in which it has less noise than that constant. Biased arms get nothing here, because a wrong
    direction may have little noise."""
    how, runs = ARMS[arm][0], results[arm]
    none, best = (results[f"{how}: {list(tree.BOUNDS)[i]}"] for i in (0, 2))
    noise = [[run["noise"] for run in each] for each in (runs, none, best)]
    if lab.over(runs, "angle")[2] > 0.5:
        return ["–", "–"]
    saved = [{"s": (base - own) / (base - least)} for own, base, least in zip(*noise)]
    quieter = sum(own < least - 1e-9 for own, _, least in zip(*noise))
    return [lab.cell(saved, "s"), f"{quieter} of {len(runs)}"]


def nearer(results: dict, arm: str) -> str:
    """In how many policies the mean is at least a degree nearer to ∇J than GRPO's."""
    pairs = zip(results[arm], results[f"{ARMS[arm][0]}: GRPO"])
    return f"{sum(one['angle'] < two['angle'] - 1 for one, two in pairs)} of {len(results[arm])}"


def rows(results: dict) -> list[list[str]]:
    head = ["arm", "noise", "saved, of what the best constant saves", "quieter than it"]
    table = [[*head, "angle to ∇J (°), policies 1–20", "21–40", "nearer than GRPO"]]
    for arm, runs in results.items():
        angles = [
            lab.cell(half, "angle", ".0f") if half else "–" for half in (runs[:20], runs[20:])
        ]
        biased = ARMS[arm][0] == "stale" and ARMS[arm][1] not in tree.BOUNDS
        angles.append(nearer(results, arm) if biased else "–")
        table.append([arm, lab.cell(runs, "noise", ".2f"), *compared(results, arm), *angles])
    return table


def draw(results: dict) -> object:
    figure, axes = lab.sheet(TITLE, "on-policy", "stale", width=10, height=6)
    names, end = [*FILES, *tree.BOUNDS], 60
    for axis, how in zip(axes, ("on-policy", "stale")):
        for y, name in enumerate(names):
            colour = lab.BLUE if name in tree.BOUNDS else lab.BLACK
            both = ((name, colour, -0.17), (f"{name}, no baseline", "white", 0.17))
            for words, filled, up in both:
                if f"{how}: {words}" not in results:
                    continue
                middle, low, high = lab.over(results[f"{how}: {words}"], "noise")
                place = -y if name in tree.BOUNDS else -y - up
                line = {"color": colour, "alpha": 0.35, "linewidth": 2.5, "solid_capstyle": "butt"}
                axis.plot([low, min(high, end)], [place, place], **line)
                axis.plot(middle, place, "o", color=colour, markerfacecolor=filled, markersize=6)
                if high > end:
                    axis.plot(end, place, ">", color=colour, markersize=6, clip_on=False)
            bias = lab.over(results[f"{how}: {name}"], "angle")[0]
            where = {"xycoords": ("axes fraction", "data"), "va": "center", "fontsize": 9}
            axis.annotate(f"{bias:.0f}°", (1.025, -y), **where)
        axis.annotate("angle", (1.0, 1.01), xycoords="axes fraction", fontsize=9, color="#444444")
        axis.set(xlabel="noise: variance / |∇J|²", yticks=[], xlim=(0.02, end))
        lab.plain_ticks(axis, "x", (0.03, 0.1, 0.3, 1, 3, 10, 30))
    axes[0].set_yticks([-y for y in range(len(names))], labels=names)
    told = {"with its baseline": lab.BLACK, "○ without": lab.BLACK, "uses the policy": lab.BLUE}
    for place, (words, colour) in enumerate(told.items()):
        words = words if "○" in words else f"● {words}"
        lab.label(axes[0], 0.02, 0.965 - 0.045 * place, words, colour, xycoords="axes fraction")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__], critic=critic)

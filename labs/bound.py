"""How noisy is each estimator of the gradient, and how noisy must one be? Exactly.

Responses of three tokens of two kinds: 8 of them, under a policy that depends on the prefix, 14
logits. All 4096 groups of four are enumerated, with their chances; each file's own `advantages` and
`policy_loss` weigh the tokens. No sampling takes part; a seed is a policy, and which 3 of the 8 are
right. *Stale*: the group was sampled by older weights, by a random step of 0.7 in every logit.

    python -m labs.bound
"""

import itertools
import sys

import torch
from tests import checks

from labs import lab, toy

TITLE = "A baseline of four siblings (filled) saves little of what the best one would"
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
BOUNDS = ("no baseline, full weight", "best constant", "best for each prefix")
ARMS = {
    f"{how}: {name}": (how, name)
    for how in ("on-policy", "stale")
    for name in [*(f"{file}{b}" for file in FILES for b in ("", ", no baseline")), *BOUNDS]
}
T, G = 3, 4
SEQUENCES = torch.tensor(list(itertools.product((0, 1), repeat=T)))  # [S, T]
# The prefix before each token, as a node of the tree: 0; 1, 2; 3 to 6
NODES = torch.tensor([[2**t - 1 + int("0" + "".join(map(str, s[:t])), 2) for t in range(T)]
                      for s in SEQUENCES.tolist()])  # [S, T]  # fmt: skip
GROUPS = torch.cartesian_prod(*[torch.arange(len(SEQUENCES))] * G)  # [M, G]


def policy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """log π of every token `[S, T]`, and its gradient by the logits `[S, T, 14]`."""
    table = logits.log_softmax(-1)  # [7, 2]
    score = torch.zeros(*NODES.shape, *table.shape, dtype=torch.float64)  # [S, T, 7, 2]
    rows, columns = torch.meshgrid(*map(torch.arange, NODES.shape), indexing="ij")
    score[rows, columns, NODES] = torch.eye(2).double()[SEQUENCES] - table.exp()[NODES]
    return table[NODES, SEQUENCES], score.flatten(2)


def measure(arm: str, seed: int, quick: bool) -> dict:
    """Noise: the estimator's variance over |∇J|², when its mean has the right length along ∇J; and
    the angle between that mean and ∇J."""
    how, name = ARMS[arm]
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(7, 2, generator=generator, dtype=torch.float64) for _ in range(2)]
    right = torch.randperm(len(SEQUENCES), generator=generator) < 3  # [S]
    R = right.double()
    (logp, score), (old, _) = policy(draw[0]), policy(draw[0] - 0.7 * (how == "stale") * draw[1])
    pi, mu, full = logp.sum(1).exp(), old.sum(1).exp(), score.sum(1)  # [S], [S], [S, 14]
    true = (pi * R) @ full  # [14]: ∇J
    if name in BOUNDS:
        w = pi / mu  # [S]
        if name == BOUNDS[2]:  # the best b of every node, where the token's score has its own place
            weights = (mu * w**2)[:, None] * (score**2).sum(-1)  # [S, T]
            zero = torch.zeros(7, dtype=torch.float64)
            over = zero.index_add(0, NODES.flatten(), weights.flatten())
            b = zero.index_add(0, NODES.flatten(), (weights * R[:, None]).flatten()) / over  # [7]
            single = w[:, None] * ((R[:, None] - b[NODES])[..., None] * score).sum(1)  # [S, 14]
        else:
            weights = mu * w**2 * (full**2).sum(1)  # [S]
            b = (weights @ R) / weights.sum() if name == BOUNDS[1] else 0.0
            single = (w * (R - b))[:, None] * full  # [S, 14]
        mean = mu @ single
        spread = (mu @ (single**2).sum(1) - mean @ mean) / G
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
        each = torch.einsum("rt,rtd->rd", c, score[rows]).view(-1, G, score.shape[-1]).mean(1)
        mean = chance @ each  # [14]
        spread = chance @ (each**2).sum(1) - mean @ mean
    along = mean @ true / true.norm()
    angle = (along / mean.norm()).clamp(-1, 1).arccos().rad2deg()
    return {"noise": (spread / along**2).item(), "angle": 0.0 if name in BOUNDS else angle.item()}


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "noise", "angle to ∇J (°)"]]
    for arm, runs in results.items():
        table.append([arm, lab.cell(runs, "noise", ".1f"), lab.cell(runs, "angle", ".0f")])
    return table


def draw(results: dict) -> object:
    figure, axes = lab.sheet(
        TITLE, "on-policy; open: no baseline", "stale; at the right of both: angle to ∇J"
    )
    colours = dict(zip(FILES, (lab.BLACK, lab.GREEN, lab.BLUE, lab.ORANGE, lab.PINK, lab.GREY)))
    names = [name for name in (*FILES, *BOUNDS) if f"stale: {name}" in results]
    for axis, how in zip(axes, ("on-policy", "stale")):
        for y, name in enumerate(names):
            colour = colours.get(name, lab.BLACK)
            for words, filled in ((name, colour), (f"{name}, no baseline", "white")):
                if f"{how}: {words}" in results:
                    runs = results[f"{how}: {words}"]
                    middle, low, high = lab.over(runs, "noise")
                    axis.plot([low, high], [-y, -y], color=colour, alpha=0.3, linewidth=3)
                    axis.plot(middle, -y, "o", color=colour, markerfacecolor=filled, markersize=7)
            bias = lab.over(results[f"{how}: {name}"], "angle")[0]
            axis.annotate(f"{bias:.0f}°", (1, -y), xycoords=("axes fraction", "data"), va="center")
        axis.set(xlabel="variance / |∇J|²", yticks=[], xlim=(0.08, 60))
        lab.plain_ticks(axis, "x", (0.1, 0.3, 1, 3, 10, 30))
    axes[0].set_yticks([-y for y in range(len(names))], labels=names)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])

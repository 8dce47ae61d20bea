"""How noisy is each estimator of the gradient, and which baseline or critic would make it quiet?

Responses of three tokens of two kinds: 8 of them, under a policy that depends on the prefix, 14
logits. All 4096 groups of four are enumerated, with their chances; each file's own `advantages` and
`policy_loss` weigh the tokens. No sampling takes part; a seed is a policy, and which 3 of the 8 are
right. *Stale*: the group was sampled by older weights, by a random step of 0.7 in every logit.

Beside the files stand estimators that know the policy: constants, and what a perfect critic makes
of V(s), the chance of a right answer after the prefix s, and of Q(s, a), that after one more token.

    python -m labs.bound
"""

import itertools
import sys

import torch
import checks

from labs import lab, toy

TITLE = "A perfect V(s) is as good a baseline as one constant; what pays is Q(s, a)"
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
# Name -> what is credited, and what is subtracted. In whole responses R has the weight π/μ of the
# response; Q that of the tokens up to its own.
BOUNDS = {
    "no baseline, full weight": ("R", "none"),
    "R - p": ("R", "p"),  # what the mean of a group without end is
    "R - best constant": ("R", "constant"),
    "R - V(s)": ("R", "V"),
    "R - best b(s)": ("R", "best"),
    "V(s') - V(s), λ = 0": ("Q", "V"),  # s', the state after a, has Q(s, a)
    "Q(s, a) - best b(s)": ("Q", "best"),
}
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
        credited, baseline = BOUNDS[name]
        zero = torch.zeros(7, dtype=torch.float64)

        def at_nodes(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            """`[S, T]` -> the weighted mean at each token's node, again `[S, T]`."""
            total = zero.index_add(0, NODES.flatten(), (values * weights).flatten())
            return (total / zero.index_add(0, NODES.flatten(), weights.flatten()))[NODES]

        w = (logp - old).cumsum(1).exp()  # [S, T]: of the prefix with this token
        what = R[:, None].expand(w.shape)  # [S, T]
        V = at_nodes(what, pi[:, None].expand(w.shape))  # [S, T]
        if credited == "Q":
            what = torch.cat([V[:, 1:], R[:, None]], 1)  # [S, T]
        else:
            w = w[:, -1:].expand(w.shape)  # [S, T]
        if baseline == "best":  # of every node, where the token's score has its own place
            b = at_nodes(what, mu[:, None] * w**2 * (score**2).sum(-1))  # [S, T]
        else:
            weights = mu * w[:, -1] ** 2 * (full**2).sum(1)  # [S]
            known = {"none": 0.0, "p": pi @ R, "constant": weights @ R / weights.sum(), "V": V}
            b = known[baseline]
        single = ((w * (what - b))[..., None] * score).sum(1)  # [S, 14]
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


def compared(results: dict, arm: str) -> list[str]:
    """Of an unbiased arm: how much of what the best constant saves it saves, and in how many
    policies it is quieter than that. Of others: nothing, as a wrong direction may be quiet."""
    how, runs = ARMS[arm][0], results[arm]
    none, best = (results[f"{how}: {list(BOUNDS)[i]}"] for i in (0, 2))
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
        biased = ARMS[arm][0] == "stale" and ARMS[arm][1] not in BOUNDS
        angles.append(nearer(results, arm) if biased else "–")
        table.append([arm, lab.cell(runs, "noise", ".2f"), *compared(results, arm), *angles])
    return table


def draw(results: dict) -> object:
    figure, axes = lab.sheet(TITLE, "on-policy", "stale", width=10, height=6)
    names, end = [*FILES, *BOUNDS], 60
    for axis, how in zip(axes, ("on-policy", "stale")):
        for y, name in enumerate(names):
            colour = lab.BLUE if name in BOUNDS else lab.BLACK
            both = ((name, colour, -0.17), (f"{name}, no baseline", "white", 0.17))
            for words, filled, up in both:
                if f"{how}: {words}" not in results:
                    continue
                middle, low, high = lab.over(results[f"{how}: {words}"], "noise")
                place = -y if name in BOUNDS else -y - up
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
    told = {"with its baseline": lab.BLACK, "○ without": lab.BLACK, "knows the policy": lab.BLUE}
    for place, (words, colour) in enumerate(told.items()):
        words = words if "○" in words else f"● {words}"
        lab.label(axes[0], 0.02, 0.965 - 0.045 * place, words, colour, xycoords="axes fraction")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])

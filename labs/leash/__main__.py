"""Which KL term keeps a policy at its reference? A softmax of 50 tokens, without any reward.

The reference has three likely tokens and an entropy of 1.81 nats; a uniform one would have ln 50 =
3.91. The policy starts near it, with noise on its logits. There are 1500 steps of 8 samples each,
and the KL term is the only gradient. A working term brings the policy back; one that does nothing
leaves it where it is. The samples are the policy's own, or those of a sharper sampler (temperature
0.8, then top-p 0.9) under log-probs at temperature 1 over all tokens. Four optimisers see the same
random numbers. k3 and r·k3 are grpo.py's; in r·k3 the ratio r is against the sampler.

    python -m labs.leash
"""

import sys

import numpy as np

from labs import lab

TITLE = "k1 in the loss holds nothing, and under a sharper sampler it makes the policy uniform"
TERMS = ("k1", "k2", "k3", "r·k3", "k1 in the reward")
ARMS = {f"{term}, {how}": how for how in ("own samples", "sharper sampler") for term in TERMS}
OPTIMISERS = ("SGD", "SGD, clipped", "Adam", "Adam, clipped")
K, N, STEPS, SHARE = 50, 8, 1500, 25  # tokens, samples a step; a point of the curve each 25
LR, CLIP, NOISE = {"SGD": 0.05, "Adam": 0.01}, 0.1, 2.0


def logprobs(logits: np.ndarray) -> np.ndarray:
    """log π of tables `[S, K]`."""
    return logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)


def sampler(chances: np.ndarray, sharper: bool) -> np.ndarray:
    """μ `[S, K]`: π itself, or at temperature 0.8 the most likely tokens up to a mass of 0.9."""
    if not sharper:
        return chances
    hot = chances ** (1 / 0.8)
    hot /= hot.sum(axis=1, keepdims=True)
    order = np.argsort(-hot, axis=1)
    ordered = np.take_along_axis(hot, order, axis=1)
    inside = ordered.cumsum(axis=1) - ordered < 0.9  # the one that crosses 0.9 is the last
    kept = np.zeros_like(hot)
    np.put_along_axis(kept, order, ordered * inside, axis=1)
    return kept / kept.sum(axis=1, keepdims=True)


def weights(term: str, logp: np.ndarray, ref: np.ndarray, log_mu: np.ndarray) -> np.ndarray:
    """The gradient weight of each sample `[S, N]`, which multiplies its ∇ log π."""
    gap = logp - ref  # log π/π_ref
    if term == "k1":
        return np.ones_like(gap)  # the derivative of log π - log π_ref: the reference is gone
    if term == "k3":
        return 1 - np.exp(-gap)
    if term == "r·k3":
        return np.exp(logp - log_mu) * gap
    if term == "k1 in the reward":  # R = -gap, with the group's mean as the baseline
        return gap - gap.mean(axis=1, keepdims=True)
    return gap  # k2: gap² / 2


def measure(arm: str, seed: int, quick: bool) -> dict:
    """Entropy and KL(π ‖ π_ref) along the way, under each optimiser."""
    generator = np.random.default_rng(seed)
    term, sharper = arm.split(",")[0], ARMS[arm] == "sharper sampler"
    start = np.zeros(K)
    start[:3] = 5.0, 4.5, 4.0
    ref = logprobs(start[None])  # [1, K]
    logits = np.repeat((start + NOISE * generator.normal(size=K))[None], len(OPTIMISERS), 0)
    first, second = np.zeros_like(logits), np.zeros_like(logits)  # Adam's moments
    adam, clipped = (np.array([[w in name] for name in OPTIMISERS]) for w in ("Adam", "clipped"))
    rows = np.arange(len(OPTIMISERS))[:, None]
    entropy, kl = [], []
    for step in range(STEPS + 1):
        logp = logprobs(logits)  # [S, K]
        p = np.exp(logp)
        if step % SHARE == 0:
            entropy.append(-(p * logp).sum(axis=1))
            kl.append((p * (logp - ref)).sum(axis=1))
        mu = sampler(p, sharper)
        draws = generator.random((1, N, 1))  # the same for all optimisers
        tokens = (draws > mu.cumsum(axis=1)[:, None]).sum(axis=2).clip(max=K - 1)  # [S, N]
        log_mu = np.log(np.maximum(mu[rows, tokens], 1e-300))
        w = weights(term, logp[rows, tokens], ref[0][tokens], log_mu) / N  # [S, N]
        grad = -p * w.sum(axis=1, keepdims=True)  # ∇ log π of a sample is onehot - p
        np.add.at(grad, (rows, tokens), w)
        norm = np.linalg.norm(grad, axis=1, keepdims=True)
        grad *= np.where(clipped, np.minimum(1, CLIP / (norm + 1e-12)), 1)
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        unbiased = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
        scaled = unbiased[0] / (np.sqrt(unbiased[1]) + 1e-8)
        logits = logits - np.where(adam, LR["Adam"] * scaled, LR["SGD"] * grad)
    found = {"entropy before": entropy[0][0], "KL before": kl[0][0]}
    for name, x, y in zip(OPTIMISERS, np.array(entropy).T, np.array(kl).T):
        found |= {name: x, f"{name}, end": x[-1], f"{name}, KL": y[-1]}
    return found


def rows(results: dict) -> list[list[str]]:
    table = [["arm", "entropy before", *OPTIMISERS, "rises, SGD", "rises, Adam, clipped"]]
    table[0] += ["KL before", "KL, Adam, clipped"]
    ends = [f"{name}, end" for name in OPTIMISERS]
    for arm, runs in results.items():
        higher = [
            sum(run[f"{name}, end"] > run["entropy before"] for run in runs)
            for name in ("SGD", "Adam, clipped")
        ]
        table.append([arm, *(lab.cell(runs, name) for name in ("entropy before", *ends))])
        table[-1] += [f"{count} of {len(runs)}" for count in higher]
        table[-1] += [lab.cell(runs, name) for name in ("KL before", "Adam, clipped, KL")]
    return table


COLOURS = dict(zip(TERMS, (lab.ORANGE, lab.BLUE, lab.GREEN, lab.PINK, lab.BLACK)))


def draw(results: dict) -> object:
    whose = ("own samples", "sharper sampler")
    panels = [f"entropy, {how}, {name}" for how in whose for name in ("SGD", "Adam, clipped")]
    figure, axes = lab.sheet(TITLE, *panels, width=14, height=4.2)
    x = np.arange(0, STEPS + 1, SHARE)
    for axis, panel in zip(axes, panels):
        _, how, name = panel.split(", ", 2)
        for term, colour in COLOURS.items():
            if term == "k1":  # of the others the table has the range
                lab.line(axis, x, results[f"{term}, {how}"], name, colour)
            else:
                style = {"linewidth": 2, "linestyle": (0, (4, 2)) if term == "r·k3" else "-"}
                axis.plot(x, lab.over(results[f"{term}, {how}"], name)[0], color=colour, **style)
        for y, words in ((np.log(K), "uniform"), (1.81, "reference")):
            axis.axhline(y, color=lab.GREY, linewidth=1, linestyle=":")
            axis.annotate(
                words,
                (STEPS, y),
                (0, 3),
                textcoords="offset points",
                ha="right",
                fontsize=8.5,
                color=lab.GREY,
            )
        axis.set(ylim=(0, 4.3), xlabel="step")
    lab.key(axes[3], COLOURS)
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])

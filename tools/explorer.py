"""Write an HTML page, which works offline, that shows what each loss does to a token. Play with
it before you read a file.

    python -m tools.explorer [--out explorer.html]

In part 1 you move one token: its ratio, its probability, its advantage, and what surrounds it. In
part 2 you flip the rewards of a group. Part 3 shows the runs of two stored pages side by side.

This program computes all weights by autograd of each file's own `policy_loss`. The page only reads
them from tables. Between two ratios of a table, the weight is a straight line up to TOLERANCE.
"""

import importlib
import itertools
import json
import random
import re
from functools import partial
from pathlib import Path
from types import ModuleType

import grpo
import minirl
import torch
from checks.harness import terms
from checks.files import MODULES, ROOT, VARIANTS
from common.cli import BadInput, in_one_line
from torch import Tensor
from variants import baselines

from tools import arguments, page
from tools.look import filled, short, write

TEMPLATE, WORDS = (Path(__file__).with_suffix(end) for end in (".html", ".json"))
PAGES = [ROOT / "docs" / "page-healthy.html", ROOT / "docs" / "page-collapse.html"]
# The stops of the sliders. All other tokens of the response have π_old = 0.5, the ratio exp(drift),
# no gap, and entropies of which 80% are below 0.7 nats.
AXES = {
    "sign": [1, -1],  # the sign of Â
    "size": [0.35, 0.5, 1, 1.6, 2.5],  # |Â|
    "p": [1e-4, 1e-3, 0.005, 0.02, 0.1, 0.3, 0.6, 0.9, 0.99],  # π_old of the token
    "entropy": [0.05, 0.3, 0.6, 1, 2, 3],  # of the token's distribution, in nats
    "length": [10, 30, 100, 300, 1000],  # tokens in the response
    "drift": [-0.03, -0.001, 0, 0.001, 0.03],  # mean log r of the response's other tokens
    "gap": [0.25, 0.5, 0.8, 1, 1.25, 2, 4],  # π_old / μ of the token
}
USUAL = {"sign": 1, "size": 1, "p": 1e-4, "entropy": 1, "length": 100, "drift": 0, "gap": 1}
LOWEST, HIGHEST = 0.02, 50.0  # ratios
TOLERANCE, EDGE = 2e-3, 1e-10  # relative error of a straight line, relative width of a jump
NINE = "grpo gspo sapo stapo maspo minirl vcpo goldilocks deep_grpo".split()
# Variants whose weight depends on other responses, and two whose table would be too large.
WITHOUT = ["lp_reg", "opd", "paced", "stack"]
NUMBERS = ["is_cap", "tau_p"]  # flags that a sentence of the page names
OTHERS = [2, 4, 6]  # right answers of 8 in each of the other groups of part 2's batch
GROUP = {  # part 2: how a reward becomes an advantage, and the file whose loss receives it
    "z-score": ("grpo", grpo.advantages),
    "no std": ("minirl", minirl.advantages),
    "RLOO": ("baselines", partial(baselines.advantages, how="rloo")),
    "batch": ("baselines", partial(baselines.advantages, how="batch")),
}
# Where the buttons of part 3 lead. We found it once by the page's rule with these numbers.
RULE = {"window": 10, "fallen": 90.0, "lost": 50.0}
MARKS = [
    {"kind": "rises", "step": 24, "name": "weight_max"},
    {"kind": "falls", "step": 41, "name": "reward"},
    {"kind": "late", "step": 53, "name": "reward"},
]


# A token's weight


def weights(module: ModuleType, at: dict, ratios: Tensor) -> Tensor:
    """Compute the weight `[N]` on ∇ log π of one token for each of its ratios `[N]`.

    `at` has a value for each axis. Each ratio has a response of its own, whose first token has it.
    The weight belongs to the loss's sum, so it is not yet divided by responses or tokens.
    """
    n, T = len(ratios), at["length"]
    first = torch.arange(T) == 0  # [T]

    def column(token: Tensor, others: Tensor | float) -> Tensor:
        return torch.where(first, token, others).expand(n, T).clone()  # [N, T]

    p, gap = torch.tensor([at["p"], at["gap"]], dtype=torch.float64).log()  # [], []
    old_logp = column(p, torch.tensor(0.5, dtype=torch.float64).log())  # [N, T]
    moved = column(ratios.log()[:, None], at["drift"])  # [N, T]: log r
    entropies = torch.linspace(0, 0.875, T, dtype=torch.float64)  # [T]
    logp = (old_logp + moved).requires_grad_()
    A = torch.full((n,), at["sign"] * at["size"], dtype=torch.float64)  # [N]
    total, _ = terms(
        module,
        module.Args(),
        logp=logp,
        old_logp=old_logp,
        rollout_logp=old_logp - column(gap, 0.0),
        ref_logp=logp.detach(),  # with these values a KL term has no gradient
        entropy=column(torch.tensor(at["entropy"], dtype=torch.float64), entropies),
        advantages=A,
        mask=torch.ones_like(old_logp),
    )
    return -torch.autograd.grad(total, logp)[0][:, 0]


def grid(at: dict, points: int) -> Tensor:
    """Make a grid of ratios at which the token's probability is at most 1."""
    highest = min(HIGHEST, 1 / at["p"])
    ends = torch.tensor([LOWEST, highest], dtype=torch.float64).log()
    middle = torch.linspace(ends[0], ends[1], points, dtype=torch.float64).exp()
    inside = [short(r, 4) for r in middle[1:-1]]
    return torch.tensor([LOWEST, *inside, highest], dtype=torch.float64)


# Tables


def effect_of(module: ModuleType, axis: str) -> list[float] | None:
    """Find an axis's effect by trying random values of the others: a factor for each of its stops
    (all 1 if the loss ignores it), or None if it changes the curve."""
    rng, stops, usual = random.Random(axis), AXES[axis], AXES[axis].index(USUAL[axis])
    factors = torch.ones(len(stops), dtype=torch.float64)  # [stops]
    known = False
    for _ in range(16):
        at = {name: rng.choice(values) for name, values in AXES.items()}
        ratios = grid(at | {"p": max(AXES["p"]) if axis == "p" else at["p"]}, 20)
        curves = torch.stack([weights(module, at | {axis: stop}, ratios) for stop in stops])
        curve = curves[usual]  # [20]
        if not known and curve.any():
            factors, known = curves @ curve / (curve @ curve), True
        if not curves.allclose(factors[:, None] * curve, rtol=1e-9, atol=1e-12):
            return None
    return [short(factor, 9) for factor in factors]


def knots(module: ModuleType, at: dict, scale: float) -> tuple[list[float], list[float]]:
    """Return ratios, and weights divided by `scale`, of one curve. A jump has two close knots."""
    known: dict[float, float] = {}  # ratio -> weight

    def measure(ratios: list[float]) -> None:
        values = weights(module, at, torch.tensor(ratios, dtype=torch.float64)) / scale
        known.update(zip(ratios, values.tolist()))

    measure(grid(at, 24).tolist())
    intervals = list(itertools.pairwise(known))  # intervals in which the curve may bend
    while intervals:
        middles = [short((a + b) / 2, 5 if b / a > 1.01 else 12) for a, b in intervals]
        measure(middles)
        halves = []
        for (a, b), middle in zip(intervals, middles):
            line = known[a] + (known[b] - known[a]) * (middle - a) / (b - a)
            error = abs(known[middle] - line)
            if error > TOLERANCE * max(abs(known[middle]), 0.05) and b / a > 1 + EDGE:
                halves += [(a, middle), (middle, b)]
        intervals = halves
    r = sorted(known)
    return thinned(r, [known[ratio] for ratio in r])


def thinned(r: list[float], w: list[float]) -> tuple[list[float], list[float]]:
    """Drop the knots that a straight line between their neighbours replaces."""
    kept, start = [0], 0
    for end in range(2, len(r)):
        slope = (w[end] - w[start]) / (r[end] - r[start])
        for i in range(start + 1, end):
            error = abs(w[start] + slope * (r[i] - r[start]) - w[i])
            if error > TOLERANCE * max(abs(w[i]), 0.05):
                start = end - 1
                kept.append(start)
                break
    kept.append(len(r) - 1)
    return [short(r[i], 10) for i in kept], [short(w[i], 5) + 0.0 for i in kept]


def table(name: str) -> dict:
    """Compute all weights of a file, in units of its weight at r = 1, Â = 1 and 100 tokens."""
    module = importlib.import_module(MODULES[name])
    scale = weights(module, USUAL, torch.ones(1, dtype=torch.float64)).item()
    effects = {axis: effect_of(module, axis) for axis in AXES}
    real = [axis for axis, factors in effects.items() if factors is None]
    curves, index = {}, []
    for stops in itertools.product(*(AXES[axis] for axis in real)):
        at = USUAL | dict(zip(real, stops))
        r, w = knots(module, at, scale)
        curve = json.dumps({"r": r, "w": w})
        index.append(curves.setdefault(curve, len(curves)))
    args = module.Args()
    numbers = {flag: getattr(args, flag) for flag in NUMBERS if hasattr(args, flag)}
    if hasattr(args, "clip_low"):
        numbers |= {"low": short(1 - args.clip_low, 6), "high": short(1 + args.clip_high, 6)}
    return {
        "name": module.__doc__.splitlines()[0].partition(":")[0],
        "unit": scale,
        "numbers": numbers,
        "axes": real,
        "factors": {axis: f for axis, f in effects.items() if f and len({*f}) > 1},
        "index": index,
        "curves": [json.loads(curve) for curve in curves],
    }


def group_tables() -> dict:
    """Compute each method's advantages `[right, wrong]` for 0 to 8 right answers of 8."""
    counts = [[k, *OTHERS] for k in range(9)]
    tables = {}
    for name, (file, advantages) in GROUP.items():
        rows = []
        for batch in counts:
            rewards = torch.tensor([[1.0] * k + [0.0] * (8 - k) for k in batch])  # [P, G]
            A = advantages(rewards)[0]
            rows.append([short(A[0], 5), short(A[-1], 5)])
        tables[name] = {"file": file, "advantages": rows}
    return tables


# Two runs


def stored(path: Path) -> dict:
    """Read the run of a stored page: one group per step, with numbers of three digits."""
    match = re.search(r'id="data">(.*?)</script>', path.read_text("utf-8"), re.DOTALL)
    run = json.loads(match[1])["runs"][0]
    rows = {row["step"]: row for row in reversed(run["rows"])}  # each step's first group
    run["rows"] = [rows[step] for step in sorted(rows)]
    for response in itertools.chain.from_iterable(row["responses"] for row in run["rows"]):
        for name, column in response.items():
            if isinstance(column, list) and name != "tokens":
                response[name] = [x if x is None else short(x, 3) for x in column]
    return run


def two_runs(healthy: dict, collapse: dict) -> dict:
    """Make part 3. It shows both runs at the steps nearest to the healthy run's and to MARKS."""
    wanted = [row["step"] for row in healthy["rows"]] + [mark["step"] for mark in MARKS]
    steps = set()
    for run in (healthy, collapse):
        near = {min(run["rows"], key=lambda row: abs(row["step"] - s))["step"] for s in wanted}
        run["rows"] = [row for row in run["rows"] if row["step"] in near]
        steps |= near
    shown = filled(page.TEMPLATE, {"runs": [healthy, collapse]})
    return {"marks": MARKS, "steps": sorted(steps), "rule": RULE, "runs": shown}


def main(out: Path) -> None:
    """Write the page and print where it is."""
    data = two_runs(*map(stored, PAGES)) | {
        "axes": AXES,
        "usual": {axis: AXES[axis].index(value) for axis, value in USUAL.items()},
        "span": [LOWEST, HIGHEST],
        "nine": NINE,
        "files": {name: table(name) for name in (*NINE, *VARIANTS) if name not in WITHOUT},
        "without": WITHOUT,
        "group": group_tables(),
        "words": json.loads(WORDS.read_text("utf-8")),
    }
    write(TEMPLATE, data | page.overview_beside(out), out)


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, default=Path("explorer.html"), help="the page to write")
    out = parser.parse_args().out
    try:
        main(out)
    except (BadInput, OSError) as error:
        parser.error(in_one_line(error))

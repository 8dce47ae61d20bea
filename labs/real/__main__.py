"""Ten panels: does what each method claims about tokens, responses or prompts show on a real model?

    python -m labs.real.start runs/smollm2 runs/smollm2-sums    # once: its warm start
    python -m labs.real

Each subject's responses are sampled once and kept beside the table; then they are measured. Two
subjects or seeds are under way at a time.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from common.run import atomic_write

from labs import lab
from labs.real.panels import BINS, LOOKED_AT, after, measured
from labs.real.responses import UPDATES, Subject, small

TITLE = "Ten mechanisms on SmolLM2-135M and on the embedded model"
SUBJECTS = {
    "SmolLM2": Subject("runs/smollm2-sums", "labs/real/sums.py:worked", 1e-5, 56, prompts=32),
    # Without the warm start, which makes improbable tokens rare
    "base": Subject("runs/smollm2", "labs/real/sums.py", 1e-5, 6, prompts=64, only_stapo=True),
    "tiny": Subject("tiny", "arithmetic", 3e-4, 64, prompts=64),
    "tiny-teacher": Subject("tiny-teacher", "arithmetic", 3e-4, 64, prompts=64),
}
COLOURS = {"SmolLM2": lab.BLUE, "tiny": lab.ORANGE}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="labs.real",
        usage=argparse.SUPPRESS,  # an error is one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--seeds", type=int, help="of prompts (default: 2; --quick: 1)")
    parser.add_argument("--quick", action="store_true", help="eight prompts: wide intervals")
    parser.add_argument("--out", type=Path, default=Path("runs/labs"), help="default: runs/labs")
    words = parser.parse_args()
    seeds = words.seeds
    if seeds is None:
        seeds = 1 if words.quick else 2
    if seeds < 1:
        parser.error(f"--seeds {seeds}: must be 1 or more")
    for name in words.subjects:
        model = SUBJECTS[name].model
        if "/" in model and not Path(model).exists():
            parser.error(f"{model}: is not there, make it: python -m labs.real.start --help")
    folder, kind = words.out / "real", ".quick" if words.quick else ""
    folder.mkdir(parents=True, exist_ok=True)
    table = folder / f"panels{kind}.json"
    results = {name: [] for name in words.subjects}
    if table.exists():
        results |= json.loads(table.read_text(encoding="utf-8"))["results"]
    jobs = [(name, seed) for seed in range(1, seeds + 1) for name in words.subjects]
    jobs = [job for job in jobs if job[1] not in [run["seed"] for run in results[job[0]]]]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        under_way = {}
        for name, seed in jobs:
            subject = small(SUBJECTS[name]) if words.quick else SUBJECTS[name]
            kept = folder / f"{name}-{seed}{kind}.pt"
            under_way[name, seed] = pool.submit(measured, subject, seed, kept)
        for (name, _), future in under_way.items():
            results[name].append(future.result())
            head = {"command": "python -m labs.real", "date": str(date.today())}
            lab.write(table, head | {"results": results})
    drawn = draw(results)
    with atomic_write(table.with_suffix(".png")) as partial:
        drawn.savefig(partial, dpi=130, format="png")
    print(lab.text(rows(results)), "", table, table.with_suffix(".png"), sep="\n")


def cell(found: list[float]) -> str:
    """`0.31 (0.22–0.40)`."""
    middle, low, high = (f"{value:.2g}" for value in found)
    return middle if low == high else f"{middle} ({low}–{high})"


def rows(results: dict) -> list[list[str]]:
    """Every number, a column for each subject and seed."""
    runs = {
        f"{name}, seed {run['seed']}": run["numbers"] for name in results for run in results[name]
    }
    told = list(dict.fromkeys(key for numbers in runs.values() for key in numbers))
    table = [["number", *runs]]
    for key in told:
        cells = [cell(numbers[key]) if key in numbers else "–" for numbers in runs.values()]
        table.append([key, *cells])
    return table


def draw(results: dict) -> object:
    """The ten panels, with the first seed of prompts."""
    from matplotlib.figure import Figure  # here: it takes a second

    figure = Figure(figsize=(17, 8), layout="constrained")
    lab.entitle(figure, TITLE)
    axes = dict(zip(WORDS, figure.subplots(2, 5).flat))
    for n, name in enumerate(name for name in COLOURS if results.get(name)):
        draw_subject(axes, name, n, **results[name][0])
    grid = np.linspace(0, 1, 101)
    axes["goldilocks"].plot(grid, np.sqrt(grid * (1 - grid)), color=lab.BLACK, label="√(p(1-p))")
    for file, axis in axes.items():
        title, below, ticks = WORDS[file]
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel(below)
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.has_data():
            axis.legend(frameon=False, fontsize=8)
        if ticks:
            axis.set_xticks(range(len(ticks)), ticks)
    lab.plain_ticks(axes["minirl"], "x", (0.001, 0.01, 0.1, 1))
    for file in ("gspo", "stapo"):
        axes[file].set(xscale="log", yscale="log")
    axes["stapo"].set(xlim=(1e-7, 4), ylim=(1e-4, None))  # below, float32 has no digits left
    return figure


def draw_subject(axes: dict, name: str, n: int, numbers: dict, series: dict, seed: int) -> None:
    """One subject's points in all panels."""

    def points(file: str, x: list, keys: list[str], words: str = "", style: str = "o-") -> None:
        keys = [f"{file}: {key}" for key in keys]
        # With eight prompts, perhaps no group has a gradient, and a number is missing
        found = [(place, numbers[key]) for place, key in zip(x, keys) if key in numbers]
        if not found:
            return
        middle, low, high = np.array([value for _, value in found]).T
        errors = [np.maximum(0, middle - low), np.maximum(0, high - middle)]
        drawn = {"color": COLOURS[name], "capsize": 3, "label": f"{name} {words}"}
        axes[file].errorbar([place for place, _ in found], middle, errors, fmt=style, **drawn)

    late, aside = after(LOOKED_AT[-1]), np.arange(4) + 0.15 * n
    for what, style in (("gradient", "o-"), ("tokens", "s:")):
        points("grpo", aside, [f"{what} cut, {after(t)}" for t in LOOKED_AT], f"of {what}", style)
    lengths, spreads = np.array(series[f"spread, {late}"])
    for what, y, style in (("Σ log r", spreads, "o-"), ("its mean", spreads / lengths, "s:")):
        drawn = {"color": COLOURS[name], "label": f"{name} {what}"}
        axes["gspo"].plot(lengths, y, style, **drawn)
    points("sapo", aside, [f"cosine, {rule}, {late}" for rule in ("GRPO", "GSPO", "SAPO")], "", "o")
    axes["stapo"].plot(*series["norms"], ".", color=COLOURS[name], alpha=0.6, label=name)
    for rule, style in (("GRPO", "s:"), ("MASPO", "o-")):
        points("maspo", aside, [f"kept by {rule}, {kind}, {late}" for kind in BINS], rule, style)
    gaps = ["bfloat16", "float8", *map(after, LOOKED_AT)]
    gaps = [gap for gap in gaps if f"minirl: cosine, {gap}" in numbers]
    kl = [numbers[f"minirl: KL of a response, {gap}"][0] for gap in gaps]
    points("minirl", kl, [f"cosine, {gap}" for gap in gaps], "", "o")
    points("vcpo", list(UPDATES), [f"ESS/B, {after(steps)}" for steps in UPDATES])
    p, norms = np.array(series["norms by p"])
    law = np.sqrt(p * (1 - p))
    scaled = norms / np.median(norms[law > 0] / law[law > 0])
    axes["goldilocks"].plot(p, scaled, ".", color=COLOURS[name], alpha=0.6, label=name)
    thirds = [f"right, cut in third {third}" for third in (1, 2, 3)]
    points("deep_grpo", aside, ["right, new responses", *thirds])
    for step, style in (("wrong", "o"), ("right", "s")):
        keys = [
            f"step on {step}, seen in {step}, {place}" for place in ("sampled", "likely", "rest")
        ]
        points("mass", aside, keys, f"step on {step} ones", style)


WORDS = {  # each panel's title, and what is below it
    "grpo": ("grpo: share that the clip cuts", "updates", LOOKED_AT),
    "gspo": ("gspo: spread over responses, 16 updates", "first t tokens", ()),
    "sapo": ("sapo: cosine with the unclipped gradient", "16 updates", ("GRPO", "GSPO", "SAPO")),
    "stapo": ("stapo: |∇ log π|² of single tokens", "1 - 2π + Σπ²", ()),
    "maspo": ("maspo: gradient kept, 16 updates", "token", ("π < 0.1", "between", "π > 0.9")),
    "minirl": ("minirl: cosine, token and response", "KL(μ‖π) of a response", ()),
    "vcpo": ("vcpo: ESS/B of a stale batch", "updates", ()),
    "goldilocks": ("goldilocks: |gradient| of a group", "share of right responses p", ()),
    "deep_grpo": (
        "deep_grpo: new endings that are right",
        "cut in",
        ("root", "1st", "2nd", "3rd third"),
    ),
    "mass": ("where probability goes in one step", "token", ("sampled", "likely", "rest")),
}


if __name__ == "__main__":
    main()

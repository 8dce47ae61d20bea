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

import common  # noqa: F401  (before torch)
import numpy as np
import torch
from common.run import atomic_write

from labs import lab
from labs.real.panels import LOOKED_AT, Panels
from labs.real.responses import UPDATES, Subject, small, stored

TITLE = "Ten mechanisms on SmolLM2-135M and on the embedded model"
SUBJECTS = {
    "SmolLM2": Subject("runs/smollm2-sums", "labs/real/sums.py:worked", 1e-5, 56, prompts=32),
    "tiny": Subject("tiny", "arithmetic", 3e-4, 64, prompts=64),
    "tiny-teacher": Subject("tiny-teacher", "arithmetic", 3e-4, 64, prompts=64),
}
COLOURS = {"SmolLM2": lab.BLUE, "tiny": lab.ORANGE}
KINDS = ("rare", "between", "common")
PLACES = ("sampled", "likely", "rest")


def measure(name: str, seed: int, folder: Path, quick: bool) -> dict:
    """The numbers and series of one subject with one seed of prompts."""
    torch.set_num_threads(1)
    subject = small(SUBJECTS[name]) if quick else SUBJECTS[name]
    kept = folder / f"{name}-{seed}{'.quick' if quick else ''}.pt"
    panels = Panels(subject, seed, stored(kept, subject, seed))
    panels.measure()
    numbers = {key: [float(f"{x:.3g}") for x in found] for key, found in panels.numbers.items()}
    return {"seed": seed, "numbers": numbers, "series": panels.series}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="labs.real",
        usage=argparse.SUPPRESS,  # an error is one line
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--seeds", type=int, default=2, help="of prompts (default: 2)")
    parser.add_argument("--quick", action="store_true", help="eight prompts: wide intervals")
    parser.add_argument("--out", type=Path, default=Path("runs/labs"), help="default: runs/labs")
    words = parser.parse_args()
    if words.seeds < 1:
        parser.error(f"--seeds {words.seeds}: must be 1 or more")
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
    jobs = [(name, seed) for seed in range(1, words.seeds + 1) for name in words.subjects]
    jobs = [job for job in jobs if job[1] not in [run["seed"] for run in results[job[0]]]]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        under_way = {job: pool.submit(measure, *job, folder, words.quick) for job in jobs}
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
    """Ten panels: SmolLM2 in blue, the embedded model in orange; the first seed of prompts."""
    from matplotlib.figure import Figure  # here: it takes a second

    figure = Figure(figsize=(17, 8), layout="constrained")
    lab.entitle(figure, TITLE)
    axes = figure.subplots(2, 5)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    shown = [
        (n, name, colour) for n, (name, colour) in enumerate(COLOURS.items()) if results.get(name)
    ]
    for n, name, colour in shown:
        numbers, series = results[name][0]["numbers"], results[name][0]["series"]

        def points(axis: object, x: list, keys: list[str], **style: object) -> None:
            """Numbers with their intervals, where they were found."""
            found = [(place, numbers[key]) for place, key in zip(x, keys) if key in numbers]
            middle, low, high = np.array([value for _, value in found]).T
            errors = [np.maximum(0, middle - low), np.maximum(0, high - middle)]
            where = [place for place, _ in found]
            axis.errorbar(where, middle, errors, color=colour, capsize=3, **style)

        at = [f"{steps} update{'s'[: steps > 1]}" for steps in LOOKED_AT]
        aside = np.arange(3) + 0.15 * n
        points(
            axes[0, 0],
            LOOKED_AT,
            [f"grpo: gradient cut, {words}" for words in at],
            marker="o",
            label=f"{name}: of |gradient|",
        )
        points(
            axes[0, 0],
            LOOKED_AT,
            [f"grpo: tokens cut, {words}" for words in at],
            marker="s",
            linestyle=":",
            label=f"{name}: of tokens",
        )
        lengths, spreads = series["spread, 16 updates"]
        axes[0, 1].plot(lengths, spreads, "o-", color=colour, label=f"{name}: Σ log r")
        axes[0, 1].plot(
            lengths, np.array(spreads) / lengths, "s:", color=colour, label=f"{name}: its mean"
        )
        points(
            axes[0, 2],
            aside,
            [f"sapo: cosine, {rule}, 16 updates" for rule in ("GRPO", "GSPO", "SAPO")],
            marker="o",
            linestyle="",
            label=name,
        )
        axes[0, 3].plot(*np.exp(series["norms"]), ".", color=colour, alpha=0.6, label=name)
        for rule, style in (("GRPO", ":"), ("MASPO", "-")):
            points(
                axes[0, 4],
                aside,
                [f"maspo: kept by {rule}, {kind}, 16 updates" for kind in KINDS],
                marker="o",
                linestyle=style,
                label=f"{name}: {rule}",
            )
        gaps = ["bfloat16", "float8", *at]
        kl = [numbers[f"minirl: KL of a response, {gap}"][0] for gap in gaps]
        points(
            axes[1, 0],
            kl,
            [f"minirl: cosine, {gap}" for gap in gaps],
            marker="o",
            linestyle="",
            label=name,
        )
        updates = [
            f"vcpo: ESS/B, {steps} update{'s'[: steps > 1 or steps == 0]}" for steps in UPDATES
        ]
        points(axes[1, 1], UPDATES, updates, marker="o", label=name)
        p, norms = np.array(series["norms by p"])
        scale = np.median(norms[p * (1 - p) > 0] / np.sqrt((p * (1 - p))[p * (1 - p) > 0]))
        axes[1, 2].plot(p, norms / scale, ".", color=colour, alpha=0.6, label=name)
        keys = ["deep_grpo: right, new responses"]
        keys += [f"deep_grpo: right, cut in third {third}" for third in (1, 2, 3)]
        points(axes[1, 3], np.arange(4) + 0.1 * n, keys, marker="o", label=name)
        for step, style in (("wrong", "o"), ("right", "s")):
            keys = [f"mass: step on {step}, seen in {step}, {place}" for place in PLACES]
            points(
                axes[1, 4], aside, keys, marker=style, linestyle="", label=f"{name}: {step} ones"
            )
    grid = np.linspace(0, 1, 101)
    axes[1, 2].plot(grid, np.sqrt(grid * (1 - grid)), color=lab.BLACK, label="√(p(1-p))")
    for axis, words in zip(axes.flat, WORDS):
        axis.set_title(words[0], fontsize=10, loc="left")
        axis.set_xlabel(words[1])
        axis.legend(frameon=False, fontsize=8)
    lab.plain_ticks(axes[0, 0], "x", LOOKED_AT)
    axes[0, 1].set(xscale="log", yscale="log")
    axes[0, 2].set_xticks(range(3), ["GRPO", "GSPO", "SAPO"])
    axes[0, 3].set(xscale="log", yscale="log")
    axes[0, 4].set_xticks(range(3), ["π < 0.1", "between", "π > 0.9"])
    axes[1, 0].set_xscale("log")
    axes[1, 3].set_xticks(range(4), ["root", "1/3", "2/3", "end"])
    axes[1, 4].set_xticks(range(3), ["sampled", "likely", "rest"])
    return figure


WORDS = [  # each panel's title and x-axis
    ("grpo: the clip cuts", "updates"),
    ("gspo: spread over responses, 16 updates", "first t tokens"),
    ("sapo: cosine with the unclipped gradient", "16 updates"),
    ("stapo: |∇ log π|² of single tokens", "1 - 2π + Σπ²"),
    ("maspo: gradient kept, 16 updates", "probability of the token"),
    ("minirl: cosine, token and response level", "KL(μ‖π) of a response"),
    ("vcpo: ESS/B of a stale batch", "updates"),
    ("goldilocks: |gradient| of a group", "share of right responses p"),
    ("deep_grpo: new endings that are right", "cut at"),
    ("where probability goes in one step", "token"),
]


if __name__ == "__main__":
    main()

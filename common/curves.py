"""metrics.jsonl -> curves.png: `python -m common.curves RUN_FOLDER ...` draws them again."""

from __future__ import annotations

import math
import sys
from pathlib import Path

from common.distributed import BadInput, first_line
from common.folder import read_lines, saved_config, whole


def draw_curves(folder: Path) -> Path:
    """curves.png from config.json and metrics.jsonl alone: `python -m common.curves runs/...`
    draws it again."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    config = saved_config(folder)
    if not config:
        raise BadInput(f"{folder}: holds no run")
    lines = read_lines(folder / "metrics.jsonl")
    if not lines:
        raise BadInput(f"{folder}: nothing to draw yet, metrics.jsonl has no line")
    panels = {
        "reward, sampled (training prompts)": ["reward"],
        "held-out accuracy": ["greedy", "sampled"],
        "response length (tokens)": ["response_len"],
        f"what {config['algorithm']} did": [
            next(iter(acted)) if isinstance(acted := config["acted"], dict) else acted
        ],
        "entropy (nats per token)": ["entropy"],
        "gradient norm (before clipping)": ["grad_norm"],
        "KL sampler vs trainer": ["sampler_kl"],
        "groups without gradient (share)": ["zero_groups"],
    }
    figure, axes = pyplot.subplots(2, 4, figsize=(17, 7), layout="constrained")
    for axis, (title, names) in zip(axes.flat, panels.items()):
        for name in names:
            points = [
                (line["step"], math.nan if line[name] is None else line[name])
                for line in lines
                if name in line
            ]
            marker = "o" if len(points) < 30 else ""
            axis.plot(
                [x for x, _ in points],
                [y for _, y in points],
                label=name,
                marker=marker,
                linewidth=1.2,
            )
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend()
        if names[0] in ("reward", "greedy", "zero_groups"):
            axis.set_ylim(-0.03, 1.03)
    setting = f"{config['model']} on {config['task']}, seed {config['seed']}, lr {config['lr']}"
    figure.suptitle(f"{config['algorithm']}: {setting}")
    path = folder / "curves.png"
    with whole(path) as partial:
        figure.savefig(partial, dpi=80, format="png")
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        if not sys.argv[1:] or sys.argv[1] in ("-h", "--help"):
            raise BadInput("usage: python -m common.curves RUN_FOLDER ...")
        for argument in sys.argv[1:]:
            print(draw_curves(Path(argument)))
    except (BadInput, OSError) as error:
        print(f"common.curves: error: {first_line(error)}", file=sys.stderr)
        sys.exit(2)

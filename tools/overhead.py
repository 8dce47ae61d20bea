"""What each method costs beside grpo.py: runs all algorithm files in turn, at equal settings.

    python -m tools.overhead [STEPS [NAME ...]]      of all files, or of these

Three seeds; for each the median over the steps of seconds per step (without evaluation and
checkpoints) and of sampled tokens per step, as ratios to the same seed's grpo.py. Prints the
docs/cost.md's table, smallest and largest seed in brackets.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import arguments
from checks.files import FIRST, ROOT, algorithms

# Name of each algorithm file -> its module
FILES = {p.stem: ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in algorithms()}
SEEDS = (1, 2, 3)


def measure(name: str, seed: int, steps: int, folder: Path) -> dict[str, float]:
    """Median seconds and sampled tokens per step of one run."""
    run_dir = folder / f"{name}-{seed}"
    flags = f"--seed {seed} --steps {steps} --prompts_per_step 16 --minibatches 1"
    flags += f" --eval_every {steps} --save_every {steps} --eval_problems 16 --eval_samples 1"
    flags += " --lag 2" if name == "vcpo" else ""
    words = [sys.executable, "-m", FILES[name], *flags.split(), "--run_dir", run_dir]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, encoding="utf-8")
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        print(f"tools.overhead: error: {name}.py failed: {last}", file=sys.stderr)
        sys.exit(run.returncode)
    lines = [
        json.loads(line) for line in (run_dir / "metrics.jsonl").read_text("utf-8").splitlines()
    ]
    steady = lines[len(lines) // 4 :]  # goldilocks chooses and the first compilations are over
    # A line has the seconds of what its step did: most steps neither evaluate nor save
    apart = ("seconds_evaluate", "seconds_save")
    seconds = [line["seconds"] - sum(line.get(name, 0) for name in apart) for line in steady]
    tokens = [line["tokens"] for line in steady]
    return {"seconds": statistics.median(seconds), "tokens": statistics.median(tokens)}


def main(steps: int, names: list[str]) -> None:
    """Measure these files with every seed, the seeds in turn, and print the table."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            for name in names:
                found[name, seed] = measure(name, seed, steps, Path(folder))
    print("| file | seconds per step | sampled tokens per step |\n|---|---|---|")
    for name in names:
        cells = []
        for what in ("seconds", "tokens"):
            ratios = sorted(found[name, seed][what] / found[FIRST, seed][what] for seed in SEEDS)
            cells.append(f"{ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("steps", nargs="?", type=int, default=40, help="4 or more (default: 40)")
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as sapo (default: all)")
    words = parser.parse_args()
    if words.steps < 4:
        parser.error(f"{words.steps} steps: must be 4 or more, the first quarter is not measured")
    if unknown := [name for name in words.names if name not in FILES]:
        parser.error(f"{unknown[0]}: unknown, use some of {', '.join(FILES)}")
    # grpo.py is what the others are compared with
    main(words.steps, list(dict.fromkeys([FIRST, *(words.names or FILES)])))

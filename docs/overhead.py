"""What each method costs beside grpo.py: `python docs/overhead.py [steps]` runs all nine in turn,
at equal settings.

Three seeds; for each the median over the steps of seconds per step (without evaluation and
checkpoints) and of sampled tokens per step, as ratios to the same seed's grpo.py. Prints the
README's table, smallest and largest seed in brackets.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = "grpo gspo sapo stapo maspo minirl vcpo goldilocks deep_grpo".split()
SEEDS = (1, 2, 3)


def measure(name: str, seed: int, steps: int, folder: Path) -> dict[str, float]:
    """Median seconds and sampled tokens per step of one run."""
    flags = (
        f"--seed {seed} --steps {steps} --prompts_per_step 16 --minibatches 1 --eval_every {steps}"
    )
    flags += f" --save_every {steps} --eval_problems 16 --eval_samples 1 --run_dir {folder}/{name}-{seed}"
    flags += " --lag 2" if name == "vcpo" else ""
    run = subprocess.run(
        [sys.executable, ROOT / f"{name}.py", *flags.split()], capture_output=True, text=True
    )
    if run.returncode:
        last = (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1]
        print(f"overhead.py: error: {name}.py failed: {last}", file=sys.stderr)
        sys.exit(run.returncode)
    lines = [
        json.loads(line)
        for line in (folder / f"{name}-{seed}/metrics.jsonl").read_text().splitlines()
    ]
    steady = lines[len(lines) // 4 :]  # goldilocks chooses and the first compilations are over
    seconds = [line["seconds"] - line["seconds_evaluate"] - line["seconds_save"] for line in steady]
    return {
        "seconds": statistics.median(seconds),
        "tokens": statistics.median(line["tokens"] for line in steady),
    }


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = {
            (name, seed): measure(name, seed, steps, Path(folder))
            for seed in SEEDS
            for name in FILES
        }
    print("| file | seconds per step | sampled tokens per step |\n|---|---|---|")
    for name in FILES:
        cells = []
        for what in ("seconds", "tokens"):
            ratios = sorted(found[name, seed][what] / found["grpo", seed][what] for seed in SEEDS)
            cells.append(f"{ratios[1]:.2f} ({ratios[0]:.2f} to {ratios[2]:.2f})")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    # No usage: an error is one line
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, description=__doc__)
    parser.add_argument("steps", nargs="?", type=int, default=40)
    steps = parser.parse_args().steps
    if steps < 4:
        parser.error(f"{steps} steps: must be 4 or more, the first quarter is not measured")
    main(steps)

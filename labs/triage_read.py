"""python labs/triage_read.py: when accuracy falls, and when g and its size leave their early range.

A fall begins at the evaluation from which on greedy accuracy stays 0.15 below its best. A mean of
four steps has left the range of steps 1 to 16 if it and the next one are three standard deviations
(of such a mean) from theirs.
"""

import json
from pathlib import Path

import numpy as np

for seed, run in json.loads(Path("labs/triage.json").read_text()).items():
    steps, greedy = [int(step) for step in run["greedy"]], list(run["greedy"].values())
    low = [max(greedy[: i + 1]) - 0.15 for i in range(len(greedy))]
    start = next((s for i, s in enumerate(steps) if all(x <= low[i] for x in greedy[i:])), None)
    words = [f"seed {seed}: best {max(greedy):.2f}, end {greedy[-1]:.2f}, falls from {start}"]
    for name in ("wrong", "wrong_size", "right", "right_size"):
        values = np.array([line.get(name, np.nan) for line in run["segments"]])
        means = np.array([np.nanmean(values[i : i + 4]) for i in range(0, 80, 4)])
        apart = np.abs(means - np.nanmean(values[:16])) > 3 * np.nanstd(values[:16]) / 2
        left = [4 * (i + 1) for i in range(4, 20) if apart[i : i + 2].all()]
        words.append(f"{name} {left[0] if left else '-'}")
    print(", ".join(words))

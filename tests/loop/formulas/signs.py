"""Signs: right and wrong responses weighed apart, outliers left out."""

import statistics

from tests.loop.oracle import Batch, M, Oracle, Tensor, grpo, sampler_logp, torch

FLAGS = {"positive_weight": 0.3, "outliers": 1.8, "beta": 0.1, "grad_clip": 4.0}
ALSO = [{"baseline": "none"}]
STORED = {"outliers": 1.5}
OFF = {"positive_weight": 1.0}


def prepare(o: Oracle, step: int, b: Batch) -> None:
    """Without a baseline right is 1, wrong -1. Outliers of the step's whole rollout, by length or
    by mean log μ, have the advantage 0."""
    if o.args["baseline"] == "none":
        b.A = torch.tensor([1.0 if row.reward else -1.0 for row in b.rows], dtype=torch.float64)
    measures = (
        lambda row: float(len(row.tokens)),
        lambda row: statistics.fmean(sampler_logp(row, o.model)),
    )
    rollout = [row for part in range(M) for _, group in o.groups(step, part) for row in group]
    b.odd = torch.zeros(len(b.rows), dtype=torch.bool)
    for measure in measures:
        every = [measure(row) for row in rollout]
        mean, std = statistics.fmean(every), statistics.pstdev(every)
        far = [abs(measure(row) - mean) > o.args["outliers"] * std for row in b.rows]
        b.odd |= torch.tensor(far)
    b.A = b.A * ~b.odd


def objective(b: Batch) -> tuple[Tensor, dict]:
    u = 1 + (b.args["positive_weight"] - 1) * (b.A > 0).double()
    J, stats = grpo(Batch(**(vars(b) | {"A": u * b.A})))
    size, odd = b.A.abs(), b.odd.double()
    stats["damped"] = float(((1 - u) * size).sum()), float(size.sum())
    stats["outlier_share"] = float(odd.sum()), len(b.rows)
    rewards = torch.tensor([row.reward for row in b.rows], dtype=torch.float64)
    stats["outlier_reward"] = float((rewards * odd).sum()), float(odd.sum())
    return J, stats

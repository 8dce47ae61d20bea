"""Signs: right and wrong responses weighed apart, outliers left out."""

import statistics

from tests.loop.oracle import Batch, Oracle, Row, Tensor, grpo, sampler_logp, torch

FLAGS = {"positive_weight": 0.3, "outliers": 1.8, "beta": 0.1, "grad_clip": 4.0}
ALSO = [{"baseline": "none"}]
STORED = {"outliers": 1.5}
OFF = {"positive_weight": 1.0}


def length(row: Row) -> float:
    return float(len(row.tokens))


def surprise(row: Row) -> float:
    return statistics.fmean(sampler_logp(row, "model"))


def prepare(o: Oracle, step: int, b: Batch) -> None:
    """Without a baseline right is 1, wrong -1. Outliers of the step's whole rollout, by length or
    by mean log μ, have the advantage 0."""
    if o.args["baseline"] == "none":
        b.A = torch.tensor([1.0 if row.reward else -1.0 for row in b.rows]).double()
    for measure in (length, surprise):
        every = [measure(row) for row in o.rows(step)]
        mean, reach = statistics.fmean(every), o.args["outliers"] * statistics.pstdev(every)
        b.A = b.A * torch.tensor([abs(measure(row) - mean) <= reach for row in b.rows])


def objective(b: Batch) -> Tensor:
    u = torch.where(b.A > 0, b.args["positive_weight"], 1.0)
    return grpo(Batch(**vars(b) | {"A": u * b.A}))

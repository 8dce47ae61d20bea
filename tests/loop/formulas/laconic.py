"""LACONIC: tokens beyond a budget cost a price, which moves."""

from statistics import fmean

from tests.loop.oracle import Oracle, Row, grpo

FLAGS = {"length_budget": 8, "price_lr": 0.5, "price_ceiling": 0.9, "grad_clip": 5.0, "beta": 0.1}
objective = grpo


def price(o: Oracle, step: int) -> float:
    """λ of a step: 0 in the first, then moved by every step before."""
    value = 0.0
    for before in range(step):
        length = fmean(len(row.tokens) for row in o.rows(before))
        value += o.args["price_lr"] * (length / o.args["length_budget"] - 1)
        value = min(max(value, o.args["price_floor"]), o.args["price_ceiling"])
    return value


def rewards(o: Oracle, step: int, rows: list[Row]) -> list[float]:
    budget, cost = o.args["length_budget"], price(o, step)
    return [row.reward - cost * max(0.0, len(row.tokens) / budget - 1) for row in rows]

"""LACONIC."""

from tests.loop.oracle import Oracle, Row, grpo

FLAGS = {"length_budget": 8, "price_lr": 0.5, "price_ceiling": 0.9, "grad_clip": 5.0, "beta": 0.1}
objective = grpo


def all_rows(o: Oracle, step: int) -> list[Row]:
    groups = [o.groups(step, part) for part in range(o.args["minibatches"])]
    return [row for part in groups for _, rows in part for row in rows]


def price(o: Oracle, step: int) -> float:
    """λ of a step: 0 in the first, then moved by every step before."""
    value = 0.0
    for before in range(step):
        rows = all_rows(o, before)
        mean = sum(len(row.tokens) for row in rows) / len(rows)
        value += o.args["price_lr"] * (mean / o.args["length_budget"] - 1)
        value = min(max(value, o.args["price_floor"]), o.args["price_ceiling"])
    return value


def charged(o: Oracle, step: int, row: Row) -> float:
    return price(o, step) * max(0.0, len(row.tokens) / o.args["length_budget"] - 1)


def rewards(o: Oracle, step: int, rows: list[Row]) -> list[float]:
    return [row.reward - charged(o, step, row) for row in rows]


def metrics(o: Oracle, step: int) -> dict[str, float]:
    rows = all_rows(o, step)
    return {
        "price": price(o, step),
        "charged": sum(charged(o, step, row) for row in rows) / len(rows),
        "over_budget": sum(len(row.tokens) > o.args["length_budget"] for row in rows) / len(rows),
    }

"""PACED-RL: goldilocks' teacher chooses what is evenly right and wrong; V is the baseline."""

from types import SimpleNamespace

from tests.loop.oracle import CHOICE, Batch, Oracle, Row, Tensor, as_recorded, teaches

FLAGS = CHOICE | {"anchor": 0.2, "grad_clip": 40.0, "lr": 3e-4, "teacher_lr": 3e-3}
STORED = {"candidates": 1}
SMALL = "--candidates 4 --teacher_batch 8 --window 20".split()
rounds = as_recorded  # prompts are chosen
teacher = SimpleNamespace(top=1.0, merit=lambda f: -abs(f - 0.5), target=lambda R: R.mean(dim=1))


def V(o: Oracle, step: int, prompt: str) -> float:
    """Of the teacher that chose the step's prompts."""
    return teaches(*o.taught(step), prompt, top=1.0).item()


def rewards(o: Oracle, step: int, rows: list[Row]) -> list[float]:
    expected = V(o, step, rows[0].prompt)
    return [row.reward - expected for row in rows]


def advantages(R: Tensor) -> Tensor:
    return R


def objective(b: Batch) -> Tensor:
    """-β/2 (log Z + log π_θ - log π_old - R/β)², where R - β log Z is A."""
    beta = b.args["anchor"]
    return -beta / 2 * ((((b.logp - b.old) * b.mask).sum(1) - b.A / beta) ** 2).mean()

"""PACED-RL."""

from types import SimpleNamespace

from tests.loop.oracle import Batch, Oracle, P, Row, Tensor, as_recorded, teaches

FLAGS = {"candidates": 5, "teacher_batch": P, "window": P, "teacher_updates": 1, "explore": 0.0}
FLAGS |= {"anchor": 0.2, "grad_clip": 40.0, "lr": 3e-4, "teacher_lr": 3e-3}
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


def objective(b: Batch) -> tuple[Tensor, dict]:
    """-β/2 (log Z + log π_θ - log π_old - R/β)², where R - β log Z is A."""
    beta = b.args["anchor"]
    log_ratio = ((b.logp - b.old) * b.mask).sum(1)
    stats = {"anchor_kl": (-beta * float(log_ratio.detach().sum()), len(b.rows))}
    return -beta / 2 * ((log_ratio - b.A / beta) ** 2).mean(), stats


def metrics(o: Oracle, step: int) -> dict[str, float]:
    (chosen,) = o.rounds[step]
    return {"expected": sum(V(o, step, prompt) for prompt in chosen.values()) / P}

"""Credit: does an exact verdict on every step prevent the falls that masks and gates were made for?

grpo.py without its KL term trains with the advantage of the whole response, with credit by step
(steps.py), and with the same credits dealt to the steps by chance. The settings are those of
docs/stability.md in which runs fall. SAPO, MASPO and STAPO are trained under the hardest one, too.

    python -m labs.credit
"""

import sys


from labs import lab
from labs.race.stresses import STRESSES

TITLE = "Exact credit by step"
HOW = ("outcome", "step", "shuffled")
SETTINGS = ("none", "lr x3", "16 updates", "stale sampler", "all four at half strength")
FOUR = SETTINGS[-1]
FLAGS = "--eval_problems 256 --eval_samples 2 --sampler_tolerance 1e6 --save_every 1000"


def command(how: str, stress: str, file: str = "grpo.py --beta 0", steps: int = 40) -> str:
    """A run; five measurements after step 0."""
    words = f"-m labs.credit.steps {how} {stress.replace(' ', '-')} {file} {FLAGS}"
    return f"{words} --steps {steps} --eval_every {steps // 5}{STRESSES[stress].flags(128)}"


ARMS = {f"{stress}, {how}": command(how, stress) for stress in SETTINGS for how in HOW}
ARMS |= {f"lr x3, 100 steps, {how}": command(how, "lr x3", steps=100) for how in HOW[:2]}
FILES = ("sapo", "maspo", "stapo")
ARMS |= {
    f"{FOUR}, {file}, {how}": command(how, FOUR, f"{file}.py") for file in FILES for how in HOW[:2]
}
COLUMNS = ("sampled", "entropy", "response_len", "grad_norm", "clip_share")
SEEDS = 5


def score(run: dict) -> float:
    """As in docs/stability.md: the mean of the last three measurements."""
    return lab.tail(run["sampled"], 3)


def rows(results: dict) -> list[list[str]]:
    table = [["setting", *HOW, "step above outcome", "shuffled above outcome"]]
    return table


def draw(results: dict) -> object:
    figure, axes = lab.sheet(TITLE, "")
    return figure


if __name__ == "__main__":
    lab.main(sys.modules[__name__])

"""Sums of two-digit numbers, for a real model (docs/results.md).

`--task labs/real/sums.py`: a prompt shows one solved sum, and the model solves the next one.
`--task labs/real/sums.py:in_words`: the prompts are questions, for a model with a chat template.
This task has no reward of its own, so math-verify scores the responses.

No pair of numbers that is held out is in the training set.
"""

import random
import re
from types import SimpleNamespace

SHOWN = "47 + 18 = 65\n{} + {} ="
ASKED = ["What is {} + {}?", "What is the sum of {} and {}?"]
ASKED += ["What is {} plus {}?", "Compute {} + {}."]

PAIRS = [(a, b) for a in range(10, 100) for b in range(10, 100)]
random.Random(0).shuffle(PAIRS)
HELD_OUT, TRAINING = PAIRS[:256], PAIRS[256:]
held_out = [(SHOWN.format(a, b), str(a + b)) for a, b in HELD_OUT]


def train(i: int) -> tuple[str, str]:
    """Draw problem i, which is random but always the same for the same i."""
    a, b = random.Random(i).choice(TRAINING)
    return SHOWN.format(a, b), str(a + b)


def reward(response: str, answer: str) -> float:
    """Return 1.0 if the first number of the response is the answer, else 0.0."""
    return float(re.findall(r"\d+", response)[:1] == [answer])


def ask(i: int) -> tuple[str, str]:
    """Ask for the same sums as `train`, each in one of four wordings."""
    rng = random.Random(i)
    a, b = rng.choice(TRAINING)
    return rng.choice(ASKED).format(a, b), str(a + b)


questions = [(ASKED[n % 4].format(a, b), str(a + b)) for n, (a, b) in enumerate(HELD_OUT)]
in_words = SimpleNamespace(train=ask, held_out=questions)

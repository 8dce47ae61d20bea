"""Sums of two numbers, for a real model that continues a text (docs/real.md).

`--task labs/real/sums.py`: a prompt shows one solved sum, and asks for another.
`--task labs/real/sums.py:in_words`: one-digit sums as questions, for a model with a chat template.
It has no reward of its own, so math-verify scores the responses.

No held-out sum is in the training set.
"""

import random
import re
from types import SimpleNamespace

SHOWN = "47 + 18 = 65\n{} + {} ="
ASKED = ["What is {} + {}?", "What is the sum of {} and {}?"]
ASKED += ["What is {} plus {}?", "Compute {} + {}."]


def split(numbers: range, held_out: int) -> tuple[list, list]:
    """All pairs of these numbers: those held out, and those to train on."""
    pairs = [(a, b) for a in numbers for b in numbers]
    random.Random(0).shuffle(pairs)
    return pairs[:held_out], pairs[held_out:]


HELD_OUT, TRAINING = split(range(10, 100), 256)
held_out = [(SHOWN.format(a, b), str(a + b)) for a, b in HELD_OUT]


def train(i: int) -> tuple[str, str]:
    """Problem i, drawn by chance, but always the same one for the same i."""
    a, b = random.Random(i).choice(TRAINING)
    return SHOWN.format(a, b), str(a + b)


def reward(response: str, answer: str) -> float:
    """1.0 if the first number of the response is the answer, else 0."""
    return float(re.findall(r"\d+", response)[:1] == [answer])


def questions() -> SimpleNamespace:
    """One-digit sums, each asked in four ways."""
    tried, trained = split(range(10), 12)

    def ask(i: int) -> tuple[str, str]:
        rng = random.Random(i)
        a, b = rng.choice(trained)
        return rng.choice(ASKED).format(a, b), str(a + b)

    asked = [(words.format(a, b), str(a + b)) for words in ASKED for a, b in tried]
    return SimpleNamespace(train=ask, held_out=asked)


in_words = questions()

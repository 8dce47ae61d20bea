"""The embedded task: chains of one-digit arithmetic, worked left to right, modulo 100.

Prompt `7*8-9+6=`; a worked response is `7*8=56;56-9=47;47+6=53#53`; a guess is `#53` at once. The
answer is what follows the last `#`. Each single step is easy and the whole chain is hard to guess,
so showing the work pays, and a policy that starts by guessing discovers this on its own within a
few dozen updates.
"""

import random
import zlib

MIN_TERMS, MAX_TERMS = 2, 7
LONGEST = "9" + "*9" * (MAX_TERMS - 1) + "="  # no prompt has more characters


def apply(left: int, operator: str, right: int) -> int:
    """One step of the chain, `left operator right` modulo 100: 3-9 is 94."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % 100


def draw(rng: random.Random) -> str:
    """A prompt with 2 to 7 terms, each number of terms equally likely; more terms are harder."""
    more, first = rng.randint(MIN_TERMS, MAX_TERMS) - 1, rng.randrange(10)
    terms = [f"{rng.choice('+-*')}{rng.randrange(10)}" for _ in range(more)]
    return f"{first}{''.join(terms)}="


def held_out(prompt: str) -> bool:
    """True for a fifth of all prompts, by a fixed hash: no training ever sees them."""
    return zlib.crc32(prompt.encode()) % 5 == 0


def work(prompt: str, rng: random.Random | None = None, slip: float = 0.0) -> tuple[list[str], str]:
    """The steps of `prompt` and its answer.

    With probability `slip` a step goes wrong, and the rest follows from it.
    """
    value, steps = int(prompt[0]), []
    for operator, digit in zip(prompt[1:-1:2], prompt[2:-1:2]):
        result = apply(value, operator, int(digit))
        if slip and rng.random() < slip:
            result = rng.randrange(100)
        steps.append(f"{value}{operator}{digit}={result}")
        value = result
    return steps, str(value)

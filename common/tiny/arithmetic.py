"""The embedded task: chains of one-digit arithmetic, worked left to right, modulo 100.

Prompt `7*8-9+6=`; a worked response is `7*8=56;56-9=47;47+6=53#53`; a guess is `#53` at once. The
answer is what follows the last `#`. Each single step is easy and the whole chain is hard to guess,
so showing the work pays. The embedded model was trained on demonstrations of both kinds: its
likeliest response is a guess, and nearly half of its samples are worked. Within a hundred updates
the reward, which judges the number alone, makes nearly all of them worked.
"""

import random
import zlib
from collections.abc import Sequence
from typing import NamedTuple


def final_number(completion: str) -> str:
    """What follows the last `#`; without one the whole text."""
    return completion.rpartition("#")[2]


def arithmetic_reward(completion: str, answer: str) -> float:
    """1.0 if what follows the last `#` is exactly the answer; a substring is not enough."""
    _, mark, final = completion.rpartition("#")
    return float(mark == "#" and final == answer)


class Kind(NamedTuple):
    """What prompts are drawn: numbers of terms, each equally likely, and operators."""

    terms: Sequence[int] = range(2, 8)
    held_out_terms: Sequence[int] = ()  # of the held-out problems, where they are others
    operators: str = "+-*"
    last: str = "+-*"  # the last operator


KINDS = {
    "arithmetic": Kind(),
    # Three quarters too easy, a fifth too long to be finished in 64 tokens, the rest to learn from.
    "arithmetic:mix": Kind(45 * (2,) + 12 * (16,) + (5, 6, 7), held_out_terms=(5, 6, 7)),
    # Sums of one-digit numbers are easy, and then one product decides: failures come late.
    "arithmetic:deep": Kind((7,), operators="+", last="*"),
    # Worked responses of some 100 and 200 tokens
    "arithmetic:100": Kind(range(13, 18)),
    "arithmetic:200": Kind(range(27, 32)),
}


def apply(left: int, operator: str, right: int) -> int:
    """One step of the chain, `left operator right` modulo 100: 3-9 is 94."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % 100


def draw(rng: random.Random, kind: Kind = KINDS["arithmetic"]) -> str:
    """A prompt; more terms are harder."""
    terms = rng.choice(kind.terms)
    prompt = str(rng.randrange(10))
    for operators in [kind.operators] * (terms - 2) + [kind.last]:
        prompt += rng.choice(operators)
        prompt += str(rng.randrange(10))
    return prompt + "="


def is_held_out(prompt: str) -> bool:
    """True for a fifth of all prompts, by a fixed hash: no training ever sees them."""
    return zlib.crc32(prompt.encode()) % 5 == 0


def training_prompt(seed: int, index: int, kind: Kind = KINDS["arithmetic"]) -> str:
    """Prompt `index` of this seed's endless stream; never one that is held out."""
    rng = random.Random(f"train/{seed}/{index}")
    prompt = draw(rng, kind)
    while is_held_out(prompt):
        prompt = draw(rng, kind)
    return prompt


def held_out_prompts(number: int, kind: Kind = KINDS["arithmetic"]) -> list[str]:
    """So many different prompts that are held out; the same ones for every seed."""
    rng = random.Random("held-out")
    prompts = {}  # the keys: in order, and each once
    while len(prompts) < number:
        prompt = draw(rng, kind)
        if is_held_out(prompt):
            prompts[prompt] = True
    return list(prompts)


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

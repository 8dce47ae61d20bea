"""The embedded task: chains of one-digit arithmetic, worked from left to right, modulo 100.

To the prompt `7*8-9+6=`, a worked response is `7*8=56;56-9=47;47+6=53#53`, and a guess is `#53`.
The answer is what follows the last `#`. Each step is easy but the whole chain is hard to guess, so
showing the work pays. The embedded model was trained on demonstrations of both kinds. Its likeliest
response is a guess, but nearly half of its samples are worked. Within a hundred updates nearly all
of them are, although the reward looks at the final number alone.
"""

import random
import zlib
from collections.abc import Sequence
from typing import NamedTuple


def final_number(completion: str) -> str:
    """Return what follows the last `#`, or the whole text if it has no `#`."""
    return completion.rpartition("#")[2]


def arithmetic_reward(completion: str, answer: str) -> float:
    """Return 1.0 if what follows the last `#` is exactly the answer, else 0.0."""
    _, mark, final = completion.rpartition("#")
    return float(mark == "#" and final == answer)


class Kind(NamedTuple):
    """The kind of prompts to draw: numbers of terms, all equally likely, and operators."""

    terms: Sequence[int] = range(2, 8)
    held_out_terms: Sequence[int] = ()  # if the held-out problems have other numbers of terms
    operators: str = "+-*"
    last: str = "+-*"  # choices for the last operator


KINDS = {
    "arithmetic": Kind(),
    # Three quarters are too easy, a fifth are too long for 64 tokens, and the rest can be learned.
    "arithmetic:mix": Kind(45 * (2,) + 12 * (16,) + (5, 6, 7), held_out_terms=(5, 6, 7)),
    # Sums of one-digit numbers are easy, and the product at the end decides, so failures come late.
    "arithmetic:deep": Kind((7,), operators="+", last="*"),
    # Worked responses have about 100 and 200 tokens.
    "arithmetic:100": Kind(range(13, 18)),
    "arithmetic:200": Kind(range(27, 32)),
}


def apply(left: int, operator: str, right: int) -> int:
    """Compute one step of the chain, `left operator right` modulo 100; 3-9 gives 94."""
    return {"+": left + right, "-": left - right, "*": left * right}[operator] % 100


def draw(rng: random.Random, kind: Kind = KINDS["arithmetic"]) -> str:
    """Draw a prompt. More terms make it harder."""
    terms = rng.choice(kind.terms)
    prompt = str(rng.randrange(10))
    for operators in [kind.operators] * (terms - 2) + [kind.last]:
        prompt += rng.choice(operators)
        prompt += str(rng.randrange(10))
    return prompt + "="


def is_held_out(prompt: str) -> bool:
    """Tell whether a prompt is held out: a fixed hash picks a fifth of all, never trained on."""
    return zlib.crc32(prompt.encode()) % 5 == 0


def training_prompt(seed: int, index: int, kind: Kind = KINDS["arithmetic"]) -> str:
    """Return prompt `index` of this seed's endless stream, never a held-out one."""
    rng = random.Random(f"train/{seed}/{index}")
    prompt = draw(rng, kind)
    while is_held_out(prompt):
        prompt = draw(rng, kind)
    return prompt


def held_out_prompts(number: int, kind: Kind = KINDS["arithmetic"]) -> list[str]:
    """Draw `number` distinct held-out prompts, the same for every seed."""
    rng = random.Random("held-out")
    prompts = {}  # its keys keep their order and are distinct
    while len(prompts) < number:
        prompt = draw(rng, kind)
        if is_held_out(prompt):
            prompts[prompt] = True
    return list(prompts)


def work(prompt: str, rng: random.Random | None = None, slip: float = 0.0) -> tuple[list[str], str]:
    """Return the steps of `prompt` and its answer.

    With probability `slip` a step goes wrong, and the later steps continue from the wrong number.
    """
    value, steps = int(prompt[0]), []
    for operator, digit in zip(prompt[1:-1:2], prompt[2:-1:2]):
        result = apply(value, operator, int(digit))
        if slip and rng.random() < slip:
            result = rng.randrange(100)
        steps.append(f"{value}{operator}{digit}={result}")
        value = result
    return steps, str(value)

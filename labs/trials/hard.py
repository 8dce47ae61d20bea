"""A task file (docs/yours.md): chains of 10 to 12 terms, of which the embedded model solves one in
twenty."""

import random

from common.tiny.arithmetic import Kind, arithmetic_reward, draw, is_held_out, work

LONG = Kind(terms=(10, 11, 12))


def problems(rng, held):
    """Endless problems, of those that are held out or of the others."""
    while True:
        prompt = draw(rng, LONG)
        if is_held_out(prompt) == held:
            yield prompt, work(prompt)[1]


def train(i):
    return next(problems(random.Random(i), held=False))


held_out = problems(random.Random("held-out"), held=True)


def reward(response, answer):
    return arithmetic_reward(response, answer)

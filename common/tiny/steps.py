"""A task file (docs/yours.md): the embedded arithmetic, with part marks for every right step.

In training the answer is the whole worked solution, and the reward is the share of its steps, the
final number among them, that the response has right. Held-out responses are right or wrong.
"""

import random

from common.tiny.arithmetic import arithmetic_reward, draw, is_held_out, work


def train(i):
    seed, index = divmod(i, 1_000_003)  # as `--task arithmetic`: the same problems for a seed
    rng = random.Random(f"train/{seed + 1}/{index}")
    prompt = draw(rng)
    while is_held_out(prompt):
        prompt = draw(rng)
    steps, answer = work(prompt)
    return prompt, ";".join(steps) + "#" + answer


def held_out_problems(number):
    rng = random.Random("held-out")
    problems = {}  # prompt: answer
    while len(problems) < number:
        prompt = draw(rng)
        if is_held_out(prompt):
            _, problems[prompt] = work(prompt)
    return list(problems.items())


held_out = held_out_problems(1000)


def reward(response, solution):
    if "#" not in solution:  # a held-out problem
        return arithmetic_reward(response, solution)
    written, _, written_answer = response.rpartition("#")
    steps, _, answer = solution.rpartition("#")
    right = written_answer == answer
    for step, right_step in zip(written.split(";"), steps.split(";")):
        right += step == right_step
    return right / (len(steps.split(";")) + 1)

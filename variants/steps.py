"""A task file (docs/yours.md): the embedded arithmetic, with a partial reward for every right step.

In training the answer is the whole worked solution, and the reward is the share of its steps that
the response has right. The final number counts as a step. Held-out responses are right or wrong.
"""

from common.tiny.arithmetic import arithmetic_reward, held_out_prompts, training_prompt, work


def train(i):
    seed, index = divmod(i, 1_000_003)  # the problems of `--task arithmetic` with this seed
    prompt = training_prompt(seed + 1, index)
    steps, answer = work(prompt)
    return prompt, ";".join(steps) + "#" + answer


held_out = [(prompt, work(prompt)[1]) for prompt in held_out_prompts(1000)]


def reward(response, solution):
    if "#" not in solution:  # a held-out problem
        return arithmetic_reward(response, solution)
    written, _, written_answer = response.rpartition("#")
    steps, _, answer = solution.rpartition("#")
    right = written_answer == answer
    for step, right_step in zip(written.split(";"), steps.split(";")):
        right += step == right_step
    return right / (len(steps.split(";")) + 1)

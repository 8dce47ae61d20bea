"""Procedural sets of the `reasoning-gym` package as tasks, each scored by its own function.

    torchrun grpo.py --task tools/gym.py:chain_sum --model Qwen/Qwen3-1.7B-Base \\
        --lr 1e-6 --max_new_tokens 2048

An example of a task file (`common/data.py: file_task`), to copy. Held out is the second half of a
set's problems, from the end. Some sets run what the model wrote as Python, in their own scoring:
those are refused, since no time limit keeps such code from doing harm.
"""

import reasoning_gym
from reasoning_gym.utils import extract_answer

SIZE = 100_000  # problems in a set; some sets make all of them at once
PROMPT = "{question}\nGive the final answer between <answer> and </answer>."
EVALUATES = set("binary_matrix spiral_matrix string_insertion n_queens simple_integration".split())
EVALUATES |= set("intermediate_integration polynomial_multiplication countdown puzzle24".split())


class Set:
    """What a task file has: problems to train on, held-out ones, a reward."""

    def __init__(self, name: str):
        if name in EVALUATES:
            raise ValueError(f"{name} would execute what the model writes")
        self.rows = reasoning_gym.create_dataset(name, size=SIZE, seed=0)
        self.held_out = (self.problem(i) for i in range(SIZE - 1, SIZE // 2, -1))

    def problem(self, index: int) -> tuple[str, str]:
        """The reference is the problem's number: from it the set's scoring has the rest."""
        return PROMPT.format(question=self.rows[index]["question"]), str(index)

    def train(self, i: int) -> tuple[str, str]:
        return self.problem(i % (SIZE // 2))

    def reward(self, response: str, reference: str) -> float:
        return self.rows.score_answer(extract_answer(response), self.rows[int(reference)])


def __getattr__(name: str) -> Set:
    """`tools/gym.py:NAME` is the set of that name."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Set(name)

"""A task file: procedural sets of the `reasoning-gym` package, each scored by its own function.

    torchrun grpo.py --task tools/gym.py:chain_sum --model Qwen/Qwen3-1.7B-Base

Any file that defines `load_task(args, tokenizer) -> Task` is one, and this is an example to copy.
Held out is the second half of the set's problems, from the end.
"""

import random
from collections.abc import Callable

SIZE = 100_000  # problems in a set; some sets make all of them at once
PROMPT = "{question}\nGive the final answer between <answer> and </answer>."


def load_task(args: object, tokenizer: object) -> object:
    """The set that `--task tools/gym.py:NAME` names."""
    from common.data import Problem, Task, encode
    from common.reward import Judge
    import reasoning_gym

    rows = reasoning_gym.create_dataset(name := args.task.partition(":")[2], size=SIZE, seed=0)

    def problem(index: int) -> Problem:
        question = PROMPT.format(question=rows[index]["question"])
        return Problem(question, f"{name} {index}", encode(question, "", tokenizer))

    offset = random.Random(args.seed).randrange(SIZE // 2)
    held_out = [problem(SIZE - 1 - i) for i in range(args.eval_problems)]
    train = lambda i: problem((offset + i) % (SIZE // 2))  # noqa: E731
    return Task(args.task, train, held_out, Judge(f"{__file__}:score"))


def score() -> Callable[[str, str], float]:
    """In the judge's worker: a set's own score of an answer to the problem "name index"."""
    import reasoning_gym
    from reasoning_gym.utils import extract_answer

    sets = {}

    def score(completion: str, reference: str) -> float:
        name, index = reference.split()
        if name not in sets:
            sets[name] = reasoning_gym.create_dataset(name, size=SIZE, seed=0)
        return sets[name].score_answer(extract_answer(completion), sets[name][int(index)])

    return score

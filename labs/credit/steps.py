"""Credit by step: a file whose tokens have the advantage of their own step of the working.

    python -m labs.credit.steps HOW STRESS FILE FLAGS...

STRESS is one of labs/race/stresses.py with `-` for blanks. HOW is
    outcome     the file as it is: one advantage for all tokens of a response
    step        what each step changes in the group's mean reward, given what was right so far
    shuffled    the same numbers, but those of a response are dealt to its steps by chance

A response's blocks are its steps with their `;` and the answer from the last `#` on. The verdict on
a step is exact. The value of a prefix is the mean reward of those responses of the group that have
as many blocks before it, all of them right (or not all). A block's credit is the value after it
minus the value before it, and the reward is the value after the last one. So the credits of a
response add up to its reward minus the group's mean, shuffled or not, and a step after the first
mistake has the credit 0 unless luck repairs it.
"""

import random
import re
import sys
from pathlib import Path
from types import ModuleType

from checks.files import ROOT
from common.batch import Rollout
from common.launch import launch
from common.tiny.arithmetic import work
import torch
from torch import Tensor

from labs import toy
from labs.race.stresses import STRESSES, load, put_under


def blocks(text: str) -> list[str]:
    """`7*8=56;56-9=47#47` -> `7*8=56;`, `56-9=47`, `#47`; a guess is one block."""
    end = text.rindex("#") if "#" in text else len(text)
    parts = re.split("(?<=;)", text[:end])
    parts.append(text[end:])
    return [part for part in parts if part]


def states(parts: list[str], solution: list[str]) -> list[tuple[int, bool]]:
    """Before each block: how many there were, and whether all were right."""
    found, right = [], True
    for place, part in enumerate(parts):
        found.append((place, right))
        right = right and place < len(solution) and part.rstrip(";") == solution[place]
    return found


def credits(texts: list[str], solution: list[str], rewards: list[float]) -> list[list[float]]:
    """The credit of every block of a group's responses."""
    ways = [states(blocks(text), solution) for text in texts]
    values = {}  # state -> the rewards of all that were in it
    for way, reward in zip(ways, rewards):
        for state in way:
            values.setdefault(state, []).append(reward)
    found = []
    for way, reward in zip(ways, rewards):
        path = [sum(values[state]) / len(values[state]) for state in way] + [reward]
        found.append([after - before for before, after in zip(path, path[1:])])
    return found


def token_advantages(
    rollout: Rollout, prompts: list[str], letters: list[str], rng: random.Random | None
) -> Tensor:
    """`[N, T]`: credits over the group's std, as grpo.py divides. `letters`: of each token id.
    `rng` shuffles a response's credits."""
    G = len(rollout) // len(prompts)
    std = rollout.rewards.view(-1, G).std(dim=1) + 1e-6  # [P]
    rows = rollout.response_ids()
    found = torch.zeros_like(rollout.mask)  # [N, T]
    for group, prompt in enumerate(prompts):
        here = range(group * G, group * G + G)
        texts = ["".join(letters[token] for token in rows[row]) for row in here]
        solution, _ = work(prompt)
        rewards = [float(rollout.rewards[row]) for row in here]
        for row, text, shares in zip(here, texts, credits(texts, solution, rewards)):
            if rng:
                rng.shuffle(shares)
            lengths = torch.tensor([len(block) for block in blocks(text)])
            spread = torch.tensor(shares).repeat_interleave(lengths)  # [tokens]
            found[row, : len(spread)] = spread / std[group]
    return found


def credited(module: ModuleType, shuffle: bool) -> None:
    """Make the module's task write the column `token_advantages` when it scores a rollout."""
    load_task = module.load_task

    def load_credited(args: object, tokenizer: object) -> object:
        task, rng = load_task(args, tokenizer), random.Random(f"credit/{args.seed}")
        # One letter for each id, so that texts and tokens have equal lengths: `.` is EOS
        letters = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        letters = [letter if len(letter) == 1 else "." for letter in letters]
        score = task.score

        def scored(rollout: Rollout, problems: list, G: int) -> Tensor:
            rewards = score(rollout, problems, G)
            prompts = [problem.prompt for problem in problems]
            dealt = rng if shuffle else None
            rollout.token_advantages = token_advantages(rollout, prompts, letters, dealt)
            return rewards

        task.score = scored
        return task

    module.load_task = load_credited


if __name__ == "__main__":
    how, name, file, *flags = sys.argv[1:]
    module = load(ROOT / file)
    if how != "outcome":
        module = toy.by_token(module)
    put_under(module, STRESSES[name.replace("-", " ")])
    if how != "outcome":  # last: a stress makes a new task
        credited(module, how == "shuffled")
    sys.argv = [Path(file).name, *flags]
    launch(module.main, module.Args)

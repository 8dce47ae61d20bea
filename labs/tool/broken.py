"""variants/tool.py with something broken (for the lab tool).

    python -m labs.tool.broken HOW tool.py FLAGS...

HOW names what is broken, joined by `+`. `fails`: in training, 30% of the calls fail by chance.
`wrong`: 30% of the replies are random numbers. `mask`: the tool's tokens count as sampled. Held-out
problems are answered with a tool that works.
"""

import argparse
import sys
from random import Random

import common  # noqa: F401  (before torch)
import torch
from common.batch import Rollout
from common.launch import launch
from tools import arguments
from variants import tool

SHARE = 0.3  # of the calls


class Broken(tool.Turns):
    how: str  # HOW

    def __init__(self, args: tool.Args, *others: object):
        super().__init__(args, *others)
        self.works, self.training = self.task.reply, False
        self.chance = Random(args.seed)
        self.task.reply = self.break_some

    def break_some(self, texts: list[str], answers: list) -> list[tuple[str | None, str]]:
        replies = self.works(texts, answers)
        for i, (reply, _) in enumerate(replies):
            if self.training and reply is not None and self.chance.random() < SHARE:
                if "fails" in self.how:
                    replies[i] = None, "by chance"
                if "wrong" in self.how:
                    replies[i] = str(self.chance.randrange(100)), ""
        return replies

    def generate(self, *positional: object, **named: object) -> Rollout:
        self.training = "answers" in named
        rollout = super().generate(*positional, **named)
        if "mask" in self.how:
            lengths = rollout.ends - rollout.prompt_len  # [N]
            t = torch.arange(rollout.mask.shape[1], device=rollout.mask.device)  # [T]
            rollout.mask = (t < lengths[:, None]).float()  # [N, T]
        return rollout


if __name__ == "__main__":
    parser = arguments(__doc__, "labs.tool.broken")
    parser.add_argument("how", choices=["fails", "wrong", "mask", "wrong+mask"], metavar="HOW")
    parser.add_argument("file", choices=["tool.py"], metavar="tool.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS")
    words = parser.parse_args()
    Broken.how = words.how
    tool.Turns = Broken
    sys.argv = [words.file, *words.flags]
    launch(tool.main, tool.Args)

"""Train a file in the form of grpo.py, and measure it after some updates of each rollout.

    python -m labs.fall.watch grpo.py --minibatches 16 --lr 9e-4

A line of metrics.jsonl gets these numbers after the updates of AFTER, as `kl_1`, `kl_2`, ...:
    kl        KL(π_old ‖ π_θ) over all responses of the rollout, nats per token
    beyond    share of their tokens beyond the clip's limit of 20%, on the side where it acts
    back      share of the tokens that were beyond before this update whose ratio is nearer to 1
              after it
    moved     mean |Δ log π| by this update on the tokens of fresh responses, which π_old gave to
              other prompts, and on which no update trains
    length    ‖Δθ‖ of this update
    grad      gradient norm before `--grad_clip`
It also gets `shows_work`, the share of the rollout's responses with a worked step.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from common.batch import Rollout
from common.cli import BadInput, blame, in_one_line
from common.launch import launch
from common.logprobs import all_logprobs
from common.metrics import clip_shares
from tools import arguments
from torch import Tensor

from labs.stresses import load

AFTER = (1, 2, 4, 8, 16)
MEASURED = ("kl", "beyond", "back", "moved", "length", "grad")
FRESH = 32  # number of other prompts
LIMIT = 0.2
READ = ("sequences", "prompt_len", "prefix_len", "tokens", "mask", "advantages", "old_logp")


class Watch:
    """The measurements of a run around its optimiser steps; `watch` passes it what it reads."""

    def __init__(self):
        self.parts, self.line = [], {}  # the rollout's mini-batches; numbers for its line
        self.updates = 0  # in this rollout

    def logp(self, batch: Rollout) -> Tensor:
        """Return log π_θ of the batch's tokens `[N, T]`."""
        return all_logprobs(self.policy, batch, self.run.args, self.run.world).logp

    def begin(self) -> None:
        """Join the mini-batches before the first update, and let π_old answer other prompts."""
        joined = {name: torch.cat([getattr(part, name) for part in self.parts]) for name in READ}
        self.batch = Rollout(**joined)
        state, args = self.engine.state_dict(), self.run.args
        prompts = [problem.prompt_ids for problem in self.run.task.held_out[:FRESH]]
        self.fresh = self.engine.generate(prompts, 1, args.max_new_tokens, args.temperature)
        self.engine.load_state_dict(state)  # so the run samples as if it were not watched
        worked = (self.batch.tokens == self.run.task.tokenizer.convert_tokens_to_ids("=")).any(1)
        self.line["shows_work"] = worked.float().mean().item()

    def around(self, step: Callable) -> None:
        """Take one optimiser step, and measure it if it is one of AFTER."""
        self.updates += 1
        if self.updates == 1:
            self.begin()
        if self.updates not in AFTER:
            step()
            return
        weights = [weight.detach().clone() for weight in self.policy.parameters()]
        logp, fresh = self.logp(self.batch), self.logp(self.fresh)  # [N, T], [FRESH, T]
        step()
        mask, old_logp = self.batch.mask, self.batch.old_logp  # [N, T]
        A = self.batch.advantages[:, None]  # [N, 1]
        before, after = logp - old_logp, self.logp(self.batch) - old_logp  # [N, T]: log r
        outside = (A > 0) & (before.exp() > 1 + LIMIT) | (A < 0) & (before.exp() < 1 - LIMIT)
        outside = outside & mask.bool()  # [N, T]
        nearer = (after.abs() < before.abs()) & outside  # [N, T]
        beyond, tokens = clip_shares(old_logp + after, self.batch, LIMIT, LIMIT)["clip_share"]
        moved = (self.logp(self.fresh) - fresh).abs().sum() / self.fresh.mask.sum()
        pairs = zip(self.policy.parameters(), weights)
        found = {
            "kl": ((after.exp() - 1 - after) * mask).sum() / tokens,  # k3 with r = π_θ/π_old
            "beyond": beyond / tokens,
            "moved": moved,
            "length": sum((new.detach() - old).square().sum() for new, old in pairs).sqrt(),
            "grad": self.norm,
        }
        if outside.any():
            found["back"] = nearer.sum() / outside.sum()
        self.line |= {f"{name}_{self.updates}": float(value) for name, value in found.items()}


def watch(module: ModuleType) -> None:
    """Replace what the module's `main` calls, so that a Watch sees each optimiser step."""
    watching = Watch()
    make_engine, shard = module.make_engine, module.shard
    balance_tokens, clip_gradients = module.balance_tokens, module.clip_gradients

    def kept_engine(*given: object) -> object:
        watching.engine = make_engine(*given)
        return watching.engine

    def kept_policy(*given: object) -> object:
        watching.policy = shard(*given)
        return watching.policy

    def kept_part(*given: object) -> Rollout:
        watching.parts.append(balance_tokens(*given))
        return watching.parts[-1]

    def kept_norm(*given: object) -> float:
        watching.norm = clip_gradients(*given)
        return watching.norm

    class Run(module.Run):
        def log(self, step: int, metrics: dict, minibatches: list = ()) -> None:
            super().log(step, metrics | watching.line, minibatches)
            watching.run, watching.parts, watching.line, watching.updates = self, [], {}, 0

    class AdamW(torch.optim.AdamW):
        def step(self) -> None:
            watching.around(super().step)

    module.make_engine, module.shard, module.balance_tokens = kept_engine, kept_policy, kept_part
    module.clip_gradients, module.Run, torch.optim.AdamW = kept_norm, Run, AdamW


def main() -> None:
    parser = arguments(__doc__, "labs.fall.watch")
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS")
    words = parser.parse_args()
    try:
        with blame(f"{words.file}: not a file in the form of grpo.py"):
            module = load(words.file)
            watch(module)
    except BadInput as error:
        parser.error(in_one_line(error))
    sys.argv = [words.file.name, *words.flags]
    launch(module.main, module.Args)


if __name__ == "__main__":
    main()

r"""GRPO over several turns: the policy calls a tool, reads the reply and goes on.

Jin et al., "Search-R1: Training LLMs to Reason and Leverage Search Engines with Reinforcement
Learning", 2025, arXiv 2503.09516.

The problem: a response with calls of a tool contains text that the policy did not write.

The idea: treat the tool's tokens as context, like a prompt in the middle of the response. The
policy did not choose them, so they have no gradient, and |y_i| does not count them. The mask alone
does this; the loss is grpo.py's. The sampled tokens of all turns share one advantage.

Objective, for G responses y_i to one prompt, with r = π_θ(y_t) / π_old(y_t) for each token y_t,
I = 1 on tokens that the policy sampled, 0 on tokens that the tool wrote, and |y_i| = Σ_t I:

    J = 1/G Σ_i 1/|y_i| Σ_t I { min(r Â_i, clip(r, 1-ε, 1+ε) Â_i) - β k3 }
    Â_i = (R_i - mean R) / std R;   with `--failed_call drop` among responses without a failed call

Gradient weight on ∇ log π_θ(y_t), without the factors 1/G and 1/|y_i|:

    I [M r Â + β (π_ref/π_θ - 1)]      (M, k3 and `--kl_ratio` as in grpo.py)

A response consists of turns. In a turn the policy samples up to EOS, or up to a token that ends in
`--turn_end`. Then the tool is asked. If it replies, its tokens are appended, and the policy samples
the next turn after them. In the embedded task the tool is a calculator: the policy writes `7*8=`,
the calculator `56`, the policy `;56-9=`, the calculator `47`, the policy `#47` and EOS.

A call *fails* if the tool raises, takes too long or returns no text. This is not the policy's
fault. If it costs the reward, the policy unlearns to call (docs/results.md). So by default the
policy reads an error text and goes on.

Base file: grpo.py. Differs from it in:
1. `Turns`, an engine with a tool. The mask of its rows has holes where the tool wrote.
2. `advantages_without`, for `--failed_call drop`. A dropped response has Â = 0. It stays in the
   average and under the KL term.

Run it:
    torchrun -m variants.tool                               # laptop, 2 to 4 minutes, no download
    # your own tool: `reply(response, answer)` in a task file (docs/yours.md); chat turns end at EOS
    torchrun --nproc_per_node=8 -m variants.tool --model Qwen/Qwen2.5-1.5B-Instruct \
        --task calls.py --turn_end "" --prompts_per_step 64 --max_new_tokens 512 --lr 1e-6
"""

import re
from dataclasses import dataclass, field
from typing import Literal

from common.batch import Rollout
from common.cli import BadInput, blame, Count, RunStopped
from common.clock import timed
from common.data import Task
from common.distributed import World
from common.launch import launch
from common.rollout import make_engine
from common.tiny.arithmetic import KINDS, apply
import torch
from torch import Tensor

import grpo
from grpo import advantages
from variants import loop_of


@dataclass
class Args(grpo.Args):
    turn_end: str = "="
    """A token that ends in this text ends a turn, as EOS does; "": only EOS does (chat models)."""
    max_turns: Count = 16
    """Largest number of turns in a response (our choice)."""
    failed_call: Literal["reply", "end", "drop"] = "reply"
    """After a failed call: reply, the policy reads the task's error text; end, the response ends;
    drop, it ends and is left out of its group's mean and std (our choice)."""


def advantages_without(rewards: Tensor, failed: Tensor) -> Tensor:
    """Return advantages `[P, G]` that compare only responses without a failed call. They are 0 if a
    call failed. `rewards` and `failed` are `[P, G]`."""
    A = torch.zeros_like(rewards)  # [P, G]
    for group, kept in enumerate(~failed):
        if kept.sum() > 1:  # one response has nothing to be compared with
            A[group, kept] = advantages(rewards[group, kept][None])[0]
    return A


def calculator(response: str) -> str | None:
    """Return what the embedded task's tool writes after a response: `56` after `7*8=`, "" after
    anything else that ends in `=`, and None (the response is over) if it does not end in `=`."""
    if not response.endswith("="):
        return None
    call = re.search(r"(?:^|;)(\d+)([-+*])(\d+)=$", response)
    return str(apply(int(call[1]), call[2], int(call[3]))) if call else ""


def calculators(responses: list[str], answers: list) -> list[tuple[str | None, str]]:
    """Return the calculator's replies to all responses. None of them fails."""
    return [(calculator(response), "") for response in responses]


@dataclass
class Response:
    """A response while it grows: its tokens, with log μ and mask of each."""

    prompt: list[int]
    answer: object
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    mask: list[float] = field(default_factory=list)
    calls: int = 0
    failed: bool = False  # one of its calls
    finished: bool = False  # False: cut by the limit of tokens or turns

    def write(self, tokens: list[int], logps: list[float], sampled: bool) -> None:
        self.tokens += tokens
        self.logps += logps
        self.mask += [float(sampled)] * len(tokens)


class Turns:
    """An engine whose responses have several turns, with a tool's replies between them.

    The engine inside samples one turn, with all that was written before as the prefix. Token ids
    are joined, never texts, because a text that is encoded again may give other ids.
    """

    def __init__(self, args: Args, lm: object, task: Task, world: World):
        self.reply = task.reply  # of a task file
        if self.reply is None and args.task in KINDS:
            self.reply = calculators
        if self.reply is None:
            raise BadInput(f"--task {args.task}: has no reply(response, answer)")
        eos = lm.generation_config.eos_token_id
        texts = task.tokenizer.batch_decode([[token] for token in range(len(task.tokenizer))])
        ends = [i for i, text in enumerate(texts) if args.turn_end and text.endswith(args.turn_end)]
        if args.turn_end and not ends:
            raise BadInput(f"--turn_end {args.turn_end!r}: no token ends in it")
        self.args = args
        self.task = task
        self.device = world.device
        self.eos = eos
        self.turn_ends = {*eos, *ends}
        # Why id()? Two held-out problems may have equal prompts.
        self.answers = {id(problem.prompt_ids): problem.answer for problem in task.held_out}
        # An engine reads where to stop when it is made. A saved model must stop at EOS alone.
        lm.generation_config.eos_token_id = sorted(self.turn_ends)
        self.engine = make_engine(args, lm, world)
        lm.generation_config.eos_token_id = eos
        self.sync = self.engine.sync
        self.state_dict = self.engine.state_dict  # the tool has none: it sees the text alone
        self.load_state_dict = self.engine.load_state_dict

    def generate(
        self,
        prompts: list[list[int]],
        n: int,
        limit: int,
        temperature: float,
        prefixes: None = None,
        top_p: float = 1.0,
        answers: list | None = None,
    ) -> Rollout:
        """Generate as an engine does. `limit` counts the tool's tokens, too. The tool receives the
        `answers` of the prompts (default: of held-out problems).

        Two further columns are `calls [N]`, and `failed [N]`, True if one of the calls failed.
        """
        answers = answers or [self.answers[id(prompt)] for prompt in prompts]
        rows = []
        for prompt, answer in zip(prompts, answers):
            rows += [Response(prompt, answer) for _ in range(n)]
        going = rows
        for turn in range(self.args.max_turns):  # also without rows: ranks may share an engine
            starts = [row.prompt for row in going]
            written = [row.tokens for row in going]
            part = self.engine.generate(starts, 1, limit, temperature, written, top_p)
            for row, ids, logps in zip(going, part.response_ids(), part.rollout_logp.tolist()):
                sampled = ids[len(row.tokens) :]
                row.write(sampled, logps[: len(sampled)], sampled=True)
            last = turn + 1 == self.args.max_turns
            going = self.replied(going, 0 if last else limit)
        rollout = Rollout.pack(
            prompts=prompts,
            tokens=[row.tokens for row in rows],
            logps=[row.logps for row in rows],
            masks=[row.mask for row in rows],
            eos=self.eos,
            device=self.device,
        )
        kinds = {"calls": torch.long, "failed": torch.bool, "finished": torch.bool}
        for name, kind in kinds.items():
            values = [getattr(row, name) for row in rows]
            setattr(rollout, name, torch.tensor(values, dtype=kind, device=self.device))  # [N]
        return rollout

    @timed("tool")
    def replied(self, rows: list[Response], limit: int) -> list[Response]:
        """Ask the tool about rows whose turn is over, append its replies, and return the rows that
        go on. A row must end in a sampled token, so a row is cut if none fits after the reply."""
        rows = [row for row in rows if row.tokens[-1] in self.turn_ends]
        texts = [row.tokens for row in rows]
        texts = self.task.tokenizer.batch_decode(texts, skip_special_tokens=True)
        replies = self.reply(texts, [row.answer for row in rows])
        going = []
        for row, (reply, failure) in zip(rows, replies):
            if failure:
                row.failed = True
                reply = self.task.reply_error if self.args.failed_call == "reply" else None
            if failure or reply is not None:
                row.calls += 1
            row.finished = reply is None  # this was the answer; or the end, after a failed call
            if reply is None:
                continue
            with blame(f"--task {self.args.task}: the reply {reply[:80]!r}", RunStopped):
                ids = self.task.tokenizer(reply, add_special_tokens=False)["input_ids"]
            if len(row.tokens) + len(ids) < limit:
                row.write(ids, [0.0] * len(ids), sampled=False)
                going.append(row)
        return going


ACTED = {"calls": "calls of the tool per response", "clip_share": "tokens clipped (share)"}


# The diff of grpo.py's loop
LOOP = """
-    engine = make_engine(args, lm, world)
+    engine = Turns(args, lm, task, world)

-        rollout = engine.generate(prompts, G, args.max_new_tokens, args.temperature)  # N = P·G rows
+        answers = [problem.answer for problem in problems]
+        sampling = {"limit": args.max_new_tokens, "temperature": args.temperature}
+        rollout = engine.generate(prompts, G, answers=answers, **sampling)  # N = P·G rows
+        called = (rollout.calls > 0).sum()
+        means.add(calls=(rollout.calls.sum(), P * G), called=(called, P * G))
+        means.add(failed=(rollout.failed.sum(), called))  # of the responses that call

         rollout.advantages = advantages(rewards).flatten()  # [N]
+        if args.failed_call == "drop":
+            failed = rollout.failed.view(P, G)  # [P, G]
+            rollout.advantages = advantages_without(rewards, failed).flatten()  # [N]
"""
measures = grpo.measures
policy_loss = grpo.policy_loss
main = loop_of(grpo, globals(), LOOP)


if __name__ == "__main__":
    launch(main, Args)

# Differs from the paper in:
# 1. The paper's tool is a search engine. `--failed_call` is ours.
# 2. In each turn all rows wait for the slowest one. Larger systems ask for each row as soon as it
#    is ready.
#
# Not here: environments with a state, several tools at once, histories that are rewritten.

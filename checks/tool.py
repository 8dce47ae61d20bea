"""GRPO over several turns: grpo.py's loss; turns, their mask, and what a failed call costs."""

from dataclasses import replace
from types import ModuleType, SimpleNamespace
from unittest import mock

import torch
from common.batch import Rollout
from common.distributed import ALONE

from . import Run, grpo
from .formulas import z_score
from .harness import ZSCORES, near

objective, statistics = grpo.objective, grpo.statistics
CASES, FIXTURES, SHARED = grpo.CASES, grpo.FIXTURES, ZSCORES

TEXTS = ["", "", "a", "aa", "=", "7"]  # of the tokens; 1 is EOS
# Prompt -> what is sampled in each turn; then EOS
SCRIPT = {
    10: [[2, 2, 4], [2]],  # a call
    11: [[2]],  # no call
    12: [[2, 2, 2, 2, 2, 2, 4]],  # a call; after the reply no further token has room
    13: [[4], [4], [4]],  # calls in every turn
    14: [[2, 4]],  # a call that fails
}
# Prompt -> tokens, mask, log μ, (calls, failed, finished)
EXPECTED = {
    10: ([2, 2, 4, 5, 2, 1], [1, 1, 1, 0, 1, 1], [-0.2, -0.2, -0.4, 0, -1.2, -1.1], (1, 0, 1)),
    11: ([2, 1], [1, 1], [-0.2, -0.1], (0, 0, 1)),
    12: ([2, 2, 2, 2, 2, 2, 4], [1] * 7, [-0.2] * 6 + [-0.4], (1, 0, 0)),
    13: ([4, 5, 4, 5, 4], [1, 0, 1, 0, 1], [-0.4, 0, -1.4, 0, -2.4], (3, 0, 0)),
    14: ([2, 4, 3, 1], [1, 1, 0, 1], [-0.2, -0.4, 0, -1.1], (1, 1, 1)),
}
ENDED = ([2, 4], [1, 1], [-0.2, -0.4], (1, 1, 1))  # 14, where a failed call ends the response


class Tokenizer:
    """Sampled `a` `a` is encoded again as the one token `aa`."""

    def __len__(self) -> int:
        return len(TEXTS)

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool = True) -> list[str]:
        return ["".join(TEXTS[token] for token in row) for row in rows]

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict:
        return {"input_ids": [3] * text.count("aa") + [5] * text.count("7")}


class Engine:
    """An engine whose k-th call continues each row with the k-th turn of its prompt's script."""

    state_dict = load_state_dict = sync = None

    def __init__(self, args: object, lm: SimpleNamespace, world: object):
        self.turn, self.stops = 0, lm.generation_config.eos_token_id

    def generate(
        self, prompts: list, n: int, limit: int, T: float, prefixes: list, top_p: float
    ) -> Rollout:
        assert (n, limit, T, top_p) == (1, 8, 0.7, 0.9)
        tokens = []
        for prompt in prompts:
            turn = SCRIPT[prompt[0]][self.turn : self.turn + 1] or [[]]
            tokens.append(turn[0] if turn[0][-1:] == [4] else [*turn[0], 1])
        logps = [[-self.turn - token / 10 for token in row] for row in tokens]
        self.turn += 1
        how = {"prefixes": prefixes, "eos": [1], "device": "cpu"}
        return Rollout.pack(prompts=prompts, tokens=tokens, logps=logps, **how)


def reply(texts: list[str], answers: list[str]) -> list[tuple[str | None, str]]:
    """Reply `7` after `=`. The call of the prompt with the answer "fails" fails."""
    calls = [text.endswith("=") for text in texts]
    failures = ["an error" * (call and answer == "fails") for call, answer in zip(calls, answers)]
    return [("7" if call else None, failure) for call, failure in zip(calls, failures)]


def check_turns(module: ModuleType) -> None:
    """Two responses to each of five prompts have the right tokens, mask, log μ, calls and end: ids
    stay as they were sampled, replies stand between them, and a sampled token is last. The model
    keeps its own EOS."""
    for rule in ("reply", "end", "drop"):
        lm = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=[1]))
        task = SimpleNamespace(reply=reply, reply_error="aa", held_out=[], tokenizer=Tokenizer())
        args = replace(module.Args(), max_turns=3, failed_call=rule)
        with mock.patch.object(module, "make_engine", Engine):
            turns = module.Turns(args, lm, task, ALONE)
        near(turns.engine.stops, [1, 4], "the engine stops at EOS and `=`: its tokens")
        near(lm.generation_config.eos_token_id, [1], "the model's own EOS afterwards")
        prompts, answers = [[prompt] for prompt in SCRIPT], ["", "", "", "", "fails"]
        made = turns.generate(prompts, 2, 8, 0.7, top_p=0.9, answers=answers)
        for row in range(10):
            prompt, case = 10 + row // 2, f"of response {row} with --failed_call {rule}"
            tokens, mask, logps, ends = EXPECTED[prompt] if rule == "reply" else ENDED
            if prompt != 14:
                tokens, mask, logps, ends = EXPECTED[prompt]
            padding = [0.0] * (made.mask.shape[1] - len(tokens))
            near(made.sequences[row], [prompt, *tokens, *padding], f"prompt and tokens {case}")
            near(made.mask[row], mask + padding, f"mask {case}")
            near(made.rollout_logp[row], logps + padding, f"log μ {case}", 1e-6)
            ended = [getattr(made, name)[row] for name in ("calls", "failed", "finished")]
            near(ended, ends, f"calls, failed and finished {case}")


def check_dropped(module: ModuleType) -> None:
    """With `--failed_call drop` advantages compare only the group's other responses."""
    R = torch.tensor([[1.0, 0, 0, 1, 0], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]], dtype=torch.float64)
    failed = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]).bool()
    expected = torch.zeros_like(R)
    expected[0, ~failed[0]] = z_score(R[0, ~failed[0]])
    near(module.advantages_without(R, failed), expected, "advantages without failed calls", 1e-9)


MUTANTS = {"a tool's tokens are trained": ("sampled=False)", "sampled=True)")}


RUN = Run(
    of_words="--turn_end =",
    fits_stored=False,  # the stored answers have one turn
    refuses=(("--turn_end ?", "--turn_end '?': no token ends in it"),),
)

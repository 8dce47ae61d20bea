"""A file's own `main` on stored answers: what reaches its optimiser, its engine and its log.

The stored answers are made for this: sequences of unequal length, some cut off; groups all right,
all wrong and mixed; a sampler whose log-probs μ are off by noise, and in some responses by a factor
beyond vcpo's cap; temperature 0.7; a learning rate at which π_θ leaves π_old within one step, and
(in the second step) both have left the reference.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import random
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest
from common.batch import Rollout
from common.data import Problem, Task
from common.distributed import World, setup
from common.model import load_model
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from checks import mutate, run_of
from checks.files import MODULES
from tests.helpers import forked

TINY = Path(__file__).parent.parent.parent / "common" / "tiny"
VOCABULARY = ["<pad>", "<eos>", *"0123456789+-*=;#"]
EOS, LIMIT, T = 1, 40, 0.7
EQUALS = VOCABULARY.index("=")
P, G, M, K = 8, 4, 2, 2  # prompts, responses, mini-batches a step; branches from a pivot
SAMPLES = 2  # sampled responses to a held-out problem
TRAIN = """7*8-9+6= 1+2= 3*3*3= 9-9= 4+5*6= 0*1+2-3= 8*8= 5-6+7*8= 2+2-1= 6*7= 5*5-5= 9+9+9= 3-8=
    1*2*3*4= 7+0= 8-2*3= 4*4= 6-6+6= 2*9-1= 5+5= 7*7-7= 1-2-3= 9*8+7= 3+4= 8+8*2= 0-1= 6*6*6=
    2+3-4= 9*9= 1+1*1=""".split()
HELD_OUT = "2*2= 5-7+1= 8*9-4= 3+3= 6*5+4*3=".split()


# The stored answers


def right_answer(prompt: str) -> str:
    value = int(prompt[0])
    for operator, digit in zip(prompt[1:-1:2], map(int, prompt[2:-1:2])):
        results = {"+": value + digit, "-": value - digit, "*": value * digit}
        value = results[operator] % 100
    return str(value)


def reward(text: str, answer: str) -> float:
    return float("#" in text and text.split("#")[-1] == answer)


def marks(text: str, answer: str) -> float:
    """Judge the working, too, and alone, as blockwise.py needs it."""
    return reward(text, answer) + text.count(";") / 4


@dataclass(frozen=True)
class Row:
    """One stored response: `tokens` as sampled after prompt and prefix."""

    prompt: str
    prefix: str
    tokens: tuple[int, ...]
    noise: tuple[float, ...]  # log μ = log π of the model before training + this

    @property
    def text(self) -> str:
        return self.prefix + "".join(VOCABULARY[t] for t in self.tokens if t != EOS)

    @property
    def context(self) -> list[int]:
        return [VOCABULARY.index(c) for c in self.prompt + self.prefix]

    @property
    def ids(self) -> list[int]:
        return [*self.context, *self.tokens]

    @property
    def reward(self) -> float:
        return reward(self.text, right_answer(self.prompt))

    @property
    def finished(self) -> bool:
        return self.tokens[-1] == EOS


def respond(prompt: str, n: int, prefix: str = "") -> list[Row]:
    """Return the n responses to a prompt (and prefix). By the prompt's number they are all right,
    all wrong, or mixed."""
    rng, number = random.Random(f"{prompt}/{prefix}/{n}"), zlib.crc32(prompt.encode())
    kind = number % 5 if n == G else zlib.crc32((prompt + prefix).encode()) % 4
    rows = []
    for j in range(n):
        good = {0: True, 1: False}.get(kind, j % 2 == number % 2)
        right = right_answer(prompt)
        answer = right if good else str((int(right) + rng.randint(1, 9)) % 100)
        digits, operators = rng.choices(range(10), k=9), rng.choices("+-*", k=3)
        steps = [f"{digits[i]}{operators[i]}{digits[i + 3]}={digits[i + 6]}" for i in range(j % 4)]
        text = ";".join(steps) + "#" + answer
        cut = not good and j == 1  # stopped by the length limit: no EOS
        ids = [VOCABULARY.index(c) for c in (text[:-1] if cut else text)] + [EOS] * (not cut)
        noise = [rng.gauss(0, 0.3) for _ in ids]
        if j == 2:  # log w beyond vcpo's cap of log 8
            noise = [x - 3.5 / len(ids) for x in noise]
        rows.append(Row(prompt, prefix, tuple(ids), tuple(noise)))
    return rows


@lru_cache(4)
def untrained(model: str = "model") -> torch.nn.Module:
    """Return the embedded model as it ships, in float64, straight from transformers."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(TINY / model, dtype=torch.float64, **plain)


def padded(rows: list, value: float = 0.0) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def distributions(lm: torch.nn.Module, rows: list[Row]) -> Tensor:
    """Return log π at temperature 0.7 of every token of the vocabulary at each place of a response:
    [n, T, V], 0 on padding."""
    every = (lm(padded([row.ids for row in rows], 0)).logits / T).log_softmax(-1)  # [n, S, V]
    found = []
    for i, row in enumerate(rows):
        # The token at t is predicted at t - 1
        found.append(every[i, len(row.context) - 1 : len(row.ids) - 1])
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


def sampled(columns: Tensor, rows: list[Row]) -> Tensor:
    """Return, from values of all tokens [n, T, V], the values of the sampled tokens [n, T]."""
    return columns.gather(-1, padded([row.tokens for row in rows], 0)[..., None])[..., 0]


def log_probs(lm: torch.nn.Module, rows: list[Row]) -> Tensor:
    """Return log π of each row's tokens, without a gradient: [n, T]."""
    with torch.no_grad():
        return sampled(distributions(lm, rows), rows)


@lru_cache(4096)
def sampler_logp(row: Row, model: str) -> tuple[float, ...]:
    """Return log μ of a row: the engine's own opinion, near the untrained model's."""
    logp = log_probs(untrained(model), [row])[0].tolist()
    return tuple(x + e for x, e in zip(logp, row.noise))


@lru_cache(4096)
def sampler_top(row: Row, model: str) -> tuple[Tensor, Tensor]:
    """Return ids and log μ of the 4 tokens that the engine calls the most likely ones, as two
    [tokens, 4]."""
    with torch.no_grad():
        logp, ids = distributions(untrained(model), [row])[0].topk(4)
    return ids, logp - torch.tensor([0.1, 0.5, 0.2, 0.9])


# Running main


class Stored:
    """An engine that returns the stored answers and writes down what it was asked."""

    def __init__(self, world: World, model: str):
        self.world, self.model, self.reports_experts = world, model, model == "model-moe"
        self.calls, self.synced, self.top = [], [], 0

    def generate(
        self, prompts: list, n: int, limit: int, temperature: float, prefixes=None, top_p=1.0
    ) -> Rollout:
        texts = ["".join(VOCABULARY[t] for t in prompt) for prompt in prompts]
        starts = ["".join(VOCABULARY[t] for t in prefix) for prefix in prefixes or []]
        rows = []
        for i, text in enumerate(texts):
            rows += respond(text, n, starts[i] if prefixes else "")
        call = {"prompts": texts, "n": n, "limit": limit, "temperature": temperature}
        self.calls.append(call | {"top_p": top_p, "prefixes": starts if prefixes else None})
        top = [sampler_top(row, self.model) for row in rows if self.top]
        return Rollout.pack(
            top=[ids[:, : self.top] for ids, _ in top],
            top_logps=[logp[:, : self.top] for _, logp in top],
            prompts=prompts,
            prefixes=prefixes,
            tokens=[list(row.tokens) for row in rows],
            logps=[list(sampler_logp(row, self.model)) for row in rows],
            eos=[EOS],
            device=self.world.device,
            experts=[expert_choice(row) for row in rows] if self.reports_experts else None,
        )

    def sync(self, policy: torch.nn.Module) -> None:
        self.synced.append(whole(policy.parameters()))

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


class StoredTurns(Stored):
    """An engine that stops at each `=` of a stored answer. The digit after it is the tool's."""

    def generate(
        self, prompts: list, n: int, limit: int, temperature: float, prefixes: list, top_p: float
    ) -> Rollout:
        texts = ["".join(VOCABULARY[t] for t in prompt) for prompt in prompts]
        if texts and not any(prefixes):  # a first turn
            call = {"prompts": texts[::G], "n": G if texts[0] in TRAIN else 1, "prefixes": None}
            how = {"limit": limit, "temperature": temperature, "top_p": top_p}
            self.calls.append(call | how)
        tokens, logps, self.replies = [], [], []
        for i, (text, prefix) in enumerate(zip(texts, prefixes)):
            start, group = len(prefix), respond(text, G)
            row = (
                next(r for r in group if r.tokens[:start] == tuple(prefix))
                if start
                else group[i % G]
            )
            stops = [t for t in range(start, len(row.tokens)) if row.tokens[t] in (EQUALS, EOS)]
            end = stops[0] + 1 if stops else len(row.tokens)
            tokens.append(list(row.tokens[start:end]))
            logps.append(list(sampler_logp(row, self.model)[start:end]))
            if stops:
                self.replies.append(VOCABULARY[row.tokens[end]] if end < len(row.tokens) else None)
        how = {"prefixes": prefixes, "eos": [EOS], "device": self.world.device}
        return Rollout.pack(prompts=prompts, tokens=tokens, logps=logps, **how)

    def reply(self, texts: list[str], answers: list) -> list[tuple[str | None, str]]:
        return [(reply, "") for reply in self.replies]


def expert_choice(row: Row) -> Tensor:
    """Return the experts [S, layers 2, k 2] that the sampler says it sent each token to: any
    two."""
    generator = torch.Generator().manual_seed(zlib.crc32(bytes(row.ids)))
    scores = torch.rand(len(row.ids), 2, 8, generator=generator)
    return scores.topk(2, dim=-1).indices.to(torch.int16)


def whole(tensors: object) -> list[Tensor]:
    """Return copies of whole tensors, also if ranks hold only rows of them."""
    every = [x.full_tensor() if hasattr(x, "full_tensor") else x for x in tensors]
    return [x.detach().clone() for x in every]


@dataclass
class Record:
    """What one rank's `main` did."""

    rank: int
    flags: dict
    updates: list[dict] = field(default_factory=list)  # what the policy's optimiser was given
    lessons: list[dict] = field(default_factory=list)  # of a teacher or critic, likewise
    calls: list[dict] = field(default_factory=list)
    synced: list[list[Tensor]] = field(default_factory=list)
    fits: list[tuple] = field(default_factory=list)  # deep_grpo's regressions, one a step
    metrics: list[dict] = field(default_factory=list)  # rank 0's log

    @property
    def training(self) -> list[dict]:
        """Return the calls that sampled for training (evaluations ask for 1 or SAMPLES
        responses)."""
        return [call for call in self.calls if call["n"] == G and call["prefixes"] is None]

    @property
    def branching(self) -> list[dict]:
        """Return the calls that sampled new endings, one for each step."""
        return [call for call in self.calls if call["prefixes"] is not None]


DEFAULTS = {"lr": 1e-3, "warmup": 3, "micro_tokens": 220, "temperature": T, "minibatches": M}
DEFAULTS |= {"betas": (0.8, 0.9), "weight_decay": 0.01, "steps": 2}


@lru_cache(2)
def loaded(name: str) -> tuple:
    """Return the embedded model and its tokenizer as the files load them, from the disk only
    once."""
    return load_model(name)


def task(judge: Callable) -> Task:
    """Return problems by number, whose answers are judged by this function."""

    def problem(prompt: str, index: int = -1) -> Problem:
        ids = [VOCABULARY.index(c) for c in prompt]
        return Problem(prompt, right_answer(prompt), ids, index)

    def verifier(texts: list[str], answers: list[str]) -> list[float]:
        return list(map(judge, texts, answers))

    return Task(
        "arithmetic",
        lambda index: problem(TRAIN[index % len(TRAIN)], index),
        [problem(prompt) for prompt in HELD_OUT],
        verifier,
        final=lambda texts: [text.split("#")[-1] for text in texts],
        tokenizer=loaded("tiny")[1],
    )


def record(module: ModuleType, world: World, folder: Path, model: str = "model", **flags) -> Record:
    """Run the module's `main` for some steps on the stored answers."""
    name = module.__name__.removesuffix("_mutant").rpartition(".")[2]
    how = run_of(name)
    flags = DEFAULTS | how.stored | flags
    shape = {"prompts_per_step": P, "group_size": G, "max_new_tokens": LIMIT, "dtype": "float32"}
    args = module.Args(**shape | {"shard_ranks": world.size} | flags)
    args.run_dir, args.eval_every, args.eval_samples = str(folder), 100, SAMPLES
    args.model, args.sampler_tolerance = model.replace("model", "tiny"), 1e9
    engine, found = Stored(world, model), Record(world.rank, vars(args))
    problems = task(marks if how.part_marks else reward)
    if how.turns:
        engine = StoredTurns(world, model)
        problems.reply = engine.reply

    class Watched(torch.optim.AdamW):
        """AdamW that writes down what it is given."""

        def step(self, closure: object = None) -> None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            seen = {"parameters": whole(parameters), "gradients": whole(p.grad for p in parameters)}
            for name in ("lr", "betas", "weight_decay"):
                seen[name] = [group[name] for group in self.param_groups]
            policy = len(parameters) == len(list(untrained(model).parameters()))
            (found.updates if policy else found.lessons).append(seen)
            super().step(closure)

    def make_engine(*arguments: object, **named: object) -> Stored:
        engine.top = named.get("record_top", 0)
        return engine

    def fit(pairs: list) -> tuple:
        found.fits.append(fit_success(pairs))
        return found.fits[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_model", lambda name, *flag: copy.deepcopy(loaded(name)))
        patch.setattr(module, "load_task", lambda *arguments: problems)
        patch.setattr(module, "make_engine", make_engine)
        patch.setattr(module, "save_checkpoint", lambda *arguments: None)
        patch.setattr("common.run.draw_run", lambda *arguments: "")
        patch.setattr(torch.optim, "AdamW", Watched)
        if hasattr(module, "Branches"):  # recipe.py imports it
            home = sys.modules[module.Branches.__module__]
            fit_success = home.fit_success
            patch.setattr(home, "fit_success", fit)
        patch.setattr("common.distributed.StopFlag.listen", lambda flag: None)
        module.main(args, world)
    world.closing.close()
    found.calls, found.synced = engine.calls, engine.synced
    if world.rank == 0:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        found.metrics = list(map(json.loads, lines))
    return found


# Damaging it


@contextlib.contextmanager
def damaged(algorithm: str, where: str = "", old: str = "", new: str = "") -> ModuleType:
    """Return the algorithm's module with one piece of the source of `where` replaced, which is its
    own or one of common's."""
    own = importlib.import_module(MODULES[algorithm])
    home = own if where in ("", algorithm) else importlib.import_module(where)
    copied = mutate(home, old, new) if old else home
    if home is own:
        yield copied
        return
    users = [module for name, module in list(sys.modules.items()) if name.startswith("common")]
    with pytest.MonkeyPatch.context() as patch:
        for user in (own, *users):  # whoever imported something from there
            for name, value in list(vars(user).items()):
                of_home = getattr(value, "__module__", "") == home.__name__
                if user is not copied and of_home and hasattr(copied, name):
                    patch.setattr(user, name, getattr(copied, name))
        yield own


def rewards_of(rows: list[Row]) -> Tensor:
    return torch.tensor([row.reward for row in rows], dtype=torch.float64)


def flat(tensors: object) -> Tensor:
    return torch.cat([x.flatten() for x in tensors]).double()


# Several ranks


def trials(jobs: list[tuple], folder: Path) -> None:
    """Record every job (algorithm, damage, flags) in turn, on one of the ranks, in
    `folder/<job>-<rank>.pt`."""
    world = setup()
    for number, (algorithm, damage, flags) in enumerate(jobs):
        with damaged(algorithm, *damage) as module:
            found = record(module, world, folder / f"run-{number}", **flags)
        torch.save(found, folder / f"{number}-{world.rank}.pt")
    dist.barrier()  # leave together: gloo may abort a rank whose peer has gone


def on_ranks(ranks: int, jobs: list[tuple], folder: Path) -> list[list[Record]]:
    """Return the records of all ranks for every job."""
    done, found = forked(trials, jobs, folder, ranks=ranks), []
    assert done.returncode == 0, done.stderr
    for number in range(len(jobs)):
        paths = [folder / f"{number}-{rank}.pt" for rank in range(ranks)]
        found.append([torch.load(path, weights_only=False) for path in paths])
    return found

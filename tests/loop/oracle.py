"""What each file's `main` must do, computed a second time without it.

`record` runs a file's own `main` on stored answers and writes down what reaches the optimiser, the
engine and the log. `Oracle` computes from the same answers what should have come out: all columns
of a whole mini-batch in float64, by transformers' logits of the weights that each policy had, then
the file's own `policy_loss` of them, and autograd. So it tests the loop: which columns a loss gets,
its micro-batches, ranks and optimiser. The losses and other functions of a file alone are held in
checks/NAME.py.

The stored answers are made for this: sequences of unequal length, some cut off; groups all right,
all wrong and mixed; a sampler whose log-probs μ are off by noise, and in some responses by a factor
beyond vcpo's cap; temperature 0.7; a learning rate at which π_θ leaves π_old within one step, and
(in the second step) both have left the reference.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import json
import random
import sys
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import vcpo
from common.batch import Rollout
from common.data import Problem, Task
from common.distributed import ALONE, World, setup
from common.model import load_model
from common.routing import Routing
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from checks import mutate
from checks.files import MODULES
from tests.helpers import forked, module_of

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
    """For blockwise.py, which has also the working judged, alone."""
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
    """The n responses to a prompt (and prefix): by the prompt's number all right, all wrong, or
    mixed."""
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
    """The embedded model as it ships, in float64, straight from transformers."""
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(TINY / model, dtype=torch.float64, **plain)


def padded(rows: list, value: float = 0.0) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def distributions(lm: torch.nn.Module, rows: list[Row]) -> Tensor:
    """log π at temperature 0.7 of every token of the vocabulary at each place of a response:
    [n, T, V], 0 on padding."""
    every = (lm(padded([row.ids for row in rows], 0)).logits / T).log_softmax(-1)  # [n, S, V]
    found = []
    for i, row in enumerate(rows):
        # The token at t is predicted at t - 1
        found.append(every[i, len(row.context) - 1 : len(row.ids) - 1])
    return torch.nn.utils.rnn.pad_sequence(found, batch_first=True)


def sampled(columns: Tensor, rows: list[Row]) -> Tensor:
    """Of values of all tokens [n, T, V] those of the sampled ones: [n, T]."""
    return columns.gather(-1, padded([row.tokens for row in rows], 0)[..., None])[..., 0]


def log_probs(lm: torch.nn.Module, rows: list[Row]) -> Tensor:
    """log π of each row's tokens, without a gradient: [n, T]."""
    with torch.no_grad():
        return sampled(distributions(lm, rows), rows)


def mask_of(rows: list[Row]) -> Tensor:
    return padded([[1.0] * len(row.tokens) for row in rows]).double()


@lru_cache(4096)
def sampler_logp(row: Row, model: str) -> tuple[float, ...]:
    """log μ of a row: its own engine's opinion, near the untrained model's."""
    logp = log_probs(untrained(model), [row])[0].tolist()
    return tuple(x + e for x, e in zip(logp, row.noise))


@lru_cache(4096)
def sampler_top(row: Row, model: str) -> tuple[Tensor, Tensor]:
    """Ids and log μ of the 4 tokens that the engine calls the most likely ones: two [tokens, 4]."""
    with torch.no_grad():
        logp, ids = distributions(untrained(model), [row])[0].topk(4)
    return ids, logp - torch.tensor([0.1, 0.5, 0.2, 0.9])


def mu_of(rows: list[Row], model: str) -> Tensor:
    return padded([sampler_logp(row, model) for row in rows]).double()


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
            top=[ids for ids, _ in top],
            top_logps=[logp for _, logp in top],
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
    """An engine that stops at each `=` of a stored answer; the digit after it is the tool's."""

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
    """[S, layers 2, k 2]: the experts that the sampler says it sent each token to: any two."""
    generator = torch.Generator().manual_seed(zlib.crc32(bytes(row.ids)))
    scores = torch.rand(len(row.ids), 2, 8, generator=generator)
    return scores.topk(2, dim=-1).indices.to(torch.int16)


def whole(tensors: object) -> list[Tensor]:
    """Copies of whole tensors, also where ranks hold rows of them."""
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
        """The calls that sampled for training (evaluations ask for 1 or SAMPLES responses)."""
        return [call for call in self.calls if call["n"] == G and call["prefixes"] is None]

    @property
    def branching(self) -> list[dict]:
        """The calls that sampled new endings, a step each."""
        return [call for call in self.calls if call["prefixes"] is not None]


DEFAULTS = {"lr": 1e-3, "warmup": 3, "micro_tokens": 220, "temperature": T, "minibatches": M}
DEFAULTS |= {"betas": (0.8, 0.9), "weight_decay": 0.01}
# A teacher that chooses from the second step on
CHOICE = {"candidates": 5, "teacher_batch": P, "window": P, "teacher_updates": 1, "explore": 0.0}
# So that every mechanism acts on the stored answers, and some gradients but not all are above
# grad_clip
FLAGS = {
    "grpo": {"beta": 0.1, "grad_clip": 6.0},
    "gspo": {"clip_low": 0.02, "clip_high": 0.03, "grad_clip": 4.0},
    "sapo": {"grad_clip": 5.0},
    "stapo": {"tau_p": 0.9, "entropy_quantile": 0.8, "grad_clip": 4.0},
    "maspo": {"sigma_base": 0.3, "grad_clip": 8.0},
    "minirl": {"grad_clip": 60.0},
    "vcpo": {"lag": 1, "rho_on": 0.5, "grad_clip": 32.0},
    "goldilocks": CHOICE | {"beta": 0.01, "grad_clip": 4.0, "lr": 3e-4},
    "deep_grpo": {"branches": K, "beta": 0.1, "branch_weight": 0.7, "grad_clip": 8.0},
    "baselines": {"grad_clip": 6.0},
    "blockwise": {"grad_clip": 4.0},
    "centred": {"weight": "tis", "w_high": 1.2, "grad_clip": 25.0},
    "dapo": {"max_draws": 2, "overlong_buffer": 20, "overlong_penalty": 0.7, "grad_clip": 11.0},
    "entropy20": {"grad_clip": 8.0},
    "laconic": {"length_budget": 8, "price_lr": 1.0, "price_ceiling": 0.5, "grad_clip": 5.0},
    "m2po": {"grad_clip": 4.0},
    "opd": {"reward_weight": 0.3, "is_cap": 1.4, "beta": 0.6, "grad_clip": 28.0},
    "paced": CHOICE | {"grad_clip": 31.0, "lr": 3e-4},
    "ppo": {"critic_warmup": 1, "critic_lr": 3e-3, "gamma": 0.95, "lam": 0.8, "lam_critic": 0.9},
    "recipe": CHOICE | {"tau_p": 0.9, "lag": 1, "rho_on": 0.5, "branches": K, "lr": 3e-4},
    "signs": {"outliers": 1.5, "grad_clip": 3.0},
    "tool": {"beta": 0.1, "grad_clip": 6.0},
}
FLAGS["ppo"] |= {"beta": 0.1, "value_clip": 0.05, "grad_clip": 4.0}
FLAGS["recipe"] |= {"branch_weight": 0.7, "grad_clip": 12.0}


@lru_cache(2)
def loaded(name: str) -> tuple:
    """The embedded model and its tokenizer as the files load them, from the disk once."""
    return load_model(name)


def task(judge: Callable) -> Task:
    """Problems by number, whose answers are judged by this function."""

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
        final=lambda text: text.split("#")[-1],
        tokenizer=loaded("tiny")[1],
    )


def record(
    module: ModuleType, world: World, folder: Path, steps: int = 2, model: str = "model", **flags
) -> Record:
    """Run the module's `main` for some steps on the stored answers."""
    name = module.__name__.removesuffix("_mutant").rpartition(".")[2]
    flags = DEFAULTS | FLAGS[name] | flags
    shape = {"prompts_per_step": P, "group_size": G, "max_new_tokens": LIMIT, "dtype": "float32"}
    steps += flags.get("lag", 0) + flags.get("critic_warmup", 0)  # in which the policy waits
    shape |= {"steps": steps, "shard_ranks": world.size}
    args = module.Args(**shape | flags)
    args.run_dir, args.eval_every, args.eval_samples = str(folder), 100, SAMPLES
    args.model, args.sampler_tolerance = model.replace("model", "tiny"), 1e9
    engine, found = Stored(world, model), Record(world.rank, vars(args))
    problems = task(marks if name == "blockwise" else reward)
    if name == "tool":
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
        still = SimpleNamespace(anywhere=lambda world: False)
        patch.setattr("common.run.StopFlag", lambda: still)
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
    """The algorithm's module with one piece of the source of `where` replaced: its own or one of
    common's."""
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


# The oracle


def differ(group: list[Row]) -> bool:
    return len({row.reward for row in group}) > 1


def rounds_of(o: Oracle) -> list[list[dict[int, str]]]:
    """The rounds of sampling of each step: slot of the batch -> prompt. A round reads the next
    prompts of one stream: the first for all slots, further ones (dapo) for those of groups without
    a difference. A teacher's choice is taken as it was recorded, and `check_teacher` holds it."""
    drawn, steps = 0, []
    for step in range(o.args.steps):
        slots, found = list(range(P)), []
        while slots and len(found) < getattr(o.args, "max_draws", 1):
            found.append({slot: TRAIN[(drawn + i) % len(TRAIN)] for i, slot in enumerate(slots)})
            drawn += len(slots)
            slots = [slot for slot in slots if not differ(respond(found[-1][slot], G))]
        if o.has("teacher_lr"):
            found = [dict(enumerate(o.prompts(step)))]
        steps.append(found)
    return steps


class Oracle:
    """What the records of all ranks of one run should say."""

    def __init__(self, name: str, records: list[Record], model: str = "model"):
        self.name, self.records, self.model = name, records, model
        self.module, self.args = module_of(name), SimpleNamespace(**records[0].flags)
        self.size, self.updates = len(records), records[0].updates
        self.warmup = getattr(self.args, "critic_warmup", 0)  # steps in which ppo's policy waits
        self.known: dict[int, tuple] = {}
        self.rounds = rounds_of(self)

    def has(self, flag: str) -> bool:
        """Whether this file has a flag, and it is not 0."""
        return bool(getattr(self.args, flag, 0))

    def prompts(self, step: int) -> list[str]:
        """What all ranks sampled first in a step."""
        return [prompt for one in self.records for prompt in one.training[step]["prompts"]]

    def lm(self, parameters: list[Tensor]) -> torch.nn.Module:
        lm = copy.deepcopy(untrained(self.model))
        with torch.no_grad():
            for own, given in zip(lm.parameters(), parameters, strict=True):
                own.copy_(given)
        return lm

    # Rows and their advantages

    def rows(self, step: int, parts: Iterable[int] = range(M)) -> list[Row]:
        """The rows of a batch's mini-batches: of each every rank's own share, in its own order."""
        filled, found, share = {}, [], P // self.size // M
        for drawn in self.rounds[step]:
            filled |= drawn  # a later round's group takes the slot
        for part, one in itertools.product(parts, self.records):
            start = one.rank * P // self.size + part * share
            for slot in range(start, start + share):
                found += respond(filled[slot], G)
        return found

    def advantages(self, step: int) -> Tensor:
        """Of all rows of a batch, by the file's own functions: [P, G]."""
        rows, args, module = self.rows(step), self.args, self.module
        R, mask = rewards_of(rows).view(P, G), mask_of(rows)
        if self.name == "ppo":
            return R  # until the critic has judged
        if self.name == "baselines":
            return module.advantages(R, args.baseline, mask.sum(1).view(P, G))
        if self.name == "paced":
            lm, head = self.taught(step)
            V = [teaches(lm, head, row.prompt, 1.0).detach() for row in rows[::G]]
            return module.advantages(R, torch.stack(V))
        if self.name == "laconic":
            budget = module.Budget(args, ALONE)
            for before in range(step):  # each batch moves the next one's price
                earlier = self.rows(before)
                budget.charge(rewards_of(earlier), mask_of(earlier).sum(1))
            R = budget.charge(R, mask.sum(1).view(P, G))
        if self.name == "dapo":
            R = module.punished(R, SimpleNamespace(mask=mask), args)
        A = module.advantages(R)
        if self.name == "signs":
            mu = mu_of(rows, self.model)
            measures = module.measures(SimpleNamespace(mask=mask, rollout_logp=mu))
            A.view(-1)[module.outliers(args, measures, measures)] = 0.0
        return A

    def failed(self, one: Record, step: int) -> list[tuple[int, int, Row]]:
        """A rank's failed responses of a step: place of the prompt, number of the response, row."""
        found = []
        for place, prompt in enumerate(one.training[step]["prompts"]):
            for number, row in enumerate(respond(prompt, G)):
                if row.reward == 0:
                    found.append((place, number, row))
        return found

    def branches(self, step: int, part: int) -> list[list[Row]]:
        """The siblings that were grown from this mini-batch's failed responses."""
        found, share = [], P // self.size // M
        for one in self.records:
            call, failed = one.branching[step], self.failed(one, step)
            assert call["prompts"] == [row.prompt for _, _, row in failed] and call["n"] == K
            assert call["temperature"] == T and call["limit"] == LIMIT
            for (place, _, row), prefix in zip(failed, call["prefixes"], strict=True):
                if place // share == part:
                    found.append(respond(row.prompt, K, prefix))
        return found

    # A mini-batch

    def batch(self, update: int) -> SimpleNamespace:
        """All columns of the whole mini-batch of this update, and the model `lm` of `logp`."""
        start = update - update % M  # the batch's first update
        step, part = start // M + self.warmup, update % M
        rows = self.rows(step, [part])
        A, main = self.advantages(step).view(M, -1)[part], len(rows)
        for siblings in self.branches(step, part) if self.has("branches") else ():
            own = self.module.advantages(rewards_of(siblings)[None])[0]
            if own.any():  # branches must teach something
                rows, A = rows + siblings, torch.cat([A, own])
        lm = self.lm(self.updates[update]["parameters"])
        old, reference = (self.lm(self.updates[at]["parameters"]) for at in (start, 0))
        self.replay(rows, lm, old)
        every = distributions(lm, rows)
        with torch.no_grad():
            every_old = distributions(old, rows)
        b = SimpleNamespace(
            rows=rows,
            lm=lm,
            logp=sampled(every, rows),
            entropy=-(every.exp() * every).sum(-1).detach(),
            mask=mask_of(rows),
            old_logp=sampled(every_old, rows),
            ref_logp=log_probs(reference, rows),
            rollout_logp=mu_of(rows, self.model),
            finished=torch.tensor([row.finished for row in rows]),
            advantages=A,
            grown=torch.arange(len(rows)) >= main,
        )
        if self.name == "blockwise":
            self.cut(b)
        if self.name == "centred":
            top = [sampler_top(row, self.model) for row in rows]
            ids, b.sampler_top = (
                torch.nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*top)
            )
            b.top_logp = every.gather(-1, ids)
        if self.name == "tool":  # it wrote what stands after each `=`
            written = [[0, *(token == EQUALS for token in row.tokens[:-1])] for row in rows]
            b.mask = b.mask * (1 - padded(written))
        if self.name == "opd":
            b.teacher_logp = log_probs(untrained("model-teacher"), rows)
        if self.name == "ppo":
            b.token_advantages = self.judged(step)[part].token_advantages
            b.advantages = b.token_advantages[:, 0]
        if self.has("lag"):
            self.age(b)
        if hasattr(self.module, "choose_tokens"):
            with torch.no_grad():
                self.module.choose_tokens(self.args, b, ALONE)
        kept = getattr(b, "kept", b.mask).sum(1)
        b.branch = b.grown * kept[~b.grown].sum() / kept[b.grown].sum().clamp(min=1)
        return b

    def gradient(self, update: int) -> tuple[Tensor, SimpleNamespace]:
        """The flat gradient of the loss, and the batch it came from, with `loss` and `stats`."""
        if update not in self.known:
            b = self.batch(update)
            total, count, stats = self.module.policy_loss(self.args, b.logp, b)
            stats["loss"] = total, count
            b.stats = {
                name: (torch.as_tensor(number).detach(), n) for name, (number, n) in stats.items()
            }
            gradient = flat(torch.autograd.grad(total / count, list(b.lm.parameters())))
            b.logp, b.lm = b.logp.detach(), None  # the graph is not needed any more
            self.known[update] = gradient, b
        return self.known[update]

    def age(self, b: SimpleNamespace) -> None:
        """vcpo subtracts a baseline from the advantages of main rows, by a backward pass for each
        response; and ρ, by the weights of all. (checks/vcpo.py holds both formulas.)"""
        log_w = vcpo.log_weight(b.logp, b.rollout_logp, b.mask)
        main, norms = ~b.grown, []
        for row in (b.logp * b.mask)[main].sum(1):  # g_i = ∇ Σ_t log π
            parts = torch.autograd.grad(row, list(b.lm.parameters()), retain_graph=True)
            norms.append(flat(parts).norm())
        A = b.advantages[main].view(-1, G)
        b.shifts = vcpo.baseline_shift(log_w[main].view(-1, G), torch.stack(norms).view(-1, G), A)
        b.advantages[main] -= b.shifts.repeat_interleave(G)
        b.rho = float(vcpo.ess_ratio(log_w))

    def cut(self, b: SimpleNamespace) -> None:
        """blockwise's working, which ends with the last #, and the advantages of both blocks."""
        ends, first, second = [], [], []
        for row in b.rows:
            working, marker, answer = row.text.rpartition("#")
            ends.append(len(working) + 1 if marker else len(row.tokens))
            first.append(marks(working + marker, right_answer(row.prompt)))
            second.append(marks("#" + answer * bool(marker), right_answer(row.prompt)))
        b.working = padded([[1.0] * end for end in ends]).double()
        b.working = torch.nn.functional.pad(b.working, (0, b.mask.shape[1] - max(ends)))
        R = [torch.tensor(x).double().view(-1, G) for x in (first, second)]
        b.working_advantages = self.module.advantages(R[0]).flatten()
        answers = self.module.answer_advantages(self.args, R[1], R[0], ALONE)
        b.advantages = answers.flatten()

    # goldilocks' and paced's teacher, ppo's critic

    def taught(self, step: int) -> tuple[torch.nn.Module, list[Tensor]]:
        """The teacher before a step's lesson: its backbone, weight and bias of its head."""
        *backbone, weight, bias = self.records[0].lessons[step]["parameters"]
        return self.lm(backbone).model, [x.double().requires_grad_() for x in (weight, bias)]

    def values(self, update: int, rows: list[Row]) -> tuple[Tensor, list[Tensor]]:
        """V [n, T] of the critic before its update, and the parameters that it depends on."""
        *backbone, head = self.records[0].lessons[update]["parameters"]
        lm, head = self.lm(backbone).model, head.double().requires_grad_()
        hidden = lm(padded([row.ids for row in rows], 0)).last_hidden_state  # [n, S, H]
        found = []
        for i, row in enumerate(rows):
            found.append(hidden[i, len(row.context) - 1 : len(row.ids) - 1] @ head[0])
        return torch.nn.utils.rnn.pad_sequence(found, batch_first=True), [*lm.parameters(), head]

    def judged(self, step: int) -> list[SimpleNamespace]:
        """ppo's columns of each mini-batch, by the critic before the step's updates: advantages
        whitened over all."""
        args, parts, start = self.args, [], max(0, step - self.warmup) * M
        old, reference = (self.lm(self.updates[at]["parameters"]) for at in (start, 0))
        for part in range(M):
            rows = self.rows(step, [part])
            b = SimpleNamespace(rows=rows, mask=mask_of(rows), rewards=rewards_of(rows))
            b.old_logp, b.ref_logp = log_probs(old, rows), log_probs(reference, rows)
            b.values = self.values(step * M, rows)[0].detach()
            known = self.module.token_rewards(b, args.beta), b.values, b.mask, args.gamma
            lam = args.lam
            if args.lam_length:
                lam = (1 - 1 / (args.lam_length * b.mask.sum(1))).clip(min=0)
            b.token_advantages = self.module.advantages(*known, lam)[0]
            b.returns = self.module.advantages(*known, args.lam_critic)[1]
            parts.append(b)
        every = torch.cat([b.token_advantages[b.mask > 0] for b in parts])
        for b in parts:
            b.token_advantages = (b.token_advantages - every.mean()) / every.std() * b.mask
        return parts

    def lesson(self, update: int) -> Tensor:
        """The flat gradient of the critic's mean loss."""
        step, part = divmod(update, M)
        b = self.judged(step)[part]
        V, parameters = self.values(update, b.rows)
        given = V, b.values, b.returns, b.mask, self.args.value_clip
        loss, _ = self.module.value_loss(*given)
        return flat(torch.autograd.grad(loss / b.mask.sum(), parameters))

    def replay(self, rows: list[Row], lm: torch.nn.Module, old: torch.nn.Module) -> None:
        """minirl: both models send these rows' tokens to the experts of the sampler (r3), or to
        those of π_old (r2). (tests/common/test_routing.py holds `Routing`.)"""
        mode = getattr(self.args, "routing_replay", "none")
        if mode == "none":
            return
        routings = Routing(lm), Routing(old)
        if mode == "r3":
            chosen = [expert_choice(row) for row in rows]
            experts = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True).flatten(0, 1)
        else:
            log_probs(old, rows)
            experts = routings[1].recorded()
        for routing in routings:
            routing.replay = experts


def rewards_of(rows: list[Row]) -> Tensor:
    return torch.tensor([row.reward for row in rows], dtype=torch.float64)


def flat(tensors: object) -> Tensor:
    return torch.cat([x.flatten() for x in tensors]).double()


def teaches(lm: torch.nn.Module, head: list[Tensor], prompt: str, most: float) -> Tensor:
    """A teacher's number in (0, most) for a prompt: most · σ(w · mean h + b)."""
    hidden = lm(torch.tensor([[VOCABULARY.index(c) for c in prompt]])).last_hidden_state[0]
    return most / (1 + (-(hidden.mean(0) @ head[0][0] + head[1][0])).exp())


# Several ranks


def trials(jobs: list[tuple], folder: Path) -> None:
    """On one of the ranks: record every job (algorithm, damage, flags) in turn;
    `folder/<job>-<rank>.pt`."""
    world = setup()
    for number, (algorithm, damage, flags) in enumerate(jobs):
        with damaged(algorithm, *damage) as module:
            found = record(module, world, folder / f"run-{number}", **flags)
        torch.save(found, folder / f"{number}-{world.rank}.pt")


def on_ranks(ranks: int, jobs: list[tuple], folder: Path) -> list[list[Record]]:
    """The records of all ranks for every job."""
    done, found = forked(trials, jobs, folder, ranks=ranks), []
    assert done.returncode == 0, done.stderr
    for number in range(len(jobs)):
        paths = [folder / f"{number}-{rank}.pt" for rank in range(ranks)]
        found.append([torch.load(path, weights_only=False) for path in paths])
    return found

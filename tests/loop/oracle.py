"""What each file's `main` must do, computed a second time without it.

`record` runs a file's own `main` on stored answers and writes down what reaches the optimiser, the
engine and the log. `Oracle` computes from the same answers what should have come out, by
transformers' logits in float64, the header's formulas written out once more, and autograd. It uses
nothing of `common`, so that a mistake there cannot hide in the comparison.

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
from types import ModuleType, SimpleNamespace

import common  # noqa: F401  (before torch)
import numpy
import pytest
import torch
from common.batch import Rollout
from common.data import Problem, Task
from common.distributed import World, setup
from common.model import load_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from checks import mutate
from checks.files import MODULES
from tests.helpers import forked
from tests.loop import formulas

TINY = Path(__file__).parent.parent.parent / "common" / "tiny"
VOCABULARY = ["<pad>", "<eos>", *"0123456789+-*=;#"]
EOS, LIMIT, T = 1, 40, 0.7
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


@lru_cache(1)
def tokenizer() -> object:
    return AutoTokenizer.from_pretrained(TINY / "model")


def padded(rows: list, value: float = 0.0) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def log_probs(lm: torch.nn.Module, rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """log π at temperature 0.7 of each row's tokens, the entropy there, and the mask: [n, T]
    each."""
    logits = lm(padded([row.ids for row in rows], 0)).logits / T  # [n, S, V]
    every = logits.log_softmax(-1)
    logp, entropy = [], []
    for i, row in enumerate(rows):
        # The token at t is predicted at t - 1
        where = torch.arange(len(row.context) - 1, len(row.ids) - 1)
        logp.append(every[i, where, list(row.tokens)])
        entropy.append(-(every[i, where].exp() * every[i, where]).sum(-1))
    stack = [torch.nn.utils.rnn.pad_sequence(x, batch_first=True) for x in (logp, entropy)]
    return *stack, padded([[1.0] * len(row.tokens) for row in rows]).double()


@lru_cache(4096)
def sampler_logp(row: Row, model: str) -> tuple[float, ...]:
    """log μ of a row: its own engine's opinion, near the untrained model's."""
    with torch.no_grad():
        logp, _, _ = log_probs(untrained(model), [row])
    return tuple(float(x) + e for x, e in zip(logp[0], row.noise))


# Running main


class Stored:
    """An engine that returns the stored answers and writes down what it was asked."""

    def __init__(self, world: World, model: str):
        self.world, self.model, self.reports_experts = world, model, model == "model-moe"
        self.calls, self.synced = [], []

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
        return Rollout.pack(
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


def expert_choice(row: Row) -> Tensor:
    """[S, layers 2, k 2]: the experts that the sampler says it sent each token to: any two."""
    generator = torch.Generator().manual_seed(zlib.crc32(bytes(row.ids)))
    scores = torch.rand(len(row.ids), 2, 8, generator=generator)
    return scores.topk(2, dim=-1).indices.to(torch.int16)


def whole(tensors: object) -> list[Tensor]:
    """Copies of whole tensors; where ranks hold rows of them, from all ranks at once."""
    tensors = list(tensors)
    own = [(x.to_local() if isinstance(x, DTensor) else x).detach().clone() for x in tensors]
    if not isinstance(tensors[0], DTensor):
        return own
    parts = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, own)
    return [torch.cat(rows) for rows in zip(*parts)]


@dataclass
class Record:
    """What one rank's `main` did."""

    rank: int
    size: int
    flags: dict
    # Of the policy: parameters before, gradients, lr, betas
    updates: list[dict] = field(default_factory=list)
    lessons: list[dict] = field(default_factory=list)  # of a teacher or critic, likewise
    calls: list[dict] = field(default_factory=list)
    synced: list[list[Tensor]] = field(default_factory=list)
    pivots: list[dict] = field(default_factory=list)  # deep_grpo's choices
    metrics: list[dict] = field(default_factory=list)  # rank 0's log

    @property
    def training(self) -> list[dict]:
        """The calls that sampled for training (evaluations ask for one greedy or SAMPLES sampled
        responses)."""
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
}


@lru_cache(2)
def loaded(name: str) -> tuple:
    """The embedded model and its tokenizer as the files load them, from the disk once."""
    return load_model(name)


def task() -> Task:
    """Problems by number."""

    def problem(prompt: str, index: int = -1) -> Problem:
        ids = [VOCABULARY.index(c) for c in prompt]
        return Problem(prompt, right_answer(prompt), ids, index)

    def verifier(texts: list[str], answers: list[str]) -> list[float]:
        return list(map(reward, texts, answers))

    return Task(
        "arithmetic",
        lambda index: problem(TRAIN[index % len(TRAIN)], index),
        [problem(prompt) for prompt in HELD_OUT],
        verifier,
        final=lambda text: text.split("#")[-1],
        tokenizer=tokenizer(),
    )


def record(
    module: ModuleType, world: World, folder: Path, steps: int = 2, model: str = "model", **flags
) -> Record:
    """Run the module's `main` for some steps on the stored answers."""
    name = module.__name__.removesuffix("_mutant").rpartition(".")[2]
    flags = DEFAULTS | FLAGS.get(name, formulas.of(name, "FLAGS", {})) | flags
    shape = {"prompts_per_step": P, "group_size": G, "max_new_tokens": LIMIT, "dtype": "float32"}
    shape |= {"steps": steps + flags.get("lag", 0), "shard_ranks": world.size}
    args = module.Args(**shape | flags)
    args.run_dir, args.eval_every, args.eval_samples = str(folder), 100, SAMPLES
    args.model, args.sampler_tolerance = model.replace("model", "tiny"), 1e9
    engine, found = Stored(world, model), Record(world.rank, world.size, vars(args))

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

    def choose(response: list, boundaries: set, slope: float, offset: float, *rest) -> tuple:
        kept, depth = choose_pivot(response, boundaries, slope, offset, *rest)
        text = "".join(VOCABULARY[t] for t in response if t != EOS)
        pivot = {"fit": (slope, offset), "response": text, "kept": kept, "depth": depth}
        found.pivots.append(pivot)
        return kept, depth

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_model", lambda name, *flag: copy.deepcopy(loaded(name)))
        patch.setattr(module, "load_task", lambda *arguments: task())
        patch.setattr(module, "make_engine", lambda *arguments, **named: engine)
        patch.setattr(module, "save_checkpoint", lambda *arguments: None)
        patch.setattr("common.run.draw_run", lambda *arguments: "")
        patch.setattr(torch.optim, "AdamW", Watched)
        if hasattr(module, "Branches"):  # recipe.py imports it
            home = sys.modules[module.Branches.__module__]
            choose_pivot = home.choose_pivot
            patch.setattr(home, "choose_pivot", choose)
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


class Batch(SimpleNamespace):
    """All rows of a mini-batch: logp (with gradient), old, mu, ref, entropy, mask [n, T]; A, branch
    [n]; args; the models of logp and of old: lm, before. What an objective writes down: count, what
    its mean is over; rho; stats, main's own metrics as (sum, count)."""

    @property
    def r(self) -> Tensor:
        return (self.logp - self.old).exp()  # [n, T]


def z_score(R: Tensor) -> Tensor:
    return (R - R.mean()) / (R.std(correction=1) + 1e-6)


def centred(R: Tensor) -> Tensor:
    return R - R.mean()


def population_z_score(R: Tensor) -> Tensor:
    std = R.std(correction=0)
    return (R - R.mean()) / (std if std > 0 else 1.0)


ADVANTAGES = {"minirl": centred, "deep_grpo": centred, "vcpo": population_z_score}


def in_order(o: Oracle) -> list[list[dict[int, str]]]:
    """The rounds of sampling of each step: slot of the batch -> prompt. In most files one round, of
    problems (s-1)P to sP-1."""
    starts = range(0, o.args["steps"] * P, P)
    return [[{slot: TRAIN[(start + slot) % len(TRAIN)] for slot in range(P)}] for start in starts]


def as_recorded(o: Oracle) -> list[list[dict[int, str]]]:
    """One round a step, of the prompts that the ranks asked for: where they are chosen."""
    steps = [[one.training[s]["prompts"] for one in o.records] for s in range(o.args["steps"])]
    return [[dict(enumerate(prompt for own in step for prompt in own))] for step in steps]


ROUNDS = {"goldilocks": as_recorded}


def verdicts(o: Oracle, step: int, rows: list[Row]) -> list[float]:
    """What a group's advantages are made of: in most files the verifier's rewards."""
    return [row.reward for row in rows]


def response_mean(x: Tensor, mask: Tensor) -> Tensor:
    return ((x * mask).sum(1) / mask.sum(1)).mean()


def token_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum() / mask.sum()


def clipped(r: Tensor, A: Tensor, args: dict) -> Tensor:
    """min(r A, clip(r) A)."""
    return torch.minimum(r * A, r.clip(1 - args["clip_low"], 1 + args["clip_high"]) * A)


def surrogate(b: Batch) -> Tensor:
    return clipped(b.r, b.A[:, None], b.args)


def k3(b: Batch) -> Tensor:
    return (b.ref - b.logp).exp() - (b.ref - b.logp) - 1


def tokens_of(b: Batch, mask: Tensor) -> Tensor:
    """The mask, whose tokens are what the loss is a mean of."""
    b.count = float(mask.sum())
    return mask


def grpo(b: Batch) -> Tensor:
    return response_mean(surrogate(b) - b.args["beta"] * k3(b), b.mask)


def justrl(b: Batch) -> Tensor:
    """The base file of many variants."""
    return token_mean(surrogate(b), tokens_of(b, b.mask))


def gspo(b: Batch) -> Tensor:
    s = (((b.logp - b.old) * b.mask).sum(1) / b.mask.sum(1)).exp()
    return clipped(s, b.A, b.args).mean()


def sapo(b: Batch) -> Tensor:
    tau = torch.where(b.A > 0, b.args["tau_pos"], b.args["tau_neg"])[:, None].double()
    f = 4 / tau / (1 + (-tau * (b.r - 1)).exp())
    return response_mean(f * b.A[:, None], b.mask)


def silent(b: Batch) -> Tensor:
    """stapo's rare tokens of right responses where the entropy is low."""
    p, everywhere = b.logp.detach().exp(), b.mask > 0
    rare = everywhere & (p < b.args["tau_p"]) & (b.A[:, None] > 0)
    among, quantile = everywhere, b.args["entropy_quantile"]
    if b.args["entropy_rule"] == "candidates":
        among, quantile = rare, b.args["candidate_quantile"]
    height = numpy.quantile(b.entropy[among].numpy(), quantile)
    return rare & (b.entropy < height - 1e-5)


def stapo(b: Batch) -> Tensor:
    return token_mean(surrogate(b), tokens_of(b, b.mask * ~silent(b)))


def gated(b: Batch) -> Tensor:
    """maspo's gate times r A."""
    a, A, r = b.args, b.A[:, None], b.r
    width = (a["sigma_base"] / b.old.exp() ** a["alpha"]).clip(a["sigma_base"], a["sigma_high"])
    risk = torch.where(A > 0, 1 + a["beta_pos"] * A, 1 / (1 - a["beta_neg"] * A)).clip(0.1, 10)
    out = ((A > 0) & (r > 1)) | ((A < 0) & (r < 1))
    gate = torch.where(out, (-((r - 1) ** 2) / (2 * (width * risk) ** 2)).exp(), 1.0)
    return gate.detach() * r * A


def maspo(b: Batch) -> Tensor:
    return token_mean(gated(b), tokens_of(b, b.mask))


def minirl(b: Batch) -> Tensor:
    r, A = b.r.detach(), b.A[:, None]
    masked = ((A > 0) & (r > 1 + b.args["clip_high"])) | ((A < 0) & (r < 1 - b.args["clip_low"]))
    weight = (b.logp - b.mu).exp().detach()
    b.stats = {"weight_max": ((weight * b.mask).max(), 1)}
    weight = weight.clip(max=b.args["is_cap"])
    return (~masked * weight * A * b.logp * b.mask).sum(1).mean()


def age(b: Batch) -> Tensor:
    """vcpo's weight w of each response under π_θ. Takes its baseline from the advantages of the
    main rows, and writes ρ down."""
    log_w = ((b.logp - b.mu) * b.mask).sum(1).detach()
    norms = []
    for row in (b.logp * b.mask).sum(1):  # g_i = ∇ Σ_t log π: a backward pass for each response
        parts = torch.autograd.grad(row, list(b.lm.parameters()), retain_graph=True)
        norms.append(torch.cat([part.flatten() for part in parts]).norm())
    heavy, shifts = (2 * log_w).exp() * torch.stack(norms) ** 2, []
    for group in torch.arange(int((~b.branch).sum())).split(G):  # main rows come first
        shift = (heavy[group] * b.A[group]).sum() / heavy[group].sum()
        b.A[group] = b.A[group] - shift
        shifts.append(abs(float(shift)))
    w = log_w.exp()
    b.rho = float(w.sum() ** 2 / (w**2).sum() / len(w))
    b.stats = {"ess_ratio": (b.rho, 1), "baseline_shift": (sum(shifts), len(shifts))}
    return w


def vcpo(b: Batch) -> Tensor:
    w, means = age(b), (b.logp * b.mask).sum(1) / b.mask.sum(1)
    return (w.clip(max=b.args["is_cap"]) * b.A * means).mean()


def both_streams(b: Batch, x: Tensor, mask: Tensor, mean: Callable) -> Tensor:
    """The mean over main rows and the mean over branches, added up."""
    streams = [stream for stream in (~b.branch, b.branch) if stream.any()]
    return sum(mean(x[stream], mask[stream]) for stream in streams)


def deep_grpo(b: Batch) -> Tensor:
    tokens_of(b, b.mask[~b.branch])
    weight = torch.where(b.branch, b.args["branch_weight"], 1.0)[:, None]
    return both_streams(b, weight * surrogate(b) - b.args["beta"] * k3(b), b.mask, token_mean)


OBJECTIVES = {f.__name__: f for f in (grpo, gspo, sapo, stapo, maspo, minirl, vcpo, deep_grpo)}
OBJECTIVES["goldilocks"] = grpo


class Oracle:
    """What the records of all ranks of one run should say."""

    def __init__(self, name: str, records: list[Record], model: str = "model"):
        self.name, self.records, self.model = name, records, model
        self.args, self.size, self.updates = records[0].flags, len(records), records[0].updates
        self.known: dict[int, tuple] = {}
        self.rounds = self.own("rounds", ROUNDS.get(name, in_order))(self)

    def own(self, what: str, otherwise: object) -> object:
        """What a variant says in formulas/NAME.py, or the default."""
        return formulas.of(self.name, what, otherwise)

    def groups(self, step: int, part: int) -> list[list[Row]]:
        """The groups of mini-batch `part` of a batch: every rank's own share, in its own order."""
        filled, found = {}, []
        for drawn in self.rounds[step]:
            filled |= drawn  # a later round's group takes the slot
        share = P // self.size // self.args["minibatches"]
        for one in self.records:
            start = one.rank * P // self.size + part * share
            found += [respond(filled[i], G) for i in range(start, start + share)]
        return found

    def rows(self, step: int) -> list[Row]:
        """All rows of a batch."""
        groups = [group for part in range(M) for group in self.groups(step, part)]
        return [row for group in groups for row in group]

    def branches(self, step: int, part: int) -> list[list[Row]]:
        """The siblings that were grown from this mini-batch's failed responses."""
        found = []
        for one in self.records:
            call = one.branching[step]
            own = [respond(prompt, G) for prompt in one.training[step]["prompts"]]
            failed = [(g, row) for g, rows in enumerate(own) for row in rows if row.reward == 0]
            assert [row.prompt for _, row in failed] == call["prompts"] and call["n"] == K
            assert call["temperature"] == T and call["limit"] == LIMIT
            share = len(own) // self.args["minibatches"]
            for (g, row), prefix in zip(failed, call["prefixes"], strict=True):
                assert row.text.startswith(prefix) and (not prefix or prefix.endswith(";"))
                if g // share == part:
                    found.append(respond(row.prompt, K, prefix))
        return found

    def taught(self, step: int) -> tuple[torch.nn.Module, list[Tensor]]:
        """goldilocks' teacher before a step's lesson: its backbone, weight and bias of its head."""
        *backbone, weight, bias = self.records[0].lessons[step]["parameters"]
        return self.lm(backbone).model, [x.double().requires_grad_() for x in (weight, bias)]

    def lm(self, parameters: list[Tensor]) -> torch.nn.Module:
        lm = copy.deepcopy(untrained(self.model))
        with torch.no_grad():
            for own, given in zip(lm.parameters(), parameters, strict=True):
                own.copy_(given)
        return lm

    def batch(self, update: int) -> Batch:
        """Everything that the objective of this update is about."""
        step, part = divmod(update, self.args["minibatches"])
        advantage = ADVANTAGES.get(self.name, self.own("advantages", z_score))
        rewards = self.own("rewards", verdicts)
        rows, A, branch = [], [], []
        grown = self.branches(step, part) if self.args.get("branches") else []
        for siblings in (groups := self.groups(step, part)) + grown:
            own = advantage(torch.tensor(rewards(self, step, siblings), dtype=torch.float64))
            is_branch = len(branch) >= G * len(groups)
            if is_branch and not own.any():
                continue  # branches must teach something
            rows += siblings
            A.append(own)
            branch += [is_branch] * len(siblings)
        lm = self.lm(self.updates[update]["parameters"])
        old, reference = (self.updates[at]["parameters"] for at in (step * M, 0))
        routes = self.routes(rows, old)
        with self.routed(lm, routes):
            logp, entropy, mask = log_probs(lm, rows)
        with torch.no_grad(), self.routed(before := self.lm(old), routes):
            old_logp = log_probs(before, rows)[0]
            ref_logp = log_probs(self.lm(reference), rows)[0]
        mu = padded([sampler_logp(row, self.model) for row in rows]).double()
        b = Batch(logp=logp, old=old_logp, ref=ref_logp, mu=mu, entropy=entropy.detach(), mask=mask)
        vars(b).update(A=torch.cat(A), branch=torch.tensor(branch), rows=rows, args=self.args)
        vars(b).update(lm=lm, before=before, rho=1.0, count=len(rows), stats={})
        self.own("prepare", lambda *_: None)(self, step, b)
        return b

    def gradient(self, update: int) -> tuple[Tensor, Batch]:
        """The flat gradient of -J, and the batch it came from."""
        if update in self.known:
            return self.known[update]
        b = self.batch(update)
        J = self.own("objective", OBJECTIVES.get(self.name))(b)
        found = torch.autograd.grad(-J, list(b.lm.parameters()))
        # The graph is not needed any more
        b.J, b.logp, b.lm, b.before = float(J.detach()), b.logp.detach(), None, None
        self.known[update] = flat(found), b
        return self.known[update]

    # minirl's routing replay

    def routes(self, rows: list[Row], old: list[Tensor]) -> Tensor | None:
        """[n, S, layers, k]: the experts to replay: none, π_old's own choice (r2), or the sampler's
        (r3)."""
        mode = self.args.get("routing_replay", "none")
        if mode == "none":
            return None
        if mode == "r3":
            chosen = [expert_choice(row) for row in rows]
            return torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True).long()
        lm, seen = self.lm(old), []
        for router in routers(lm):
            router.register_forward_hook(lambda _, x, out: seen.append(out[0].topk(2, -1).indices))
        with torch.no_grad():
            log_probs(lm, rows)
        assert len(seen) == 2
        return torch.stack(seen, 1).unflatten(0, (len(rows), -1))

    @contextlib.contextmanager
    def routed(self, lm: torch.nn.Module, routes: Tensor | None) -> None:
        """Forward passes of `lm` inside use these experts, weighted by the current softmax among
        them."""

        def replace(layer: int) -> object:
            def hook(_: object, x: tuple, out: tuple) -> tuple:
                chosen = routes[:, :, layer].flatten(0, 1)
                weights = out[0].softmax(-1).gather(-1, chosen)
                return out[0], weights / weights.sum(-1, keepdim=True), chosen

            return hook

        replayed = [] if routes is None else enumerate(routers(lm))
        hooks = [router.register_forward_hook(replace(layer)) for layer, router in replayed]
        yield
        for hook in hooks:
            hook.remove()


def flat(tensors: object) -> Tensor:
    return torch.cat([x.flatten() for x in tensors]).double()


def teaches(lm: torch.nn.Module, head: list[Tensor], prompt: str) -> Tensor:
    """f(q) = σ(w · mean h + b) / 2 of a teacher."""
    hidden = lm(torch.tensor([[VOCABULARY.index(c) for c in prompt]])).last_hidden_state[0]
    return 0.5 / (1 + (-(hidden.mean(0) @ head[0][0] + head[1][0])).exp())


def routers(lm: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in lm.modules() if type(module).__name__ == "Qwen3MoeTopKRouter"]


# Two ranks


def trials(jobs: list[tuple], folder: Path) -> None:
    """On one of the ranks: record every job (algorithm, damage, flags) in turn;
    `folder/<job>-<rank>.pt`."""
    world = setup()
    for number, (algorithm, damage, flags) in enumerate(jobs):
        with damaged(algorithm, *damage) as module:
            found = record(module, world, folder / f"run-{number}", **flags)
        torch.save(found, folder / f"{number}-{world.rank}.pt")


def on_two_ranks(jobs: list[tuple], folder: Path) -> list[list[Record]]:
    """The records of both ranks for every job."""
    done, found = forked(trials, jobs, folder, ranks=2), []
    assert done.returncode == 0, done.stderr
    for number in range(len(jobs)):
        paths = [folder / f"{number}-{rank}.pt" for rank in (0, 1)]
        found.append([torch.load(path, weights_only=False) for path in paths])
    return found

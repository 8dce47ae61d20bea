"""Stored answers: what a sampler says to a prompt, and the log-probs of that by transformers alone.

They are made so that a mistake shows: sequences of unequal length, some cut off; groups all right,
all wrong and mixed; a sampler whose log-probs μ are off by noise, and in some responses by a factor
beyond vcpo's cap; temperature 0.7.
"""

import random
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from common.tiny.arithmetic import arithmetic_reward, work
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

TINY = Path(__file__).parent.parent.parent / "common" / "tiny"
VOCABULARY = ["<pad>", "<eos>", *"0123456789+-*=;#"]
EOS, LIMIT, TEMPERATURE = 1, 40, 0.7
P, G, M = 8, 4, 2  # prompts, responses, mini-batches a step
SAMPLES = 2  # sampled responses to a held-out problem
TRAIN = """7*8-9+6= 1+2= 3*3*3= 9-9= 4+5*6= 0*1+2-3= 8*8= 5-6+7*8= 2+2-1= 6*7= 5*5-5= 9+9+9= 3-8=
    1*2*3*4= 7+0= 8-2*3= 4*4= 6-6+6= 2*9-1= 5+5= 7*7-7= 1-2-3= 9*8+7= 3+4= 8+8*2= 0-1= 6*6*6=
    2+3-4= 9*9= 1+1*1=""".split()
HELD_OUT = "2*2= 5-7+1= 8*9-4= 3+3= 6*5+4*3=".split()


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
        return arithmetic_reward(self.text, work(self.prompt)[1])

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
        right = work(prompt)[1]
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
    logits = lm(padded([row.ids for row in rows], 0)).logits / TEMPERATURE  # [n, S, V]
    every = logits.log_softmax(-1)  # [n, S, V]
    slices = []
    for i, row in enumerate(rows):
        # The token at t is predicted at t - 1
        slices.append(every[i, len(row.context) - 1 : len(row.ids) - 1])
    return torch.nn.utils.rnn.pad_sequence(slices, batch_first=True)


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


def rewards_of(rows: list[Row]) -> Tensor:
    return torch.tensor([row.reward for row in rows], dtype=torch.float64)


def expert_choice(row: Row) -> Tensor:
    """Return the experts [S, layers 2, k 2] that the sampler says it sent each token to: any
    two."""
    generator = torch.Generator().manual_seed(zlib.crc32(bytes(row.ids)))
    scores = torch.rand(len(row.ids), 2, 8, generator=generator)
    return scores.topk(2, dim=-1).indices.to(torch.int16)

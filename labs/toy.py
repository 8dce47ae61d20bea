"""Policies so small that they are a table of logits, trained by the real files' losses.

They take plain gradient steps. Adam and gradient clipping would hide how a loss weighs its tokens.
"""

import importlib
from pathlib import Path
from collections.abc import Callable
from types import ModuleType

import checks
from checks import harness
from checks.files import MODULES
import torch
from torch import Tensor

torch.set_num_threads(1)  # tables this small gain nothing from more


def load(stem: str) -> ModuleType:
    """Import an algorithm file, given its stem."""
    return importlib.import_module(MODULES[stem])


def by_token(module: ModuleType) -> ModuleType:
    """Change a file's loss to read an advantage for each token, `token_advantages [N, T]`."""
    source = Path(module.__file__).read_text("utf-8")
    source = source.replace("batch.advantages[:, None]", "batch.token_advantages")
    return checks.module_from(source, module)


def start(p: float, size: int) -> Tensor:
    """Make logits `[size]` of a softmax with probability p on 0 and the rest spread evenly."""
    first = torch.tensor(p / (1 - p) * (size - 1), dtype=torch.float64).log()
    return torch.cat([first[None], torch.zeros(size - 1, dtype=torch.float64)])


def sample(logits: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Sample `count` responses from independent tables `[T, V]` -> tokens `[count, T]`."""
    chances = logits.softmax(-1)  # [T, V]
    return torch.multinomial(chances, count, True, generator=generator).T


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return log π of tokens `[N, T]` under tables `[T, V]` -> `[N, T]`."""
    return logits.log_softmax(-1).gather(1, tokens.T).T


def gradient(
    module: ModuleType,
    flags: dict,
    logits: Tensor,
    tokens: Tensor,
    read: Callable[[Tensor, Tensor], Tensor] = logprobs,
    **columns: Tensor,
) -> Tensor:
    """Compute the gradient of a file's loss, without a KL term, by the logits.

    `columns` are old_logp, advantages, ...; `read(logits, tokens)` gives the log-probs `[N, T]`.
    """
    logits = logits.detach().requires_grad_()
    logp = read(logits, tokens)  # [N, T]
    columns = {"mask": torch.ones_like(logp)} | columns
    loss = harness.loss_of(module, harness.no_kl(module, **flags), logp=logp, **columns)
    return torch.autograd.grad(loss, logits)[0]

"""What an algorithm file must hold, without pytest: for tests/test_checks.py and the labs' grader.

`tests/checks/<algorithm>.py` has two lists. `CHECKS` are functions of a module (the file, a damaged
copy, or a student's): they raise AssertionError where it is wrong, and their docstring says what is
held. `MUTANTS` are damages, name -> (what stands in the file once, what it becomes), each of which
at least one check must see; a third entry names the check that must see it.
"""

import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import common  # noqa: F401  (before torch)
import torch
from torch import Tensor

FIXTURE = json.loads((Path(__file__).parent.parent / "fixtures" / "losses.json").read_text())


def of(algorithm: str) -> tuple[list[Callable], dict[str, tuple]]:
    """CHECKS and MUTANTS of an algorithm, by its file's stem."""
    module = importlib.import_module(f"tests.checks.{algorithm}")
    return list(module.CHECKS), module.MUTANTS


def written_here(namespace: dict) -> list[Callable]:
    """Every `check_*` that a module defines, in the order written."""
    ours = [f for name, f in namespace.items() if name.startswith("check_")]
    return [f for f in ours if f.__module__ == namespace["__name__"]]


def replaced(path: Path, old: str, new: str) -> str:
    """A file's text with `old`, which must stand there once, replaced; line breaks inside it are no
    matter, so that a formatter may move them."""
    source, tokens = path.read_text(), re.findall(r"\w+|\s+|.", old.strip())
    # A formatter also puts a comma before a bracket that closes on a line of its own
    loose = [r",?\s*" + re.escape(t) if t in ")]}" else re.escape(t) for t in tokens if t.strip()]
    found = re.findall(re.escape(old), source) or re.findall(r"\s*".join(loose), source)
    if len(found) != 1:  # no AssertionError: that is what a damage that was seen raises
        raise LookupError(f"{path.name} has {len(found)} times {old!r}")
    return source.replace(found[0], new)


def mutate(module: ModuleType, old: str, new: str) -> ModuleType:
    """The module with one piece of its source replaced."""
    source = replaced(Path(module.__file__), old, new)
    mutant = ModuleType(f"{module.__name__}_mutant")
    sys.modules[mutant.__name__] = mutant  # dataclasses look their module up
    mutant.__file__ = module.__file__
    exec(compile(source, module.__file__, "exec"), vars(mutant))
    return mutant


def red(module: ModuleType, checks: list[Callable]) -> Iterator[Callable]:
    """The checks that the module does not pass, one by one."""
    for check in checks:
        try:
            check(module)
        except (AssertionError, RuntimeError):  # RuntimeError: backward finds no gradient
            yield check


# Tools of the checks


def terms(module: ModuleType, args: object, **tensors: Tensor) -> tuple[Tensor, Tensor, dict]:
    """What `policy_loss` returns; not given are: μ, as π_old; the entropy, as 0; π_ref, as None."""
    tensors = {
        "rollout_logp": tensors["old_logp"],
        "entropy": torch.zeros_like(tensors["logp"]),
        "ref_logp": None,
    } | tensors
    return module.policy_loss(args, **tensors)


def loss_of(module: ModuleType, args: object, **tensors: Tensor) -> tuple[Tensor, dict]:
    """The loss, a mean, and the statistics."""
    total, count, stats = terms(module, args, **tensors)
    return total / count, stats


def no_kl(module: ModuleType, **flags: object) -> object:
    """The file's Args, without a KL term where it has one."""
    return replace(
        module.Args(), **({"beta": 0.0} if hasattr(module.Args(), "beta") else {}), **flags
    )


def one(*values: float) -> Tensor:
    """[1, n] in float64."""
    return torch.tensor([values], dtype=torch.float64)


def toy_batch() -> dict[str, Tensor]:
    """The fixture's: six responses, many of whose tokens are beyond every clip."""
    inputs = FIXTURE["inputs"]
    batch = {
        name: torch.tensor(inputs[name], dtype=torch.float64)
        for name in ("mask", "old_logp", "advantages")
    }
    batch["logp"] = batch["old_logp"] + torch.tensor(inputs["logratio"], dtype=torch.float64)
    return batch


def two_responses() -> dict[str, Tensor]:
    """For checks by hand: log-ratios [.1, -.2, .3] with Â = 1, [-.05, .02] with Â = -1."""
    logp = torch.tensor([[0.1, -0.2, 0.3], [-0.05, 0.02, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1, 1], [1, 1, 0]], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1], dtype=torch.float64)
    return {"logp": logp, "old_logp": 0 * logp, "mask": mask, "advantages": advantages}


def weight(
    module: ModuleType,
    ratio: float,
    advantage: float,
    old: float = 1.0,
    mu: float | None = None,
    **flags: object,
) -> float:
    """The gradient weight on ∇ log π of a one-token response with this ratio and π_old = `old`."""
    old_logp = one(old).log()
    logp = (old_logp + one(ratio).log()).requires_grad_()
    tensors = {"advantages": one(advantage)[0], "mask": one(1.0)}
    tensors["rollout_logp"] = old_logp if mu is None else one(mu).log()
    tensors["entropy"] = torch.full_like(old_logp, 9.0)
    loss_of(module, no_kl(module, **flags), logp=logp, old_logp=old_logp, **tensors)[0].backward()
    return -logp.grad.item()


def gradient(module: ModuleType, **flags: object) -> Tensor:
    """The gradient on the toy batch."""
    batch = toy_batch()
    batch["logp"].requires_grad_()
    loss_of(module, no_kl(module, **flags), **batch)[0].backward()
    return batch["logp"].grad


def matches(module: ModuleType, case: str, **flags: object) -> None:
    """Value and gradient on the toy batch are those of the fixture's case, to 1e-8."""
    expected, batch = FIXTURE["cases"][case], toy_batch()
    loss = loss_of(module, no_kl(module, **flags), **batch)[0]
    assert abs(loss.item() - expected["loss"]) < 1e-8
    wanted = torch.tensor(expected["grad"], dtype=torch.float64)
    assert torch.allclose(gradient(module, **flags), wanted, rtol=0, atol=1e-8)


def advantages_match(module: ModuleType, case: str, tolerance: float) -> None:
    """Advantages of the fixture's rewards are those of its case."""
    numbers = FIXTURE["advantages"]
    rewards, expected = (
        torch.tensor(numbers[name], dtype=torch.float64) for name in ("rewards", case)
    )
    assert torch.allclose(module.advantages(rewards), expected, rtol=0, atol=tolerance)


def gradient_law(module: ModuleType, power: float, **flags: object) -> None:
    """|∇J| = (p (1-p))^power · |E[∇ log π | right] - E[∇ log π | wrong]|, of the module's own
    advantages and loss.

    The "group" holds every outcome of a policy in exact proportion: no sampling noise takes part.
    """
    right = torch.tensor([1.0, 0, 0, 1, 0, 1], dtype=torch.float64)
    for counts in ([1, 7, 3, 4, 2, 3], [12, 2, 1, 1, 2, 2], [1, 1, 1, 15, 1, 1]):
        weights = torch.tensor(counts, dtype=torch.float64)
        outcomes, n = torch.repeat_interleave(torch.arange(6), weights.long()), int(weights.sum())
        theta = (weights / n).log().requires_grad_()
        logp, ones = theta.log_softmax(0)[outcomes][:, None], torch.ones(n, 1, dtype=torch.float64)
        batch = {"logp": logp, "old_logp": logp.detach(), "mask": ones}
        batch["advantages"] = module.advantages(right[outcomes][None])[0]
        loss_of(module, no_kl(module, **flags), **batch)[0].backward()
        pi = weights / n
        p = (pi * right).sum()
        scores = torch.eye(6, dtype=torch.float64) - pi  # ∇ log π of each outcome, a row each
        apart = (pi * right) @ scores / p - (pi * (1 - right)) @ scores / (1 - p)
        law = (p * (1 - p)) ** power * apart.norm()
        sample_std = ((n - 1) / n) ** 0.5 if power == 0.5 else 1.0  # by which the file divides
        assert torch.isclose(theta.grad.norm(), law * sample_std, rtol=1e-4)

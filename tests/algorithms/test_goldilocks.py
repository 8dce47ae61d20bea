"""Goldilocks in a run: the teacher learns, chooses, and is one on all ranks."""

import random
from types import SimpleNamespace

import goldilocks
import pytest
import torch
from common.distributed import World
from common.tiny import arithmetic

from tests.helpers import MORE, SMALL, metrics, run_here


def untaught(world: World, **flags: object) -> goldilocks.Curriculum:
    """A curriculum whose teacher knows nothing yet."""
    args = goldilocks.Args(dtype="float32", **flags)
    return goldilocks.Curriculum(args, SimpleNamespace(held_out=[]), world)


@pytest.mark.slow
def test_the_teacher_ranks_prompts_by_what_they_teach(world):
    """A student that solves prompts of 2 to 7 terms with known p; f then orders unseen prompts by
    sqrt(p (1-p)), and the best is a good one."""
    chance = {2: 1.0, 3: 0.97, 4: 0.85, 5: 0.5, 6: 0.12, 7: 0.02}
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    curriculum = untaught(world)
    curriculum.rng = rng
    prompts = [arithmetic.draw(rng) for _ in range(1100)]
    p = torch.tensor([chance[len(prompt) // 2] for prompt in prompts])
    rewards = torch.bernoulli(p[:, None].expand(-1, 8), generator=generator)  # [1100, 8]
    observed = goldilocks.learning_value(rewards)  # [1100]
    ids = [curriculum.tokenizer(prompt)["input_ids"] for prompt in prompts]
    curriculum.window.extend(list(zip(ids, observed.tolist()))[:1000])
    for _ in range(120):
        curriculum.teach()
    values, true = curriculum.predict(ids[1000:]), (p * (1 - p)).sqrt()[1000:]
    ranks = torch.stack([values.argsort().argsort(), true.argsort(stable=True).argsort()]).double()
    assert torch.corrcoef(ranks)[0, 1] > 0.8
    assert true[values.argmax()] >= 0.35


def test_micro_batches_do_not_change_the_teacher(world):
    """One prompt at a time or all at once: the same values and the same summed gradient."""
    prompts, targets = ("1+2=", "3*4-5=", "9-9+9*9="), torch.rand(3) / 2
    found = []
    for tokens in (1, 10_000):
        curriculum = untaught(world, micro_tokens=tokens)
        teacher, generator = curriculum.teacher, torch.Generator().manual_seed(0)
        torch.nn.init.normal_(teacher.head.weight, generator=generator)
        ids = [curriculum.tokenizer(prompt)["input_ids"] for prompt in prompts]
        values = curriculum.predict(ids, targets)
        found.append((values, torch.cat([p.grad.flatten() for p in teacher.parameters()])))
    assert torch.allclose(found[0][0], found[1][0], atol=1e-6)
    assert torch.allclose(found[0][1], found[1][1], rtol=1e-4, atol=1e-6)


def test_it_chooses_only_when_it_has_learned(tmp_path):
    """Uniform until the window holds a batch; then every slot but the ε ones is the teacher's. When
    it is saved changes nothing."""
    flags = [*SMALL, *MORE["goldilocks"], "--steps", 5, "--explore", 0]
    for every in (1, 100):
        where = ["--save_every", every, "--run_dir", tmp_path / f"every{every}"]
        assert run_here(goldilocks.main, *flags, *where) == 0
    lines = metrics(tmp_path / "every1")
    assert lines == metrics(tmp_path / "every100")
    assert ["zero_groups_uniform" in line for line in lines[1:]] == [True] * 2 + [False] * 3
    assert all(line["chosen_over_mean"] > 1e-3 for line in lines[3:])

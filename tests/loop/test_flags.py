"""Every flag does something. A file's own flag changes its training on stored answers (what is
asked of the engine, a gradient, or the last weights). A shared flag changes a run of grpo.py."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import grpo
import pytest
import torch
from checks import run_of
from checks.files import NINE, VARIANTS
from common.cli import Flags
from common.distributed import World
from common.records.checkpoint import checkpoints
from common.scale.vllm import vllm_options

from tests.helpers import SMALL, metrics, module_of, run_here
from tests.loop.record import flat, record

SHARED = [field.name for field in fields(Flags)]
# For memory, time and the disk: the same training
IDLE = "--save_every 1 --keep 2 --save_hf --sample_every 0 --shard_ranks 1 --resume auto"
IDLE += " --gradient_checkpointing --offload --offload_reference"
EVALUATION = {"eval_every": 1, "eval_problems": 4, "eval_samples": 2}
ACTING = {"model": "tiny-moe", "task": "arithmetic:mix", "seed": 2, "sampler_tolerance": 1e-9}
ACTING |= {"dtype": "bfloat16", "rollout_dtype": "bfloat16"}
ACTING |= {"rollout_rows": 4}  # in another order, other random numbers
VLLM = {"vllm": ("a=1",), "vllm_memory": 0.5, "vllm_sleep": True, "tensor_parallel": 2}
# Other tests show what these do
ELSEWHERE = """answer_column back_to chat compile eval_task instruction max_prompt_tokens
    micro_tokens prompt_column rollout run_dir wandb""".split()
# What flags of several files need to act, or where to start, if half of their usual value does
# nothing. What those of one file need is in checks/NAME.py, `RUN`.
NEEDS = {
    "clip_high": {"clip_high": 0.0},
    "clip_low": {"clip_low": 0.0},
    "is_cap": {"is_cap": 1.4},
    "w_high": {"w_high": 2.4},
}
TEXTS = {"boundary": "#", "teacher": "tiny"}
SLOW = ["goldilocks", *(name for name in VARIANTS if run_of(name).fits_stored)]
FILES = [name for name in NINE if name not in SLOW]


def others(flag: str, value: object, kind: object) -> list:
    """Return every other choice, or another number or text."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [2 * value or 1]
    if isinstance(value, float):
        return [value / 2 or 0.5]
    if isinstance(value, tuple):
        return [tuple(number / 2 for number in value)]
    return [choice for choice in get_args(kind) or [TEXTS[flag]] if choice != value]


def trained(name: str, world: World, folder: Path, **flags: object) -> SimpleNamespace:
    """Return what a run does to training, its metrics and its flags."""
    result = record(module_of(name), world, folder, sample_every=0, **flags)
    gradients = [flat(seen["gradients"]) for seen in result.updates + result.lessons]
    numbers = torch.cat([*gradients, flat(result.synced[-1])])
    training = result.calls, numbers.numpy().tobytes()
    return SimpleNamespace(training=training, metrics=metrics(folder), flags=result.flags)


@pytest.mark.parametrize("name", [*FILES, *(pytest.param(n, marks=pytest.mark.slow) for n in SLOW)])
def test_a_files_own_flags_change_its_training(name, world, tmp_path):
    Args, plain, idle = module_of(name).Args, {}, []
    how = run_of(name)
    for flag, kind in get_type_hints(Args).items():
        if flag in SHARED or flag in ELSEWHERE:
            continue
        start = {"steps": how.first} if name in NINE else {}
        start |= (NEEDS | how.needs).get(flag, {})
        if str(start) not in plain:
            plain[str(start)] = trained(name, world, tmp_path / str(start), **start)
        before = plain[str(start)]
        for value in others(flag, before.flags[flag], kind):
            after = trained(name, world, tmp_path / f"{flag} {value}", **start | {flag: value})
            changed = after.training != before.training
            if flag in how.measured:
                changed = after.metrics != before.metrics and not changed
            if not changed:
                idle.append(f"--{flag} {value}")
    assert not idle, f"{idle} of {name} do nothing: a bug, or see NEEDS"


@pytest.mark.parametrize("flag", ACTING | EVALUATION)
def test_a_shared_flag_changes_a_run(flag, tmp_path, finished):
    words = ["--steps", 2, f"--{flag}", (ACTING | EVALUATION)[flag], "--run_dir", tmp_path / "run"]
    run_here(grpo.main, *SMALL, *words)  # which --sampler_tolerance ends
    assert metrics(tmp_path / "run") != metrics(finished)[:3]


def test_other_shared_flags_change_no_training(tmp_path, finished):
    run, words = tmp_path / "run", [*SMALL, *IDLE.split(), "--steps", 3]
    words += [word for flag, value in EVALUATION.items() for word in (f"--{flag}", value)]
    assert run_here(grpo.main, *words, "--run_dir", run) == 0
    assert [path.name for path in checkpoints(run)] == ["step_000002", "step_000003"]
    assert (run / "model").is_dir() and not (run / "samples.jsonl").exists()
    runs = metrics(run), metrics(finished)[:4]
    for line in (*runs[0], *runs[1]):
        line.pop("greedy", None), line.pop("sampled", None)
    assert runs[0] == runs[1]


@pytest.mark.parametrize("flag", VLLM)
def test_a_flag_of_vllm_changes_its_options(flag, tiny):
    gpus = SimpleNamespace(size=2, rank=1, device=torch.device("cuda"))
    usual, changed = grpo.Args(), grpo.Args(**{flag: VLLM[flag]})
    assert vllm_options(changed, tiny[0], gpus) != vllm_options(usual, tiny[0], gpus)


def test_no_shared_flag_is_forgotten():
    idle = [word.removeprefix("--") for word in IDLE.split()]
    listed = {*idle, *EVALUATION, *ACTING, *VLLM, *ELSEWHERE}
    forgotten = [flag for flag in SHARED if flag not in listed]
    assert not forgotten, f"{forgotten}: give each a line at the head of tests/loop/test_flags.py"

"""Checks on a GPU: `python tests/gpu/check.py NAME ...` runs them in this process and prints a
table row for each.

No hub needed, and no vLLM but for the checks `with_vllm`, which have a call of their own: starting
vLLM takes a minute or more each time. Each row is printed as soon as it is known.
"""

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ |= {"HF_HUB_OFFLINE": "1"}

import common  # noqa: E402, F401  (before torch)
import grpo  # noqa: E402
import torch  # noqa: E402
from common.batch import Rollout  # noqa: E402
from common.distributed import World, setup, shard  # noqa: E402
from common.logprobs import Policy, all_logprobs, response_logprobs, token_logprobs  # noqa: E402
from common.plumbing.model import load_model  # noqa: E402
from common.rollout import HFEngine  # noqa: E402
from gpu.shapes import qwen3_1_7b  # noqa: E402
from torch import Tensor  # noqa: E402

SECONDS = 240  # for a short run
# FLOP/s, without sparsity
DENSE_BF16 = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


def sample(
    world: World, dtype: str, temperature: float = 1.0, rows: int = 8
) -> tuple[Rollout, Policy]:
    """A rollout of the embedded model on this device, and the policy of the same weights (sharded
    in bfloat16)."""
    lm, tokenizer = load_model("tiny")
    prompts = [
        tokenizer(text)["input_ids"] for text in ("7*8-9+6=", "1+2=", "3*3*3*3*3*3*3=", "9-9=")
    ]
    rollout = HFEngine(lm, world, 0, dtype, 1024).generate(prompts, rows, 64, temperature)
    return rollout, shard(Policy(lm), grpo.Args(dtype=dtype), world)


def logprobs(world: World) -> str:
    """Sampler and trainer agree on the device, in float32 and bfloat16, at two temperatures."""
    found = []
    for dtype, bound in (("float32", 1e-3), ("bfloat16", 0.05)):
        for temperature in (1.0, 0.7):
            rollout, policy = sample(world, dtype, temperature)
            args = importlib.import_module("grpo").Args(dtype=dtype, temperature=temperature)
            old_logp, _ = all_logprobs(policy, rollout, args, world)
            gap = (
                ((old_logp - rollout.rollout_logp) * rollout.mask).abs().sum() / rollout.mask.sum()
            ).item()
            assert gap < bound, (dtype, gap)
            found.append(f"{dtype} T={temperature}: {gap:.1e}")
    return "mean |log π_old - log μ|, " + ", ".join(found)


def exactness(world: World) -> str:
    """The gradient does not depend on micro-batches, in float32 on the device."""
    rollout, policy = sample(world, "float32")
    weights = torch.randn(rollout.mask.shape, generator=torch.Generator().manual_seed(0)).to(
        world.device
    )
    gradients = []
    for size in (len(rollout), 5, 1):
        for rows in torch.arange(len(rollout), device=world.device).split(size):
            micro = rollout.rows(rows)
            logp, _ = response_logprobs(policy, micro, 1.0)
            (logp * micro.mask * weights[rows]).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
        policy.zero_grad()
    worst = max(((g - gradients[0]).norm() / gradients[0].norm()).item() for g in gradients[1:])
    assert worst < 1e-4, worst  # TF32 is off by default; sums run in another order
    return f"largest relative difference {worst:.1e}"


def losses(world: World) -> str:
    """Every file's loss gives the CPU's value and gradient for the fixture's batch."""
    fixture = json.loads((ROOT / "tests/fixtures/losses.json").read_text())["inputs"]
    worst = 0.0
    for name in FILES:
        module, found = importlib.import_module(name), []
        for device in ("cpu", world.device):
            batch = {
                k: torch.tensor(fixture[k], dtype=torch.float64)
                for k in ("mask", "old_logp", "advantages")
            }
            batch["logp"] = batch["old_logp"] + torch.tensor(
                fixture["logratio"], dtype=torch.float64
            )
            batch |= {"rollout_logp": batch["old_logp"] - 0.01, "entropy": batch["mask"] * 0.5}
            batch = {k: v.to(device) for k, v in batch.items()}
            batch["logp"].requires_grad_()
            batch["ref_logp"] = batch["old_logp"]
            total, count, _ = module.policy_loss(module.Args(), **batch)
            (total / count).backward()
            found.append(
                torch.cat(
                    [(total / count).detach().cpu().view(1), batch["logp"].grad.cpu().flatten()]
                )
            )
        worst = max(worst, (found[0] - found[1]).abs().max().item())
    assert worst < 1e-10, worst
    return f"nine files, largest difference {worst:.1e}"


def short_run(name: str, *flags: str) -> Callable[[World], str]:
    """A short run of a file on the embedded model, in a process of its own."""

    def check(world: World) -> str:
        steps = "45" if name == "vcpo" else "25"
        with (
            tempfile.TemporaryDirectory() as folder,
            (Path(folder) / "messages").open("w+") as messages,
        ):
            words = f"{name}.py --steps {steps} --eval_every {steps} --run_dir {folder}/run".split()
            how = {
                "cwd": ROOT,
                "stdout": messages,
                "stderr": messages,
                "timeout": SECONDS,
                "check": True,
            }
            try:
                subprocess.run([sys.executable, *words, *flags], **how)
            except subprocess.SubprocessError as error:
                messages.seek(0)
                raise RuntimeError(f"{type(error).__name__}: {messages.read()[-600:]}") from error
            summary = json.loads((Path(folder) / "run/summary.json").read_text())
            lines = [
                json.loads(line)
                for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
            ]
        gap = max(line.get("sampler_gap", 0.0) for line in lines[1:])
        accuracy = f"greedy {summary['greedy_before']:.2f} → {summary['greedy_after']:.2f}"
        return f"{accuracy}, largest sampler gap {gap:.1e}"

    return check


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds and peak GB of a call (the second one: the first warms up)."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    function()
    torch.cuda.synchronize()
    return time.perf_counter() - start, (torch.cuda.max_memory_allocated() - before) / 1e9


def vocabulary(world: World) -> str:
    """Memory-lean log-probs at a vocabulary of 152k and 16k tokens, against the plain formula: peak
    and time."""
    generator = torch.Generator(world.device).manual_seed(0)
    on = {"device": world.device, "dtype": torch.bfloat16, "generator": generator}
    hidden = torch.randn(16_384, 2048, **on).requires_grad_()
    weight = (torch.randn(151_936, 2048, **on) * 0.02).requires_grad_()
    targets = torch.randint(151_936, (16_384,), device=world.device, generator=generator)

    def lean() -> Tensor:
        logp, _ = token_logprobs(hidden, weight, targets, 1.0)
        logp.sum().backward()
        return logp.detach()

    def plain() -> Tensor:
        logprobs = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
        logp = logprobs.gather(-1, targets[:, None])[:, 0]
        logp.sum().backward()
        return logp.detach()

    gap = (lean() - plain()).abs().max().item()
    # Both round the head's product to bfloat16: 2^-6 for a logit between 2 and 4
    assert gap < 5e-2, gap
    (a, b), (c, d) = timed(lean), timed(plain)
    return f"lean {a:.2f} s, {b:.1f} GB; plain {c:.2f} s, {d:.1f} GB"


def qwen3_step(world: World) -> str:
    """A training step of Qwen3-1.7B's shape in bfloat16 under FSDP2 with checkpointing: tokens/s,
    FLOPs used, peak."""
    torch.manual_seed(0)
    lm = qwen3_1_7b()
    parameters = sum(p.numel() for p in lm.parameters())
    policy = shard(Policy(lm), grpo.Args(dtype="bfloat16"), world)
    policy.train().lm.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    rows, prompt, length = 16, 128, 896
    tokens = torch.randint(2, 150_000, (rows, prompt + length), device=world.device)
    batch = Rollout(
        sequences=tokens,
        prompt_len=torch.full((rows,), prompt, device=world.device),
        tokens=tokens[:, prompt:],
        mask=torch.ones(rows, length, device=world.device),
    )

    def step() -> None:
        logp, _ = response_logprobs(policy, batch, 1.0)
        (-logp.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds, peak = timed(step)
    n = rows * (prompt + length)
    name = torch.cuda.get_device_name()
    top = next((flops for key, flops in DENSE_BF16.items() if key in name), None)
    used = f", {6 * parameters * n / seconds / top:.0%} of {name}'s bfloat16 peak" if top else ""
    weights = 16 * parameters / 1e9
    speed = f"{n / seconds:,.0f} tokens/s{used} (6 N per token)"
    return f"{speed}, {peak:.1f} GB beside {weights:.0f} GB of weights"


FILES = "grpo gspo sapo stapo maspo minirl vcpo goldilocks deep_grpo".split()
HF = ("--rollout", "hf")
# More would be millions of cache blocks for so small a model
VLLM = ("--rollout", "vllm", "--vllm_memory", "0.05")
ALONE: dict[str, Callable[[World], str]] = {  # in this process, one after the other: some are timed
    "losses": losses,
    "logprobs": logprobs,
    "exactness": exactness,
    "vocabulary": vocabulary,
    "qwen3_step": qwen3_step,
}
TOGETHER = {  # several at a time: they are small
    **{name: short_run(name, *HF) for name in FILES},
    "moe_r3": short_run("minirl", *HF, "--model", "tiny-moe", "--routing_replay", "r3"),
    "async": short_run("vcpo", *HF, "--async"),
    "offload": short_run("grpo", *HF, "--offload_reference", "--gradient_checkpointing"),
}
WITH_VLLM = {  # one after the other: vLLM measures the free memory when it starts
    "vllm": short_run("grpo", *VLLM),
    "vllm_sleep": short_run("grpo", *VLLM, "--vllm_sleep"),
    "vllm_vcpo": short_run("vcpo", *VLLM),
    "vllm_async": short_run("vcpo", *VLLM, "--async"),
    "vllm_moe_r3": short_run("minirl", *VLLM, "--model", "tiny-moe", "--routing_replay", "r3"),
}


def main(names: list[str]) -> int:
    """Print a row for each check named (default: all that need no vLLM; `with_vllm`: the others);
    return how many failed."""
    world, checks, failed = setup(), ALONE | TOGETHER | WITH_VLLM, 0

    def row(name: str) -> tuple[str, str, str, float]:
        start = time.perf_counter()
        try:
            if name in WITH_VLLM and not importlib.util.find_spec("vllm"):
                return name, "skipped", "vLLM is not installed", 0.0
            verdict, told = "passed", checks[name](world)
        except Exception as error:  # a table of all checks is worth more than the first failure
            traceback.print_exc()
            verdict, told = "FAILED", " ".join(str(error).split())[-300:]
        return name, verdict, told, time.perf_counter() - start

    names = list(WITH_VLLM) if names == ["with_vllm"] else names or [*ALONE, *TOGETHER]
    for group, at_once in ((ALONE, 1), (TOGETHER, 4), (WITH_VLLM, 1)):
        with ThreadPoolExecutor(at_once) as pool:
            wanted = [name for name in names if name in group]
            for name, verdict, told, seconds in pool.map(row, wanted):
                failed += verdict == "FAILED"
                print(f"| {name} | {verdict} | {told} | {seconds:.0f} s |", flush=True)
        torch.cuda.empty_cache()
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))

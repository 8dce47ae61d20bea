"""Checks on a GPU: `python tests/gpu/check.py BLOCK|CHECK ...` prints a table row for each check,
as soon as it is known.

No hub needed, and no vLLM but for the block `vllm`. On a machine without a GPU the same checks run
on the CPU at a toy's shape: that holds this file (tests/engines/test_gpu_checks.py), and
measures nothing.
"""

import functools
import gc
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"HF_HUB_OFFLINE": "1"}

import common  # noqa: E402, F401  (before torch)
import grpo  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from common.batch import Rollout  # noqa: E402
from common.distributed import World, clip_gradients, setup, shard  # noqa: E402
from common.logprobs import Policy, all_logprobs, micro_batches, response_logprobs  # noqa: E402
from common.logprobs import TokenLogprobs  # noqa: E402
from common.model import head_logits, load_model  # noqa: E402
from common.norms import in_one_pass  # noqa: E402
from common.rollout import HFEngine  # noqa: E402
from tools import make_smollm2  # noqa: E402
from tools.maintain.shapes import byte_tokenizer, qwen3  # noqa: E402
from torch import Tensor  # noqa: E402

Check = Callable[[World], str]  # what was seen; an AssertionError: what is wrong
GPU = torch.cuda.is_available()
SECONDS = 400  # for a program
FILES = "grpo gspo sapo stapo maspo minirl vcpo goldilocks deep_grpo".split()
HF = ("--rollout", "hf")
# More would be millions of cache blocks for so small a model
VLLM = ("--rollout", "vllm", "--vllm_memory", "0.05")


# What the checks share


@functools.cache
def large() -> tuple[Policy, torch.optim.Optimizer]:
    """Qwen3-1.7B's shape under FSDP2 in bfloat16, with AdamW (on a CPU a toy's)."""
    world = World(0, 1, torch.device("cuda", 0) if GPU else torch.device("cpu"))
    torch.manual_seed(0)
    with world.device:
        lm = qwen3(2048, 6144, toy=not GPU)
    policy = shard(Policy(lm), grpo.Args(dtype="bfloat16"), world)
    return policy, torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)


def random_rows(world: World, rows: int, tokens: list[int]) -> Rollout:
    """Random token ids: 128 (8) of a prompt, and responses of these lengths, over and over."""
    torch.manual_seed(1)
    prompt, lengths = (128, tokens) if GPU else (8, [max(2, n // 64) for n in tokens])
    lengths = [lengths[i % len(lengths)] for i in range(rows)]
    draw = functools.partial(torch.randint, 2, 150_000 if GPU else 300)
    given = {"prompts": draw((rows, prompt)).tolist(), "eos": [1], "device": world.device}
    given["tokens"] = [draw((n,)).tolist() for n in lengths]
    return Rollout.pack(logps=[[0.0] * n for n in lengths], **given)


def timed(function: Callable[[], object]) -> tuple[float, float]:
    """Seconds and peak GB of a call (the second one: the first warms up)."""
    for _ in range(2):
        if GPU:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        function()
        if GPU:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    return seconds, (torch.cuda.max_memory_allocated() - before) / 1e9


# Block `facts`: is it right?


def machine(world: World) -> str:
    """Versions."""
    found = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    if not GPU:
        return ", ".join([*found, "no GPU: toy shapes on the CPU, whose times say nothing"])
    memory = torch.cuda.get_device_properties(0).total_memory / 1e9
    found += [f"{torch.cuda.get_device_name()} {memory:.0f} GB", f"CUDA {torch.version.cuda}"]
    return ", ".join(found)


def exactness(world: World) -> str:
    """The gradient does not depend on micro-batches, in float32 on the device."""
    lm, tokenizer = load_model("tiny")
    prompts = [tokenizer(text)["input_ids"] for text in ("7*8-9+6=", "1+2=", "3*3*3*3*3*3*3=")]
    rollout = HFEngine(lm, world, 0, "float32", 1024).generate(prompts, 8, 64, 1.0)
    policy = shard(Policy(lm), grpo.Args(dtype="float32"), world)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(rollout.mask.shape, generator=generator).to(world.device)
    gradients = []
    for size in (len(rollout), 5, 1):
        for rows in torch.arange(len(rollout), device=world.device).split(size):
            micro = rollout.rows(rows)
            logp, _ = response_logprobs(policy, micro, 1.0)
            (logp * micro.mask * weights[rows]).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
        policy.zero_grad()
    whole, *others = gradients
    worst = max(((other - whole).norm() / whole.norm()).item() for other in others)
    assert worst < 1e-4, worst  # TF32 is off by default; sums run in another order
    return f"largest relative difference {worst:.1e}"


def ratios(world: World) -> str:
    """At the large shape: the first ratios of a rollout are exactly 1; and what the head's product
    would lose in bfloat16."""
    (policy, _), batch, args = large(), random_rows(world, 8, [900, 400, 120]), grpo.Args()
    old_logp, _ = all_logprobs(policy, batch, args, world)
    for rows in micro_batches(policy, batch, args.micro_tokens, world):
        logp, _ = response_logprobs(policy, batch.rows(rows), 1.0)
        apart = (logp.detach() - old_logp[rows]).abs().max().item()
        assert apart == 0, apart
    hidden, weight = (torch.randn(n, 2048, device=world.device) for n in (256, 4000))
    hidden, weight = hidden.bfloat16(), (weight * 0.02).bfloat16()
    rounded = ((hidden @ weight.T).float() - head_logits(hidden, weight)).abs().mean()
    return f"log r is 0 before the first update; a head in bfloat16 is off by {rounded:.1e}"


# Block `grid`: one training step of 16k tokens, every way


def qwen3_step(rows: int, length: int, checkpointing: bool = False, forward: bool = False) -> Check:
    """A training step of the large shape, or its forward pass alone: tokens/s, FLOP/s, peak."""

    def check(world: World) -> str:
        policy, optimizer = large()
        policy.train().lm.gradient_checkpointing_disable()
        if checkpointing:
            policy.lm.gradient_checkpointing_enable({"use_reentrant": False})
        batch = random_rows(world, rows, [length - 128])

        def step() -> None:
            with torch.set_grad_enabled(not forward):
                logp, _ = response_logprobs(policy, batch, 1.0)
            if not forward:
                (-logp.mean()).backward()
                optimizer.step()
                optimizer.zero_grad()

        seconds, peak = timed(step)
        tokens, flops = int(batch.ends.sum()), 2 if forward else 6  # a token and parameter
        speed = flops * tokens / seconds / 1e12 * sum(p.numel() for p in policy.parameters())
        told = f"{tokens / seconds:,.0f} tokens/s, {speed:.0f} TFLOP/s, {1e3 * seconds:.0f} ms"
        return f"{told}, {peak:.1f} GB beside weights and moments"

    return check


GRID = {
    "8x2048": qwen3_step(8, 2048),
    "16x1024": qwen3_step(16, 1024),
    "8x2048 checkpointing": qwen3_step(8, 2048, checkpointing=True),
    "8x2048 forward": qwen3_step(8, 2048, forward=True),
}


def vocabulary(world: World) -> str:
    """Memory-lean log-probs at a vocabulary of 152k and 16k tokens, against the plain formula: peak
    and time."""
    generator = torch.Generator(world.device).manual_seed(0)
    on = {"device": world.device, "dtype": torch.bfloat16, "generator": generator}
    M, V, H = (16_384, 151_936, 2048) if GPU else (64, 500, 32)
    hidden = torch.randn(M, H, **on).requires_grad_()
    weight = (torch.randn(V, H, **on) * 0.02).requires_grad_()
    targets = torch.randint(V, (M,), device=world.device, generator=generator)

    def plain() -> Tensor:
        logprobs = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
        return logprobs.gather(-1, targets[:, None])[:, 0]

    def lean() -> Tensor:
        return TokenLogprobs.apply(hidden, weight, targets, 1.0, None)[0]

    found, told = [], []
    for name, formula in (("lean", lean), ("plain", plain)):
        seconds, peak = timed(lambda formula=formula: formula().sum().backward())
        told.append(f"{name} {seconds:.2f} s, {peak:.1f} GB")
        weight.grad = None
        logp = formula()
        logp.sum().backward()
        found.append((logp.detach(), weight.grad.float()))
    (logp, gradient), (other, exact) = found
    # The plain one rounds the head's product to bfloat16: 2^-6 for a logit between 2 and 4
    assert (logp - other).abs().max() < 5e-2
    assert (gradient - exact).norm() < 2e-2 * exact.norm()
    return "; ".join(told)


# The other blocks: whole programs, in processes of their own


def launched(folder: Path, *words: object, ranks: Sequence[dict[str, str]] = ({},)) -> str:
    """Run a Python program and return what it says; a RuntimeError with its end where it fails.

    `ranks` has further environment variables for each process of the program. The first process
    that fails ends the others.
    """
    with (folder / "messages").open("w+") as messages:
        how = {"cwd": ROOT, "stdout": messages, "stderr": messages}
        command, end = [sys.executable, *map(str, words)], time.monotonic() + SECONDS
        started = [subprocess.Popen(command, env=os.environ | rank, **how) for rank in ranks]
        try:
            codes = [None]  # None: still running
            while None in codes and not any(codes) and time.monotonic() < end:
                time.sleep(0.1)
                codes = [process.poll() for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
        messages.seek(0)
        said = messages.read()
    if any(code != 0 for code in codes):
        raise RuntimeError(f"exit codes {codes} (None: killed): {said[-600:]}")
    return said


def written(folder: str | Path, world: World, hidden: int, intermediate: int) -> None:
    """A model with random weights, to be loaded by another process, which needs the memory."""
    with world.device:
        lm = qwen3(hidden, intermediate, toy=not GPU)
    lm.to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer(lm.config.vocab_size).save_pretrained(folder)
    del lm
    free_memory()


def metrics(run: Path) -> list[dict]:
    """A run's rows, of which the first is the evaluation before training."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def largest_gap(run: Path) -> float:
    """The largest difference between sampler and trainer in a run."""
    return max(line.get("sampler_gap", 0.0) for line in metrics(run)[1:])


def greedy(run: Path) -> tuple[float, float]:
    """Greedy accuracy before and after training."""
    summary = json.loads((run / "summary.json").read_text())
    return summary["greedy_before"], summary["greedy_after"]


def results(run: Path) -> str:
    """Accuracies, the sampler's gap, and seconds a step."""
    before, after = greedy(run)
    step = statistics.median(line["seconds"] for line in metrics(run)[1:])
    gap = f"largest sampler gap {largest_gap(run):.1e}"
    return f"greedy {before:.2f} → {after:.2f}, {gap}, {step:.1f} s a step"


def short_run(name: str, *flags: str) -> Check:
    """A short run of a file on the embedded model."""

    def check(world: World) -> str:
        steps = "45" if name == "vcpo" else "25"
        with tempfile.TemporaryDirectory() as scratch:
            words = f"{name}.py --steps {steps} --eval_every {steps} --run_dir {scratch}/run"
            launched(Path(scratch), *words.split(), *flags)
            return results(Path(scratch) / "run")

    return check


def resumed(world: World) -> str:
    """A run of 4 steps that goes on to 8 from its checkpoint: every step is there once."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        words = f"grpo.py --rollout hf --save_every 2 --eval_every 4 --run_dir {run}".split()
        launched(Path(scratch), *words, "--steps", 4)
        launched(Path(scratch), *words, "--steps", 8, "--resume")
        steps = [line["step"] for line in metrics(run)]
        assert steps == [*range(9)], steps
        return results(run)


# Block `ranks`


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def two_ranks(world: World) -> str:
    """Two ranks share a model on one card; then one rank continues their run.

    Each rank says that it is alone on its node, so NCCL connects them through the loopback
    interface as if there were two nodes. NVIDIA does not support two ranks on one card: NCCL may
    refuse, and this row then says so. Without a GPU the ranks use gloo.
    """
    nccl = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
    nccl |= {"NCCL_SOCKET_IFNAME": "lo", "NCCL_DEBUG": "WARN"}
    shared = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} | nccl
    ranks = [shared | {"RANK": str(rank), "NCCL_HOSTID": str(rank)} for rank in range(2)]
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        words = f"grpo.py {' '.join(HF)} --dtype bfloat16 --save_every 2 --run_dir {run}".split()
        launched(Path(scratch), *words, "--steps", 4, "--shard_ranks", 2, ranks=ranks)
        launched(Path(scratch), *words, "--steps", 6, "--resume")
        steps = [line["step"] for line in metrics(run)]
        assert steps == [*range(7)], steps
        gap = largest_gap(run)
        assert gap < 0.02, gap  # both sides compute in bfloat16
        return results(run)


# Block `learns`

# A program whose reward is a coin flip; held-out problems keep the true verifier.
COIN = """
import os, random, runpy, sys
sys.path[0] = os.getcwd()  # it is empty, and the verifier's workers would not find this repository
from common import data
load_task = data.load_task

def with_a_coin(args, tokenizer):
    task, coin = load_task(args, tokenizer), random.Random(args.seed)
    task.held_out_verifier = task.held_out_verifier or task.verifier
    task.verifier = lambda texts, answers: [float(coin.random() < 0.5) for text in texts]
    return task

data.load_task = with_a_coin
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def learns(world: World) -> str:
    """SmolLM2-135M-Instruct learns sums of two-digit numbers, and does not where the reward is a
    coin flip. Seed, problems and flags of the two runs are the same."""
    missing = [name for name in make_smollm2.NEEDED if not importlib.util.find_spec(name)]
    if GPU and missing:
        return f"skipped: no package {', '.join(missing)}"
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if GPU:
            launched(folder, "-m", "tools.make_smollm2", folder / "model")
        else:  # random weights, which answer nothing
            written(folder / "model", world, 32, 32)
        words = f"grpo.py --model {folder}/model --task {ROOT}/labs/real/sums.py"
        words += f" {' '.join(HF)} --beta 0 --minibatches 2 --lr 1e-5 --max_new_tokens 6"
        words += " --steps 60 --dtype bfloat16" if GPU else " --steps 2 --eval_problems 8"
        rewards = {"true": [], "coin": ["-c", COIN]}
        told = []
        for name, program in rewards.items():
            launched(folder, *program, *words.split(), "--run_dir", folder / name)
            told.append(f"{name} reward: {results(folder / name)}")
        (before, after), (_, control) = greedy(folder / "true"), greedy(folder / "coin")
        # The standard error of an accuracy on 256 problems is about 0.03
        assert not GPU or (after > before + 0.2 and control < before + 0.15), told
        return "; ".join(told)


# Block `resume`: a part of the GPU's memory

LIMITED = """
import sys, runpy, common, torch
if torch.cuda.is_available():
    share = float(sys.argv[1]) * 1e9 / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def on_a_card(gigabytes: int, hidden: int, intermediate: int, *flags: str) -> Check:
    """Two steps of a real shape with random weights in a part of this GPU's memory."""

    def check(world: World) -> str:
        with tempfile.TemporaryDirectory() as scratch:
            written(scratch, world, hidden, intermediate)
            words = f"grpo.py --model {scratch} --task arithmetic --rollout hf --steps 2 --lr 1e-6"
            words += " --eval_problems 8 --eval_samples 1 --sampler_tolerance 1 --instruction= "
            words += f"--prompts_per_step 8 --max_new_tokens {256 if GPU else 8} --beta 0"
            words += f" --micro_tokens 8192 --gradient_checkpointing --run_dir {scratch}/run"
            launched(Path(scratch), "-c", LIMITED, gigabytes, *words.split(), *flags)
            return results(Path(scratch) / "run")

    return check


# Block `norms`


def norms(world: World) -> str:
    """vcpo's norms of single responses at the large shape: one pass, against two backward ones."""
    (policy, _), batch = large(), random_rows(world, 2, [900, 300])
    policy.lm.gradient_checkpointing_disable()
    (seconds, peak), worst = timed(lambda: in_one_pass(policy, batch, 1.0)), 0.0
    _, found = in_one_pass(policy, batch, 1.0)
    for row in range(2):
        logp, _ = response_logprobs(policy, batch.rows(slice(row, row + 1)), 1.0)
        logp.sum().backward()
        true = clip_gradients(policy, float("inf"))  # measures and does not clip
        worst = max(worst, abs(found[row].item() / true - 1))
        policy.zero_grad()
    assert worst < 0.05, worst  # bfloat16 on both sides
    return f"within {worst:.1%} of backward passes; {seconds:.2f} s, {peak:.1f} GB"


# In the order of what they tell; tests/gpu/run.sh has the minutes of each
BLOCKS: dict[str, dict[str, Check]] = {
    "facts": {"machine": machine, "exactness": exactness, "ratios": ratios},
    "norms": {"norms": norms},
    "learns": {"learns": learns},
    "ranks": {"two ranks on one card": two_ranks},
    "vllm": {  # one after the other: vLLM measures the free memory when it starts
        "vllm": short_run("grpo", *VLLM),
        "vllm_sleep": short_run("grpo", *VLLM, "--vllm_sleep"),
        "vllm_moe_r3": short_run("minirl", *VLLM, "--model", "tiny-moe", "--routing_replay", "r3"),
    },
    "grid": GRID | {"vocabulary": vocabulary},
    "resume": {
        "resumed": resumed,
        "0.6B on 24 GB": on_a_card(24, 1024, 3072),
        "1.7B on 24 GB, --offload": on_a_card(24, 2048, 6144, "--offload"),
    },
    "runs": {  # four at a time: they are small
        **{name: short_run(name, *HF) for name in FILES},
        "moe_r3": short_run("minirl", *HF, "--model", "tiny-moe", "--routing_replay", "r3"),
        "offload": short_run("grpo", *HF, "--offload_reference", "--gradient_checkpointing"),
    },
}


def free_memory() -> None:
    """Give up the large model: another process needs the memory."""
    large.cache_clear()
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


def chosen(names: list[str]) -> list[tuple[str, dict[str, Check]]]:
    """Blocks, or parts of them: `names` are of blocks and of checks (none: every block)."""
    known = {*BLOCKS, *(name for block in BLOCKS.values() for name in block)}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"{unknown[0]}: unknown, use some of {', '.join(BLOCKS)}, or a check's name")
    wanted = {b: {n: c for n, c in BLOCKS[b].items() if {b, n} & {*names}} for b in BLOCKS}
    return [*(wanted if names else BLOCKS).items()]


def main(names: list[str]) -> int:
    """Print a row for each check; return how many failed."""
    world, failed = setup(), 0

    def row(name: str, check: Check) -> tuple[str, str, str, float]:
        start = time.perf_counter()
        try:
            told = check(world)
            verdict = "skipped" if told.startswith("skipped") else "passed"
        except Exception as error:  # a table of all checks is worth more than the first failure
            traceback.print_exc()
            verdict, told = "FAILED", " ".join(str(error).split())[-300:]
        return name, verdict, told, time.perf_counter() - start

    for block, checks in chosen(names):
        if block == "vllm" and not importlib.util.find_spec("vllm"):
            checks = dict.fromkeys(checks, lambda world: "skipped: vLLM is not installed")
        with ThreadPoolExecutor(4 if block == "runs" else 1) as pool:
            rows = [pool.submit(row, name, check) for name, check in checks.items()]
            for done in as_completed(rows):  # a call that is cut short has said what it knew
                name, verdict, told, seconds = done.result()
                failed += verdict == "FAILED"
                print(f"| {name} | {verdict} | {told} | {seconds:.0f} s |", flush=True)
        free_memory()
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))

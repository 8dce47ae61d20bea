"""The first hour on a GPU: `python -m tests.gpu.check [--compile] [NAME ...]` (all of it: some 15
minutes without `--compile`, which compiles layers and head).

Each check prints a line: ok, wrong or skipped, and what was measured. Details of what is wrong go
to stderr. Without a GPU the same checks run on the CPU. That tests this file and no kernel.
"""

import copy
import sys
import tempfile
import traceback
from pathlib import Path

import grpo
import torch
from checks.files import NINE
from common.batch import Rollout
from common.cli import BadInput
from common.distributed import ALONE, World, divide_gradients, setup, shard
from common.distributed import total_count, whole_tensor
from common.logprobs import Policy, micro_batches, response_logprobs
from common.model import load_model
from common.rollout import HFEngine

from checks import run_of
from tests.helpers import metrics, started

GPUS = torch.cuda.device_count()
RANKS = 1 if GPUS == 1 else 2  # without a GPU: two processes on the CPU
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
LEARNS, SHORT = "--steps 25 --eval_every 25", "--steps 3 --eval_every 3"
VLLM = "--rollout vllm --vllm_memory 0.05"  # more would be millions of cache blocks for this model
RUNS = {
    "hf": f"grpo {LEARNS} --rollout hf",
    "vllm": f"grpo {LEARNS} {VLLM}",
    "sleep": f"grpo {LEARNS} {VLLM} --vllm_sleep",
    "float8": f"grpo {LEARNS} {VLLM} --rollout_dtype float8",
    "experts": f"minirl {SHORT} {VLLM} --model tiny-moe --rollout_dtype auto --routing_replay r3",
    "offload": f"grpo {SHORT} --rollout hf --offload --gradient_checkpointing",
}
for name in NINE:
    RUNS[name] = f"{name} {SHORT} --rollout hf {run_of(name).small}"
COMPILE = ["--compile"] if "--compile" in sys.argv else []
# The first loss asks for a petabyte.
TOO_LARGE = """
import common, grpo, torch
from common.launch import launch
grpo.policy_loss = lambda args, logp, *rest: torch.empty(2**50, device=logp.device)
launch(grpo.main, grpo.Args)
"""


def program(*words: object) -> str:
    """What `python WORDS` prints. Exit code 2: it refuses to run here."""
    done = started(*words)
    if done.returncode:
        raise (BadInput if done.returncode == 2 else RuntimeError)(done.stderr)
    return done.stdout


def gradient(policy: Policy, batch: Rollout, world: World) -> torch.Tensor:
    """The gradient of the mean log-prob of all ranks' tokens, from several micro-batches."""
    for rows in micro_batches(policy, batch, 150, world):
        response_logprobs(policy, batch.rows(rows), 1.0)[0].sum().backward()
    divide_gradients(policy, total_count(batch.mask.sum(), world), world)
    return torch.cat([whole_tensor(weight.grad).cpu().flatten() for weight in policy.parameters()])


def compare_gradients() -> None:
    """On each rank: the (sharded) model's gradient on its GPU, against a whole model on the CPU."""
    world = setup()
    lm, tokenizer = load_model("tiny")
    prompts = [tokenizer(text)["input_ids"] for text in ("7*8-9+6=", "1+2=", "3*3*3*3*3*3*3=")]
    batch = HFEngine(lm, ALONE, 0, "float32", 1024).generate(prompts, 8, 64, 1.0)
    exact = gradient(Policy(copy.deepcopy(lm)), batch, ALONE)
    mine = batch.to(world.device).rows(slice(world.rank, None, world.size))
    for dtype in ("float32", "bfloat16"):
        args = grpo.Args(dtype=dtype, shard_ranks=world.size, compile=bool(COMPILE))
        result = gradient(shard(Policy(copy.deepcopy(lm)), args, world), mine, world)
        if world.rank == 0:
            print(f"GRADIENT {dtype} {(result - exact).norm() / exact.norm():.1e}")
    torch.distributed.destroy_process_group()


def gradients(run: Path) -> str:
    """Kernels, FSDP in bfloat16, and NCCL where there are several GPUs."""
    words = [*TORCHRUN, "-m", "tests.gpu.check", "--compare-gradients", *COMPILE[:1]]
    lines = program(*words).splitlines()
    errors = dict(line.split()[1:] for line in lines if line.startswith("GRADIENT"))
    told = f"{RANKS} rank(s), relative difference from one CPU: {errors}"
    assert float(errors["float32"]) < 1e-4 and float(errors["bfloat16"]) < 0.15, told
    return told


def resume(run: Path) -> str:
    """Four steps, then four more from the checkpoint; several GPUs share the model."""
    words = f"grpo.py --rollout hf --shard_ranks {RANKS} --dtype bfloat16 --save_every 2".split()
    words += COMPILE
    program(*TORCHRUN, *words, "--run_dir", run, "--steps", 4)
    program(*TORCHRUN, *words, "--run_dir", run, "--steps", 8, "--resume")
    steps = [line["step"] for line in metrics(run)]
    assert steps == [*range(9)], steps
    return f"{RANKS} rank(s), steps {steps}"


def memory(run: Path) -> str:
    """A lack of it is a line that names the phase and the flags to lower."""
    message = started("-c", TOO_LARGE, "--rollout", "hf", "--run_dir", run).stderr
    assert "out of memory in " in message and "Traceback" not in message, message
    return next(line for line in message.splitlines() if "out of memory in " in line)


def trained(run: Path, words: str) -> str:
    """A run, which stops by itself where sampler and trainer disagree; 25 steps must learn."""
    name, *flags = words.split()
    file = [f"{name}.py"] if GPUS else ["-m", "tests.engines.cpu_vllm", name]
    program(*file, *flags, *COMPILE, "--run_dir", run)
    first, *lines = metrics(run)
    before, after = first["greedy"], lines[-1]["greedy"]
    gap = max(line["sampler_gap"] for line in lines)
    told = f"sampler gap {gap:.1e}, greedy {before:.2f} -> {after:.2f} in {len(lines)} steps"
    assert len(lines) < 25 or after > before + 0.2, told
    return told


CHECKS = {"gradients": gradients, "resume": resume, "memory": memory}


def main(names: list[str]) -> int:
    """A line for each check; returns how many are wrong."""
    wrong = 0
    print("torch", torch.__version__, torch.cuda.get_device_name() if GPUS else "without a GPU")
    for name in names or [*CHECKS, *RUNS]:
        with tempfile.TemporaryDirectory() as scratch:
            run = Path(scratch, "run")
            try:
                told = CHECKS[name](run) if name in CHECKS else trained(run, RUNS[name])
                verdict = "ok"
            except BadInput as reason:
                verdict, told = "skipped", str(reason)
            except Exception as error:  # the other checks are worth knowing
                traceback.print_exc()
                verdict, told = "wrong", str(error)
                wrong += 1
        last = told.strip().rpartition("\n")[2]
        print(f"{verdict:8}{name:11}{last}", flush=True)
    return wrong


if __name__ == "__main__":
    if "--compare-gradients" in sys.argv:
        compare_gradients()
    else:
        sys.exit(min(1, main([name for name in sys.argv[1:] if name != "--compile"])))

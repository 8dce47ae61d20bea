"""Measure what a quarter of an hour on a GPU allows: `python -m tests.gpu.card [PART ...]`.

    speed    grpo.py on Qwen3-1.7B: three steps without --compile, and three with it
    beside   another trainer on the same work, if --beside names a program
    checks   tests.gpu.check --compile, but for what needs vLLM; all at the same time
    learns   SmolLM2-135M on sums, 60 steps

A part that fails does not stop the next one. A part that no longer fits into --minutes is skipped.
Logs, metrics and summary.txt are in the folder --out. Without a GPU, or with --small, all parts run
the embedded model for a few steps, which tests only this file.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "4090": 165}  # of a card, in bfloat16
SPEED = "--task labs/real/sums.py --steps 6 --max_new_tokens 1000 --lr 1e-6 --minibatches 1"
SPEED += " --micro_tokens 8192 --vllm_sleep --vllm_memory 0.55"
LEARNS = "--task labs/real/sums.py --steps 60 --max_new_tokens 6 --lr 3e-6 --minibatches 2"
LEARNS += " --warmup 2 --prompts_per_step 8 --eval_every 10 --eval_problems 64 --vllm_memory 0.1"
SMALL = "--model tiny --steps 2 --max_new_tokens 16"
SHOWN = ("greedy", "sampled", "sampler_gap")


def speed() -> None:
    """Run grpo.py with the flags of the command line and --compile, which acts only in the second
    half of the steps: so vLLM starts once for both. Evaluate nothing, and save no checkpoint."""
    import grpo
    from common.launch import launch
    from common.run import Run
    from torch.compiler import set_stance

    set_stance("force_eager")
    log = Run.log

    def log_and_compile(run: Run, step: int, *arguments: object) -> None:
        log(run, step, *arguments)
        if step == run.args.steps // 2:
            set_stance("default")

    Run.log = log_and_compile
    grpo.evaluate = lambda *_: {"greedy": 0.0, "sampled": 0.0}
    grpo.save_checkpoint = lambda *_: None
    launch(grpo.main, grpo.Args)


def run_all(programs: dict[str, list], out: Path, limit: float) -> str:
    """Run Python programs at the same time, each with a log, and say how they ended."""
    processes = []
    for name, words in programs.items():
        with open(out / f"{name}.log", "w") as log:
            how = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT, "process_group": 0}
            processes.append(subprocess.Popen([sys.executable, *words], **how))
    stop = time.monotonic() + limit
    try:
        codes = [process.wait(max(0, stop - time.monotonic())) for process in processes]
        return "failed" if any(codes) else "ok"
    except subprocess.TimeoutExpired:
        return "time limit"
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):  # the first lets torchrun end its ranks
            for process in processes:
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(5)


def numbers(line: dict, share: float) -> str:
    """Describe a step. `share` is the part of the card that an update of 1 token/s would use."""
    told = f"    step {line['step']}:"
    for name in [name for name in line if name.startswith("seconds")]:
        rate = line["tokens"] / max(line[name], 1e-9)
        told += f" {name.removeprefix('seconds_')} {line[name]:.2f} s,"
        if name.endswith(("rollout", "logprobs", "update", "seconds")):
            told += f" {rate:.0f} tokens/s;"
        if name == "seconds_update" and share:
            told += f" {share * rate:.1%} of the card by 6N;"
    return told + "".join(f" {name} {line[name]:.3g}" for name in SHOWN if name in line)


def main() -> None:
    """Run the parts in turn, and report on each as soon as it ends."""
    import torch
    from common.model import parameters_of
    from common.records.files import read_lines
    from tools import arguments, empty_folder

    from tests.gpu.check import CHECKS, GPUS, RUNS, VLLM

    parser = arguments(__doc__)
    add = parser.add_argument
    add("parts", nargs="*", metavar="PART", help="default: all")
    add("--out", type=Path, default=os.environ.get("OUT", "runs/card"), help="default: %(default)s")
    add("--minutes", type=float, default=14, help="for all parts (default: %(default)s)")
    add("--model", default="Qwen/Qwen3-1.7B-Base", help="of speed (default: %(default)s)")
    add("--smollm2", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="default: %(default)s")
    add("--prompts", type=int, default=64, help="in a step of speed (default: %(default)s)")
    add("--beside", help="FILE.py, called with FOLDER MODEL PROMPTS TOKENS")
    add("--small", action="store_true")
    words = parser.parse_args()
    out = empty_folder(words.out.resolve())
    small = words.small or not GPUS
    model, prompts, tokens = words.model, words.prompts, 1000
    fast, sums = f"{SPEED} --model {model}", f"{LEARNS} --model {words.smollm2}"
    checks = [*CHECKS, *(name for name, flags in RUNS.items() if VLLM not in flags)]
    check = ["-m", "tests.gpu.check", "--compile"]
    if small:
        model, prompts, tokens = "tiny", 4, 16
        fast = sums = SMALL
        checks = ["gradients", "memory"]
        check.remove("--compile")
    fast += f" --prompts_per_step {prompts} --compile --run_dir {out}/speed"
    sums += f" --run_dir {out}/learns"

    # How many seconds they take on an H100 (estimated for `beside` and compiled steps)
    seconds = {"speed": 130 + 5.4 * prompts, "beside": 110 + 2.8 * prompts}
    seconds |= {"checks": 190, "learns": 160}
    programs = {
        "speed": {"speed": ["-m", "tests.gpu.card", "--run_speed", *fast.split()]},
        "beside": {"beside": [words.beside, out / "beside", model, str(prompts), str(tokens)]},
        "checks": {name: [*check, name] for name in checks},
        "learns": {"learns": ["grpo.py", *sums.split()]},
    }
    if unknown := set(words.parts) - programs.keys():
        parser.error(f"{min(unknown)}: must be one of {', '.join(programs)}")
    card = torch.cuda.get_device_name() if GPUS else "no GPU"
    start = time.monotonic()

    def report(line: str) -> None:
        print(line, flush=True)
        with open(out / "summary.txt", "a") as file:
            print(line, file=file)

    report(f"{card}, torch {torch.__version__}")
    for part in words.parts or programs:
        began = time.monotonic()
        left = 60 * words.minutes - (began - start)
        if part == "beside" and not words.beside:
            report("beside: skipped, without --beside")
            continue
        if left < seconds[part] and not small:
            report(f"{part}: skipped, takes some {seconds[part]:.0f} s, and {left:.0f} are left")
            continue
        limit = left if small else min(left, 1.5 * seconds[part])
        verdict = run_all(programs[part], out, limit)
        took = time.monotonic() - began
        report(f"{time.strftime('%H:%M:%S')} {part}: {verdict} after {took:.0f} s")
        for name in programs[part]:
            log = (out / f"{name}.log").read_text("utf-8", "replace").strip().splitlines()
            for line in log[-1:] if verdict == "ok" else log[-4:]:
                report(f"    {name}.log: {line[:200]}")
        shutil.rmtree(out / part / "checkpoints", ignore_errors=True)  # gigabytes
        if (out / part / "metrics.jsonl").is_file():
            lines = [line for line in read_lines(out / part / "metrics.jsonl") if line["step"]]
            every = max(1, len(lines) // 6)  # of 60 steps each tenth
            peak = sum(TFLOPS[name] for name in TFLOPS if name in card)  # 0: unknown
            share = 6 * parameters_of(model) / peak / 1e12 if peak and part == "speed" else 0
            for line in lines[every - 1 :: every]:
                report(numbers(line, share))


if __name__ == "__main__":
    if "--run_speed" in sys.argv:  # started by main
        sys.argv.remove("--run_speed")
        speed()
    else:
        main()

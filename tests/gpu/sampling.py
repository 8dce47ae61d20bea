"""How fast vLLM samples, by its options: `python -m tests.gpu.sampling` (some 15 minutes).

512 responses of 512 tokens from random weights of Qwen3-1.7B's shape; three steps for each option.
Not measured, as no flag asks for them: the engine in its own process; sampling without log-probs.
"""

import json
import shutil
import tempfile
from pathlib import Path
from statistics import median

from common.model import EMBEDDED
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.gpu.check import program
from tools.shapes import config_of

OPTIONS = ["async_scheduling=true", "async_scheduling=false", "max_num_seqs=256"]
OPTIONS += ["max_num_seqs=1024", "max_num_batched_tokens=16384", "enforce_eager=true"]
WORDS = "--prompts_per_step 64 --group_size 8 --minibatches 1 --max_new_tokens 512 --steps 3"
WORDS += " --rollout vllm --vllm_memory 0.4 --micro_tokens 8192 --lr 1e-6 --beta 0"
WORDS += " --eval_every 9 --eval_problems 8 --eval_samples 1 --vllm"

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        config = config_of("Qwen/Qwen3-1.7B-Base")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(EMBEDDED["tiny"]).save_pretrained(folder)
        print("| option | tokens/s | sampler_gap |\n|---|---|---|")
        for option in OPTIONS:
            run = Path(folder, option)
            program("grpo.py", "--model", folder, *WORDS.split(), option, "--run_dir", run)
            lines = [*map(json.loads, (run / "metrics.jsonl").read_text().splitlines()[1:])]
            rates, gaps = [], []
            for line in lines:
                rates.append(line["tokens"] / line["seconds_rollout"])
                gaps.append(line["sampler_gap"])
            shutil.rmtree(run)  # a checkpoint of 20 GB
            print(f"| {option} | {median(rates):.0f} | {max(gaps):.1e} |", flush=True)

"""How fast vLLM samples, by its options: `python -m tests.gpu.sampling` (some 15 minutes).

512 responses of 512 tokens, the last of three steps, by random weights of Qwen3-1.7B's shape."""

import json
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from common.model import EMBEDDED
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.gpu.check import program
from tools.shapes import config_of

OPTIONS = "async_scheduling=true async_scheduling=false max_num_seqs=256 max_num_seqs=1024"
OPTIONS += " max_num_batched_tokens=16384 enforce_eager=true"
WORDS = "--prompts_per_step 64 --group_size 8 --minibatches 1 --max_new_tokens 512 --steps 3"
WORDS += " --rollout vllm --vllm_memory 0.4 --micro_tokens 8192 --lr 1e-6 --beta 0"
WORDS += " --eval_every 9 --eval_problems 8 --eval_samples 1 --vllm"

if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config_of("Qwen/Qwen3-1.7B-Base")).save_pretrained(folder)
        AutoTokenizer.from_pretrained(EMBEDDED["tiny"]).save_pretrained(folder)
        for option in OPTIONS.split():
            run = Path(folder, option)
            program("grpo.py", "--model", folder, *WORDS.split(), option, "--run_dir", run)
            line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
            rate = line["tokens"] / line["seconds_rollout"]
            print(f"{option}: {rate:.0f} tokens/s, gap {line['sampler_gap']:.1e}", flush=True)
            shutil.rmtree(run)  # it holds a checkpoint of 20 GB

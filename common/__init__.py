"""What all algorithm files share; imported before torch, for what it sets below.

Who follows `grpo.py` through a step reads six rooms, in this order:
    batch         the rollout that every stage of a step hands on
    data          tasks: where prompts and reference answers come from
    rollout       prompts in, sampled responses and their log-probabilities out
    reward        the judges
    logprobs      the trainer's log-probabilities of the same tokens, in micro-batches
    distributed   ranks: sharding, exact sums and means, clean stops
Below, in `plumbing/`, is what need not be read to understand an algorithm:
    launch, flags, errors    command line to `main`; errors that are one line
    tracking, folder         what a run leaves behind; files that are whole or not there
    metrics, curves          sums and counts -> metrics.jsonl -> curves.png
    checkpoint               saving and resuming to the bit
    model                    loading weights and tokenizer
    evaluation               the two accuracies of a run
    sets                     the rows of a hub set or a file (hub.json: which, and their columns)
    balance                  rows that change ranks, so that none waits for another's long responses
    vllm                     the vLLM engine
    routing                  mixtures of experts: recording and replaying their choice (minirl)
    norms                    the norm of each response's gradient, in one pass (vcpo)
`tiny/` is the embedded task, and its models.
"""

import os
import sys

if os.name == "nt":  # locks, signals and bounds on memory are Unix's
    sys.exit("error: runs on Linux and macOS; on Windows use WSL")
# OpenMP reads these once, when torch loads. Idle threads must sleep, not spin: on a busy machine
# spinning makes a tiny model 10 to 30 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Every micro-batch has another shape, and vLLM wants whole stretches of memory back.
theirs = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # its older name
os.environ.setdefault("PYTORCH_ALLOC_CONF", theirs)

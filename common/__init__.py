"""What all algorithm files share; imported before torch, because of the settings below.

Begin with nano.py, which shows GRPO on one page and needs nothing of this, and then grpo.py. These
modules are for afterwards. In the order in which a step of grpo.py calls them:
    batch         the batch passed between the stages of a step, and its balance over ranks
    distributed   ranks: sharding, exact sums and means, clean stops
    rollout       sampling: prompts in, responses and their log-probabilities out
    logprobs      the trainer's log-probabilities of the same tokens, in micro-batches
    reward        the verifiers, in bounded processes
    answers       what a response's final answer is, and in which spelling
    equality      whether it equals the reference
    data          tasks: where prompts and reference answers come from (hub.json lists sets)
The others need not be read to understand an algorithm:
    cli, launch     flags, errors of one line; from the command line to `main`
    model           loading weights and tokenizer
    metrics         sums and counts over micro-batches and ranks; the two accuracies of a run
    run, samples    a run's folder: metrics, and some responses token by token
    curves          metrics.jsonl -> curves.png
    clock           where the time of a step goes
    checkpoint      saving, and bit-exact resume
    vllm            the vLLM engine
    routing         mixtures of experts: recording and replaying their routing (minirl)
    norms           the norm of each response's gradient, in one pass (vcpo)
`tiny/` is the embedded task and its models.
"""

import os
import sys

if os.name == "nt":  # it has no such locks, signals and limits on memory
    sys.exit("error: runs on Linux and macOS; on Windows use WSL")
# OpenMP reads this once, when torch loads: idle threads sleep, and do not spin. With one thread, as
# usual, it makes no difference. With OMP_NUM_THREADS=2 on two cores, three steps of grpo.py took
# 1.5 to 3.8 s beside other programs, against 1.6 to 21 s without this line; but alone on the cores
# 0.6 to 1.1 s, against 0.4 to 1.2 s (five pairs each). OMP_WAIT_POLICY=active undoes it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Every micro-batch has another shape, and vLLM needs contiguous memory back.
theirs = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # its older name
os.environ.setdefault("PYTORCH_ALLOC_CONF", theirs)

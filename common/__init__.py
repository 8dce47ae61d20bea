"""What all algorithm files share, and no more; imported before torch, for what it sets below.

Who follows `grpo.py` through a step reads four rooms, in this order:
    batch        the rollout that every stage of a step hands on
    rollout      prompts in, sampled responses and their log-probabilities out
    logprobs     the trainer's log-probabilities of the same tokens
    reward       the judges (its first page: the sandbox below is plumbing)
The others are plumbing, which need not be read to understand an algorithm:
    launch       command line to `main`, and errors that are one line
    flags        the flags that only this folder reads, and what numbers may be
    distributed  ranks: sharding, exact sums, gradients, stops
    balance      rows that change ranks, so that none waits for another's long responses
    checkpoint   saving and resuming to the bit
    model        loading weights and tokenizer
    routing      mixtures of experts: recording and replaying their choice (minirl)
    norms        the norm of each response's gradient, in one pass (vcpo)
    rollout_vllm the vLLM engine
    data         tasks: where problems come from (tiny/: the embedded one, and its models)
    evaluation   the two accuracies of a run
    tracking     metrics, messages, summary
    curves       metrics.jsonl -> curves.png
    folder       one run at a time in a folder, files that are whole or not there
"""

import os

# OpenMP reads these once, when torch loads. Idle threads must sleep, not spin: on a busy machine
# spinning makes a tiny model 10 to 30 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Every micro-batch has another shape, and vLLM wants whole stretches of memory back.
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

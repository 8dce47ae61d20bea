"""The code that all algorithm files share. It contains no method: each loss is in its own file.

Read nano.py first (GRPO on one page, without this package), then grpo.py, then these modules. A
step of grpo.py calls them in this order:
    batch         the batch that one stage of a step passes to the next, and its balance over ranks
    distributed   ranks: sharding, exact sums and means, clean stops
    data          tasks: prompts as text and as tokens, their answers and their verifier
    rollout       sampling: prompts in, responses and their log-probabilities out
    logprobs      the trainer's log-probabilities of the same tokens, in micro-batches
    metrics       means over micro-batches and ranks; held-out accuracy, greedy and sampled
You can understand an algorithm without these:
    cli, launch   flags and one-line errors; the way from the command line to `main`
    model         loading weights and tokenizer
    model_files   the files of a model's folder: where they are, what they declare
    clock         where the time of a step goes
    run           a run from start to end: what it logs, what stops it, what it prints
`tasks/` holds what problems and rewards are made of:
    sources       where problems come from: arithmetic, a task file, or a data set
    rows          how problems are read from files and data sets (hub.json lists the sets)
    reward        the verifiers, in bounded processes
    answers       which text of a response is its final answer, in one spelling
    equality      whether that answer equals the reference
`records/` holds what a run leaves in its folder:
    checkpoint    saving and loading, bit-exact
    resume        which run and which checkpoint goes on
    samples       some responses token by token
    curves        metrics.jsonl -> curves.png
    summary       the first, the best and the last accuracy; whether the run fell
    files         atomic writing, JSON lines, config.json
`scale/` holds what large models need:
    head          log-probabilities over a vocabulary of 152k tokens, a block of rows at a time
    vllm          the vLLM engine
    routing       mixtures of experts: recording and replaying which experts get a token
    norms         the gradient norm of each response, in one pass
`tiny/` is the embedded task and its models.

Imports never form a circle. `tasks/` imports only `cli` and `tiny/`, and of the modules beside this
file only `run` imports `records/` (tests/repository/test_structure.py).
"""

import os
import sys

if os.name == "nt":  # Windows lacks the file locks, signals and memory limits that we use
    sys.exit("error: runs on Linux and macOS; on Windows use WSL")
# Import this package before torch, because OpenMP reads OMP_WAIT_POLICY once, when torch loads. If
# "passive", idle threads sleep instead of spinning, which matters on busy cores (three steps of
# grpo.py took at most 3.8 s instead of 21 s). OMP_WAIT_POLICY=active undoes it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Micro-batches differ in shape, which would fragment GPU memory, and vLLM needs contiguous memory.
# PYTORCH_CUDA_ALLOC_CONF is the older name of the same variable; a user may have set it.
theirs = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", theirs)

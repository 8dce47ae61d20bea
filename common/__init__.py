"""What all algorithm files share; imported before torch, because of the settings below.

Begin with nano.py, which shows GRPO on one page and needs nothing of this, and then grpo.py. These
modules are for afterwards. In the order in which a step of grpo.py calls them:
    batch         the batch passed between the stages of a step, and its balance over ranks
    distributed   ranks: sharding, exact sums and means, clean stops
    data          tasks: prompts, as text and as tokens, their answers and their verifier
    rollout       sampling: prompts in, responses and their log-probabilities out
    logprobs      the trainer's log-probabilities of the same tokens, in micro-batches
    metrics       sums and counts over micro-batches and ranks; the two accuracies of a run
The others need not be read to understand an algorithm:
    cli, launch   flags, errors of one line; from the command line to `main`
    model         loading weights and tokenizer
    clock         where the time of a step goes
    run           a run from its start to its end: what is logged, what stops it, what it says
`tasks/`, what problems and rewards are made of:
    sources       where they come from: arithmetic, a task file, or a set
    rows          the rows of files and of sets (hub.json lists sets)
    reward        the verifiers, in bounded processes
    answers       what a response's final answer is, and in which spelling
    equality      whether it equals the reference
`records/`, what a run leaves in its folder:
    checkpoint    saving, and bit-exact resume
    samples       some responses token by token
    curves        metrics.jsonl -> curves.png
    summary       the first, the best and the last accuracy; whether the run fell
    files         atomic writing, JSON lines, config.json
`scale/`, what large models need:
    head          log-probabilities of a vocabulary of 152k tokens, a block of rows at a time
    vllm          the vLLM engine
    routing       mixtures of experts: recording and replaying their routing (minirl)
    norms         the norm of each response's gradient, in one pass (vcpo)
`tiny/` is the embedded task and its models.

Imports run one way, without a circle. `tasks/` asks for `cli` and `tiny/` alone; of these modules
only `run` asks for `records/`. `model` and `logprobs` ask for head, `logprobs` for routing,
`rollout` for vllm; norms asks for `logprobs`.
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

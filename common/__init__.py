"""The code that all algorithm files share. It contains no method: each loss is in its own file.

Read nano.py first (GRPO on one page, without this package), then grpo.py, then five modules, in
this order:
    batch         Rollout: the columns of a batch, which each stage of a step reads and writes
    rollout       sampling: prompts in, responses and their log-probabilities out
    tasks/reward  verifiers in bounded processes: a response in, a verdict out
    logprobs      the trainer's log-probabilities of the same tokens, in micro-batches
    distributed   ranks: sharding, exact sums and means, clean stops
A response goes this way: `rollout` samples its token ids, `data` decodes them to text and hands the
text to a worker of `tasks/reward`; the worker returns a verdict, and `Task.score` (in `data`)
writes it into columns of the batch. The loss reads the advantages that `main` makes of them.

You need the others
    data          to see how a problem becomes prompt tokens, and a text its reward
    metrics       to see what a number in metrics.jsonl means
    cli, launch   for a flag, an error message, or the way from the command line to `main`
    model         to add a family of models: a list, and how one is loaded
    model_files   if a model's folder is refused: what its files must declare
    run, clock    for what a run logs and prints, what stops it, and where the time of a step goes
    tasks/sources, rows  for a data set of your own (hub.json lists those that are known)
    tasks/answers, equality   if a right answer earns nothing: which text is the answer, what equals
    records/checkpoint, resume   to continue a run, or to go back
    records/samples, curves, summary, files   for the files in a run's folder
    scale/head    for the memory of a vocabulary of 152k tokens
    scale/vllm    for the vLLM engine
    scale/routing    for mixtures of experts
    scale/norms   for the gradient norm of each response in one pass (vcpo.py)
    tiny/         for the included task and its models

Imports form no circle, neither among modules nor among folders. `tasks/` imports only `cli` and
`tiny/`, and of the modules beside this file only `run` imports `records/`
(tests/repository/test_structure.py).
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

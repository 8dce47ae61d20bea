#!/usr/bin/env bash
# What needs a GPU, block by block in the order of what they tell; each row is printed as soon as it is known, and the
# table is in $OUT/gpu.md as well. Where a command may take ten minutes, these are the calls (minutes estimated, on one H100):
#     bash tests/gpu/run.sh facts norms      right? and vcpo's norms                                         3
#     bash tests/gpu/run.sh learns           a real model learns; with a coin as its reward it does not      6
#     bash tests/gpu/run.sh ranks            two ranks on one card, which NCCL may refuse; one resumes       2
#     bash tests/gpu/run.sh vllm             three runs with vLLM, where it is installed                    10
#     bash tests/gpu/run.sh grid             a training step: how fast, and with how much memory?            6
#     bash tests/gpu/run.sh resume           resume; 0.6B and 1.7B on 24 GB                                  5
#     bash tests/gpu/run.sh runs             eleven short runs                                               8
# Single checks go by their names (exactness, "8x2048 forward"). Needs no hub; works with the pinned versions and with torch
# 2.11 and transformers 5.17. On a machine without an index, carry what is missing there:
#     bash tests/gpu/wheels.sh 3.12          makes tests/gpu/wheels (40 MB), for that Python on x86-64 Linux
#     bash tests/gpu/vllm.sh                 says how vLLM, and the model of the block `learns`, get there
set -uo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-$(mktemp -d)}"
python=$(command -v python3 || command -v python)
export PIP_BREAK_SYSTEM_PACKAGES=1
[ -d tests/gpu/wheels ] && export PIP_NO_INDEX=1 PIP_FIND_LINKS="$PWD/tests/gpu/wheels"
if ! "$python" -c "import tyro, tqdm, matplotlib" 2> /dev/null && ! "$python" -m pip install --quiet tyro tqdm matplotlib; then
    echo "tyro, tqdm and matplotlib are missing, and there is no index: make tests/gpu/wheels on another machine (see above)"
    exit 1
fi
{
    echo "$(date -u +%F)"
    echo
    echo "| check | | what was seen | time |"
    echo "|---|---|---|---|"
    timeout "${LIMIT:-570}" "$python" tests/gpu/check.py "$@" 2> "$out/gpu.err"
} | tee "$out/gpu.md"
status=${PIPESTATUS[0]}
echo "table: $out/gpu.md, messages: $out/gpu.err"
exit "$status"

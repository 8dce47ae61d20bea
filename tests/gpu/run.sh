#!/usr/bin/env bash
# What needs a GPU, in two calls of at most ten minutes each; the table goes to the screen and to $OUT/gpu.md.
#     bash tests/gpu/run.sh          bash tests/gpu/run.sh with_vllm          bash tests/gpu/run.sh losses qwen3_step
# Works with the pinned versions and with torch 2.11 and transformers 5.17; needs no hub and no vLLM. What the loop needs
# beside them is installed if it is missing and there is an index to install from.
set -uo pipefail
cd "$(dirname "$0")/../.."
out="${OUT:-$(mktemp -d)}"
python=$(command -v python3 || command -v python)
if ! "$python" -c "import tyro, tqdm, matplotlib" && ! "$python" -m pip install --quiet tyro tqdm matplotlib; then
    echo "install tyro, tqdm and matplotlib first (tyro needs docstring-parser and typeguard)"
    exit 1
fi
{
    echo "$(date -u +%F), $("$python" -c 'import torch, transformers; print(torch.cuda.get_device_name(), "torch", torch.__version__, "transformers", transformers.__version__)')"
    echo
    echo "| check | | what was seen | time |"
    echo "|---|---|---|---|"
    timeout 570 "$python" tests/gpu/check.py "$@" 2> "$out/gpu.err"
} | tee "$out/gpu.md"
status=${PIPESTATUS[0]}
echo "table: $out/gpu.md, messages: $out/gpu.err"
exit "$status"

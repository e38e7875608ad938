#!/usr/bin/env bash
# image-check.sh [cpu|cuda]: what deploy/Dockerfile does, without Docker: on what .dockerignore lets through, in a new
# virtual environment, and a moment's training with it. Debian's packages are not installed. The pins of the CUDA variant
# are looked at as well where the package index here gives torch for CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/source"
sed -n 's/^!//p' .dockerignore | xargs cp -r -t "$folder/source"
"$folder/source/deploy/install.sh" python "$folder/flsim" "${1:-cuda}"
"$folder/flsim/bin/uv" pip compile --quiet --python-version 3.11 --python-platform x86_64-unknown-linux-gnu \
    --constraint constraints.txt --constraint deploy/constraints.txt --extra cluster --extra hdf5 \
    pyproject.toml | grep -E '^(torch|triton|nvidia-cudnn-cu13)=='
rm -rf "$folder/source" # nothing of it may be needed
deploy/install.sh check "$folder/flsim"

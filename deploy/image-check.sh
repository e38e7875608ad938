#!/usr/bin/env bash
# image-check.sh [cpu|cuda]: the steps of deploy/Dockerfile, without Docker: on the files that .dockerignore permits, in
# a new virtual environment, with a short training. Debian's packages are not installed. The pins of the CUDA variant
# are also checked if the package index gives torch for CPU.
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
rm -rf "$folder/source" # the installation must not need it
deploy/install.sh check "$folder/flsim"

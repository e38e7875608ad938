#!/usr/bin/env bash
# image-check.sh [cpu|cuda]: what deploy/Dockerfile does, without Docker: on what .dockerignore lets through, in a new
# virtual environment, and a moment's training with it. Debian's packages are not installed.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/source"
sed -n 's/^!//p' .dockerignore | xargs cp -r -t "$folder/source"
"$folder/source/deploy/install.sh" python "$folder/flsim" "${1:-cuda}"
rm -rf "$folder/source" # nothing of it may be needed
deploy/install.sh check "$folder/flsim"

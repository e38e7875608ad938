#!/usr/bin/env bash
# The steps of the image, as a script, so that they also run without Docker (make image-check):
#
#     install.sh system VARIANT           what is needed of Debian, and the user (as root)
#     install.sh python PREFIX VARIANT    a virtual environment with flsim and everything that it needs, pinned
#     install.sh check PREFIX             train with it for a moment, from a folder of its own
#
# VARIANT is cpu or cuda. The package index has torch for CUDA 13; builds for the CPU are in an index of PyTorch's own.
set -euo pipefail
source=$(cd "$(dirname "$0")/.." && pwd)

system() { # VARIANT
    packages=(wget tini) # wget for KubeRay's probes
    if [[ $1 == cuda ]]; then
        packages+=(gcc libc6-dev) # triton compiles launchers of its kernels
    fi
    apt-get update
    apt-get install --yes --no-install-recommends "${packages[@]}"
    rm -rf /var/lib/apt/lists/*
    useradd --create-home --uid 1000 flsim
    # shellcheck disable=SC2016  # expanded by login shells, which KubeRay uses and which forget Docker's PATH
    echo 'PATH=/opt/flsim/bin:$PATH' > /etc/profile.d/flsim.sh
}

python() { # PREFIX VARIANT
    local prefix=$1 torch=()
    [[ $2 == cuda ]] || torch=(--torch-backend=cpu)
    export UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}} # uv reads none of pip's settings
    python3 -m venv "$prefix"
    "$prefix/bin/python" -m pip install --quiet --no-cache-dir --constraint "$source/constraints.txt" uv
    "$prefix/bin/uv" pip install --quiet --python "$prefix" --compile-bytecode "${torch[@]}" \
        --constraint "$source/constraints.txt" --constraint "$source/deploy/constraints.txt" \
        "flsim-memorization[cluster,hdf5] @ file://$source"
}

check() { # PREFIX
    local bin=$1/bin experiments
    experiments=$("$bin/python" -c 'import experiments; print(*experiments.__path__)')
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    cd "$folder"
    "$bin/ray" --version
    "$bin/flsim" --help > /dev/null
    "$bin/flsim" data synthetic --out corpus --users 40 --words-per-user 60 > /dev/null
    "$bin/flsim" run "$experiments/demo.toml" --out run --cpus 1 --set "data.corpus='$folder/corpus'" \
        --set training.rounds=2 --set training.cohort=4 --set canaries.count=2 --set evaluation.references=100
    "$bin/flsim" report run --out report.html
}

case "${1-} ${*: -1}" in
    'system cpu' | 'system cuda' | 'python cpu' | 'python cuda' | 'check '?*) "$@" ;;
    *) sed -n '2,10s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac

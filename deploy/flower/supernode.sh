#!/bin/sh
# A SuperNode: trains the shards that it is asked to train. It must have the corpus and the run folder under the
# server's paths. Set by variables of the environment; see README.md.
set -eu
state=${FLSIM_STATE:?a folder for the installed apps and nothing else}
superlink=${FLSIM_SUPERLINK:-127.0.0.1:8000}
export FLWR_HOME="$state" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
set -- --superlink "$superlink" --port "${FLSIM_PORT:-9094}"
if [ "${FLSIM_CA:-}" ]; then
    set -- "$@" --root-certificates "$FLSIM_CA" \
        --auth-supernode-private-key "${FLSIM_KEY:?the private key of this SuperNode; make one with ssh-keygen}"
elif [ "${superlink%:*}" = 127.0.0.1 ]; then
    set -- "$@" --insecure
else
    echo "supernode.sh: without FLSIM_CA only to 127.0.0.1, not to $superlink" >&2
    exit 2
fi
mkdir -p "$state"
cd "$state"
exec flower-supernode "$@"

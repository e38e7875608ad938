#!/bin/sh
# A SuperLink: SuperNodes connect to it, `flwr run` submits to it, and it runs the ServerApp and its evaluators. Set by
# variables of the environment; see README.md.
set -eu
state=${FLSIM_STATE:?a folder for the database, the installed apps and nothing else}
host=${FLSIM_HOST:-127.0.0.1}
export FLWR_HOME="$state" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1 RAY_USAGE_STATS_ENABLED=0
set -- --host "$host" --port "${FLSIM_PORT:-8000}" --database "$state/state.db" --disable-runtime-dependency-installation
if [ "${FLSIM_CERTIFICATES:-}" ]; then
    set -- "$@" --ssl-ca-certfile "$FLSIM_CERTIFICATES/ca.crt" --ssl-certfile "$FLSIM_CERTIFICATES/superlink.crt" \
        --ssl-keyfile "$FLSIM_CERTIFICATES/superlink.key" --enable-supernode-auth
elif [ "$host" = 127.0.0.1 ]; then
    set -- "$@" --insecure
else
    echo "superlink.sh: without FLSIM_CERTIFICATES only on 127.0.0.1, not on $host; see certificates.sh" >&2
    exit 2
fi
mkdir -p "$state"
cd "$state" # Ray's workers look for code in the working directory first: no source tree may be there
exec flower-superlink "$@"

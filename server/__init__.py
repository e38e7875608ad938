"""The Flower ServerApp with its loop of rounds, the steps of central training, and the launch of either on Ray."""

import os

# Before Flower and Ray are imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's default to come; unset, Ray warns about it
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # they are of tasks whose results are not needed

"""The Flower ServerApp with its loop of rounds, the steps of central training, and the launch of either on Ray."""

import os

# These variables must be set before Flower and Ray are imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# the future default of Ray; without it, Ray prints a warning
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # these messages are about tasks whose results are not needed

"""Structured logs: what happens to a run, as JSON lines in its folder, by Python's own `logging`.

Everything of ours logs to the one logger `log`, with what tells events apart as `extra`: round, shard, worker, reason.
"""

import logging

log = logging.getLogger("flsim")
log.addHandler(logging.NullHandler())

"""A sweep of Thakkar et al. (2020), Table 1, with a private row; tests compute its numbers by hand."""

from pathlib import Path

import pytest

SWEEP = """
title = "Table 1"
question = "Which part?"
[published]
file = "thakkar2020.csv"
table = "1"
source = "Thakkar et al. (2020), Table 1"
columns = { "data.partition" = "data", "training.batch_size" = "batch_size", "training.cohort" = "batch_size" }
[[grids]]
name = "sgd"
published = { optimizer = "SGD" }
axes = { "data.partition" = ["iid", "non-iid"], "training.batch_size" = [32, 64, 128, 256] }
set = { training = { kind = "central", steps = 37_500_000 } }
[[grids]]
name = "fedavg"
published = { optimizer = "FedAvg" }
axes = { "data.partition" = ["iid", "non-iid"], "training.cohort" = [500, 1000, 2000, 5000] }
set = { training = { rounds = 8_000 } }
[[grids]]
name = "dp"
axes = { "data.partition" = ["iid", "non-iid"], "training.cohort" = [5000] }
set = { training = { rounds = 784 }, privacy = { mechanism = "dp", clip = 0.2, noise_multiplier = 1.0, delta = 1e-7 } }
[tiers.paper]
about = "The real thing."
corpus = { path = "nowhere", how = "flsim data import" }
whole_cluster = true
[tiers.smoke]
about = "400 users."
corpus = { synthetic = { users = 400, words_per_user = 250 } }
[tiers.smoke.set]
canaries = { p_u = [0.01, 0.005, 0.0025], p_e = [0.25, 0.5, 1.0], count = 4 }
model = { embedding = 32, units = 64 }
evaluation = { references = 20_000 }
[tiers.smoke.grids.sgd.set]
training = { steps = 1_488 }
evaluation = { every = 372 }
system = { checkpoint_every = 372 }
[tiers.smoke.grids.fedavg]
axes = { "training.cohort" = [4, 8, 16, 40] }
set = { training = { rounds = 400 }, local = { batch_size = 4 }, system = { shards = 1 } }
[tiers.smoke.grids.dp]
axes = { "training.cohort" = [40] }
set = { training = { rounds = 100 }, local = { batch_size = 4 }, system = { shards = 1 }, privacy = { delta = 1e-3 } }
"""


@pytest.fixture
def sweep_file(tmp_path: Path) -> Path:
    """Write two kinds of runs in four sizes and a private one, in both partitions; tiers "smoke" and "paper"."""
    path = tmp_path / "sweep.toml"
    path.write_text(SWEEP)
    return path

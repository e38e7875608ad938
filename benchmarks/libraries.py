"""Compare MKL and oneDNN for local training in float32 on this processor: `python -m benchmarks.libraries`.

`flsim.training.cohort.kernels.onednn_is_faster` has the decision. Both train the same users on one thread, in turns.
"""

import time
from statistics import median
from unittest.mock import patch

import torch

from benchmarks.engine import LAYOUT, DrawnUsers, Held, start_of
from flsim.base.progress import say
from flsim.models.architectures import ModelHParams
from flsim.training.cohort import engine as cohort_engine
from flsim.training.cohort.kernels import OneDNNProducts, Products
from flsim.training.update import LocalHParams


def ratio(batch_size: int, sizes: ModelHParams, users: int = 2, words: int | None = None, turns: int = 5) -> float:
    """Return the CPU time of training with MKL, divided by that with oneDNN; medians over turns."""
    start, population = start_of(torch.device("cpu"), sizes), Held(DrawnUsers(users, words=words))
    seconds: dict[type[Products], list[float]] = {Products: [], OneDNNProducts: []}
    engines = {}
    for library in seconds:
        with patch.object(cohort_engine, "products_for", lambda *_, library=library: library()):
            engines[library] = cohort_engine.CohortEngine(
                start, LAYOUT, LocalHParams(batch_size=batch_size, learning_rate=0.1)
            )
            engines[library].train(start, population, range(users), 0, 0)  # the first round is not counted
    for _ in range(turns):
        for library, engine in engines.items():
            before = time.process_time()
            engine.train(start, population, range(users), 0, 0)
            seconds[library].append(time.process_time() - before)
    return median(seconds[Products]) / median(seconds[OneDNNProducts])


if __name__ == "__main__":
    torch.set_num_threads(1)
    for batch_size in (16, 32, 256):
        say(f"batch size {batch_size}: oneDNN is {ratio(batch_size, ModelHParams()):.2f} times as fast as MKL")

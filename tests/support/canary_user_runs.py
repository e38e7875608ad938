"""A private run with canary users, trained and measured in this process, which takes no Ray and a second."""

from pathlib import Path

from helpers import Experiment

from flsim.runs.config import load
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint

TESTED = (
    "training.sampler='poisson'",
    "privacy.mechanism='dp'",
    "privacy.clip=0.5",
    "privacy.noise_multiplier=0.8",
    "audit.update_canaries=60",
    "audit.canary_coins=true",
)


def run_with_canary_users(experiment: Experiment) -> Path:
    """Train the experiment with 60 canary users, of whom coins leave out about half."""
    run = Run.create(load(experiment.config, TESTED), experiment.folder / "tested")
    (state,) = run.training().states(run.latest_state(), run.rounds, lambda _: False)
    evaluate_checkpoint(run.path, run.save(state))
    run.mark("completed")
    return run.path

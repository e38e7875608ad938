"""Runs with little memory, shared memory or room in TMPDIR complete, or fail with one line and resume without limit."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
from fault_injection import Surroundings, little_memory, small_places
from faulty import SETTINGS, assert_equal_runs
from helpers import CENTRAL, Experiment, Trained, finish, start
from test_central_run import PRIVATE as PRIVATE_CENTRAL

from flsim.base.progress import say

pytestmark = pytest.mark.skipif("CHAOS_KILLS" not in os.environ, reason="minutes: of `make chaos`")
PATIENCE = 600.0  # seconds
KILLED = -9  # exit code of the driver if Linux killed it because of its memory


@contextmanager
def little_room(temporary: str, shared: str) -> Iterator[Surroundings]:
    with small_places(temporary, shared) as surroundings:
        if not surroundings.places:
            pytest.skip("no small filesystem can be mounted here")
        yield surroundings


LIMITS = {
    "1100 MB of memory": lambda: little_memory(1_100),
    "800 MB of memory": lambda: little_memory(800),
    "2 MB of shared memory": lambda: little_room("500m", "2m"),
    "full TMPDIR": lambda: little_room("4k", "500m"),
}


@pytest.mark.parametrize("form", ["federated", "central"])
@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
def test_a_run_that_a_limit_ends_resumes_without_the_limit(
    experiment: Experiment, trained: Trained, form: str, limit: Callable[[], AbstractContextManager[Surroundings]]
) -> None:
    if form == "central":
        experiment.config.write_text(CENTRAL)
    settings = SETTINGS if form == "federated" else PRIVATE_CENTRAL
    options = ("--out", "tight", *(part for text in settings for part in ("--set", text)))
    tight, whole = experiment.folder / "tight", trained(*settings)
    with limit() as around:
        process = start(experiment, *options, within=around.within, environment=around.environment)
        code = process.wait(PATIENCE)
        said = finish(experiment, process)[1]
    say(f"{form}: {code}: {said.strip().splitlines()[-1]}")
    assert code in (0, 1, 2, KILLED), said
    if code in (1, 2):
        assert [line for line in said.splitlines() if line.startswith("flsim: ")] == said.splitlines()[-1:]
    assert "Traceback" not in said
    if code:
        resume = ["--resume"] if tight.exists() else []
        experiment.flsim("run", experiment.config, *options, *resume)
    assert_equal_runs(tight, whole)

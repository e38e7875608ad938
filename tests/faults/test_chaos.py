"""SIGKILL of random processes of real runs at random moments; each run ends as the one that nothing happens to.

A few kills among all other tests, CHAOS_KILLS of them with `make chaos`. CHAOS_SEED chooses moments and victims: the
same ones again, as far as the machine is as fast as before.
"""

import os
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from faulty import SETTINGS, digests, events
from helpers import Experiment, assert_same, finish, start
from raynodes import tree, without_agents
from test_central_run import CENTRAL
from test_central_run import PRIVATE as PRIVATE_CENTRAL

from flsim.checkpoint import digest_of, latest, load
from flsim.progress import say
from flsim.rng import stream

KILLS, SEED = int(os.environ.get("CHAOS_KILLS", "0")), int(os.environ.get("CHAOS_SEED", "0"))
IN_CI = 3
SILENCE = 300.0  # seconds without a round, an evaluation, or an end: it hangs
LONG = (*SETTINGS, "training.rounds=200", "evaluation.every=25")  # there is an evaluator while it trains
LONG_CENTRAL = (*PRIVATE_CENTRAL, "training.steps=800", "evaluation.every=200", "system.checkpoint_every=50")
ENDS = {0, 1, -9}  # well; a failure in one line; killed
PHASES = ("before its folder is there", "starting", "training", "finishing")
OURS = {"ray::_Client": "client", "ray::_Evaluator": "evaluator", "ray::train": "trainer"}


@dataclass
class Kill:
    """What was killed, when, and what came of it."""

    victim: str
    phase: str
    at: float
    ended: bool = False
    seconds: float | None = None  # until the next round or evaluation; None where another was killed before that


class Chaos:
    """One run after another, each killed again and again, and gone on with until it is completed."""

    def __init__(self, experiment: Experiment, name: str, settings: tuple[str, ...], rng: np.random.Generator) -> None:
        self._experiment, self._name, self._rng = experiment, name, rng
        self._options = [part for text in settings for part in ("--set", text)]
        self.runs, self.resumed, self.begun_again = 0, 0, 0
        self.kills: list[Kill] = []
        self._unpunished: list[Kill] = []  # of the command that runs now
        began = time.monotonic()
        self._begin()
        self._wait_for(float("inf"))
        self._whole, self._window = self._run, time.monotonic() - began

    def rage(self, kills: int) -> None:
        """Kill so often, in half of the cases two at once; the run that is then trained is completed."""
        self._begin()
        while len(self.kills) < kills:
            if self._is_completed_before_the_moment():
                self._begin()
                continue
            self._strike(min(int(self._rng.integers(1, 2, endpoint=True)), kills - len(self.kills)))
        self._wait_for(float("inf"))

    def _is_completed_before_the_moment(self) -> bool:
        """Wait for the next moment to kill: any of a whole run's time, or about when one of the next rounds comes."""
        if self._rng.random() < 0.5:
            return self._calm_for(self._rng.uniform(0, self._window))
        soon = int(self._rng.integers(rounds(self._whole) // 3, endpoint=True))
        round_ = min(rounds(self._run) + soon, rounds(self._whole))
        return self._wait_for(round_) or self._calm_for(self._rng.uniform(0, 0.2))

    def _begin(self) -> None:
        self.runs += 1
        self._run = self._experiment.folder / f"{self._name}-{self.runs}"
        self._seen = 0, 0
        self._start()

    def _start(self) -> None:
        """The command as a person gives it; it trains a new run where there is no folder to go on with."""
        resume = ["--resume"] if self._run.exists() else []
        self._unpunished, self._trainings = [], trainings(self._run)
        self._seen_at = time.monotonic()
        self.process = start(self._experiment, "--out", self._run.name, *self._options, *resume)

    def _is_completed(self) -> bool:
        """See whether the command has ended, and give it again where it was made to."""
        code = self.process.poll()
        if code is None:
            return False
        said = finish(self._experiment, self.process)[1]
        if code == 0:
            self._see_progress()
            self._compare()
            return True
        assert self._unpunished, f"{self._run}: nothing was killed, and it ended with {code}: {said}"
        assert code in ENDS, said
        for each in self._unpunished:
            each.ended, each.seconds = True, None  # rounds that it still did are no recovery
        self.resumed += self._run.exists()
        self.begun_again += not self._run.exists()
        self._start()
        return False

    def _calm_for(self, seconds: float) -> bool:
        """Let it run for so long; whether it is completed before."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._is_completed():
                return True
            self._see_progress()
            time.sleep(0.01)
        return self._is_completed()

    def _wait_for(self, round_: float) -> bool:
        """Let it run until it has so many rounds; whether it is completed before."""
        while not (is_completed := self._is_completed()) and rounds(self._run) < round_:
            said = self._experiment.folder / "said"
            assert time.monotonic() - self._seen_at < SILENCE, f"{self._run}: hangs: {said.read_text()}"
            self._see_progress()
            time.sleep(0.01)
        return is_completed

    def _see_progress(self) -> None:
        """A round or an evaluation more than before: what was killed last is made good."""
        before, self._seen = self._seen, (rounds(self._run), stored(self._run))
        if self._seen[0] > before[0] or self._seen[1] > before[1]:
            self._seen_at = time.monotonic()
            if self.kills and self.kills[-1].seconds is None:
                self.kills[-1].seconds = self._seen_at - self.kills[-1].at

    def _strike(self, times: int) -> None:
        """Kill one or two: any process of a kind that there is now, of the one that was killed least often so far."""
        by_kind: dict[str, list[psutil.Process]] = {}
        for process in tree(psutil.Process(self.process.pid)):
            by_kind.setdefault(kind_of(process, self.process.pid), []).append(process)
        by_kind.pop("", None)
        phase = self._phase()
        for _ in range(min(times, len(by_kind))):
            so_far = Counter(each.victim for each in self.kills)
            kind = min(self._rng.permutation(sorted(by_kind)).tolist(), key=lambda each: so_far[each])
            victim = by_kind.pop(kind)
            try:
                victim[self._rng.integers(len(victim))].kill()
            except psutil.NoSuchProcess:  # it ended by itself, or with the one before
                continue
            self.kills.append(Kill(kind, phase, time.monotonic()))
            self._unpunished.append(self.kills[-1])
            say(f"{self._run.name}: kill {len(self.kills)}, {kind}, {phase}, round {rounds(self._run)}")

    def _phase(self) -> str:
        if not self._run.exists():
            return "before its folder is there"
        if trainings(self._run) == self._trainings:
            return "starting"
        return "training" if rounds(self._run) < rounds(self._whole) else "finishing"

    def _compare(self) -> None:
        """Bit for bit, with what the first run came to; and nothing half-written is left."""
        if self.runs > 1:
            assert_equal_ends(self._run, self._whole)
        assert not list(self._experiment.folder.glob("**/*.partial*"))

    def summary(self) -> str:
        """A table in Markdown."""
        phases = [phase for phase in PHASES if any(each.phase == phase for each in self.kills)]
        runs = self.runs - 1
        lines = [
            f"{self._name}, seed {SEED}: {len(self.kills)} processes killed in {runs} runs of {self._window:.0f} s; "
            f"resumed {self.resumed} times, begun again {self.begun_again} times; {runs} of {runs} runs equal",
            "",
            f"| killed | times | {' | '.join(phases)} | ended the command | seconds until it goes on: median, most |",
            f"|---|{'---:|' * (len(phases) + 3)}",
        ]
        for victim in sorted({each.victim for each in self.kills}):
            of = [each for each in self.kills if each.victim == victim]
            counts = [sum(each.phase == phase for each in of) for phase in phases]
            seconds = [each.seconds for each in of if each.seconds is not None]
            back = f"{statistics.median(seconds):.1f}, {max(seconds):.1f}" if seconds else "-"
            cells = [victim, len(of), *counts, sum(each.ended for each in of), back]
            lines.append(f"| {' | '.join(map(str, cells))} |")
        return "\n".join(lines)


def kind_of(process: psutil.Process, driver: int) -> str:
    """What a person calls it; nothing where it has ended."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        if process.pid == driver:
            return "driver"
        title = (process.cmdline() or [""])[0]
        ours = next((kind for prefix, kind in OURS.items() if title.startswith(prefix)), None)
        return ours or (process.name() if process.name() in ("raylet", "gcs_server") else "other") if title else ""
    except psutil.NoSuchProcess:
        return ""


def rounds(run: Path) -> int:
    return (run / "rounds.jsonl").read_text().count("\n") if (run / "rounds.jsonl").exists() else 0


def trainings(run: Path) -> int:
    """How often training began."""
    return events(run).count("training") if run.exists() else 0


def stored(run: Path) -> int:
    return (run / "evaluations.jsonl").read_text().count('"stored"') if (run / "evaluations.jsonl").exists() else 0


def assert_equal_ends(broken: Path, whole: Path) -> None:
    """Parameters, moments, clip, ledger, rows, and the digest of every round."""
    (mine, _), (theirs, _) = (load(latest(run / "checkpoints") or run) for run in (broken, whole))
    assert (mine.round, mine.ledger) == (theirs.round, theirs.ledger)
    assert getattr(mine, "clip", None) == getattr(theirs, "clip", None)
    assert mine.moments.keys() == theirs.moments.keys()
    for slot, of in mine.moments.items():
        assert all(torch.equal(value, theirs.moments[slot][name]) for name, value in of.items())
    assert digest_of(mine) == digest_of(theirs)
    assert_same(broken, whole)
    assert digests(broken) == digests(whole)


def living(folder: Path) -> list[psutil.Process]:
    """Processes that were started there, whoever they belong to now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def nothing_is_left(experiment: Experiment) -> Iterator[None]:
    """Ray's agents look for their cluster for a minute before they end; only the long form has the time."""
    yield
    left = living(experiment.folder) if KILLS else without_agents(living(experiment.folder))
    try:
        assert not psutil.wait_procs(left, timeout=120)[1]
    finally:
        for process in living(experiment.folder):
            process.kill()


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("form", "settings"),
    [("federated", LONG), ("central", LONG_CENTRAL)] if KILLS else [("federated", SETTINGS)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_whatever_is_killed_the_run_ends_as_if_nothing_were(
    experiment: Experiment, form: str, settings: tuple[str, ...]
) -> None:
    if form == "central":
        experiment.config.write_text(CENTRAL)
    chaos = Chaos(experiment, form, settings, stream(SEED, "chaos", form))
    try:
        chaos.rage(KILLS // 2 if KILLS else IN_CI)
    finally:
        chaos.process.kill()
        chaos.process.wait()
    say(f"\n{chaos.summary()}\n")
    assert chaos.resumed or chaos.begun_again

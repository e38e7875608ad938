"""Runs whose random processes suffer faults of every kind at random moments end with the bits of an undisturbed run.

`make chaos` sets CHAOS_KILLS, the number of strikes. CHAOS_SEED selects moments, victims and faults, and repeats them
if the machine is as fast as before.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
from fault_injection import TO_PROCESSES, Harm, Relief, Surroundings, kind_of, living, small_places
from faulty import SETTINGS, assert_equal_runs
from helpers import CENTRAL, Experiment, finish, start
from raynodes import tree
from test_central_run import PRIVATE as PRIVATE_CENTRAL

from flsim.base.progress import say
from flsim.base.rng import stream

KILLS, SEED = int(os.environ.get("CHAOS_KILLS", "0")), int(os.environ.get("CHAOS_SEED", "0"))
SILENCE = 300.0  # seconds without a round, an evaluation or an end, after which a run counts as hanging
ENOUGH = 120  # strikes, after which every victim has suffered every harm
GRACE = 10.0  # seconds after a harm in which a command that the harm ends may still train
LARGE = ("model.embedding=32", "model.units=96")  # parameters that go through Ray's shared memory
SLOW = "evaluation.references=200000"  # evaluations take seconds, so strikes hit while an evaluator works
LONG = (*SETTINGS, "training.rounds=200", "evaluation.every=25", *LARGE, SLOW)  # evaluators run during training
LONG_CENTRAL = (*PRIVATE_CENTRAL, "training.steps=800", "evaluation.every=200", "system.checkpoint_every=50", SLOW)
ENDS = frozenset({0, 1})  # exit codes: success; a failure with a message of one line
RAYS = ("driver", "evaluator", "gcs_server", "other", "raylet")


@dataclass
class Strike:
    """A harm to one victim, its time, and its outcome."""

    victim: str
    harm: Harm
    relief: Relief
    over: float  # time at which the harm ends
    relieved: bool = False
    made_good: bool = False
    ended: bool = False


class Chaos:
    """A sequence of runs; each suffers strikes repeatedly, and is resumed until it is completed."""

    def __init__(
        self,
        experiment: Experiment,
        name: str,
        settings: tuple[str, ...],
        rng: np.random.Generator,
        surroundings: Surroundings,
    ) -> None:
        """Train the undisturbed run. `name` is federated or central; `rng` draws moments, victims and harm."""
        self._experiment, self._name, self._rng = experiment, name, rng
        self._surroundings = surroundings
        self._options = [part for text in settings for part in ("--set", text)]
        self.runs, self.resumed, self.begun_again = 0, 0, 0
        self.silent = 0  # number of ends with exit code 1 whose last line is not a message of flsim
        self.strikes: list[Strike] = []
        self._unpunished: list[Strike] = []  # strikes on the command that runs now
        began = time.monotonic()
        self._begin()
        self._wait_for(float("inf"))
        self._whole, self._window = self._run, time.monotonic() - began

    def rage(self, strikes: int) -> None:
        """Strike this many times, half of them twice at once, and until a command has ended; then complete the run."""
        self._begin()
        while len(self.strikes) < strikes or not self.resumed + self.begun_again:
            if self._is_completed_before_the_moment():
                self._begin()
                continue
            left = max(1, strikes - len(self.strikes))
            self._strike(min(int(self._rng.integers(1, 2, endpoint=True)), left))
        self._wait_for(float("inf"))

    def end(self) -> None:
        """End the command, and relieve all strikes, so that no process remains running or stopped."""
        self.process.kill()
        self.process.wait()
        for strike in self.strikes:
            self._relieve(strike)

    def missing(self) -> set[tuple[str, str]]:
        """Return the pairs of victim and harm that have not occurred."""
        processes = (*RAYS, "client" if self._name == "federated" else "trainer")
        all_ = {(victim, harm.name) for victim in processes for harm in TO_PROCESSES}
        all_ |= {(place, harm.name) for place, harm in self._surroundings.harms.items()}
        return all_ - {(strike.victim, strike.harm.name) for strike in self.strikes}

    def _is_completed_before_the_moment(self) -> bool:
        """Wait for the next strike: a random moment of a run's duration, or close to the end of a later round."""
        if self._rng.random() < 0.5 or rounds(self._run) == rounds(self._whole):
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
        """Start the command as a person would: it resumes the run if its folder exists, else it trains a new run."""
        resume = ["--resume"] if self._run.exists() else []
        self._unpunished = []
        self._seen_at = time.monotonic()
        self.process = start(
            self._experiment,
            *("--out", self._run.name, *self._options, *resume),
            within=self._surroundings.within,
            environment=self._surroundings.environment,
        )

    def _is_completed(self) -> bool:
        """Return whether the run is completed; start the command again if a strike ended it."""
        code = self.process.poll()
        if code is None:
            return False
        said = finish(self._experiment, self.process)[1]
        if code == 0:
            self._see_progress()
            self._compare()
            return True
        assert self._unpunished, f"{self._run}: nothing was done, and it ended with {code}: {said}"
        assert code in ENDS.union(*(strike.harm.ends for strike in self._unpunished)), f"{code}: {said}"
        last = (said.strip().splitlines() or [""])[-1]
        self.silent += code == 1 and not last.startswith("flsim: ")
        say(f"{time.strftime('%H:%M:%S')} {self._run.name}: ended with {code}: {last[:200]}")
        for strike in self._unpunished:
            if not strike.made_good:
                strike.ended = True
        self.resumed += self._run.exists()
        self.begun_again += not self._run.exists()
        self._start()
        return False

    def _calm_for(self, seconds: float) -> bool:
        """Let the run continue for this time; return whether it was completed."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._is_completed():
                return True
            self._see_progress()
            time.sleep(0.01)
        return self._is_completed()

    def _wait_for(self, round_: float) -> bool:
        """Let the run continue until it has this many rounds; return whether it was completed."""
        while not (is_completed := self._is_completed()) and rounds(self._run) < round_:
            said = self._experiment.folder / "said"
            assert time.monotonic() - self._seen_at < SILENCE, f"{self._run}: hangs: {said.read_text()}"
            self._see_progress()
            time.sleep(0.01)
        return is_completed

    def _see_progress(self) -> None:
        """Relieve strikes that are over. A new round or evaluation shows that the run survived its latest strikes."""
        now = time.monotonic()
        for strike in self.strikes:
            if now > strike.over:
                self._relieve(strike)
        before, self._seen = self._seen, (rounds(self._run), stored(self._run))
        if self._seen[0] > before[0] or self._seen[1] > before[1]:
            self._seen_at = now
            for strike in self._unpunished:
                strike.made_good |= now > strike.over + GRACE

    def _relieve(self, strike: Strike) -> None:
        if not strike.relieved:
            strike.relieved = True
            with suppress(psutil.Error, OSError):  # the process and its folders no longer exist
                strike.relief()

    def _strike(self, times: int) -> None:
        """Strike `times` victims, each with the rarest pair so far of victim and harm that is possible now."""
        driver = psutil.Process(self.process.pid)
        by_kind: dict[str, list[psutil.Process]] = {}
        for process in tree(driver):
            by_kind.setdefault(kind_of(process, driver.pid), []).append(process)
        by_kind.pop("", None)
        choices = [(kind, harm) for kind in by_kind for harm in TO_PROCESSES]
        choices += self._surroundings.harms.items()
        for _ in range(times):
            so_far = Counter((strike.victim, strike.harm.name) for strike in self.strikes)
            self._rng.shuffle(choices)
            kind, harm = min(choices, key=lambda choice: so_far[choice[0], choice[1].name])
            choices = [choice for choice in choices if choice[0] != kind]
            victims, now = by_kind.get(kind, [driver]), time.monotonic()
            lasts = harm.seconds and self._rng.uniform(1, harm.seconds)
            try:
                relief = harm.strike(victims[self._rng.integers(len(victims))])
            except psutil.Error:  # it ended by itself, or with the previous victim
                continue
            self.strikes.append(Strike(kind, harm, relief, now + lasts))
            self._unpunished.append(self.strikes[-1])
            lasting = f" for {lasts:.0f} s" if lasts else ""
            what = f"{kind} {harm.name}{lasting}, round {rounds(self._run)}"
            say(f"{time.strftime('%H:%M:%S')} {self._run.name}: strike {len(self.strikes)}: {what}")

    def _compare(self) -> None:
        """Check that the run equals the undisturbed run bit for bit, and that no partial file remains."""
        if self.runs > 1:
            assert_equal_runs(self._run, self._whole)
        assert not list(self._experiment.folder.glob("**/*.partial*"))

    def summary(self) -> str:
        """Return how often each victim suffered each harm, and how often the harm ended the command."""
        harm = Counter((strike.victim, strike.harm.name, strike.ended) for strike in self.strikes)
        lines = [f"{victim} {name}{', ended the command' * ended}: {n}" for (victim, name, ended), n in harm.items()]
        return "\n".join(
            [
                f"{self._name}, seed {SEED}: {len(self.strikes)} strikes in {self.runs - 1} equal runs; resumed "
                f"{self.resumed} times, begun again {self.begun_again} times, {self.silent} of them without a message",
                *sorted(lines),
            ]
        )


def rounds(run: Path) -> int:
    return (run / "rounds.jsonl").read_text().count("\n") if (run / "rounds.jsonl").exists() else 0


def stored(run: Path) -> int:
    return (run / "evaluations.jsonl").read_text().count('"stored"') if (run / "evaluations.jsonl").exists() else 0


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return str(process)


@pytest.fixture
def nothing_is_left(experiment: Experiment) -> Iterator[None]:
    """Check that no process remains after two minutes; Ray's agents look for their cluster for one minute."""
    yield
    left = living(experiment.folder)
    try:
        names = {process.pid: command_of(process) for process in left}
        _, alive = psutil.wait_procs(left, timeout=120)
        assert not [names[process.pid] for process in alive]
    finally:
        for process in living(experiment.folder):
            process.kill()


@pytest.mark.skipif(not KILLS, reason="minutes: of `make chaos`")
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("form", "settings"),
    [("federated", LONG), ("central", LONG_CENTRAL)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_runs_with_random_faults_equal_an_undisturbed_run(
    experiment: Experiment, form: str, settings: tuple[str, ...]
) -> None:
    if form == "central":
        experiment.config.write_text(CENTRAL)
    strikes = KILLS // 2
    with small_places() as surroundings:
        if not surroundings.places:
            say("no small TMPDIR and shared memory can be mounted here: nothing is full")
        chaos = Chaos(experiment, form, settings, stream(SEED, "chaos", form), surroundings)
        try:
            chaos.rage(strikes)
        finally:
            chaos.end()
            say(f"\n{chaos.summary()}\n")
    assert strikes < ENOUGH or not chaos.missing()

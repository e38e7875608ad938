"""If a sweep's machine loses power after any step, the same command continues it, and its runs end equal."""

import json
import sys
from pathlib import Path

import pytest
from power import resuming
from power.recording import record
from power.replaying import HEAD, IS_WHOLE, replay

from flsim.base.progress import say
from flsim.results.sweeps import read_sweep
from flsim.runs.sweeps.folder import SweepFolder

SAMPLE = 12
RUNS = r"out/(runs/[^/]+|\.?corpus[^/]*)/"  # test_power_of_runs.py replays the writes in these folders
SWEEP = """
title = "Two kinds"
question = "?"

[base]
canaries = { p_u = [0.5], p_e = [1.0], count = 1, length = 3 }
model = { embedding = 4, units = 6 }
evaluation = { references = 20 }
system = { tracking = [] }

[[grids]]
name = "central"
axes = {}
set = { training = { kind = "central", steps = 2, batch_size = 4, learning_rate = 0.1 } }

[[grids]]
name = "federated"
axes = {}
set = { training = { rounds = 2, cohort = 4 }, system = { shards = 1 } }

[tiers.smoke]
about = "tiny"

[tiers.smoke.corpus]
synthetic = { users = 12, test_users = 2, heldout_users = 0, words_per_user = 60, vocabulary_size = 50 }
"""


def outcome(sweep: Path) -> dict[str, object]:
    """Return what is equal in equal sweeps: each run, the definition, and the entries of sweep.json about the runs."""
    folder, about = SweepFolder(sweep), json.loads((sweep / "sweep.json").read_text())
    runs = {run.name: resuming.outcome(folder.run(run.name)) for run in read_sweep(sweep).runs}
    kept = {name: value for name, value in about.items() if name not in ("sessions", "command", "commands", "versions")}
    return {"runs": runs, "definition": (sweep / "sweep.toml").read_text(), **kept}


@pytest.mark.nightly
def test_a_sweep_that_lost_power_continues_to_the_same_outcome(tmp_path: Path) -> None:
    definition, folder = tmp_path / "sweep.toml", tmp_path / "recorded"
    definition.write_text(SWEEP)
    folder.mkdir()
    arguments = ["sweep", str(definition), "--out"]
    command = [sys.executable, *(["-m", "flsim"] if IS_WHOLE else [resuming.__file__])]
    ops = record([*command, *arguments, str(folder / "out")], folder)
    whole = outcome(folder / "out")

    def go_on(state: Path) -> str:
        sweep = state / "out"
        over = [resuming.status(run) for run in (sweep / "runs").glob("[!.]*")].count("completed")
        with resuming.without_ray():
            code, said = resuming.command(*arguments, sweep)
        assert code == 0, said
        assert outcome(sweep) == whole
        return f"with {over} of its 2 runs completed"

    made = replay("sweep", ops, tmp_path, go_on, None if IS_WHOLE else SAMPLE, leave_out=RUNS)
    say(f"\n{HEAD}\n{made.row()}\n")
    assert not made.wrong, json.dumps(made.wrong, indent=2)
    assert made.last.keys() == {"with 2 of its 2 runs completed"}

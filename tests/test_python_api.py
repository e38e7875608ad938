"""The Python API: docs/python.md as it stands, and what `import flsim` costs."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from helpers import Experiment

import flsim
from flsim.results.store import read_run

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "python.md"
SHORT = 4  # rounds, and two evaluations


def test_importing_is_quick_and_loads_nothing_large() -> None:
    code = """
import sys
site = {name.split(".")[0] for name in sys.modules}  # what an environment loads at its start
import flsim
assert {name.split(".")[0] for name in sys.modules} <= {"flsim", *sys.stdlib_module_names, "__main__", *site}
assert set(flsim.__all__) <= set(dir(flsim))
import flsim.cli  # what `flsim --help` loads
assert not {"matplotlib", "numpy", "pandas", "scipy", "torch"} & set(sys.modules)
flsim.simulate, flsim.evaluate
assert not {"ray", "flwr"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_state_is_shown_without_its_tensors(experiment: Experiment) -> None:
    planted = flsim.plant(experiment.folder / "corpus", flsim.Canaries(p_u=(0.2,), p_e=(0.5,), count=2))
    algorithm = flsim.FedAvg(cohort=5, server=flsim.ServerOptimizer("adam", 0.1), shards=1)
    (state,) = flsim.simulate(planted, flsim.Model(3, 5), algorithm, 1)
    assert state.params
    assert state.moments
    assert repr(state).startswith("State(round=1, values=")
    assert "tensor" not in repr(state)


def test_every_public_name_is_documented_in_the_code() -> None:
    for name in flsim.__all__:
        assert getattr(flsim, name).__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'audits_'"):
        _ = flsim.audits_  # type: ignore[attr-defined]


@pytest.mark.slow
def test_the_guide_runs_and_gives_the_rows_of_runs_bit_for_bit(
    experiment: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All its code in one process, with fewer rounds; what is simulated is held against the runs that it trains."""
    monkeypatch.chdir(experiment.folder)
    (experiment.folder / "experiments").mkdir()
    shutil.copy(ROOT / "experiments" / "demo.toml", experiment.folder / "experiments")
    blocks = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    code = "\n".join(blocks)
    length = 'f"training.rounds={rounds}"'
    less = '"evaluation.every_epochs=0.1", "evaluation.references=500"'
    shorter = {"rounds = 200": f"rounds = {SHORT}", "every=40": "every=2", "20_000": "500", length: f"{length}, {less}"}
    for old, new in shorter.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    script = experiment.folder / "guide.py"
    save = "\nfor (partition, after), found in rows.items():\n    found.to_parquet(f'{partition}-{after}.parquet')\n"
    script.write_text(code + save, encoding="utf-8")
    subprocess.run([sys.executable, script], check=True, cwd=experiment.folder)
    for partition in ("iid", "non-iid"):
        stored = read_run(experiment.folder / "runs" / partition).rows
        assert sorted(stored["round"].unique()) == [2, SHORT]
        for after, ours in stored.groupby("round"):
            simulated = pd.read_parquet(experiment.folder / f"{partition}-{after}.parquet")
            pd.testing.assert_frame_equal(_sorted(simulated), _sorted(ours), check_exact=True)
    for name in ("memorization.png", "report.html"):
        assert (experiment.folder / name).stat().st_size > 10_000


def _sorted(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows without the run's identity, which a simulation has not."""
    columns = ["round", "metric", "canary", "value"]
    return rows[columns].sort_values(columns[:3]).reset_index(drop=True)

"""`flsim plan` as a user meets it; `test_planning_measure.py` trains a short run."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from helpers import Experiment, Flsim

from flsim.privacy.ledger import Entry, Ledger
from flsim.privacy.table import report
from flsim.results.power import Spread, detectable_exposure, seeds_for

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def flsim(flsim: Flsim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Flsim:
    """`flsim plan --no-calibration` in this process, its scratch folder below `tmp_path`: code, output, errors."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def run(*arguments: str | Path, calibrated: bool = False) -> tuple[int, str, str]:
        more = () if calibrated else ("--no-calibration",)
        found = flsim("plan", *arguments, *more)
        assert not list(scratch.iterdir()), "left behind"
        return found

    return run


def planned(flsim: Flsim, *arguments: str | Path) -> dict[str, Any]:
    code, out, err = flsim(*arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("table", ["table1", "secret-sharer-table4"])
def test_a_page_of_our_own_experiments(flsim: Flsim, table: str) -> None:
    """Sections and notes are only of what there is: neither time nor memory, and nothing private."""
    code, out, _ = flsim(EXPERIMENTS / f"{table}.toml", "--tier", "smoke")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    titles = [line.removeprefix("## ") for line in out.splitlines() if line.startswith("## ")]
    assert titles == ["Disk", "Scale and amount of training", "Largest provable epsilon", "Statistical power"]
    for text in ("392,000", "share of all users", "p_u x users"):
        assert (text in out) == (table == "table1"), "users of Thakkar et al., cohorts and sharers"


def test_numbers(flsim: Flsim, sweep_file: Path) -> None:
    options = "--only sgd --only fedavg --set evaluation.every=100 --effect 2 --seeds 3 --sd-seeds 0.5"
    plan = planned(flsim, sweep_file, *options.split())
    assert plan["scale"]["users"]["users"] == 400
    assert plan["published"]["users"]["users"] == 392_000
    assert plan["disk"]["kept"] == 3 * 8 * (15 + 4), "of 1,488 steps, and of 400 rounds"
    assert (plan["time"], plan["times"]) == (None, [])
    assert plan["privacy"] == []
    assert plan["scale"]["rows"][0]["amount"] == pytest.approx(0.005 * 1_488)
    assert plan["published"]["rows"][0]["utility"] == {"iid": 62.2, "non-iid": 64.3}
    power = plan["power"]
    assert (power["canaries"], power["seeds"]) == (36, 3)
    rows = len(plan["scale"]["rows"])  # each with both worlds: k comparisons, each as a test at a level of 0.05 / k
    assert power["tests"] == rows > 1
    assert power["bits"] == pytest.approx(detectable_exposure(36, 3, Spread(seeds=0.5), 0.05 / rows))
    assert power["seeds_needed"] == seeds_for(2, 36, Spread(seeds=0.5), 0.05 / rows)


def test_epsilon_is_that_of_flsim_privacy(flsim: Flsim, sweep_file: Path) -> None:
    """100 rounds of 40 of 400 users at z = 1; both worlds and all seeds release as much."""
    plan = planned(flsim, sweep_file, "--seeds", "2")
    (private,) = plan["privacy"]
    lines = report(Ledger((Entry("fixed-size", 400, 40, 1.0, 100),)), 1e-3)
    assert private["epsilons"] == {line.convention.name: line.epsilon for line in lines}
    assert (private["name"], private["delta"], private["unit"]) == ("dp cohort 40", 1e-3, "user")


def test_without_the_corpus_the_published_users_stand_for_it(flsim: Flsim, sweep_file: Path) -> None:
    """784 rounds of 5,000 are the paper's ten epochs, epsilon 5.62 as it counts."""
    code, page, err = flsim(sweep_file, "--tier", "paper", "--only", "dp")
    assert code == 0
    assert "flsim data import" in err
    assert re.search(r"dp cohort 5000 *\| *2 *\| *784 *\| *5,000 *\| *1.3% *\| *10 *\|", page)
    assert "5.62" in page
    assert "exchanging a user" in page
    assert max(map(len, page.splitlines())) <= 80


def test_a_run_without_canaries_has_no_power_and_proves_nothing(experiment: Experiment, flsim: Flsim) -> None:
    arguments = (experiment.config, "--set", "canaries.count=0")
    code, out, err = flsim(*arguments)
    assert (code, err) == (0, "")
    assert not [words for words in ("Statistical power", "Largest provable epsilon", "sharers") if words in out]
    assert planned(flsim, *arguments)["power"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tier", "huge"), "has no tier 'huge'; choose one of"),
        (("--only", "none"), "has no grid 'none'; choose one of"),
        (("--set", "training"), "write it as section.key=value"),
        (("--set", "seed=3"), "--set seed: of a sweep that is for --seeds"),
        (("--effect", "nan"), "--effect nan: a number of bits is needed"),
        (("--corpus", "nowhere"), "not a corpus"),
        (("--seeds", "many"), '"many" is neither a number of seeds such as 5 nor a range such as 5-9'),
        (("--seeds", "0"), '"0" names no seed'),
        (("--seeds", "9-5"), '"9-5" names no seed'),
        (("--against", "nowhere"), "--against compares a measurement"),
        (("--set", "model.embedding=1000000000"), "weights needs"),
        (("--set", "canaries.count=1000"), "canaries would replace about"),
        (("--set", "evaluation.references=99999999999999"), "evaluation.references = 99,999,999,999,999 needs"),
    ],
)
def test_bad_input_is_one_line(flsim: Flsim, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = flsim(EXPERIMENTS / "table1.toml", *arguments)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_a_file_or_a_sweep_that_does_not_fit(experiment: Experiment, flsim: Flsim, tmp_path: Path) -> None:
    assert flsim(tmp_path / "none.toml")[0] == 2
    code, _, err = flsim(experiment.config, "--seeds", "2")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "--seeds is for a sweep" in err
    code, _, err = flsim(EXPERIMENTS / "table1.toml", "--against", tmp_path, calibrated=True)
    assert code == 2
    assert "not a sweep's folder" in err

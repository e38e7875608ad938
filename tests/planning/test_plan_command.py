"""`flsim plan` on the command line, and the contents of plans; `test_planning_measure.py` trains a short run."""

import json
import math
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy
from helpers import PRIVATE, Experiment, Flsim, Trained

from flsim.attacks.audit.audit import Coins, Subject, audit_subject, ceiling_of_coins, subject_of
from flsim.base.machine import cores
from flsim.base.statistics import holm
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Corpus
from flsim.planning.measure import Cost, Machine, Measurement, UserNumbers, checkpoints_of, configuration_of, table
from flsim.planning.plan import Plan, Request, corpus_bytes, groups_of, page, plan_of, power_of, provable_of, run_disk
from flsim.privacy.ledger import Entry, Ledger
from flsim.privacy.table import report
from flsim.results.power import SD_CANARIES, SD_SEEDS, Spread, detectable_exposure, seeds_for
from flsim.runs.config import load
from flsim.runs.evaluate import EvaluationHParams
from flsim.runs.folder import Run
from flsim.runs.sweeps.definition import Planned, planned_runs, tier_of
from flsim.runs.sweeps.definition import load as load_sweep

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


@pytest.fixture
def flsim(flsim: Flsim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Flsim:
    """Run `flsim plan --no-calibration` in this process, with scratch below `tmp_path`: code, output, errors."""
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


def test_numbers_of_a_plan_follow_from_the_sweep(flsim: Flsim, sweep_file: Path) -> None:
    options = "--only sgd --only fedavg --set evaluation.every=100 --effect 2 --seeds 3 --sd-seeds 0.5"
    plan = planned(flsim, sweep_file, *options.split())
    assert plan["scale"]["users"]["users"] == 400
    assert plan["published"]["users"]["users"] == 392_000
    assert plan["disk"]["kept"] == 3 * 8 * (15 + 4), "of 1,488 steps, and of 400 rounds"
    assert (plan["time"], plan["times"]) == (None, [])
    assert plan["privacy"] == []
    assert plan["scale"]["rows"][0]["amount"] == pytest.approx(0.005 * 1_488)
    assert plan["published"]["rows"][0]["utility"] == 62.2
    power = plan["power"]
    assert (power["canaries"], power["seeds"]) == (36, 3)
    rows = len(plan["scale"]["rows"]) // 2  # k comparisons of two partitions, each as a test at a level of 0.05 / k
    assert power["tests"] == rows > 1
    assert power["bits"] == pytest.approx(detectable_exposure(36, 3, Spread(seeds=0.5), 0.05 / rows))
    assert power["seeds_needed"] == seeds_for(2, 36, Spread(seeds=0.5), 0.05 / rows)
    assert "--effect 0: must be above 0" in flsim(sweep_file, "--effect", "0")[2]


def test_epsilon_is_that_of_flsim_privacy(flsim: Flsim, sweep_file: Path) -> None:
    """All runs of both partitions and seeds spend the same: 100 rounds of 40 of 400 users at z = 1."""
    plan = planned(flsim, sweep_file, "--seeds", "2")
    (private,) = plan["privacy"]
    lines = report(Ledger((Entry("fixed-size", 400, 40, 1.0, 100),)), 1e-3)
    assert private["epsilons"] == {line.convention.name: line.epsilon for line in lines}
    assert (private["name"], private["delta"], private["unit"]) == ("dp cohort 40", 1e-3, "user")


def test_without_the_corpus_a_plan_uses_the_published_users(flsim: Flsim, sweep_file: Path) -> None:
    """784 rounds of 5,000 users are the ten epochs for which the paper states epsilon 5.62."""
    code, page, err = flsim(sweep_file, "--tier", "paper", "--only", "dp")
    assert code == 0
    assert "flsim data import" in err
    assert re.search(r"dp cohort 5000, IID *\| *1 *\| *784 *\| *5,000 *\| *1.3% *\| *10 *\|", page)
    assert "5.62" in page
    assert "exchanging a user" in " ".join(page.split())
    assert max(map(len, page.splitlines())) <= 80


def test_a_run_without_canaries_has_no_power_and_no_provable_epsilon(experiment: Experiment, flsim: Flsim) -> None:
    arguments = (experiment.config, "--set", "canaries.count=0")
    code, out, err = flsim(*arguments)
    assert (code, err) == (0, "")
    assert not [words for words in ("Statistical power", "Largest provable epsilon", "sharers") if words in out]
    assert planned(flsim, *arguments)["power"] is None


def test_cores_are_those_of_the_affinity_also_for_ray(experiment: Experiment, flsim: Flsim) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert planned(flsim, experiment.config)["machine"]["cores"] == cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("copies", "is_crowded"), [(96, False), (97, True)])
def test_mostly_canaries_are_a_warning_of_plan_and_run(
    experiment: Experiment, flsim: Flsim, copies: int, is_crowded: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of 192 records are no warning, and one record more is."""
    change = f"canaries={{ count = 1, insertions = [{copies}] }}"
    _, _, err = flsim(experiment.config, "--set", change)
    Run.create(load(experiment.config, [change]), experiment.folder / "run")
    assert err == capsys.readouterr().err
    assert ("warning: Canaries replace more than half of all records (50.5%), so the model" in err) == is_crowded


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tier", "huge"), "there is no tier 'huge'; choose one of"),
        (("--set", "seed=3"), "--set seed: in a sweep, use --seeds"),
        (("--seeds", "many"), '"many" must be a number of seeds such as 5 or a range such as 5-9'),
        (("--set", "model.embedding=1000000000"), "weights needs"),
        (("--set", "canaries.count=1000"), "canaries would replace about"),
        (("--set", "evaluation.references=99999999999999"), "evaluation.references = 99,999,999,999,999 needs"),
    ],
)
def test_bad_input_is_one_line(flsim: Flsim, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = flsim(EXPERIMENTS / "table1.toml", *arguments)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


CENTRAL = ("training.kind='central'", "training.steps=4", "training.batch_size=4")
WIDE = ("model.embedding=64", "model.units=128")  # so that a checkpoint is more than its header


@pytest.mark.parametrize(
    ("partition", "overrides", "slots"),
    [
        ("iid", ("training.server_optimizer='adam'",), None),
        ("non-iid", CENTRAL, ()),
        ("iid", (*CENTRAL, "training.optimizer='momentum'"), ("momentum_buffer",)),
    ],
)
def test_planned_sizes_are_those_of_a_run_folder(
    experiment: Experiment, partition: str, overrides: tuple[str, ...], slots: tuple[str, ...] | None
) -> None:
    """Checkpoints agree within 5%, and planted files within 3 kB, because a tiny roster is mostly file metadata."""

    def size_of(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    if slots is not None:
        text = experiment.config.read_text()
        for of_federated in ("rounds = 4\ncohort = 6\n", "[local]\nbatch_size = 4\n", "shards = 1\n"):
            text = text.replace(of_federated, "")
        experiment.config.write_text(text)
    settings = load(experiment.config, (*WIDE, *overrides, f"data.partition='{partition}'"))
    run = Run.create(settings, experiment.folder / "run")  # 4 rounds, evaluated after 2 and 4
    state = run.latest_state()
    if slots is not None:
        copies = {name: value.clone() for name, value in state.params.items()}
        state = replace(state, moments=dict.fromkeys(slots, copies))
    for round_ in (2, 4):
        run.save(replace(state, round=round_))
    use = run_disk(run.config, run.corpus.split("train"))
    assert use.kept == 2
    assert use.checkpoints == pytest.approx(size_of(run.path / "checkpoints"), rel=0.05)
    assert use.planted == pytest.approx(size_of(run.path / "planted"), abs=3_000)
    assert use.meanwhile == pytest.approx(1.5 * use.checkpoints)  # three checkpoints, of which two are kept
    assert corpus_bytes(run.corpus) == size_of(run.corpus.path)


def test_the_checkpoint_at_which_arms_part_is_counted(experiment: Experiment) -> None:
    """Rounds 2 and 4 are evaluated; a window that begins after round 3 keeps the checkpoint of round 3, too."""
    train = Corpus.open(experiment.folder / "corpus").split("train")
    windows = ("[[0, 1]]", "[[2, 4]]", "[[3, 4]]")
    configs = [load(experiment.config, [f"canaries.windows={window}"]) for window in windows]
    assert [checkpoints_of(config, train) for config in configs] == [2, 2, 3]


def test_an_iid_twin_needs_a_number_for_each_record(experiment: Experiment) -> None:
    """The twin has 4 bytes per record, and 8 bytes for the start of each user and for the end."""
    own, twin = (
        run_disk(load(experiment.config, [f"data.partition='{partition}'"]), UserNumbers(24, 192, 900, 40).split())
        for partition in ("non-iid", "iid")
    )
    assert twin.planted - own.planted == 4 * 192 + 8 * 25
    assert twin.checkpoints == own.checkpoints


USERS = UserNumbers(400, 12_000, 100_000, 600)
MACHINE = Machine(cores=2, gpus=0)


def measured(sweep_file: Path) -> Plan:
    """Plan table 1: start 10 s, a round 0.5 s, an evaluation 3 s, and 5 s of overhead."""
    definition = load_sweep(sweep_file)
    tier = tier_of(definition, "smoke", "here")
    planned = planned_runs(definition, tier, Path("corpus"), "here", range(1), ["sgd", "fedavg"])
    request = Request("table1", "smoke", planned, USERS.split(), whole_cluster=False)
    costs = {configuration_of(run): Cost(10, 0.5, 3) for run in planned}
    measurement = Measurement(memory=41 * 10**8, at_once=2, overhead=5.0, seconds=70.0, load=0.4)
    return plan_of(request, MACHINE, 1.0, measured=(costs, measurement))


def test_a_page_fits_the_width_and_has_units(sweep_file: Path) -> None:
    plan = measured(sweep_file)
    text = page(plan)
    assert max(map(len, text.splitlines())) <= 80
    titles = [line.removeprefix("## ") for line in text.splitlines() if line.startswith("## ")]
    assert titles == [
        *["Time, memory and disk", "Time of a run", "Scale and amount of training", "Largest provable epsilon"],
        "Statistical power",
    ]
    assert plan.time is not None
    assert plan.time.seconds == 5 + 8 * (766 + 222) / 2
    assert re.search(r"Time of all runs, as many at once as fit *\| *66 \| min", text)
    assert re.search(r"Peak memory of all processes, measured *\| *4.1 \| GB", text)
    assert re.search(r"fedavg cohort 40 *\| *2 *\| *2 *\| *10 s *\| *400 *\| *0.5 s *\| *4 *\| *3 s *\| *4 min", text)
    assert json.loads(json.dumps(asdict(plan), allow_nan=False))["disk"]["kept"] == 64


@pytest.mark.parametrize(("effect", "tests"), [(1.3, 1), (2.5, 8)])
def test_power_is_that_of_a_table_which_corrects_for_its_rows(effect: float, tests: int) -> None:
    """Expected: draws in which one row differs by the effect and the others by 0; its corrected p is below 0.05."""
    stated = power_of(48, 5, EvaluationHParams(), effect, tests)
    assert stated is not None
    rng, draws = np.random.default_rng(7), 4_000
    spread = math.hypot(SD_SEEDS, SD_CANARIES / math.sqrt(48))
    means = rng.normal(0, spread, (draws, tests, 5))
    means[:, 0] += effect
    p = scipy.stats.ttest_1samp(means, 0, axis=2).pvalue
    found = np.mean([holm(row.tolist())[0] < 0.05 for row in p])
    margin = 4 * math.sqrt(0.25 / draws)
    # Holm detects slightly more if another row is detected first, which has a probability below 5% here.
    assert stated.power / 100 - margin <= found <= stated.power / 100 + margin + 0.05 * (tests > 1)


COINS = ("canaries.coins=true", "canaries.p_u=[0.1]", "canaries.p_e=[0.2]", "canaries.count=30")
TEMPLATE = ("canaries.source='template'", "canaries.template='w4 {w1} w7'")  # fewer fillings than references
TINY_USERS = UserNumbers(24, 192, 960, 40)  # as in `Experiment`


def certain(subject: Subject, groups: Sequence[int], planted: Sequence[int]) -> Subject:
    """Return the run with these groups, as if its model ranked each planted canary first and each other one last."""
    sizes, coin = np.array(groups), np.zeros(len(groups), np.bool_)
    coin[::2] = True
    tossed = None
    if subject.coins is not None:
        tossed = Coins(np.where(coin, 1.0, subject.references + 1.0), coin, sizes)
    return replace(subject, ranks=np.ones(len(planted)), groups=np.array(planted), coins=tossed)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [((*COINS, "data.partition='non-iid'"), 1), (PRIVATE, 2), (TEMPLATE, 1)],
    ids=["coins", "dp", "template"],
)
def test_a_plan_has_the_epsilon_that_an_audit_of_perfect_ranks_proves(
    trained_here: Trained, settings: tuple[str, ...], steps: int
) -> None:
    """Coins plant half of the canaries. Epsilon under replacement is twice that under addition or removal."""
    run = trained_here(*settings)
    config = Run.open(run).config
    (bound,) = provable_of([Planned("run", "run", 0, {}, None, config)], TINY_USERS.split())
    groups = groups_of(config, TINY_USERS)
    subject = certain(subject_of(run), groups, groups[::2] if config.canaries.coins else groups)
    rows = {row["method"]: row for row in audit_subject(subject).frame.to_dict("records")}
    assert (subject.references < config.evaluation.references) == bool(config.canaries.template)
    assert rows["epsilon"]["detected"] == rows["epsilon"]["n_in"] == bound.canaries
    assert bound.epsilon == pytest.approx(rows["epsilon"]["low"] / steps, rel=1e-9)
    assert bound.epsilon > 0
    assert bound.group == rows["epsilon"]["group"]
    assert bound.relation == ("add-or-remove-one" if steps == 2 else "replace-one")
    if config.canaries.coins:
        assert bound.coins == pytest.approx(rows["epsilon, coins"]["low"] / steps, rel=1e-9)
    else:
        assert bound.coins is None
        assert "epsilon, coins" not in rows


def test_units_are_counted_as_an_audit_counts_them(experiment: Experiment) -> None:
    """Of 24 users and 192 records at p_u = 0.2, 5 users share a canary; in IID, 19 and 38 records count as users."""
    configs = {
        partition: load(experiment.config, (f"data.partition='{partition}'",)) for partition in ("non-iid", "iid")
    }
    assert groups_of(configs["non-iid"], TINY_USERS) == [5] * 4
    assert groups_of(configs["iid"], TINY_USERS) == [19] * 2 + [24] * 2, "there are no more users"
    exact = replace(configs["non-iid"], canaries=CanaryHParams(insertions=(1, 7), count=1))
    assert groups_of(exact, TINY_USERS) == [1, 7]


def test_canary_users_have_a_bound_and_a_cost(experiment: Experiment) -> None:
    """Coins let half of 40 canary users take part: 20 random updates for 24 users."""
    settings = (*PRIVATE, "audit.update_canaries=40", "audit.canary_coins=true")
    planned = [Planned("run", "run", 0, {}, None, load(experiment.config, settings))]
    (row,) = provable_of(planned, TINY_USERS.split())
    assert row.random_updates == pytest.approx(20 / 24)
    assert row.delta is not None
    assert row.canary_users == ceiling_of_coins([1] * 40, row.delta)
    assert re.search(r"users *\|.*random", table([row]))

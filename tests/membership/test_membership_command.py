"""Tests of `flsim membership` cover its output, stored rows, claims, custom attacks, refusals and two commands."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import PRIVATE, Flsim, Trained, refusal
from membership.before_model import before, in_pairs, untrained
from scipy import stats

import flsim as api
from flsim.attacks.audit.audit import claim_of
from flsim.attacks.audit.bounds import of_group
from flsim.attacks.membership.candidates import BUILT_IN, BY_DEFAULT, attack_named
from flsim.attacks.membership.inference import LEVELS, AttackHParams, newest_rows, scores_of, write_rows
from flsim.attacks.membership.tables import draw, with_differences
from flsim.attacks.result import Result
from flsim.base.errors import InputError, RunFailed
from flsim.cli.attacks import ATTACKS
from flsim.runs.folder import Run

RAREST = """
import numpy as np
def rarest(candidates):
    return -np.minimum.reduceat(candidates.unigram[candidates.records.tokens], candidates.records.offsets[:-1])
"""
ADDING = """
import sys
from pathlib import Path
from flsim.attacks.membership import inference
run, identity = Path(sys.argv[1]), sys.argv[2]
rows = inference.newest_rows(run, identity).head(1)
print(flush=True)
sys.stdin.readline()
for number in range(20):
    inference.write_rows(run, 4, rows.assign(attack=f"b-{number}"))
"""


@pytest.fixture
def copied(trained_here: Trained, tmp_path: Path) -> Path:
    """Return a copy of a run, for tests that write into it; its corpus is not copied."""
    return Path(shutil.copytree(trained_here(), tmp_path / "copy"))


def test_help_names_all_attacks() -> None:
    """The help has a separate list, because importing the attacks would load torch for `flsim --help`."""
    assert ATTACKS.split(", ") == list(BUILT_IN)


def test_json_output_equals_the_stored_rows(copied: Path, flsim: Flsim) -> None:
    """Each default attack has a row with the controls. Rows have no claim, because the run has no noise."""
    code, out, _ = flsim("membership", copied, "--json")
    assert code == 0
    (printed,) = json.loads(out)["runs"]
    run = Run.open(copied)
    stored = newest_rows(copied, run.identity).set_index("attack")
    assert [row["attack"] for row in printed["rows"]] == list(BY_DEFAULT) == list(stored.index)
    for row in printed["rows"]:
        kept = stored.loc[row["attack"]]
        assert (row["run"], row["unit"], row["round"], row["epsilon"]) == (run.identity, "record", 4, None)
        assert all(row[name] == kept[name] for name in ("n_in", "n_out", "auroc", "auroc_low", "untrained_auroc"))
        assert row["is_confounded"] is None  # 30 records are too few
        assert row["tpr_at_0.1"] == kept["tpr_at_0.1"]
        assert row["curve_tpr"] == kept["curve_tpr"].tolist()
    control = {row["attack"]: row["auroc"] for row in printed["rows"]}["blind"]
    assert all(row["control_auroc"] == control for row in printed["rows"])


def test_a_second_command_replaces_only_rows_of_its_attacks(copied: Path) -> None:
    first = api.infer_membership(copied, attacks=["loss", "zlib"], records=15)
    second = api.infer_membership(copied, attacks=["zlib", "min-k"], records=10)
    stored = newest_rows(copied, Run.open(copied).identity)
    assert stored[["attack", "n_in"]].to_numpy().tolist() == [["loss", 15], ["zlib", 10], ["min-k", 10]]
    assert stored["auroc"].tolist() == [first["auroc"][0], *second["auroc"]]
    pd.testing.assert_frame_equal(api.infer_membership(copied, attacks=["zlib", "min-k"], records=10), second)


def test_a_custom_attack_is_loaded_from_a_file(copied: Path, tmp_path: Path, flsim: Flsim) -> None:
    (tmp_path / "mine.py").write_text(RAREST)
    code, out, _ = flsim("membership", copied, "--attack", f"{tmp_path}/mine.py:rarest", "--json")
    assert code == 0
    (row,) = json.loads(out)["runs"][0]["rows"]
    assert row["attack"] == "rarest"
    assert row["auroc"] == row["untrained_auroc"]  # because the attack reads no model
    (tmp_path / "mine.py").write_text("def rarest(candidates):\n    return candidates.nothing\n")
    code, _, err = flsim("membership", copied, "--attack", f"{tmp_path}/mine.py:rarest")
    assert code == 1
    assert "mine.py:2: AttributeError" in err


def test_a_claim_about_users_bounds_the_replacement_of_a_user(trained_here: Trained) -> None:
    """Under Poisson sampling, a replacement removes a user and adds another: two steps of the ledger's curve."""
    run = trained_here(*PRIVATE)
    opened = Run.open(run)
    claim = claim_of(opened, opened.load(run / "checkpoints" / "round-000004.safetensors"))
    assert claim is not None
    (row,) = api.infer_membership(run, attacks=["loss"], records=30).to_dict("records")
    assert (row["epsilon"], row["delta"], row["protects"]) == (claim.epsilon, claim.delta, "user")
    least = of_group(claim.curve.least_probability, 2)
    for level in LEVELS:
        assert row[f"allowed_at_{level:g}"] == pytest.approx(1 - least(1 - level))
        assert row[f"allowed_at_{level:g}"] > claim.curve.tpr(level) or claim.curve.tpr(level) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--attack", "guess"), "attack must be one of loss, reference"),
        (("--round", 3_000), "round-003000.safetensors: no such checkpoint; name another --round"),
        (("--out", "roc.txt"), "plots have the formats .png, .svg and .pdf"),
        (("--shadows", "--out", "roc.png"), "attacks with shadow models have no figure; remove --out or --shadows"),
        (("--attack", "ez"), "attack ez: needs a reference; name one with --reference"),
        (("--reference", "nowhere"), "--reference nowhere: no such checkpoint; name a file"),
    ],
)
def test_refusals_are_one_line(copied: Path, flsim: Flsim, options: tuple[str, ...], message: str) -> None:
    assert message in refusal(flsim, "membership", copied, *options)
    assert not (copied / "membership").exists()


def test_a_reference_on_the_same_corpus_is_refused(copied: Path, flsim: Flsim) -> None:
    assert "trained on the corpus of the run" in refusal(
        flsim, "membership", copied, "--reference", copied / "checkpoints" / "round-000004.safetensors"
    )


def test_rows_of_another_run_are_refused(copied: Path) -> None:
    api.infer_membership(copied, attacks=["loss"], records=10)
    with pytest.raises(InputError, match="has rows of another run; move it away and attack again"):
        newest_rows(copied, "another")


def test_a_report_has_a_table_and_curves(copied: Path, tmp_path: Path) -> None:
    rows = api.infer_membership(copied, attacks=["loss", "blind"])
    api.write_report(copied, out=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    section = page[page.index('id="proof"') :]
    assert "How well attacks distinguish training records from other records" in section
    loss = rows.iloc[0]
    assert f">{loss['auroc']:.3f}</td>" in section
    assert f">{loss['auroc_low']:.3f}-{loss['auroc_high']:.3f}</td>" in section
    assert f'<desc id="membership-0-d">loss: area {loss["auroc"]:.3f}.' in section


def test_a_figure_has_a_curve_for_each_attack(copied: Path, tmp_path: Path, flsim: Flsim) -> None:
    figure = tmp_path / "roc.svg"
    code, _, _ = flsim("membership", copied, "--attack", "loss", "--attack", "dc-pdd", "--out", figure)
    assert code == 0
    assert figure.stat().st_size > 10_000
    attacked = {copied: Result(frame=newest_rows(copied, Run.open(copied).identity))}
    (axes,) = draw(attacked).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert set(lines) == {"chance", "loss", "dc-pdd"}
    for row in attacked[copied].frame.to_dict("records"):
        line = lines[row["attack"]]
        assert np.asarray(line.get_xdata()).tolist() == [*row["curve_fpr"]]
        assert np.asarray(line.get_ydata()).tolist() == [max(rate, 1 / row["n_out"]) for rate in row["curve_tpr"]]


def test_two_commands_at_once_lose_no_rows(copied: Path, flsim: Flsim) -> None:
    """Another process and this process each add rows of 20 attacks to rows of one command, one attack at a time."""
    assert flsim("membership", copied, "--attack", "loss")[0] == 0
    identity = Run.open(copied).identity
    rows = newest_rows(copied, identity)
    command = [sys.executable, "-c", ADDING, str(copied), identity]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert other.stdin is not None
        other.stdin.write(b"\n")
        other.stdin.flush()
        for number in range(20):
            write_rows(copied, 4, rows.assign(attack=f"a-{number}"))
        assert other.wait() == 0
    expected = {"loss", *(f"{name}-{number}" for name in "ab" for number in range(20))}
    assert set(newest_rows(copied, identity)["attack"]) == expected


def test_a_report_on_only_the_blind_attack_has_a_table_and_its_curve(copied: Path, tmp_path: Path) -> None:
    api.infer_membership(copied, attacks=["blind"], records=20)
    api.write_report(copied, out=tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "How well attacks distinguish training records from other records" in page
    assert '<desc id="membership-0-d">blind: area ' in page


@pytest.mark.parametrize("options", [("--shadows", "--attack", "loss"), ("--unit", "user", "--model", "model.py:load")])
def test_an_option_without_effect_is_refused(copied: Path, flsim: Flsim, options: tuple[str, ...]) -> None:
    assert f"flsim: {options[-2]}: " in refusal(flsim, "membership", copied, *options)


def test_attacks_with_shadow_models_take_the_delta_of_the_claim(
    copied: Path, flsim: Flsim, monkeypatch: pytest.MonkeyPatch
) -> None:
    deltas = list[float | None]()

    def attack(_paths: list[Path], hparams: AttackHParams) -> list[None]:
        deltas.append(hparams.delta)
        return []

    monkeypatch.setattr("flsim.attacks.membership.shadows.by_setting", attack)
    assert flsim("membership", copied, "--shadows", "--delta", "1e-3")[0] == 0
    assert deltas == [1e-3]


AREAS = {"iid": {0: 0.50, 1: 0.52, 2: 0.54}, "non-iid": {0: 0.55, 1: 0.56, 3: 0.99}}


def rows(attack: str = "loss", shift: float = 0.0) -> pd.DataFrame:
    return pd.DataFrame(
        {"setting": partition, "series": partition, "unit": "record", "attack": attack, "seed": seed}
        | {"auroc": area + shift, "control_auroc": 0.5, "tpr": 0.01 * seed}
        for partition, areas in AREAS.items()
        for seed, area in areas.items()
    )


def test_means_and_intervals_are_over_the_seeds_of_a_setting() -> None:
    iid, non_iid = with_differences(rows()).to_dict("records")
    assert (iid["setting"], iid["seeds"], non_iid["seeds"]) == ("iid", 3, 3)
    assert iid["auroc"] == pytest.approx(0.52)
    half = stats.t.ppf(0.975, 2) * 0.02 / math.sqrt(3)
    assert (iid["low"], iid["high"]) == pytest.approx((0.52 - half, 0.52 + half))
    assert iid["tpr"] == pytest.approx(0.01)
    assert np.isnan(iid["difference"])


def test_differences_are_paired_by_the_seeds_that_both_settings_have() -> None:
    _, non_iid = with_differences(rows()).to_dict("records")
    differences = np.array([0.05, 0.04])  # seeds 0 and 1; seed 2 and seed 3 have no partner
    assert non_iid["difference"] == pytest.approx(differences.mean())
    half = stats.t.ppf(0.975, 1) * differences.std(ddof=1) / math.sqrt(2)
    assert (non_iid["difference_low"], non_iid["difference_high"]) == pytest.approx((0.045 - half, 0.045 + half))
    assert non_iid["p"] == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)


SOURCE = """import numpy as np
from flsim.attacks.membership import Attack


class Model:
    def __init__(self, vocabulary_size, hparams):
        self.size = vocabulary_size


def misspelled(candidates):
    return candidates.logprobs.min(axis=1)


def lacking():
    return 0



def zeroing(candidates):
    for value in candidates.model.parameters():
        value.data.zero_()
    return np.zeros(len(candidates))


def worst(candidates):
    return candidates.log_probs.min(axis=1)


def columns(candidates):
    return np.column_stack([candidates.log_probs.min(axis=1), candidates.lengths])



def of_first(statistics, is_member):
    return lambda values: values[:, 0]


def of_third(statistics, is_member):
    return lambda values: values[:, 2]

loss = worst
no_function = Attack("number", 3)
fit_is_number = Attack("fit", worst, fit=3)
fit_gives_nothing = Attack("fit", columns, fit=lambda statistics, is_member: None)
learned_fails = Attack("fit", columns, fit=of_third)
one_column = Attack("fit", worst, fit=of_first)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(f"{SOURCE}# {tmp_path}")  # equal content is executed once, under its first path
    return tmp_path / "mine.py"


def test_the_attacks_in_the_documentation_score_records(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "membership.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page.partition("## Write an attack")[2], re.DOTALL)
    (tmp_path / "my_attack.py").write_text("\n".join(code))
    records, targets = in_pairs(10)
    for name, scored in (("worst_word", len(records)), ("fitted", len(records) // 2)):
        scores, _ = scores_of(attack_named(f"{tmp_path}/my_attack.py:{name}"), before(untrained(), records), targets)
        assert len(scores) == scored


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Model", "found <class "),
        ("no_function", "found Attack(name='number', score=3, "),
        ("loss", "flsim has an attack loss, whose rows this attack would replace; rename it"),
        ("fit_is_number", "found Attack(name='fit', score="),
    ],
)
def test_objects_that_are_not_attacks_are_refused(file: Path, name: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        attack_named(f"{file}:{name}")
    assert str(refused.value).startswith(f"{file}:{name}: {message}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("misspelled", ":11: AttributeError: 'Candidates' object has no attribute 'logprobs'"),
        ("lacking", ":lacking: lacking() takes 0 positional arguments but 1 was given; it needs score(candidates)"),
        ("zeroing", ":zeroing: the code changes the model's "),
        (
            "fit_gives_nothing",
            ":fit_gives_nothing: 'NoneType' object is not callable; it needs fit(statistics, is_member)",
        ),
        ("learned_fails", ":39: IndexError: "),
        ("one_column", ":one_column: did not return a finite number for each of 20 records; return float64 [20, F]"),
    ],
)
def test_the_error_of_a_failing_attack_is_one_line_with_its_file(file: Path, name: str, message: str) -> None:
    records, targets = in_pairs(10)
    with pytest.raises(RunFailed) as failed:
        scores_of(attack_named(f"{file}:{name}"), before(untrained(), records), targets)
    assert str(failed.value).startswith(f"{file}{message}")
    assert "\n" not in str(failed.value)

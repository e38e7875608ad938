"""The text, figures and tables of a report, against the files of its runs; a report needs no other file."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import Trained, assert_refused
from htmlpage import Page, described, plain
from reported import Made, roster, write_run, write_sweep
from simulated_report import gathered_of, table_1

from flsim.attacks.audit.audit import audit_subject, subject_of
from flsim.base.errors import InputError
from flsim.base.files import file_digest
from flsim.base.statistics import t_interval
from flsim.canaries.population import Partition
from flsim.models.architectures import ModelHParams
from flsim.report.figures import Figure, Note, ReportTable, number, overview
from flsim.report.gather import Gathered, RunView, Setting, SettingLine, contrasts, gather
from flsim.report.page import answer, render, write_report
from flsim.report.provenance import settings
from flsim.report.tables import privacy
from flsim.results.rows import SCHEMA, RunResults, read_run
from flsim.runs.config import CentralConfig, CentralTrainingHParams, DataHParams, FederatedConfig, TrainingHParams, load
from flsim.show.figure import page_style
from flsim.training.update import LocalHParams


def test_the_first_screen_has_the_question_one_figure_and_one_short_table(page: Page) -> None:
    begin, answer = page.section(""), page.section("answer")
    for text in ("Memorization <by> cohort & partition", "Do users’ own data memorize less?"):
        assert text in begin
    for text in ("Table 9", "smoke: 12 users", "8 of 11 completed", "1 diverged", "1 running", "1 not begun"):
        assert text in answer
    first = page.html[page.html.index('id="answer"') : page.html.index("<nav")]
    assert (first.count("<figure"), first.count("<table"), first.count("<svg role")) == (1, 1, 1)
    assert 1 < first.count("<tr>") <= 1 + 8
    assert page.html.index("<nav") < page.html.index("<section", page.html.index('id="answer"'))


def test_every_setting_status_reason_and_run_occurs(page: Page, sweep: Made) -> None:
    for name, setting in sweep.settings.items():
        assert plain(setting) in page.text
        assert name in page.text
    for text in ("diverged", "the model of round 10 is not finite", "running", "waits", "not begun", "absurd"):
        assert text in page.text


def test_flags_are_compared_in_percent_of_the_planted_canaries(page: Page) -> None:
    """RS finds 7 and 8 (IID), 3 and 4 of 16 in FedAvg, 1 and 1 in DP, 4 and 4 in SGD. DP has only seed 0."""
    section = page.section("contrasts")
    a, b = (100 * np.mean([found, 1]) / 16 for found in (7, 3))
    assert f"IID − non-IID: Partition, FedAvg, 2 pairs RS, % {a:.0f} {b:.0f} +{a - b:.0f} – – – 1 seed" in section
    assert "IID − non-IID: SGD, br=32 RS, % 25 25 +0 – 1 1 16 canaries" in section
    assert re.search(r"FedAvg, bu=4 RS, % 47 22 \+25 .* 0.5 1 2 seeds", section)


def test_published_values_are_shown_next_to_measured_values(page: Page) -> None:
    """RS finds 7 and 8 of 16 canaries. Published are 65 of 90, with IID above non-IID."""
    section = page.section("memorized")
    assert re.search(r"IID, FedAvg, bu=4 2/2 0 3 46.9 29-65 72.2 yes ", section)
    assert "|R| is 1,000 here and unknown in the paper" in section
    assert "RS, Table 9: 1 of 1 pairs of rows" in section


def test_extracted_phrases_are_listed_in_words(page: Page, sweep: Made) -> None:
    """The fixture extracts every second memorized canary, and gives all canaries the same phrase."""
    section = page.section("memorized").partition("in words")[2]
    for name, memorized in sweep.rs.items():
        count = memorized // 2
        if name != "hot" and count:
            setting = plain(sweep.settings[name])
            assert f"{name} {setting} {count} {'; '.join(['“a b c d e”'] * count)} " in section, name
        else:
            assert f"{name} " not in section


def test_each_epsilon_has_its_convention(page: Page) -> None:
    privacy = page.section("privacy")
    assert "paper 18.8 0.001 user fixed-size replace-one S rdp mironov-proposition-3 1 30" in privacy
    assert "replace-one-rdp 152.8 0.001 user fixed-size replace-one 2S rdp tight 1 30" in privacy


def test_seeds_with_different_noise_have_each_their_own(page: Page, sweep: Made) -> None:
    """A second seed of the private IID setting has z = 2, and a third one has no noise."""
    gathered = gather([sweep.path])
    (setting,) = [one for one in gathered.settings if one.label == sweep.settings["dp-iid"]]
    (run,) = setting.runs
    assert run.config
    noisier = replace(run.config, privacy=replace(run.config.privacy, noise_multiplier=2.0))
    setting.runs.append(replace(run, results=replace(run.results, seed=1), config=noisier))
    plain_rows = run.results.rows[~run.results.rows["metric"].str.startswith("epsilon")]
    setting.runs.append(replace(run, results=replace(run.results, seed=2, rows=plain_rows)))
    table, *notes = privacy(gathered)
    assert isinstance(table, ReportTable)
    noise = {(row[0], row[-2]) for row in table.rows if row[0].startswith(setting.label)}
    assert noise == {(f"{setting.label}, seed 0", "1"), (f"{setting.label}, seed 1", "2")}
    (without,) = [note.text for note in notes if isinstance(note, Note) and note.text.startswith("Without noise")]
    assert f"{setting.label}, seed 2" in without


def test_the_settings_of_seeds_without_settings_are_those_of_other_seeds(tmp_path: Path) -> None:
    """The first run folder of a setting has no config.toml."""
    made = write_sweep(tmp_path / "sweep", tmp_path / "corpus")
    label, unknown = made.settings["fedavg-iid-0"], "The privacy of training is not known for: {}."
    (made.path / "runs" / "fedavg-iid-0" / "config.toml").unlink()
    gathered = gather([made.path])
    *_, table = [each for each in settings(gathered) if isinstance(each, ReportTable)]
    (row,) = [row for row in table.rows if row[0] == label]
    assert row[1] == "1"
    assert all(f"{name} = " in row[2] for name in ("data.partition", "training.rounds", "training.cohort"))
    assert Note(unknown.format(label)) not in privacy(gathered)
    (made.path / "runs" / "fedavg-iid-1" / "config.toml").unlink()
    assert Note(unknown.format(label)) in privacy(gather([made.path]))


def test_numbers_of_data_are_those_of_the_corpus_and_the_roster(page: Page, corpus: Path) -> None:
    manifest = json.loads((corpus / "manifest.json").read_text())
    train = manifest["splits"]["train"]
    assert f"train {train['users']:,} {train['records']:,} {train['words']:,}" in page.text
    assert "(2 seeds) 1/20, 50% 8 2.0 2.0 6.0 5.0" in page.text


def test_provenance_has_seeds_lengths_times_digests_and_versions(page: Page, sweep: Made) -> None:
    digest = load(sweep.path / "runs" / "fedavg-iid-1" / "config.toml").digest
    assert f"fedavg-iid-1 1 30 / 30 3 45 s – {digest[:12]}" in page.text
    for text in (
        "torch 2.13.0",
        "flsim sweep table9.toml --out table9 --only fedavg (2 runs)",
        "flsim sweep table9.toml --out table9 (1 run)",
        "2026-01-02T03:04:05Z 9 min 2.0 GiB 2 on 2 1 1",
    ):
        assert text in page.text


def test_curves_and_maps_show_what_was_measured(page: Page, sweep: Made) -> None:
    runs = [read_run(sweep.path / "runs" / f"fedavg-iid-{seed}") for seed in (0, 1)]
    bits = pd.concat([run.of_canaries("exposure", 30) for run in runs])
    first = np.mean([run.of_canaries("exposure", 10).mean() for run in runs])  # type: ignore[union-attr]
    setting = sweep.settings["fedavg-iid-0"]
    told = described(page, "Mean exposure over epochs")
    assert f"{setting}: from {first:.1f} bits at 1 to {bits.mean():.1f} bits at 3 epochs." in told
    shown = described(page, f"By configuration, {setting}")
    by_canary = bits.groupby(level=0, sort=False).mean()
    cells = roster(0).assign(bits=by_canary.to_numpy()).groupby(["p_u", "p_e"], as_index=False)["bits"].mean()
    assert len(cells) == 4
    for p_u, p_e, mean in zip(cells["p_u"], cells["p_e"], cells["bits"], strict=True):
        assert f"1/{1 / p_u:.0f}, {p_e:.0%}: {mean:.1f}" in shown


def test_copies_of_custom_code_are_one_setting_and_no_factor(tmp_path: Path) -> None:
    """Each run folder has a copy of the same file; only the partition and the learning rate differ."""
    own = tmp_path / "mine.py"
    own.write_text("class Bow: ...\n")
    partitions: tuple[Partition, ...] = ("iid", "non-iid")
    for partition, rate, seed in product(partitions, (0.3, 0.9), (0,)):
        config = FederatedConfig(
            DataHParams(tmp_path / "corpus", partition),
            seed,
            model=ModelHParams(architecture=f"{own}:Bow"),
            training=TrainingHParams(rounds=30),
            local=LocalHParams(learning_rate=rate),
        )
        folder = tmp_path / f"{partition}-{rate}-{seed}"
        write_run(folder, config, setting=config.setting, series=config.series, memorized=3 + (partition == "iid"))
    page = Page(render(gather([folder.parent for folder in tmp_path.glob("*/code")])))
    answer = page.section("answer")
    assert "IID − non-IID: Partition, 2 pairs" in answer
    assert "local.learning_rate 0.9" in answer
    assert "model.architecture" not in answer
    [copy] = {path.name for path in tmp_path.glob("*/code/*.py")}
    assert copy == f"mine.{file_digest(own)[:16]}.py"
    assert f"model.architecture {copy}:Bow cifg" in page.section("settings")
    assert str(tmp_path) not in page.section("settings")


def test_a_run_that_is_not_evaluated_has_a_report(tmp_path: Path) -> None:
    html = render(gather([write_run(tmp_path / "run", rounds=(), status="running")]))
    assert "No run has been evaluated yet" in html
    assert "<svg" not in html


def test_an_unfinished_run_shows_its_results(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", memorized=5, reason="no space left", rounds=(0,), status="interrupted")
    page = Page(render(gather([folder])))
    assert re.search(r"RS /16 .*bu=4 .*\b5\.0\b", page.section("answer"))
    assert "no space left" in page.text


def test_text_is_escaped(tmp_path: Path, corpus: Path) -> None:
    config = FederatedConfig(DataHParams(corpus), training=TrainingHParams(cohort=4))
    nasty = '"><script>alert(1)</script>'
    folder = write_run(tmp_path / "run", config, setting=f"IID, {nasty}", name="run", status="failed", reason=nasty)
    page = Page(render(gather([folder])))
    assert "script" not in {tag for tag, _ in page.elements}
    assert nasty in page.text
    assert page.html.count("&lt;script&gt;") > 5


def test_structure_is_accessible(page: Page) -> None:
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in page.elements:
        for name in ("aria-labelledby", "aria-describedby"):
            assert attributes.get(name, ids[0]) in ids
        assert attributes.get("href", f"#{ids[0]}")[1:] in ids
    assert page.elements_of("html") == [{"lang": "en"}]
    assert [len(page.elements_of(tag)) for tag in ("h1", "main", "header", "nav", "footer")] == [1] * 5
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch("h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in zip([0, *levels], levels, strict=False))
    assert all(svg.get("role") == "img" or svg.get("aria-hidden") == "true" for svg in page.elements_of("svg"))
    assert len(page.elements_of("caption")) == len(page.elements_of("table"))
    assert {th.get("scope") for th in page.elements_of("th")} == {"col", "row"}
    assert len(page.elements_of("figcaption")) == len(page.elements_of("figure"))


def test_a_large_sweep_stays_below_three_megabytes() -> None:
    """Panels grow with a sweep, so one of 8 pairs may need an eighth: the paper's 90 canaries, 40 evaluations."""
    canaries, rounds = [f"c{index:02d}" for index in range(90)], range(200, 8001, 200)
    planted = pd.DataFrame({"canary": canaries, "tokens": [[1]] * 90, "words": [["a"]] * 90, "p_u": [0.1, 0.2] * 45})
    flags = product(rounds, ("rs", "bs"), canaries)
    of_model = {"references": 2e6, "accuracy": 0.2, "perplexity": 60.0}
    rows = [
        ("run", at, "exposure", canary, at / 999 + index)
        for at, (index, canary) in product(rounds, enumerate(canaries))
    ]
    rows += [("run", at, metric, canary, float(at > 4000)) for at, metric, canary in flags]
    rows += [("run", at, metric, "", value) for at, (metric, value) in product(rounds, of_model.items())]
    frame, names = pd.DataFrame(rows, columns=SCHEMA.names), ("IID, A", "Non-IID, A")
    known: tuple[pd.DataFrame, pd.DataFrame, dict[str, str], float, int] = frame, planted.assign(p_e=1.0), {}, 100.0, 0
    runs = [RunResults(name, name, "completed", None, 8000, 8000, *known, name) for name in names]
    settings = [Setting(run.name, run.name[:-3].lower(), [RunView(Path(run.name), run, None)]) for run in runs]
    assert 50_000 < len(render(Gathered([], [SettingLine("A", settings)], [])).encode()) < 3_000_000 / 8


def test_the_figure_at_the_top_has_each_setting(page: Page, sweep: Made) -> None:
    """FedAvg has two seeds and so an interval; the others have one seed."""
    told = described(page, "Mean exposure")
    for partition, name in (("iid", "IID"), ("non-iid", "Non-IID")):
        runs = [read_run(sweep.path / "runs" / f"fedavg-{partition}-{seed}") for seed in (0, 1)]
        means = [float(run.of_canaries("exposure", 30).mean()) for run in runs]  # type: ignore[union-attr]
        low, high = (number(end) for end in t_interval(np.array(means)))
        assert f"{name}, FedAvg, b_u=4: {np.mean(means):.1f} ({low} to {high})." in told
        assert f"{name}, SGD, b_r=32: 5.1." in told
    assert "b_u=6" not in told
    assert page.html.index("overview-t") < page.html.index("<table")


def test_a_report_on_many_settings_begins_with_the_effects_of_factors() -> None:
    """Seven cohort sizes and six batch sizes in both partitions: 13 rows are more than a figure has."""
    data = {partition: DataHParams(Path("corpus"), partition) for partition in ("iid", "non-iid")}
    federated = [TrainingHParams(rounds=50, cohort=size) for size in range(2, 9)]
    central = [CentralTrainingHParams(steps=99, batch_size=size) for size in range(2, 8)]
    configs = [FederatedConfig(data[partition], training=each) for each in federated for partition in data]
    configs += [CentralConfig(data[partition], training=each) for each in central for partition in data]  # type: ignore[misc]
    gathered = gathered_of(configs, lambda config, _: 4.0 + (config.data.partition == "iid"), seeds=2)
    with page_style():
        figure, table = answer(gathered, contrasts(gathered))
    assert isinstance(figure, Figure)
    assert "IID − non-IID, FedAvg, end of training: +1.00 (+1.00 to +1.00)." in str(figure.panels[0][1])
    assert isinstance(table, ReportTable)
    assert 1 < len(table.rows) <= 8


def test_the_figure_excludes_a_seed_that_diverged_from_both_partitions() -> None:
    configs = [config for config in table_1() if config.label == "FedAvg, b_u=4"]
    gathered = gathered_of(configs, lambda config, seed: 4.0 + seed + (config.data.partition == "iid"))
    runs = gathered.settings[0].runs
    runs[2] = replace(runs[2], results=replace(runs[2].results, status="diverged"))
    with page_style():
        (figure,) = overview(gathered)
    assert "IID, FedAvg, b_u=4: 5.5" in str(figure.panels[0][1])  # seeds 0 and 1 of both
    assert "Non-IID, FedAvg, b_u=4: 4.5" in str(figure.panels[0][1])


def test_the_same_results_give_the_same_bytes_also_in_a_pipe(tmp_path: Path) -> None:
    """The pipe is written by another process, whose sets of strings have another order."""
    paths = [write_run(tmp_path / partition, setting=f"{partition}, FedAvg, b_u=4") for partition in ("IID", "Non-IID")]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    code = "import sys; from pathlib import Path; from flsim.report.page import write_report as write; "
    code += "*paths, out = map(Path, sys.argv[1:]); write(paths, out)"
    command = [sys.executable, "-c", code, *map(str, paths), str(pipe)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONHASHSEED": "7"}):
        read = pipe.read_bytes()
    write_report(paths, tmp_path / "here.html")
    assert read == (tmp_path / "here.html").read_bytes()


def test_bad_input_is_one_line_and_writes_nothing(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "sweep.json").write_text("{")
    about = dict.fromkeys(("name", "title", "question", "tier", "about", "command"), "")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "sweep.json").write_text(
        json.dumps({**about, "source": None, "versions": {}, "runs": [], "sessions": []})
    )
    for arguments, says in (
        (("nowhere", "--out", "report.html"), "not a run folder"),
        (("run", "--out", "report.pdf"), "reports have the format .html"),
        (("run", "--out", "missing/report.html"), "the folder missing does not exist"),
        (("run", "broken", "--out", "report.html"), "the file is damaged"),
        (("empty", "--out", "report.html"), "no run has started"),
    ):
        assert_refused(tmp_path, ["report", *arguments], says)


def test_an_existing_report_stays_if_a_new_one_fails(tmp_path: Path) -> None:
    run, out = write_run(tmp_path / "run"), tmp_path / "report.html"
    out.write_bytes(b"before")
    (run / "planted" / "roster.parquet").write_bytes(b"damaged")
    with pytest.raises(InputError, match="not a readable Parquet file"):
        write_report([run], out)
    assert out.read_bytes() == b"before"
    assert not list(tmp_path.glob(".*"))


def test_without_probabilities_configurations_are_numbers_of_copies(tmp_path: Path) -> None:
    html = render(gather([write_run(tmp_path / "run", copies=(1, 4, 16), memorized=4)]))
    told = described(Page(html), "By configuration, IID, FedAvg, b_u=4")
    assert "RS, %: 1 copy: 67; 4 copies: 0; 16 copies: 0." in told


def test_a_report_has_the_rows_of_the_audit(trained_here: Trained) -> None:
    run = trained_here("canaries.coins=true", "canaries.count=10", "canaries.p_u=[0.05]")
    (row,) = [
        row for row in audit_subject(subject_of(run)).frame.to_dict("records") if row["method"] == "epsilon, coins"
    ]
    table = render(gather([run])).partition("Statements about epsilon")[2].partition("epsilon, coins</td>")[2]
    cells = re.findall(r"<td[^>]*>(.*?)</td>", table.partition("</tr>")[0])
    values = [row["kind"], f"{row['detected']}", f"{row['trials']}", "–", f"{row['low']:.2f}", f"{row['delta']:.2g}"]
    assert [cell for cell in cells if cell != "–"] == [value for value in values if value != "–"]

"""Configuration: defaults, names, digests, paths, lengths, former names, and error messages."""

import json
import math
import re
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frozen_results import unpack
from helpers import Experiment
from hypothesis import given
from hypothesis import strategies as st

from flsim.base import machine
from flsim.base.errors import InputError
from flsim.base.settings import with_former_names, with_present_names
from flsim.canaries.spec import CanaryHParams
from flsim.data.corpus import Split
from flsim.data.records import Layout
from flsim.measures.memorization.score import references
from flsim.models.architectures import BUILT_IN, ModelHParams, build, weights_of
from flsim.results.rows import read_run_file, read_settings
from flsim.results.sweeps import read_sweep
from flsim.runs.config import (
    CentralConfig,
    Config,
    DataHParams,
    FederatedConfig,
    ScheduledEvaluationHParams,
    TrainingHParams,
    dump,
    files,
    load,
    parse,
)
from flsim.runs.config.custom_code import refuse_other_settings
from flsim.runs.folder import Run

MINIMAL = '[data]\ncorpus = "corpus"\n'
NOISE = ("privacy.mechanism=dp", "privacy.clip=0.1", "privacy.noise_multiplier=1")
CENTRAL = MINIMAL + '[training]\nkind = "central"\n'


def read_any(tmp_path: Path, text: str, *overrides: str) -> Config:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return load(path, overrides)


def read(tmp_path: Path, text: str, *overrides: str) -> FederatedConfig:
    config = read_any(tmp_path, text, *overrides)
    assert isinstance(config, FederatedConfig)
    return config


def read_central(tmp_path: Path, *overrides: str) -> CentralConfig:
    config = read_any(tmp_path, CENTRAL, *overrides)
    assert isinstance(config, CentralConfig)
    return config


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    """Expected: Thakkar et al. (2020), section 4.1, whose cohorts are 500 to 5,000."""
    config = read(tmp_path, MINIMAL)
    assert (config.model.embedding, config.model.units) == (96, 670)
    assert config.canaries.p_u == (1 / 5_000, 3 / 50_000, 1 / 50_000)
    assert config.canaries.p_e == (0.01, 0.1, 1.0)
    assert (config.training.rounds, config.training.cohort) == (8_000, 500)
    assert (config.evaluation.references, config.evaluation.beam_width, config.evaluation.prefix) == (2_000_000, 5, 1)
    assert config.setting == "Non-IID, FedAvg, b_u=500"


@pytest.mark.parametrize(
    ("overrides", "setting"),
    [
        (["privacy.mechanism=clip", "privacy.clip=0.2"], "Non-IID, FedAvg+Clip, S=0.2, b_u=500"),
        (["model.architecture=transformer", "model.layers=3"], "Non-IID, FedAvg, Transformer 3 layers, b_u=500"),
        (
            [*NOISE, "privacy.target_quantile=0.5", "training.sampler=poisson", "training.server_optimizer=adam"],
            "Non-IID, DP-FedAvg+Adam, S=q50%, z=1, b_u=500, Poisson",
        ),
    ],
)
def test_the_setting_names_differences_from_plain_averaging(tmp_path: Path, overrides: list[str], setting: str) -> None:
    config = read(tmp_path, MINIMAL, *overrides)
    assert config.setting == setting
    assert config.digest != read(tmp_path, MINIMAL).digest
    dump(config, tmp_path / "dumped.toml")
    assert load(tmp_path / "dumped.toml") == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cohort = 3\n" + MINIMAL, "unknown key cohort; did you mean training.cohort?"),
        (MINIMAL + "[local]\nlearning_rte = 1\n", "unknown key local.learning_rte; did you mean local.learning_rate?"),
        (MINIMAL + "[local]\nfoo = 1\n", "unknown key local.foo; `flsim settings` lists all settings"),
        (MINIMAL + "[training]\nlearning_rate = 1\n", "remove these settings, or did you mean local.learning_rate?"),
        (MINIMAL + '[system]\ndevice = "meta"\n', "remove these settings, or did you mean system.gpus_per_client?"),
        (MINIMAL + "[training]\nbatch_size = 3\n", "training.batch_size: of central training, but training.kind is"),
        (MINIMAL + "[canaries]\np_e = 0.3\n", "canaries.p_e must be a list, such as [0.3], found 0.3"),
        (MINIMAL + "[canaries]\np_e = [0.5, 0.5]\n", "canaries.p_e must list different values, found [0.5, 0.5]"),
        (MINIMAL + '[training]\nrounds = "many"\n', "training.rounds must be an integer, found 'many'"),
        (MINIMAL + "[local]\nlearning_rate = nan\n", "local.learning_rate must be a finite number, found nan"),
        (MINIMAL + "[evaluation]\ndecide = 1\n", "evaluation.decide must be true or false, found 1"),
        ("training = 3\n" + MINIMAL, "training must be a table, found 3"),
        (CENTRAL + 'order = "iid"\n', 'training.order "iid" contradicts data.partition "non-iid"'),
        (MINIMAL + '[local]\nprecision = "bf16"\n[system]\nengine = "local"\n', "precision 'bf16' needs"),
        (MINIMAL + "[privacy]\nclip = 0.2\n", 'privacy: mechanism "none" does not clip updates; remove clip'),
        (
            MINIMAL + '[privacy]\nmechanism = "dp"\nclip = 1\nnoise_multiplier = 200\ntarget_quantile = 0.5\n',
            "uses more privacy than noise_multiplier 200 allows; raise it above",
        ),
        (MINIMAL + "[model]\nlayers = 2\n", 'model: architecture "cifg" has one layer, found layers = 2'),
        (MINIMAL + "[local]\nmomentum = 0.5\n", 'local: momentum 0.5: has no effect with optimizer "sgd"; it is for'),
        (MINIMAL + "[audit]\nupdate_canaries = 100_001\n", "audit.update_canaries must be at most 100000"),
        (MINIMAL.replace('"c', '"\\u0000c'), "contains a null character; remove it"),
        ("", "data is missing"),
        ("[data\n", "not TOML: "),
    ],
)
def test_bad_settings_are_refused_in_one_line_that_names_them(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        read_any(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "run.toml"))
    assert "\n" not in str(caught.value).partition("not TOML")[0]


@pytest.mark.parametrize("override", ["training.rounds", "=3", "a..b=1", "seed.x=1", "seed=1\nother=2"])
def test_malformed_overrides_are_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(InputError, match=r"write a setting as|is a value, not a section|more than one setting"):
        read(tmp_path, "seed = 1\n" + MINIMAL, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.round=10", "training.round=10: unknown key training.round; did you mean training.rounds?"),
        ("training.rounds=0", "training.rounds=0: training.rounds must be at least 1, found 0"),
        ("training.batch_size=3", "training.batch_size=3: training.batch_size: of central training"),
    ],
)
def test_an_override_is_named_in_place_of_the_file(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        read(tmp_path, MINIMAL, "seed=3", override)
    with pytest.raises(InputError, match=r"run\.toml: training\.rounds must be"):
        read(tmp_path, MINIMAL + "[training]\nrounds = 0\n", "seed=3")


CHANGES = ("seed=1", "data.partition=iid", "model.units=9", "canaries.count=3")
CHANGES_NOTHING = ("evaluation.every=1", "data.corpus='x'", "training.epochs=9")


@pytest.mark.parametrize(
    ("text", "changes", "changes_nothing"),
    [
        (MINIMAL, ("local.epochs=2", "training.cohort=5"), ("system.shards=9", "training.rounds=1")),
        (CENTRAL, ("training.batch_size=9", "training.dropout=0.1"), ("training.steps=9", "training.order=sequence")),
    ],
)
def test_the_digest_of_results(
    tmp_path: Path, text: str, changes: tuple[str, ...], changes_nothing: tuple[str, ...]
) -> None:
    """Settings that may change when a run is resumed do not change the digest."""
    digest = read_any(tmp_path, text).digest
    assert all(read_any(tmp_path, text, override).digest != digest for override in CHANGES + changes)
    assert all(read_any(tmp_path, text, override).digest == digest for override in CHANGES_NOTHING + changes_nothing)
    assert read_central(tmp_path).digest != read(tmp_path, MINIMAL).digest


def test_relative_paths_start_at_the_file_or_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "settings").mkdir()
    (tmp_path / "shell").mkdir()
    monkeypatch.chdir(tmp_path / "shell")
    text = '[data]\ncorpus = "in-file"\n[evaluation]\nalso = ["mine.py:measure"]\n'
    (tmp_path / "settings" / "run.toml").write_text(text)
    path = Path("../settings/run.toml")
    config = load(path)
    assert config.data.corpus == tmp_path / "settings" / "in-file"
    assert config.evaluation.also == (f"{tmp_path}/settings/mine.py:measure",)
    overrides = ("data.corpus=typed", 'evaluation.also=["mine.py:measure", "space"]', "training.sampler=sub/s.py:Turns")
    typed = load(path, overrides)
    assert typed.data.corpus == tmp_path / "shell" / "typed"
    assert typed.evaluation.also == (f"{tmp_path}/shell/mine.py:measure", "space")
    assert typed.training.sampler == f"{tmp_path}/shell/sub/s.py:Turns"  # type: ignore[attr-defined]
    assert load(path, ["data={corpus='typed', partition='iid'}"]).data.corpus == tmp_path / "shell" / "typed"
    assert load(path, ["data.corpus=s3://bucket/corpus"]).data.corpus == "s3://bucket/corpus"


def test_central_settings_are_named_as_the_papers(tmp_path: Path) -> None:
    """Thakkar et al. (2020), Table 1, has "IID, SGD, b_r = 32". With noise, both partitions draw records at random."""
    private = ("privacy.mechanism=dp", "privacy.clip=10", "privacy.noise_multiplier=0.5")
    for overrides, setting, order in (
        ((), "Non-IID, SGD, b_r=32", "sequence"),
        (("data.partition=iid",), "IID, SGD, b_r=32", "iid"),
        (("data.partition=iid", "model.architecture=lstm"), "IID, SGD, LSTM, b_r=32", "iid"),
        (("training.order=sequence", "training.optimizer=adam"), "Non-IID, Adam, b_r=32", "sequence"),
        (("privacy.mechanism=clip", "privacy.clip=1"), "SGD+Clip, C=1, b_r=32", "iid"),
        ((*private, "training.optimizer=rmsprop", "data.partition=iid"), "DP-RMSProp, C=10, z=0.5, b_r=32", "iid"),
    ):
        config = read_central(tmp_path, *overrides)
        assert (config.setting, config.order) == (setting, order)


def test_the_default_of_a_removed_setting_is_still_read_and_other_values_are_refused(tmp_path: Path) -> None:
    assert read_central(tmp_path, "system.workers=1") == read_central(tmp_path)
    with pytest.raises(InputError, match=r"unknown key system\.workers"):
        read_central(tmp_path, "system.workers=4")


def test_a_run_from_before_architectures_keeps_its_digest(tmp_path: Path) -> None:
    """Expected: digests of `MINIMAL` and `CENTRAL` by the last version without architectures."""
    assert read(tmp_path, MINIMAL).digest == "3a6ca425865abb84a617b9daa2a37033f4012e4c00ba552e7aa287603d630f70"
    assert read_central(tmp_path).digest == "60ad27c060441954349d446724920767d8ae809ee6d498fdfd97d0c66efc4f76"


@given(key=st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20))
def test_no_unknown_key_is_ever_ignored(key: str) -> None:
    known = {item.name for kind in (FederatedConfig, CentralConfig) for item in fields(kind)}
    if key not in known:
        with pytest.raises(InputError, match="unknown key"):
            parse({"data": {"corpus": "c"}, key: 1}, "x.toml")


def test_a_schedule_has_the_length_in_the_digest_and_a_series_has_no_seed() -> None:

    def central(**training: object) -> CentralConfig:
        config = parse({"data": {"corpus": "c"}, "training": {"kind": "central", **training}}, "x")
        assert isinstance(config, CentralConfig)
        return config

    assert central(epochs=1, schedule="linear").digest != central(epochs=2, schedule="linear").digest
    other = replace(central(), seed=1)
    assert other.digest != central().digest
    assert other.series == central().series != central(dropout=0.1).series


def train_split(records: int, users: int) -> Split:
    """Return records of 8 words, divided equally among users."""
    tokens, offsets = np.zeros(8 * records, np.uint16), np.arange(0, 8 * records + 1, 8)
    return Split(Layout(12), tokens, offsets, np.arange(users + 1) * records // users, Path("nowhere"))


def test_epochs_of_both_kinds_are_the_same_data() -> None:
    """One epoch of 1,000 records of 50 users is 32 steps of 32 records, or 5 rounds of 10 users. With 2 local epochs it
    is 2.5 rounds; with at most 10 of a user's 20 records, 10 rounds."""
    train, data = train_split(1_000, 50), {"corpus": "c"}
    server = {"training": {"cohort": 10, "epochs": 3}}
    central = parse({"data": data, "training": {"kind": "central", "epochs": 3}}, "x")
    assert (central.rounds_per_epoch(train), central.rounds_over(train)) == (32, 96)
    words = parse({"data": data, "training": {"kind": "central", "words": 24_000}}, "x")
    assert words.rounds_over(train) == 96
    for local, rounds, epoch in (({}, 15, 5.0), ({"epochs": 2}, 8, 2.5), ({"max_records": 10}, 30, 10.0)):
        federated = parse({"data": data, "local": local, **server}, "x")
        assert (federated.rounds_per_epoch(train), federated.rounds_over(train)) == (epoch, rounds)


def test_no_evaluation_is_due_a_round_before_the_last() -> None:
    """Eight epochs of 4,000 users in cohorts of 51 are 627.45 rounds. Training and the second evaluation end at 628."""
    train = train_split(16_000, 4_000)
    config = parse({"data": {"corpus": "c"}, "training": {"cohort": 51, "epochs": 8}}, "x")
    schedule, per_epoch = ScheduledEvaluationHParams(every_epochs=4.0), config.rounds_per_epoch(train)
    assert config.rounds_over(train) == 628
    assert [round_ for round_ in range(1, 629) if schedule.is_due(round_, per_epoch)] == [314, 628]


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 40), st.integers(1, 40))
def test_evaluations_are_due_once_so_many_epochs_are_read(users: int, cohort: int, upper: int, lower: int) -> None:
    """A round is due if it is the first by which a multiple of the epochs has been read, in exact fractions."""
    per_epoch, every = Fraction(users, cohort), Fraction(upper, lower)
    due = {math.ceil(count * every * per_epoch) for count in range(1, 101 + int(100 / (every * per_epoch)))}
    schedule = ScheduledEvaluationHParams(every_epochs=float(every))
    evaluated = {round_ for round_ in range(1, 101) if schedule.is_due(round_, float(per_epoch))}
    assert evaluated == {round_ for round_ in due if round_ <= 100}


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("evaluation", {"every_epochs": 0.0}, "every_epochs must be above 0"),
        ("evaluation", {"every": 20, "every_epochs": 2.0}, r"every_epochs \(2\) and every \(20\) both set when"),
        ("training", {"rounds": 20, "epochs": 2.0}, r"epochs \(2\) and rounds \(20\) both set how long"),
    ],
)
def test_two_settings_of_one_quantity_are_refused(section: str, values: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse({"data": {"corpus": "c"}, section: values}, "x")


def test_a_refused_length_has_its_reason(tmp_path: Path) -> None:
    """Windows in fractions would move. If another setting differs too, the message names this setting first."""
    data, windows = DataHParams(tmp_path / "corpus"), CanaryHParams(windows=((0.2, 0.5),))
    started = FederatedConfig(data, canaries=windows, training=TrainingHParams(rounds=20))
    longer = replace(started, training=TrainingHParams(rounds=30))
    with pytest.raises(InputError, match=r"training\.rounds was 20 and is now 30 \(some settings depend on the length"):
        refuse_other_settings(started, longer, tmp_path / "run")
    with pytest.raises(InputError, match=re.escape("settings: seed was 0 and is now 1; resume")):
        refuse_other_settings(started, replace(longer, seed=1), tmp_path / "run")


# Former names of settings: files with these names are read, and digests of runs stay the same.
#
# The former name of `data.partition` is `data.world`. The runs in tests/frozen were stored with it.


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"axes": {"data.world": ["iid"]}}, {"axes": {"data.partition": ["iid"]}}),
        ({"data": {"world": "iid", "corpus": "world"}}, {"data": {"partition": "iid", "corpus": "world"}}),
        ({"by": ["data.world", "local.world"]}, {"by": ["data.partition", "local.world"]}),
        ({"world": 1, "model": [{"data.world": 2}]}, {"world": 1, "model": [{"data.partition": 2}]}),
    ],
)
def test_former_names_are_renamed_and_nothing_else(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert with_present_names(old) == new
    assert with_former_names(new) == old


def test_a_configuration_can_have_either_name_but_not_both(tmp_path: Path) -> None:
    for number, line in enumerate(("", 'world = "iid"', 'partition = "iid"', 'world = "non-iid"')):
        (tmp_path / f"{number}.toml").write_text(f'[data]\ncorpus = "corpus"\n{line}\n')
    default, old, new, other = (files.load(tmp_path / f"{number}.toml") for number in range(4))
    assert old == new
    assert old.data.partition == "iid"
    assert default == other
    for override in ("data.world=iid", "data.partition=iid"):
        assert files.load(tmp_path / "3.toml", [override]) == new
    (tmp_path / "both.toml").write_text('[data]\ncorpus = "corpus"\nworld = "iid"\npartition = "iid"\n')
    with pytest.raises(InputError, match=r"both\.toml: world is the old name of partition, and both are set; remove"):
        files.load(tmp_path / "both.toml")


@pytest.mark.parametrize("partition", ["iid", "non-iid"])
def test_a_run_with_former_names_opens_with_its_digests(partition: str, tmp_path: Path) -> None:
    folder = unpack("worlds", tmp_path)
    path = folder / "runs" / f"fedavg-{partition}-seed0"
    stored = json.loads((path / "run.json").read_text())
    assert stored["world"] == json.loads((path / "planted" / "population.json").read_text())["world"] == partition
    run = Run.open(path)
    assert run.config.data.partition == read_run_file(path)["partition"] == partition
    assert read_settings(path)["data.partition"] == partition
    assert (run.config.digest, run.series) == (stored["config"], stored["series"])
    run.load(path / "checkpoints" / "round-000060.safetensors")  # refused if the digest differed
    axes = {entry.name: entry.axes for entry in read_sweep(folder).runs}
    assert axes[path.name] == {"data.partition": partition}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["seed=-1"], "seed must be at least 0, found -1"),
        (
            ["canaries.p_u=[0.5]", "canaries.p_e=[0.5, 1.0]", "canaries.count=4"],
            "8 canaries would replace about 576 records, and the training users have 192; set a smaller canaries.count",
        ),
        (
            ["canaries.p_u=[1e-9]", "canaries.p_e=[1.0]", "canaries.count=100000"],
            "100,000 canaries, but a run can have at most",
        ),
        (["evaluation.references=99999999999999"], "evaluation.references = 99,999,999,999,999 needs"),
        (["evaluation.beam_width=100000000000", "canaries.length=20"], "evaluation.beam_width = 100,000,000,000 needs"),
        (["canaries.length=1000000000"], "canaries of 1,000,000,000 words would be cut"),
        (["model.embedding=1000000000"], "set a smaller model.embedding or model.units"),
        (["model.units=1000000000"], "weights needs"),
    ],
)
def test_impossible_settings_are_refused(experiment: Experiment, settings: list[str], message: str) -> None:
    """The corpus has 192 training records, and (0.5 * 0.5 + 0.5 * 1.0) * 4 times these are 576."""
    (experiment.folder / "bare.toml").write_text('[data]\ncorpus = "corpus"\n[training]\ncohort = 6\n')
    with pytest.raises(InputError, match=f"^[^\n]*{re.escape(message)}[^\n]*$"):
        Run.create(load(experiment.folder / "bare.toml", settings), experiment.folder / "run")
    assert not list(experiment.folder.glob("*run*"))


def test_references_that_do_not_fit_are_refused_before_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """References are drawn and sorted: two tables of 8 bytes a word, so 1,000 of 4 words take 64,000 bytes."""
    monkeypatch.setattr(machine, "machine_memory", lambda: 63_999)
    with pytest.raises(InputError, match=r"evaluation\.references = 1,000 needs"):
        references(0, 1_000, 4, Layout(12))
    monkeypatch.setattr(machine, "machine_memory", lambda: 64_000)
    assert references(0, 1_000, 4, Layout(12)).shape == (1_000, 4)


@pytest.mark.parametrize("architecture", [name for name in BUILT_IN if name != "hf"])  # its sizes are those of a base
def test_weights_are_counted_without_memory_for_them(architecture: str) -> None:
    hparams = ModelHParams(8, 12, architecture=architecture)
    assert weights_of(50, hparams) == sum(value.numel() for value in build(50, hparams).trainable.values())
    assert weights_of(50, ModelHParams(10**8, 16, architecture=architecture)) > 50 * 10**8


def test_sizes_beyond_64_bits_are_refused() -> None:
    with pytest.raises(InputError, match=r"^model: a tensor is too large .*; set smaller sizes$"):
        weights_of(50, ModelHParams(10**12, 16, architecture="transformer"))

"""Predicted disk space next to run folders that are really made."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import Experiment

from flsim.data.corpus import Corpus
from flsim.planning.plan import corpus_bytes, run_disk
from flsim.planning.scale import Users, checkpoints_of
from flsim.runs.config import CentralConfig, load
from flsim.runs.folder import Run

CENTRAL = ("training.kind='central'", "training.steps=4", "training.batch_size=4")
WIDE = ("model.embedding=64", "model.units=128")  # so that a checkpoint is more than its header


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def config_of(experiment: Experiment, *overrides: str) -> Path:
    text = experiment.config.read_text()
    if overrides and overrides[0] == CENTRAL[0]:
        for of_federated in ("rounds = 4\ncohort = 6\n", "[local]\nbatch_size = 4\n", "shards = 1\n"):
            text = text.replace(of_federated, "")
    path = experiment.folder / "this.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "overrides",
    [
        (*WIDE, "training.server_optimizer='adam'"),
        (*CENTRAL, *WIDE),
        (*CENTRAL, *WIDE, "training.optimizer='momentum'"),
    ],
)
@pytest.mark.parametrize("world", ["iid", "non-iid"])
def test_a_run_folder(experiment: Experiment, overrides: tuple[str, ...], world: str) -> None:
    """Checkpoints within 5%, and what is planted within 3 kB: of a tiny roster the file's frame is most."""
    settings = load(config_of(experiment, *overrides), (*overrides, f"data.world='{world}'"))
    run = Run.create(settings, experiment.folder / "run")  # 4 rounds, evaluated after 2 and 4
    state, slots = run.latest_state(), dict[str, dict[str, torch.Tensor]]()
    if isinstance(settings, CentralConfig):
        names = {"sgd": (), "momentum": ("momentum_buffer",), "adam": ("exp_avg", "exp_avg_sq")}
        for slot in names[settings.training.optimizer]:
            slots[slot] = {name: value.clone() for name, value in state.params.items()}
        run.save(replace(state, round=2, moments=slots))
        run.save(replace(state, round=4, moments=slots))
    else:
        run.save(replace(state, round=2))
        run.save(replace(state, round=4))
    use = run_disk(run.config, run.corpus.split("train"))
    assert use.kept == 2
    assert use.checkpoints == pytest.approx(size_of(run.path / "checkpoints"), rel=0.05)
    assert use.planted == pytest.approx(size_of(run.path / "planted"), abs=3_000)
    assert use.meanwhile == pytest.approx(1.5 * use.checkpoints)  # three, of two
    assert corpus_bytes(run.corpus) == size_of(run.corpus.path)


def test_the_checkpoint_at_which_arms_part_is_one_more(experiment: Experiment) -> None:
    """Evaluated after rounds 2 and 4; a window that begins after round 3 keeps that one, too."""
    train = Corpus.open(experiment.folder / "corpus").split("train")
    windows = ("[[0, 1]]", "[[2, 4]]", "[[3, 4]]")
    configs = [load(experiment.config, [f"canaries.windows={window}"]) for window in windows]
    assert [checkpoints_of(config, train) for config in configs] == [2, 2, 3]


def test_a_twin_is_a_number_for_each_record(experiment: Experiment) -> None:
    """4 bytes a record, and 8 for where each user starts, and the end."""
    own, twin = (
        run_disk(load(experiment.config, [f"data.world='{world}'"]), Users(24, 192, 900, 40).split())
        for world in ("non-iid", "iid")
    )
    assert twin.planted - own.planted == 4 * 192 + 8 * 25
    assert twin.checkpoints == own.checkpoints

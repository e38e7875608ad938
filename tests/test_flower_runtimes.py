"""`flwr run .` trains on Flower's simulation runtime, and on a real SuperLink with real SuperNodes over TLS."""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from zipfile import ZipFile

import pytest
from flower_commands import Flower, wait_until
from flwr.cli.build import build_fab_from_files
from helpers import TINY, Experiment, Trained, assert_same, wait_for_round
from raynodes import free_port
from typer.testing import CliRunner

from flsim.base.errors import InputError
from flsim.base.machine import PACKAGES
from flsim.cli import app as cli
from flsim.runs import config
from flsim.runs.folder import Run
from server.app import refuse_other_code, run_of

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy" / "flower"
# If a SuperNode dies, another one trains its shard after `deadline` seconds; Flower itself notices after a minute.
SETTINGS = TINY.replace("rounds = 4", "rounds = 2").replace("shards = 1", "shards = 2") + "deadline = 40\n"
# In the reference run, client processes sum branches; on Flower's runtimes, the server sums them in the same order.
TREE = SETTINGS.replace("shards = 2", "shards = 3\nbranch = 2")


@pytest.fixture
def flower(tmp_path: Path) -> Iterator[Flower]:
    (tmp_path / "flower").mkdir()
    flower = Flower(tmp_path / "flower")
    try:
        yield flower
    finally:
        flower.close()
    assert not flower.processes()


@pytest.fixture
def tiny(experiment: Experiment) -> Experiment:
    experiment.config.write_text(SETTINGS)
    return experiment


def run_config(experiment: Experiment, out: str, resume: bool = False) -> str:
    return f"config='{experiment.config}' out='{experiment.folder / out}' resume={str(resume).lower()}"


def table_of(run: Path) -> str:
    """Return what `flsim table` prints."""
    done = CliRunner().invoke(cli, ["table", str(run)])
    assert done.exit_code == 0, done.output
    assert "Non-IID, FedAvg" in done.stdout
    return done.stdout


@pytest.mark.nightly
def test_flower_s_simulation_trains_the_same_run(tiny: Experiment, trained_here: Trained, flower: Flower) -> None:
    tiny.config.write_text(TREE)
    reference = trained_here()
    Run.create(config.load(tiny.config), tiny.folder / "simulated")  # a run that ended before its first round
    asked = run_config(tiny, "simulated", resume=True)
    port = str(free_port())
    said = flower.flwr("run", ROOT, "--stream", "--run-config", asked, FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=port)
    assert "simulated: 2 of 2" in said, said
    assert_same(reference, tiny.folder / "simulated")
    assert table_of(tiny.folder / "simulated") == table_of(reference)


@dataclass
class Deployment:
    """A SuperLink and SuperNodes on loopback, with certificates and keys, as deploy/flower/README.md starts them."""

    flower: Flower
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        subprocess.run([DEPLOY / "certificates.sh", self.certificates], check=True)
        self.flower.start(
            DEPLOY / "superlink.sh",
            FLSIM_STATE=self.flower.folder / "superlink",
            FLSIM_PORT=str(self.port),
            FLSIM_CERTIFICATES=self.certificates,
        )
        (self.flower.folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{self.certificates / "ca.crt"}"\n'
        )
        wait_until(lambda: "Uvicorn running on https" in self.flower.output, self.flower)

    @property
    def certificates(self) -> Path:
        return self.flower.folder / "certificates"

    def supernode(self, name: str, register: bool = True) -> subprocess.Popen[bytes]:
        folder = self.flower.folder / name
        folder.mkdir()
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", folder / "key"], check=True)
        if register:
            self.flower.flwr("supernode", "register", folder / "key.pub")
        return self.flower.start(
            DEPLOY / "supernode.sh",
            FLSIM_STATE=folder,
            FLSIM_PORT=str(free_port()),
            FLSIM_SUPERLINK=f"127.0.0.1:{self.port}",
            FLSIM_CA=self.certificates / "ca.crt",
            FLSIM_KEY=folder / "key",
        )

    def online(self) -> int:
        return self.flower.output.count("SuperNode ID: ")


def copy_of_app(folder: Path) -> Path:
    """Return a copy of what `flwr run` sends. It matches every path of a virtual environment against .gitignore."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.slow
def test_supernodes_train_the_same_run_though_one_is_killed(
    tiny: Experiment, trained_here: Trained, flower: Flower
) -> None:
    tiny.config.write_text(TREE)
    app = copy_of_app(tiny.folder / "app")
    deployment = Deployment(flower)
    stranger = deployment.supernode("stranger", register=False)
    first, _ = deployment.supernode("first"), deployment.supernode("second")
    reference = trained_here()
    wait_until(lambda: deployment.online() == 2, flower)
    assert stranger.wait(timeout=60) != 0

    running = flower.start("flwr", "run", app, "--stream", "--run-config", run_config(tiny, "deployed"))
    assert len(wait_for_round(tiny.folder / "deployed", 1)) >= 2  # a node may start more than one client process
    first.send_signal(signal.SIGKILL)
    assert running.wait(timeout=300) == 0
    assert "deployed: 2 of 2" in flower.output, flower.output
    assert_same(reference, tiny.folder / "deployed")
    assert table_of(tiny.folder / "deployed") == table_of(reference)

    said = flower.flwr("run", app, "--stream", "--run-config", run_config(tiny, "deployed"))
    path = tiny.folder / "deployed"
    assert f"\nflsim: {path}: already exists; continue it with resume=true, or name another folder\n" in said
    (run, *_) = json.loads(flower.flwr("list", "--format", "json", "--limit", "1"))["runs"]
    assert run["status"] == "finished:failed"


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # caused by Flower
def test_the_app_has_the_source_and_no_other_files() -> None:
    """`flwr run` sends to every node each file that `code_digest` counts, README.md and LICENSE, and no other files.
    `flwr build` itself refuses more than Flower's 10 MiB. One file represents all files of environments, `.venv*`."""
    sources = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    pages = [ROOT / "README.md", ROOT / "LICENSE"]
    files: dict[str, bytes | Path] = {".venv/lib/other.py": b""}
    for folder, inside, names in os.walk(ROOT):
        inside[:] = [name for name in inside if name != ".git" and not name.startswith(".venv")]
        files |= {str((Path(folder) / name).relative_to(ROOT)): Path(folder) / name for name in names}
    bundle, _ = build_fab_from_files(files)
    with ZipFile(BytesIO(bundle)) as archive:
        sent = {name: archive.read(name) for name in archive.namelist()}
    expected = {str(path.relative_to(ROOT)) for path in [*sources, *pages]}
    assert set(sent) - {"pyproject.toml", ".info/CONTENT"} == expected
    assert all(sent[str(path.relative_to(ROOT))] == path.read_bytes() for path in sources)


@pytest.mark.parametrize(("name", "config", "out"), [("config", "tiny.toml", "/r"), ("out", "/tiny.toml", "")])
def test_paths_that_are_not_absolute_are_refused(name: str, config: str, out: str) -> None:
    with pytest.raises(InputError, match=f"run config: {name} must be an absolute path, found "):
        run_of(config, out, resume=False)


def test_simulated_clients_run_the_code_that_was_submitted(tmp_path: Path) -> None:
    """Ray's processes import first from the folder in which the SuperLink was started; other code there is refused."""
    refuse_other_code(tmp_path)
    refuse_other_code(copy_of_app(tmp_path))
    with (tmp_path / "flsim" / "base" / "rng.py").open("a") as file:
        file.write("\n")
    with pytest.raises(InputError, match="clients would run the code in this folder, which differs"):
        refuse_other_code(tmp_path)

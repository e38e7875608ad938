"""Flower ServerApp, for `flwr run .`: makes a run folder from the run config's `config` and `out`, and trains it."""

from pathlib import Path
from threading import Event

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flsim import config
from flsim.config import FederatedConfig
from flsim.errors import InputError
from flsim.runs import Run
from server import rounds

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the configuration that `flwr run . --run-config 'config="..." out="..."'` names."""
    path = Path(str(context.run_config["config"]))
    settings = config.load(path)
    if not isinstance(settings, FederatedConfig):
        raise InputError(f"{path}: training is central, which has no clients; train it with `flsim run`")
    run = Run.create(settings, Path(str(context.run_config["out"])))
    rounds.train(grid, run, Event())

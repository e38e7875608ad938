"""Flower ServerApp, for `flwr run .`: makes a run folder from the run config's `config` and `out`, and trains it."""

from pathlib import Path
from threading import Event

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flsim import config
from flsim.runs import Run
from server import rounds

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the configuration that `flwr run . --run-config 'config="..." out="..."'` names."""
    settings = config.load(Path(str(context.run_config["config"])))
    run = Run.create(settings, Path(str(context.run_config["out"])))
    rounds.train(grid, run, Event())

"""The public names of `flsim`, each documented where it is made. `import flsim` loads this module when a name is used."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

from flsim.algorithms import checkpoint
from flsim.base.errors import Diverged, InputError, RunFailed
from flsim.canaries.spec import CanaryHParams as Canaries
from flsim.data.corpus import Corpus
from flsim.data.importing.run import import_corpus
from flsim.data.synthetic import SyntheticHParams, make_synthetic
from flsim.evaluation.audit import audit as audit_model
from flsim.evaluation.evaluate import EvaluationHParams as Evaluation
from flsim.evaluation.evaluate import evaluate as evaluate_model
from flsim.evaluation.loading import load_model
from flsim.models.architectures import restore
from flsim.models.hparams import ModelHParams
from flsim.privacy.mechanism import PrivacyHParams as Privacy
from flsim.report.page import write_report as report
from flsim.results.compare_runs import RunsCompared, compare_runs
from flsim.results.frames import frames
from flsim.results.plots import plot_rounds
from flsim.results.rows import frame
from flsim.results.store import read_run
from flsim.results.sweeps import read_shown
from flsim.results.tables import memorization_table, to_markdown
from flsim.runs.config import Config, load, parse
from flsim.runs.folder import Run
from flsim.runs.measuring import evaluate_checkpoint
from flsim.simulate import Central, FedAvg, Planted, plant, simulate
from flsim.training.central import CentralHParams as CentralSGD
from flsim.training.hparams import LocalHParams as LocalSGD
from flsim.training.state import State

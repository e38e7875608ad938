"""The configuration of a run: a TOML file is read into dataclasses; an unknown key is an error."""

from flsim.runs.config.base import (
    Config,
    DataHParams,
    FederatedConfig,
    ScheduledEvaluationHParams,
    SystemHParams,
    TrainingHParams,
)
from flsim.runs.config.central import (
    CentralConfig,
    CentralSystemHParams,
    CentralTrainingHParams,
    StepwiseEvaluationHParams,
)
from flsim.runs.config.files import dump, from_working_directory, load, parse

__all__ = [
    "CentralConfig",
    "CentralSystemHParams",
    "CentralTrainingHParams",
    "Config",
    "DataHParams",
    "FederatedConfig",
    "ScheduledEvaluationHParams",
    "StepwiseEvaluationHParams",
    "SystemHParams",
    "TrainingHParams",
    "dump",
    "from_working_directory",
    "load",
    "parse",
]

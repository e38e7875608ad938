"""Central training over records: an explicit state, the settings of training, and engines that train.

Thakkar et al. (2020), section 4.2: SGD, Momentum or Adam over records in random order, or in sequence through users.
With a clip, or a clip and noise, it is DP-SGD over records (`flsim.training.central.hparams`).
"""

from flsim.training.central.hparams import CentralHParams
from flsim.training.central.training import CentralTraining, Log, init, train_central

__all__ = ["CentralHParams", "CentralTraining", "Log", "init", "train_central"]

"""FedProx, whose proximal term keeps local steps near the global model.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks" (2020), Algorithm 2.
"""

from flsim.algorithms.algorithm import Algorithm
from flsim.base.errors import InputError
from flsim.training.hparams import LocalHParams


class FedProx(Algorithm):
    """Federated Averaging whose users minimize their loss + mu / 2 ||w - w_global||^2, equation 2.

    mu is `local.proximal`, which every engine adds. This class requires it to be set, and names the table's row.
    """

    label = "FedProx"

    def refuse(self, local: LocalHParams) -> None:
        """Raise InputError where mu is 0."""
        if not local.proximal:
            raise InputError('training.algorithm "fedprox" needs mu; set local.proximal above 0')

"""FedProx: local steps are held near the global model by a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated Optimization in Heterogeneous Networks" (2020), Algorithm 2.
"""

from flsim.algorithms.algorithm import Algorithm
from flsim.base.errors import InputError
from flsim.training.hparams import LocalHParams


class FedProx(Algorithm):
    """Federated Averaging whose users minimize their loss + mu / 2 ||w - w_global||^2, equation 2.

    mu is `local.proximal`, which every engine knows; here it must be set, and the table's row says that it is.
    """

    label = "FedProx"

    def refuse(self, local: LocalHParams) -> None:
        """Raise InputError where there is no mu."""
        if not local.proximal:
            raise InputError('training.algorithm "fedprox" needs mu; set local.proximal above 0')

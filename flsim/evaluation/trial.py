"""The trial of a user's own measures before training: a measure that always fails would cost a whole run."""

from collections.abc import Sequence
from dataclasses import replace

from flsim.base.errors import InputError, RunFailed
from flsim.base.extensions import is_own
from flsim.canaries.spec import Canary
from flsim.data.records import Users
from flsim.evaluation.evaluate import EvaluationHParams, evaluate
from flsim.evaluation.measures import measures
from flsim.models.architectures import build
from flsim.models.hparams import ModelHParams

FEW = 20  # references, samples and nodes of the trial


def refuse_failing(
    model: ModelHParams, canaries: Sequence[Canary], test: Users, hparams: EvaluationHParams, seed: int
) -> None:
    """Call each of a user's own measures once, of an untrained model, one canary and one test user.

    Raises:
        InputError: a file failed, or has no fit `Measure`; or a measure failed, or computed something else than finite
            numbers of its quantities. The message names the file.
    """
    measures(hparams.also)
    own = tuple(name for name in hparams.also if is_own(name))
    if not own:
        return
    few = {name: min(getattr(hparams, name), FEW) for name in ("references", "samples", "nodes")}
    tiny = replace(hparams, also=own, test_users=1, **few)
    untrained = build(test.layout.vocabulary_size, model).initialize(seed)
    try:
        evaluate(untrained, canaries[:1], test, tiny, seed, "trial", 0)
    except RunFailed as error:
        raise InputError(f"evaluation.also: {error} (tried with an untrained model)") from error

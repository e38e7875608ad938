"""The shares of a GPU that a run's processes take, of which a part is for evaluators."""

EVALUATION_SHARE = 0.05  # share of a GPU, for all evaluators; the rest of it is for training


def gpu_shares(training: float | None, evaluation: float | None, evaluators: int, has_gpu: bool) -> tuple[float, float]:
    """Return the GPUs of a training process and of an evaluator.

    By default one training process and all evaluators fill a GPU.

    Args:
        training: GPUs that a setting names for a training process; None where it does not.
        evaluation: the same for an evaluator.
        evaluators: number of evaluators.
        has_gpu: whether there is a GPU to train on.
    """
    if evaluation is None:
        evaluation = EVALUATION_SHARE / evaluators if has_gpu else 0.0
    if training is None:
        rest = 1.0 - evaluation * evaluators
        training = rest if has_gpu and rest > 0 else float(has_gpu)
    return training, evaluation

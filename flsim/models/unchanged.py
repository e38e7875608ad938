"""The check that a user's own code left a model as it was, so that later results are of the model that was trained."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flsim.base.errors import RunFailed
from flsim.models.language_model import digest_of


@contextmanager
def refusing_changes(name: str, models: Sequence[object], inputs: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Refuse a change, within the block, of the values of models or of other tensors.

    Args:
        name: the name of the user's object that is called in the block, for the message.
        models: the models; those that are no torch modules are not compared.
        inputs: other tensors by name.

    Raises:
        RunFailed: a value of a parameter, of a buffer or of a tensor in `inputs` is another one after the block.
    """

    def values() -> dict[str, Tensor]:
        listed = dict(inputs or {})
        modules = [model for model in models if isinstance(model, nn.Module)]
        for number, module in enumerate(modules):
            tensors = [*module.named_parameters(), *module.named_buffers()]
            listed |= {f"model {number}/{key}": value.detach() for key, value in tensors}
        return listed

    before = {key: value.clone() for key, value in values().items()}
    yield
    changed = _first_changed(before, values())
    if changed:
        what = f"the model's {changed.partition('/')[2]}" if "/" in changed else changed
        raise RunFailed(f"{name}: changes {what}, which later results are computed from; change a copy, by .clone()")


def _first_changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor that is new, gone, or has other values; None where all are the same."""
    for key in {**before, **after}:
        if key not in before or key not in after or _differ(before[key], after[key]):
            return key
    return None


def _differ(one: Tensor, other: Tensor) -> bool:
    # Digests compare NaN as equal, and values on different devices; `torch.equal` is faster, and nearly always enough.
    if one.device == other.device and one.dtype == other.dtype and torch.equal(one, other):
        return False
    return digest_of({"": one}) != digest_of({"": other})

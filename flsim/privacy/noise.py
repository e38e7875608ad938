"""Processes of noise on sums, whose state is stored in checkpoints; the built-in process has no memory.

The noise is a function of (seed, round), so that a resumed run adds the same noise. Anyone who knows the seed can
subtract the noise. This is acceptable for a simulation; a deployment must draw noise from a secret, cryptographic
source. A custom process, ``path/to/file.py:NAME``, is a class like `Independent`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from flsim.base.errors import InputError, RunFailed
from flsim.base.extensions import custom_call_errors, declared_label, is_custom, name_in_settings, resolve_class
from flsim.base.rng import stream
from flsim.privacy.sampling import refuse_no_event

if TYPE_CHECKING:  # each import takes half a second or more in accounting or in every process of a run
    import torch
    from dp_accounting import DpEvent

    from flsim.models.language_model import Params

SLOT = "noise/"  # prefix of a process's slots in a state; slots of optimizers have no slash


@dataclass(frozen=True)
class Noise(ABC):
    """A process that yields the noise of each round at unit scale; the mechanism multiplies it by z S.

    Attributes:
        seed: the experiment's seed.
        shapes: shapes of the parameters, by name.
        label: the part of a row's name in tables that names the process; "" for none. Custom code without a label is
            named NAME.
    """

    seed: int
    shapes: "Mapping[str, torch.Size]"
    label: ClassVar[str] = ""

    def init(self) -> "dict[str, Params]":
        """Return the state before the first round: slot -> parameter -> tensor of its shape; empty by default."""
        return {}

    @abstractmethod
    def next(self, state: "dict[str, Params]", round_: int) -> "tuple[Params, dict[str, Params]]":
        """Return the noise of a round (from 0), float64 by parameter, and the state after it."""

    @staticmethod
    def event(
        sampled: "Callable[[DpEvent], DpEvent]",  # noqa: ARG004 (for others)
        noise_multiplier: float,  # noqa: ARG004
        rounds: int,  # noqa: ARG004
    ) -> "DpEvent | None":
        """Return the total cost of the first `rounds` rounds; None if it is unknown.

        Args:
            sampled: turns the cost of a mechanism on a cohort's sum into its cost on a sampled cohort's sum.
            noise_multiplier: z divided by the distance by which one user moves a sum; the added noise is z times that
                of this process.
            rounds: number of rounds.
        """
        return None

    def fresh(self, round_: int) -> "Params":
        """Return independent standard normal noise of a round, float64 by parameter."""
        import torch

        return {
            name: torch.from_numpy(stream(self.seed, "noise", round_, name).normal(0.0, 1.0, shape))
            for name, shape in self.shapes.items()
        }


class Independent(Noise):
    """Gaussian noise that is independent from round to round."""

    def next(self, state: "dict[str, Params]", round_: int) -> "tuple[Params, dict[str, Params]]":
        """Return independent noise, and no state."""
        return self.fresh(round_), state

    @staticmethod
    def event(sampled: "Callable[[DpEvent], DpEvent]", noise_multiplier: float, rounds: int) -> "DpEvent":
        """Return the Gaussian mechanism on a sampled cohort, `rounds` times."""
        from dp_accounting import GaussianDpEvent, SelfComposedDpEvent

        return SelfComposedDpEvent(sampled(GaussianDpEvent(noise_multiplier)), rounds)


NOISES: dict[str, type[Noise]] = {"independent": Independent}


def noise_class(name: str) -> type[Noise]:
    """Return a built-in process, or the one at ``path/to/file.py:NAME``.

    Raises:
        InputError: there is no process of this name, or the file failed.
    """
    return resolve_class(name, NOISES, "noise", Noise)  # type: ignore[type-abstract]


def label_of(name: str) -> str:
    """Return the part of a row's name in tables that names the process, without executing custom code."""
    return declared_label(name) if is_custom(name) else NOISES[name].label


def noise_event(name: str, sampled: "Callable[[DpEvent], DpEvent]", noise_multiplier: float, rounds: int) -> "DpEvent":
    """Return the total cost of rounds with a process's noise; for the arguments, see `Noise.event`.

    Raises:
        InputError: a custom process failed, or has no event.
    """
    kind = noise_class(name)
    written = name_in_settings(name)
    with custom_call_errors(written, "event(sampled, noise_multiplier, rounds)", InputError):
        event = kind.event(sampled, noise_multiplier, rounds)
    if event is None:
        raise InputError(
            f"{written}: this noise has no privacy event, so no accountant supports it; define `event`, which "
            "can return dp_accounting.NonPrivateDpEvent()"
        )
    refuse_no_event(written, event)
    return event


def init(name: str, seed: int, like: "Mapping[str, torch.Tensor]") -> "dict[str, Params]":
    """Return a process's state before the first round, with slots named as in a state of training.

    Args:
        name: a key of `NOISES`, or a custom process.
        seed: the experiment's seed.
        like: tensors of the parameters' names and shapes.

    Raises:
        InputError: a custom process failed, or its state has other names or shapes.
    """
    shapes, kind = _shapes(like), noise_class(name)
    with custom_call_errors(name, "init()", InputError):
        state = kind(seed, shapes).init()
        _refuse_other_shapes(name, state, shapes, InputError)
    return {SLOT + slot: values for slot, values in state.items()}


def step(
    name: str,
    seed: int,
    like: "Mapping[str, torch.Tensor]",
    moments: "Mapping[str, Params]",
    round_: int,
    failure: type[InputError] | type[RunFailed] = RunFailed,
) -> "tuple[Params, dict[str, Params]]":
    """Return the noise of a round (from 0) at unit scale, float64 by parameter, and the process's slots after it.

    Args:
        name, seed, like: see `init`.
        moments: slots of a state of training; other slots are ignored.
        round_: the round, from 0.
        failure: the type of the error if a custom process fails; InputError before training.

    Raises:
        RunFailed: a custom process failed, or its noise has other names or shapes.
    """
    shapes, kind = _shapes(like), noise_class(name)
    before = {slot.removeprefix(SLOT): values for slot, values in moments.items() if slot.startswith(SLOT)}
    with custom_call_errors(name, "next(state, round_)", failure):
        noise, after = kind(seed, shapes).next(before, round_)
        if before.keys() != after.keys():
            raise failure(
                f"{name}: a round changes the slots {sorted(before)} into {sorted(after)}; keep the same slots"
            )
        _refuse_other_shapes(name, after | {"noise": noise}, shapes, failure)
    return noise, {SLOT + slot: values for slot, values in after.items()}


def refuse_unrepeatable(name: str, seed: int, like: "Mapping[str, torch.Tensor]") -> None:
    """Raise InputError if a custom process fails, or its noise differs between calls; for the arguments, see `init`.

    A resumed run and `flsim verify` draw the noise of a run again.
    """
    import torch

    one, other = (step(name, seed, like, init(name, seed, like), 0, InputError) for _ in range(2))
    for slot, values in (one[1] | {"noise": one[0]}).items():
        again = (other[1] | {"noise": other[0]})[slot]
        if not all(torch.equal(value, again[key]) for key, value in values.items()):
            raise InputError(
                f"{name}: the noise differs between two calls; draw it with self.fresh or flsim.base.rng.stream"
            )


def _shapes(like: "Mapping[str, torch.Tensor]") -> "dict[str, torch.Size]":
    return {name: value.shape for name, value in like.items()}


def _refuse_other_shapes(
    name: str, slots: "Mapping[str, Params]", shapes: "dict[str, torch.Size]", failure: type[Exception]
) -> None:
    import torch

    for slot, values in slots.items() if is_custom(name) else ():
        are_tensors = all(isinstance(value, torch.Tensor) for value in values.values())
        if not (slot.isidentifier() and are_tensors and _shapes(values) == shapes):
            raise failure(f"{name}: {slot!r} must hold tensors with the names and shapes of the model's parameters")
        if not all(bool(value.isfinite().all()) for value in values.values()):
            raise failure(f"{name}: {slot!r} has values that are not finite; return finite noise")

"""The `cohort` engine: users of similar size form micro-cohorts, which train together and sum their updates.

It equals `flsim.training.local`, its reference, up to rounding. On a CPU, users train one after another, because the
matrices of one fill the caches, unless a step is too little work (`users_on_cpu`). On other devices, users are stacked.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch

from flsim.base.errors import InputError, RunFailed, at_least_one, first_line, is_out_of_memory
from flsim.base.progress import say
from flsim.base.rng import stream
from flsim.data.records import Records, Users
from flsim.data.vocabulary import Layout
from flsim.models.language_model import Params, representative
from flsim.training.cohort.gradient import packed_batches, packed_model
from flsim.training.cohort.products import products_for
from flsim.training.cohort.steps import Participant, Steps, steps_of
from flsim.training.hparams import LocalHParams
from flsim.training.local import prefetched, take_step
from flsim.training.update import Counts, UpdateSum, global_norm

# Local training on a CPU, one user at a time, with the written-out gradient of `gradient`.


class PackedTrainer:
    """A `Trainer` of one user after another on a CPU, in float32, float64 or "bf16", for parameters like `like`."""

    def __init__(self, like: Params, hparams: LocalHParams, layout: Layout) -> None:
        self._hparams, self._layout = hparams, layout
        self._model = packed_model(like, products_for(hparams.precision, like))
        self._start: Params = {}

    def pack(self, group: Sequence[Participant]) -> list[Steps]:
        return [steps_of(records, self._layout, self._hparams, rng) for records, rng in group]

    @torch.no_grad()
    def train(self, start: Params, group: Sequence[Steps], rate: float | None = None) -> tuple[list[float], list[int]]:
        (steps,) = group
        self._start, hparams, loss = start, self._hparams, 0.0
        rate = hparams.learning_rate if rate is None else rate
        self._model.load(start)
        if hparams.is_plain:
            for batch in packed_batches(steps):
                loss += self._model.descend(batch, rate)
            return [loss], [len(steps.inputs)]
        weights = list(self._model.weights.values())
        optimizer = hparams.optimizer_over(weights, rate)
        for batch in packed_batches(steps):
            summed, gradient = self._model.gradient(batch)
            if hparams.proximal:
                for name, weight in self._model.weights.items():
                    gradient[name].add_(weight - start[name], alpha=hparams.proximal)
            take_step(optimizer, weights, list(gradient.values()), hparams.gradient_clip)
            loss += summed
        return [loss], [len(steps.inputs)]

    @torch.no_grad()
    def norms(self) -> list[float]:
        for name, value in self._model.weights.items():
            value.sub_(self._start[name])
        return [global_norm(self._model.weights)]

    @torch.no_grad()
    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        (factor,) = factors
        if factor:
            for name, update in self._model.weights.items():
                into[name].add_(update, alpha=factor)


Member = tuple[int, Records]

# Measured: docs/benchmarks.md, "Small models".
SMALL_STEP = 600_000  # parameters times records of a step, up to which stacked users are faster
STACKED_ON_CPU = 16


class Trainer(Protocol):
    """A trainer of a micro-cohort; if memory runs out, the tensors that updates are added to do not change."""

    def pack(self, group: Sequence[Participant]) -> Any:
        """Return the argument of `train`; can run in another thread while another group trains."""

    def train(self, start: Params, packed: Any, rate: float | None = None) -> tuple[Sequence[float], Sequence[int]]:
        """Train, by default at the settings' rate; return summed losses (nats) before steps, and positions, by user."""

    def norms(self) -> Sequence[float]:
        """Return the L2 norm of the complete update of each user, summed in float64."""

    def add_updates(self, factors: Sequence[float], into: Params) -> None:
        """Add every user's update times its factor to float64 tensors; users with factor 0 are omitted."""


class CohortEngine:
    """An engine that trains cohorts in micro-cohorts, and reuses its buffers for the next cohort.

    `like` has the names, shapes, dtype and device of parameters. `micro_cohort` users train at once; None chooses by
    the device's memory, of which this process can use `memory_share`. If memory runs out, the number is halved, and all
    users train again. A schedule of the learning rate needs the `rounds` of the run. `trainer` makes the trainer of at
    most a number of users, and needs `micro_cohort`. InputError if the device does not support the settings.
    """

    def __init__(
        self,
        like: Params,
        layout: Layout,
        hparams: LocalHParams,
        micro_cohort: int | None = None,
        memory_share: float = 1.0,
        rounds: int | None = None,
        trainer: Callable[[int], Trainer] | None = None,
    ) -> None:
        if micro_cohort is not None:
            at_least_one(micro_cohort=micro_cohort)
        self._make = trainer
        self._like, self._layout, self._hparams, self._rounds = like, layout, hparams, rounds
        self._device = representative(like).device
        if hparams.precision == "tf32" and self._device.type != "cuda":
            raise InputError('precision "tf32" needs an NVIDIA GPU, but this process has none; set "float32"')
        self.is_stacked = trainer is not None or is_stacked(like, micro_cohort)
        if self._device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(memory_share, self._device)
        self._at_once = micro_cohort or (self._choose(memory_share) if self.is_stacked else 1)
        self._trainer: Trainer | None = None

    @property
    def device_name(self) -> str:
        on_gpu = self._device.type == "cuda"
        return torch.cuda.get_device_name(self._device) if on_gpu else str(self._device)

    @property
    def micro_cohort(self) -> int:
        """Return the largest number of users that train together, which decreases when memory runs out."""
        return self._at_once

    @micro_cohort.setter
    def micro_cohort(self, users: int) -> None:
        if users != self._at_once:
            self._at_once, self._trainer = users, None  # buffers of the trainer have the old size

    def train(
        self, start: Params, users: Users, cohort: Iterable[int], seed: int, round_: int, clip: float | None = None
    ) -> UpdateSum:
        """Train users and return the sum of their updates, as `train_users`; RunFailed if one exceeds the memory."""
        try:
            start = {name: value.to(self._device) for name, value in start.items()}
            delta = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in start.items()}
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._too_little(error) from error
        # Largest first: users that train together have similar sizes, and memory runs out early or never.
        members = sorted(((user, users[user]) for user in cohort), key=lambda member: -len(member[1]))
        while True:
            try:
                counts = self._train_all(start, members, seed, round_, clip, delta)
                return UpdateSum({name: value.cpu() for name, value in delta.items()}, counts)
            except (MemoryError, RuntimeError) as error:  # Python's error, or torch's
                if not is_out_of_memory(error):
                    raise
                self._trainer = None
                if self._at_once == 1:
                    raise self._too_little(error) from error
                self._at_once //= 2
                say(f"{self._device}: out of memory; from now on, {self._at_once} users train together")
            # All users train again, so the sum equals that of an engine with the smaller size from the beginning.
            for value in delta.values():
                value.zero_()

    def _train_all(
        self,
        start: Params,
        members: Sequence[Member],
        seed: int,
        round_: int,
        clip: float | None,
        delta: Params,
    ) -> Counts:
        # A separate function, so that no reference keeps the memory of a trainer that did not fit.
        trainer, rate = self._trainer or self._build(), self._hparams.rate(round_, self._rounds)
        groups = self._packed(trainer, members, seed, round_)
        counts = Counts()
        for group, packed in prefetched(groups) if self._device.type == "cuda" else groups:
            losses, tokens = trainer.train(start, packed, rate)
            factors = []
            for (_, records), loss, count, norm in zip(group, losses, tokens, trainer.norms(), strict=True):
                examples = self._hparams.examples(len(records))
                left_out = len(records) - examples
                user, factor = Counts.of_user(norm, examples, loss, count, clip=clip, left_out=left_out)
                counts += user
                factors.append(factor)
            trainer.add_updates(factors, delta)
        return counts

    def _packed(
        self, trainer: Trainer, members: Sequence[Member], seed: int, round_: int
    ) -> Iterator[tuple[Sequence[Member], Any]]:
        for first, end in pairwise(bounds(len(members), self._at_once)):
            group = members[first:end]
            participants = [Participant(records, stream(seed, "local", round_, user)) for user, records in group]
            yield group, trainer.pack(participants)

    def _choose(self, memory_share: float) -> int:
        from flsim.training.cohort.stacked_trainer import StackedTrainer

        return StackedTrainer.users_that_fit(self._like, self._hparams, self._layout, memory_share)

    def _build(self) -> Trainer:
        settings = self._like, self._hparams, self._layout
        if self._make is not None:
            self._trainer = self._make(self._at_once)
        elif self.is_stacked:
            from flsim.training.cohort.stacked_trainer import StackedTrainer

            self._trainer = StackedTrainer(*settings, self._at_once)
        else:
            self._trainer = PackedTrainer(*settings)
        return self._trainer

    def _too_little(self, error: Exception) -> RunFailed:
        return RunFailed(f"{self._device}: not enough memory to train one user ({first_line(error)})")


def is_stacked(like: Params, micro_cohort: int | None) -> bool:
    """Return whether users train stacked; otherwise they train one after another, as on a CPU."""
    return representative(like).device.type != "cpu" or (micro_cohort or 1) > 1


def users_on_cpu(like: Params, hparams: LocalHParams) -> int | None:
    """Return the fastest number of users to train together on a CPU, if more than one; otherwise, or on a GPU, None.

    It depends only on the model and the settings, so all processes and resumed runs have the same groups.
    """
    values = sum(value.numel() for value in like.values())
    is_small = values * hparams.batch_size <= SMALL_STEP and hparams.precision == "float32"
    return STACKED_ON_CPU if is_small and representative(like).device.type == "cpu" else None


def bounds(users: int, at_once: int) -> list[int]:
    """Return the bounds of the fewest groups of at most `at_once` users, whose sizes differ by at most 1.

    A small last group would leave most of a GPU idle: 625 users train as 208, 208 and 209, not as 264, 264 and 97.
    """
    groups = -(-users // at_once)
    return [users * group // groups for group in range(groups + 1)] if groups else []

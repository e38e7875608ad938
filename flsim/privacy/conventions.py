"""The conventions under which an epsilon is stated; epsilons of different conventions are not comparable.

[M] Mironov, "Renyi Differential Privacy" (2017).
[CKS] Canonne, Kamath, Steinke, "The Discrete Gaussian for Differential Privacy" (2020), Proposition 12.
[C] Charles et al., "Fine-Tuning Large Language Models with User-Level Differential Privacy" (2024).
"""

from dataclasses import dataclass
from typing import Literal

from flsim.base.errors import InputError
from flsim.base.extensions import is_custom, short_name, without_options
from flsim.privacy.sampling import Relation, sampler_class

Sensitivity = Literal["S", "2S"]
Accountant = Literal["rdp", "pld"]
Conversion = Literal["mironov-proposition-3", "tight"]


@dataclass(frozen=True)
class Convention:
    """A convention by which an epsilon is computed.

    Neighbours of "replace-one" differ in one user's data (the number of users is public), of "add-or-remove-one" in the
    presence of one user. Those of "zero-out" differ in whether one user takes part with zeros, in place of updates and
    of votes on an adaptive clip (cohorts are public).
    """

    sampler: str  # how cohorts are drawn; for a custom sampler, its NAME with its options
    relation: Relation
    sensitivity: Sensitivity  # largest difference of the sum of clipped updates between neighbours; S is the clip norm
    accountant: Accountant  # Renyi DP or privacy loss distributions
    conversion: Conversion | None  # from Renyi DP to epsilon: [M] Proposition 3, or the tighter [CKS]
    name: str
    # for DP-SGD, the most records of a user, each of which is sampled independently: neighbours then differ in a
    # user, who moves the sum by up to `records` S ([C], section 3)
    records: int | None = None

    def __str__(self) -> str:
        return f'convention "{self.name}"'

    @property
    def distance(self) -> str:
        """Return how far neighbours move the sum of clipped updates, as text."""
        return self.sensitivity if self.records is None else f"{self.records} x S"

    @property
    def is_sound(self) -> bool:
        """Return whether the sensitivity covers the relation: exchanging a user moves the sum by up to 2S."""
        return self.sensitivity == SENSITIVITY[self.relation]


def of_users(records: int) -> Convention:
    """Return the user-level convention of DP-SGD, for users of at most this number of records."""
    return Convention("poisson", "add-or-remove-one", "S", "pld", None, "poisson-user-pld", records)


SENSITIVITY: dict[Relation, Sensitivity] = {"replace-one": "2S", "add-or-remove-one": "S", "zero-out": "S"}


def _sound(sampler: str, relation: Relation, name: str) -> tuple[Convention, Convention]:
    """Return the conventions of both accountants, with the sensitivity that covers the relation."""
    return (
        Convention(sampler, relation, SENSITIVITY[relation], "rdp", "tight", f"{name}-rdp"),
        Convention(sampler, relation, SENSITIVITY[relation], "pld", None, f"{name}-pld"),
    )


# samplers whose privacy follows only from the limit of a user's rounds
TURNS = ("round-robin", "min-separation", "balls-in-bins", "available")
PAPER = Convention("fixed-size", "replace-one", "S", "rdp", "mironov-proposition-3", "paper")
CONVENTIONS = (
    PAPER,
    Convention("fixed-size", "replace-one", "S", "rdp", "tight", "paper-tight"),
    *_sound("fixed-size", "replace-one", "replace-one"),
    *_sound("poisson", "add-or-remove-one", "poisson"),
    Convention("truncated-poisson", "add-or-remove-one", "S", "pld", None, "truncated-poisson-pld"),
    *_sound("cyclic-poisson", "add-or-remove-one", "cyclic-poisson"),
    *(one for sampler in TURNS for one in _sound(sampler, "zero-out", f"{sampler}-zero-out")),
    *(one for sampler in TURNS for one in _sound(sampler, "replace-one", f"{sampler}-replace-one")),
)
REFUSED = (  # also used with the accountants, which give the reason
    *_sound("with-replacement", "replace-one", "with-replacement"),
    Convention("fedbuff", "zero-out", "S", "pld", None, "fedbuff-zero-out-pld"),
)


def conventions_of(sampler: str) -> tuple[Convention, ...]:
    """Return the conventions for a sampler, or the relation of a custom one; runs report the first sound one."""
    if is_custom(sampler):
        relation = sampler_class(sampler).relation
        if relation not in SENSITIVITY:
            raise InputError(f"{sampler}: relation must be one of {', '.join(SENSITIVITY)}, found {relation!r:.60}")
        return _sound(short_name(sampler), relation, f"own-{relation}")
    return tuple(one for one in (*CONVENTIONS, *REFUSED) if one.sampler == without_options(sampler))


def sampler_in_conventions(sampler: str) -> str:
    """Return a sampler's name in `Convention.sampler`: options of a built-in sampler do not change the convention."""
    return short_name(sampler) if is_custom(sampler) else without_options(sampler)


def sound_convention(sampler: str) -> Convention:
    """Return the first convention of a sampler whose sensitivity covers its relation; raise InputError without one."""
    sound = next((one for one in conventions_of(sampler) if one.is_sound), None)
    if sound is None:
        raise InputError(f"{sampler}: there is no sound convention for this sampler, and its epsilon cannot be audited")
    return sound


def possible_conventions(sampler: str) -> tuple[Convention, ...]:
    """Return the possible conventions for a sampler, without executing a custom one: those of all relations."""
    if not is_custom(sampler):
        return conventions_of(sampler)
    return tuple(one for relation in SENSITIVITY for one in _sound(short_name(sampler), relation, f"own-{relation}"))

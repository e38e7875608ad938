"""The conventions under which an epsilon is stated; epsilons of different conventions are not comparable.

A convention is a sampler, a relation between neighbouring data sets, the distance by which one user moves the clipped
sum, an accountant, and a conversion to (epsilon, delta).

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
Accountant = Literal["rdp", "pld", "rdp-opacus", "prv-opacus"]
Conversion = Literal["mironov-proposition-3", "tight"]


@dataclass(frozen=True)
class Convention:
    """A convention by which an epsilon is computed."""

    sampler: str  # how cohorts are drawn; for a custom sampler, its NAME with its options
    # what neighbours differ in: one user's data ("replace-one", the number of users is public), the presence of
    # one user ("add-or-remove-one"), or whether one user's updates are zero ("zero-out", the users of each round
    # are public)
    relation: Relation
    # the largest difference of the sum of clipped updates between neighbours; S is the clip norm
    sensitivity: Sensitivity
    accountant: Accountant  # Renyi DP or privacy loss distributions (dp_accounting), or Opacus's RDP or PRV
    # from Renyi DP to epsilon: [M] Proposition 3, or the tighter [CKS]; None if the accountant computes the loss
    # distribution
    conversion: Conversion | None
    name: str  # short name
    # for DP-SGD, the most records of a user, each of which is sampled independently: neighbours then differ in a
    # user, who moves the sum by up to `records` S ([C], section 3); None for neighbours that differ in one of the
    # units that are sampled
    records: int | None = None

    def __post_init__(self) -> None:
        if self.accountant.startswith("rdp") != (self.conversion is not None):
            raise InputError(f"{self.name}: RDP needs a conversion, and only RDP does; found {self.conversion}")
        if self.accountant == "rdp-opacus" and self.conversion != "tight":
            raise InputError(f"{self.name}: Opacus supports only the tight conversion, found {self.conversion}")

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


def _of_turns(sampler: str) -> tuple[Convention, ...]:
    """Return the conventions of a sampler whose privacy follows only from the limit of a user's rounds."""
    return (
        Convention(sampler, "zero-out", "S", "rdp", "tight", f"{sampler}-zero-out-rdp"),
        Convention(sampler, "zero-out", "S", "pld", None, f"{sampler}-zero-out-pld"),
        Convention(sampler, "replace-one", "2S", "rdp", "tight", f"{sampler}-replace-one-rdp"),
        Convention(sampler, "replace-one", "2S", "pld", None, f"{sampler}-replace-one-pld"),
    )


SENSITIVITY: dict[Relation, Sensitivity] = {"replace-one": "2S", "add-or-remove-one": "S", "zero-out": "S"}
PAPER = Convention("fixed-size", "replace-one", "S", "rdp", "mironov-proposition-3", "paper")
CONVENTIONS = (
    PAPER,
    Convention("fixed-size", "replace-one", "S", "rdp", "tight", "paper-tight"),
    Convention("fixed-size", "replace-one", "2S", "rdp", "tight", "replace-one-rdp"),
    Convention("fixed-size", "replace-one", "2S", "pld", None, "replace-one-pld"),
    Convention("poisson", "add-or-remove-one", "S", "rdp", "tight", "poisson-rdp"),
    Convention("poisson", "add-or-remove-one", "S", "pld", None, "poisson-pld"),
    Convention("poisson", "add-or-remove-one", "S", "rdp-opacus", "tight", "poisson-rdp-opacus"),
    Convention("poisson", "add-or-remove-one", "S", "prv-opacus", None, "poisson-prv-opacus"),
    Convention("truncated-poisson", "add-or-remove-one", "S", "pld", None, "truncated-poisson-pld"),
    Convention("cyclic-poisson", "add-or-remove-one", "S", "rdp", "tight", "cyclic-poisson-rdp"),
    Convention("cyclic-poisson", "add-or-remove-one", "S", "pld", None, "cyclic-poisson-pld"),
    *_of_turns("round-robin"),
    *_of_turns("min-separation"),
    *_of_turns("balls-in-bins"),
    *_of_turns("available"),
)
REFUSED = (  # also used with the accountants, which give the reason
    Convention("with-replacement", "replace-one", "2S", "rdp", "tight", "with-replacement-rdp"),
    Convention("with-replacement", "replace-one", "2S", "pld", None, "with-replacement-pld"),
    Convention("fedbuff", "zero-out", "S", "pld", None, "fedbuff-zero-out-pld"),
)


def conventions_of(sampler: str) -> tuple[Convention, ...]:
    """Return the conventions for a sampler, or the relation of a custom one; runs report the first sound one."""
    if is_custom(sampler):
        return _of_own(sampler, sampler_class(sampler).relation)
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
    return tuple(convention for relation in SENSITIVITY for convention in _of_own(sampler, relation))


def _of_own(sampler: str, relation: Relation) -> tuple[Convention, ...]:
    description = short_name(sampler), relation, SENSITIVITY[relation]
    return (
        Convention(*description, "rdp", "tight", f"own-{relation}-rdp"),
        Convention(*description, "pld", None, f"own-{relation}-pld"),
    )

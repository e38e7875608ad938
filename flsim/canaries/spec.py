"""The canaries to plant: phrases of random words, with probabilities of users and records, or with numbers of copies.

Thakkar et al. (2020), section 4.1, "Canary Construction" and "Canary Insertion"; numbers of copies: Carlini et al.,
"The Secret Sharer" (2018), section 6.5.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Literal, NamedTuple

from flsim.base.errors import InputError
from flsim.base.rng import stream
from flsim.base.settings import DIFFERENT, Count, Flag, Natural, Probability, Whole, bounds, check, settings
from flsim.canaries.secrets import Secrets, fillings, parse, unknown_symbols
from flsim.data.records import Layout

# Windows: the rounds in which canaries are planted, as fractions of training or as numbers of rounds.
#  A window [a, b] begins when a rounds are completed and ends when b are completed: it contains the rounds a + 1 to b.
# In Jagielski et al., "Measuring Forgetting of Memorized Training Examples" (2022), Algorithm 1 (POISON) is the window
# [0, T], and Algorithm 2 (INJECT) a short one that begins at T.

Window = tuple[float, float]
Probabilities = Annotated[tuple[Probability, ...], bounds(min_length=1), DIFFERENT]
Bounds = tuple[int | None, int | None]  # the first and the last round, from 1; None for no bound
ALWAYS: Window = (0.0, 1.0)


def is_share(window: Window) -> bool:
    """Return whether a window is given as fractions of training: it ends at 1 or before."""
    return window[1] <= 1


def _window(window: Window) -> Window:
    """Return a window that does not end before its beginning or mix fractions with numbers of rounds."""
    start, end = window
    if not 0 <= start <= end:
        raise ValueError("must begin at 0 or later and not end before they begin")
    if not is_share(window) and not (start.is_integer() and end.is_integer()):
        raise ValueError("must be fractions of training, from 0 to 1, or integer numbers of rounds")
    return window


def _injection(at: float) -> float:
    if not (0 <= at < 1 or (at >= 1 and at.is_integer())):
        raise ValueError("must be fractions of training below 1, or integer numbers of completed rounds")
    return at


def window_label(window: Window) -> str:
    """Return a window in words; empty if it contains all rounds."""
    if window == ALWAYS:
        return ""
    start, end = window
    if start == end:
        return "never"
    return f"{100 * start:g}-{100 * end:g}%" if is_share(window) else f"rounds {start + 1:,.0f}-{end:,.0f}"


def bounds_of(window: Window, rounds: int | None) -> Bounds:
    """Return the first and the last round of a window, from 1; the last is before the first if it is empty."""
    if window == ALWAYS:
        return None, None
    if rounds is None and is_share(window):
        raise InputError(
            f"windows {list(window)} is a fraction of training, whose length is unknown; give the number of rounds, or "
            f"set the window in rounds"
        )
    length = (rounds or 1) if is_share(window) else 1
    start, end = (round(bound * length) for bound in window)
    if rounds is not None and end > start >= rounds:
        raise InputError(f"windows {list(window)} begins after the last of {rounds:,} rounds; set an earlier window")
    return start + 1 if start or end == start else None, None if window[1] == 1 and end > start else end


def injection_label(at: float) -> str:
    return f"after {100 * at:g}%" if at < 1 else f"in round {at + 1:,.0f}"


def injection_bounds(at: float, rounds: int | None) -> Bounds:
    """Return the round of an injection, from 1, as the first and the last round."""
    if rounds is None and 0 < at < 1:
        raise InputError(
            f"injections {at:g} is a fraction of training, whose length is unknown; give the number of rounds, or set "
            f"the injection in rounds"
        )
    before = round(at * (rounds or 1)) if at < 1 else int(at)
    if rounds is not None and before >= rounds:
        raise InputError(f"injections {at:g} is after the last of {rounds:,} rounds; set an earlier injection")
    return before + 1, before + 1


Arm = Literal["in", "out"]
Source = Literal["words", "heldout", "template", "phrases"]

ABOUT_INJECTIONS = "Injected users take part with probability 1 ({}): an epsilon of the ledger does not cover them."


@settings
class CanaryHParams:
    """The canary configurations of a run.

    Attributes:
        p_u: Probabilities that a user is a sharer of a canary; each pair of a p_u and a p_e is a configuration. Unit:
            probability.
        p_e: Probabilities that a record of a sharer is replaced by the canary. Unit: probability.
        count: Number of canaries in each configuration; 0 plants no canaries, for runs that only measure utility. Unit:
            canaries.
        length: Number of words in a canary. Unit: words.
        insertions: In place of p_u and p_e: exact numbers of records that a canary replaces, drawn uniformly from the
            records of all users. Each number is a configuration. Unit: records.
        controls: Number of further canaries that are never planted, but are measured like all canaries, e.g. 50. They
            are the controls of a test for memorization, and do not change other canaries or their records. Unit:
            canaries.
        coins: Plant each canary only if an independent fair coin lands heads, e.g. for `flsim audit`. Guesses of the
            coins then bound epsilon.
        windows: Windows [start, end] of training in which canaries are planted: fractions of training, such as [0.5,
            0.6], or, if the end is above 1, numbers of completed rounds, such as [100, 120] for the rounds 101 to 120.
            Each window is a configuration with each p_u and p_e, or number of insertions; in other rounds, users have
            the records that the canary replaces. In an empty window, such as [0.5, 0.5], a canary is never planted.
        arm: "out" draws and measures the same canaries, but plants them in no round; compare it with a run of arm "in",
            which is equal before the first window.
        source: "words" draws the words of a canary at random; "heldout" takes the first words of a record of a held-out
            user: natural text, which replaces records of users. Ranks of natural text among random words prove nothing,
            so use it only with arms, see `flsim forgetting`. "template" fills the holes of `template` at random.
            "phrases" takes your own texts; their ranks among random words prove nothing either.
        injections: In place of p_u, p_e, insertions and windows: times at which canaries are injected, each in one
            round, by pseudo-users who take part only in that round, in addition to its cohort. Each number is a
            configuration: a fraction of training below 1, or a number of completed rounds, e.g. 100 for the round 101.
            In central training their records extend the batch of that step.
        injection_users: With injections: number of pseudo-users of each canary. Unit: users.
        injection_copies: With injections: records of each pseudo-user; all are the canary. Unit: records.
        template: With source "template": text with holes for secrets, e.g. "the random number is {d9}" for 9 digits.
            Other holes: {l9} for letters; {w2} for words of the vocabulary; {card} for a payment card number; {ssn} for
            a US social security number. In a corpus of words each digit or letter is a token. {k5} is a key, which
            attackers know, and which differs for each canary: 5 letters, or words in a corpus of words or tokens.
            Attackers know the text before the first secret. The length of the template replaces `length` and
            evaluation.prefix.
        phrases: With source "phrases": the text of each canary, in the order of their configurations, controls last.
            The vocabulary of the corpus cuts each text into words, characters or tokens. No text may occur in the
            corpus.

    Examples:
        >>> flsim.Canaries(p_u=(0.01, 0.005), p_e=(0.5, 1.0), count=12)        # doctest: +SKIP
    """

    p_u: Probabilities = (1 / 5_000, 3 / 50_000, 1 / 50_000)
    p_e: Probabilities = (0.01, 0.1, 1.0)
    count: Natural = 10
    length: Annotated[Whole, bounds(ge=2)] = 5  # a prefix and a word that follows
    insertions: Annotated[tuple[Count, ...], DIFFERENT] = ()
    controls: Natural = 0
    coins: Flag = False
    windows: Annotated[tuple[Annotated[Window, check(_window)], ...], bounds(min_length=1), DIFFERENT] = (ALWAYS,)
    arm: Arm = "in"
    source: Source = "words"
    injections: Annotated[tuple[Annotated[float, check(_injection)], ...], DIFFERENT] = ()
    injection_users: Count = 1
    injection_copies: Count = 1
    template: str = ""
    phrases: Annotated[tuple[str, ...], DIFFERENT] = ()

    def __post_init__(self) -> None:
        default = type(self)
        if self.insertions and (self.p_u, self.p_e) != (default.p_u, default.p_e):
            raise InputError("insertions and p_u, p_e both set how often canaries occur; remove one of the two")
        self._refuse_wrong_text("template", self.template)
        self._refuse_wrong_text("phrases", self.phrases)
        if self.source == "template":
            parse(self.template)
        if self.source == "phrases" and len(self.phrases) != (canaries := number_of_canaries(self)):
            raise InputError(
                f"phrases lists {len(self.phrases):,} texts for {canaries:,} canaries; list as many texts, or set count"
            )
        self._refuse_wrong_injections()

    def _refuse_wrong_text(self, name: str, value: object) -> None:
        """Raise InputError if `template` or `phrases` is set for another source, or with a length."""
        if self.source != name and value:
            raise InputError(
                f'{name} needs source "{name}", found "{self.source}"; set source to "{name}", or remove {name}'
            )
        if self.source == name and self.length != type(self).length:
            raise InputError(f"length and {name} both set the length of canaries; remove length")

    def _refuse_wrong_injections(self) -> None:
        default = type(self)
        if not self.injections:
            for name in ("injection_users", "injection_copies"):
                if getattr(self, name) != getattr(default, name):
                    raise InputError(f"{name} needs canaries.injections; set canaries.injections, or remove {name}")
            return
        for name in ("p_u", "p_e", "insertions", "windows"):
            if getattr(self, name) != getattr(default, name):
                raise InputError(f"injections and {name} both set when canaries occur; remove one of the two")

    @property
    def is_natural(self) -> bool:
        """Return whether canaries are natural text, which is more likely than random words even without training."""
        return self.source in ("heldout", "phrases")

    @property
    def depends_on_length(self) -> bool:
        """Return whether rounds of windows or of injections follow from the length of training."""
        is_injected = any(0 < at < 1 for at in self.injections)
        return is_injected or any(is_share(window) and tuple(window) != ALWAYS for window in self.windows)

    def unknown_words(self, prefix: int) -> int:
        """Return the number of words, of the longest phrase, after the first `prefix` or after known text."""
        if self.phrases:
            return max(1, *(len(phrase.split()) - prefix for phrase in self.phrases))
        return unknown_symbols(self.template) if self.template else self.length - prefix

    def continuations(self, prefix: int, words: int) -> int:
        """Return the number of phrases that a beam can generate after the first `prefix` words."""
        return fillings(self.template, words) if self.template else int(words ** self.unknown_words(prefix))

    def references(self, count: int, words: int) -> int:
        """Return the number of references if `count` are requested; small templates have fewer."""
        canaries = len(configurations(self)) + self.controls
        return min(count, fillings(self.template, words) - canaries) if self.template else count

    @property
    def about_injections(self) -> str:
        """Return a sentence on what an epsilon does not cover; empty if no pseudo-user takes part."""
        if not self.injections or not self.count or self.arm == "out":
            return ""
        return ABOUT_INJECTIONS.format(", ".join(injection_label(at) for at in self.injections))

    def bounds(self, configuration: "Configuration", rounds: int | None) -> Bounds:
        """Return the first and the last round in which this arm plants canaries; arm "out" has an empty window."""
        window = configuration.window
        first, last = injection_bounds(window[0], rounds) if configuration.users else bounds_of(window, rounds)
        return (first, last) if self.arm == "in" else (first or 1, (first or 1) - 1)

    def refuse_rounded(self, rounds: int) -> None:
        """Raise InputError if some window becomes empty because its ends are rounded to the same round."""
        for start, end in self.windows if self.count else ():
            first, last = bounds_of((start, end), rounds)
            if start < end and first and last and last < first:
                raise InputError(
                    f"canaries.windows [{start:g}, {end:g}] has none of the {rounds:,} rounds, since both ends are "
                    f"rounded to {last:,} completed rounds; set a longer window"
                )

    def parting(self, rounds: int) -> int:
        """Return the number of rounds before any window, after which both arms are still equal bit for bit."""
        return min((self.bounds(one, rounds)[0] or 1) - 1 for one in distinct_configurations(self))


@dataclass(frozen=True)
class Canary:
    """A canary: a phrase, and the way of planting it."""

    id: str  # the name of the canary in tables, e.g. ``"c07"``
    tokens: tuple[int, ...]  # the word ids of the phrase
    p_u: float  # probability that a user is a sharer; NaN if it is unknown, or if `copies` is set
    p_e: float  # probability that a record of a sharer is replaced; NaN if it is unknown, or if `copies` is set
    copies: int | None = None  # exact number of records, of any users, that are replaced; None if probabilities decide
    is_planted: bool = True  # whether records are replaced; False for a control, which is only drawn and measured
    coin: bool | None = None  # the coin that decided whether it is planted; None if no coin did
    first_round: int | None = None  # the first round in which it is planted, from 1; None for no bound
    last_round: int | None = None  # the last round in which it is planted; None for no bound
    # number of pseudo-users who hold its copies, equally many each, and inject it in `first_round`; None if users
    # of the population hold it
    pseudo_users: int | None = None
    template: Secrets | None = None  # the template that the phrase fills, with the space of its fillings; None for none
    is_natural: bool = False  # whether the phrase is text of a held-out user or of the settings, and not random words


def draw_phrase(seed: int, index: int, attempt: int, length: int, layout: Layout) -> tuple[int, ...]:
    """Draw the words of canary `index`, each uniform over the vocabulary; `attempt` counts repeated draws."""
    rng = stream(seed, "canary", index, attempt)
    return tuple(rng.integers(layout.first_word, layout.last_word, length, endpoint=True).tolist())


def toss(seed: int, index: int) -> bool:
    """Return the fair coin that decides whether canary `index` is planted."""
    return bool(stream(seed, "canary coin", index).random() < 0.5)


class Configuration(NamedTuple):
    """The configuration of a canary that is planted; see `Canary`.

    `window` is as in the settings, and for an injection its time twice; `users` is the number of pseudo-users.
    """

    p_u: float
    p_e: float
    copies: int | None
    window: Window = ALWAYS
    users: int = 0

    @property
    def when(self) -> str:
        """Return the rounds in which it is planted as text, in the form of the settings; empty for all rounds."""
        return injection_label(self.window[0]) if self.users else window_label(self.window)


def distinct_configurations(hparams: CanaryHParams) -> list[Configuration]:
    """Return each configuration once, windows within probabilities or numbers of copies."""
    if hparams.injections:
        users, copies = hparams.injection_users, hparams.injection_users * hparams.injection_copies
        return [Configuration(math.nan, math.nan, copies, (at, at), users) for at in hparams.injections]
    pairs: list[tuple[float, float, int | None]] = [(math.nan, math.nan, copies) for copies in hparams.insertions]
    pairs = pairs or [(p_u, p_e, None) for p_u, p_e in product(hparams.p_u, hparams.p_e)]
    return [Configuration(*pair, (start, end)) for pair, (start, end) in product(pairs, hparams.windows)]


def configurations(hparams: CanaryHParams) -> list[Configuration]:
    return [configuration for configuration in distinct_configurations(hparams) for _ in range(hparams.count)]


def number_of_canaries(hparams: CanaryHParams) -> int:
    """Return the number of all canaries, including controls, without creating them."""
    return len(distinct_configurations(hparams)) * hparams.count + hparams.controls


def expected_copies(hparams: CanaryHParams, records: int) -> float:
    """Return the expected number of records that canaries replace, if no record is claimed twice."""
    planned = [one for one in configurations(hparams) if not one.users]  # pseudo-users replace no records
    return sum(one.p_u * one.p_e * records if one.copies is None else one.copies for one in planned)


def expected_share(hparams: CanaryHParams, records: int) -> float:
    """Return the expected share of `records` that canaries replace; a record that several claim is replaced once."""
    if hparams.insertions:
        return expected_copies(hparams, records) / max(records, 1)
    return 1 - math.prod(1 - one.p_u * one.p_e for one in configurations(hparams) if not one.users)


def crowding(share: float) -> str:
    """Return a warning if `share`, the share of all records that canaries replace, is above 0.5; otherwise ""."""
    what = f"Canaries replace more than half of all records ({100 * share:.1f}%), so the model learns little else"
    return f"{what}; lower insertions, count, p_u or p_e." if share > 0.5 else ""

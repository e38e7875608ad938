"""Amounts of training of a plan as text for people."""

from collections.abc import Iterator, Sequence

from flsim.planning.amounts import UTILITY, Amount, shares_of
from flsim.planning.plan import Plan
from flsim.results.formats import note
from flsim.results.layout import Column, markdown
from flsim.results.run_file import WORLDS

UNLIKE = 1.5  # times another row's share of the published amount, from which on the text warns
AMOUNT = (
    "Amount: the sum of learning rates over steps that follow each other. Of SGD this is learning rate x steps; "
    "of FedAvg local rate x local steps of a user x rounds x server rate; with an adaptive server optimizer server "
    "rate x rounds. Momentum is not counted."
)


def training(plan: Plan) -> str:
    """Return the section of a page on amounts of training, beside the published ones; empty without amounts."""
    ours, theirs = plan.amounts, plan.published_amounts
    if not ours:
        return ""
    has_pairs = theirs is not None and [other.name for other in theirs] == [amount.name for amount in ours]
    names = Column("Rows", [amount.name for amount in ours], is_number=False)
    units = [list(_columns(ours, "")), *([list(_beside(ours, theirs))] if theirs and has_pairs else [])]
    worlds = [world for world in WORLDS if any(world in amount.utility for amount in (*ours, *(theirs or ())))]
    text = AMOUNT
    if any(amount.utility for amount in (*ours, *(theirs or ()))):
        text += f" {UTILITY.heading}: {UTILITY.title.lower()}" + ", IID/non-IID" * (len(worlds) > 1) + "."
    if theirs and has_pairs:
        text += f" Publ.: {plan.source}, with the default where the paper does not state a setting, such as FedAvg's "
        text += "local rate. Share: of the published amount." + _warning(ours, theirs)
    return "## Amount of training\n\n" + markdown([names], units) + note(text)


def _columns(amounts: Sequence[Amount], head: str) -> Iterator[Column]:
    yield Column(f"{head}amount", ["" if a.rate_steps is None else _short(a.rate_steps) for a in amounts])
    yield Column("epochs", [_short(amount.epochs) for amount in amounts])
    if any(amount.utility for amount in amounts):
        yield Column(UTILITY.heading, [_utility(amount) for amount in amounts])


def _beside(ours: Sequence[Amount], theirs: Sequence[Amount]) -> Iterator[Column]:
    yield from _columns(theirs, "publ. ")
    yield Column("share", ["" if share is None else _percent(share) for share in shares_of(ours, theirs)])


def _warning(ours: Sequence[Amount], theirs: Sequence[Amount]) -> str:
    """Return a sentence on rows whose shares of the published amounts are unlike; empty if all are alike."""
    named = zip([amount.name for amount in ours], shares_of(ours, theirs), strict=True)
    shares = [(share, name) for name, share in named if share is not None]
    if not shares:
        return ""
    (least, less), (most, more) = (extreme(shares, key=lambda pair: pair[0]) for extreme in (min, max))
    if most <= UNLIKE * least:
        return ""
    return (
        f" {more} is trained for {_percent(most)} of its published amount and {less} for {_percent(least)}, "
        f"{_short(most / least)} times less: a difference between them is also one of training."
    )


def _utility(amount: Amount) -> str:
    values = [amount.utility.get(world) for world in ("", *WORLDS)]
    return "/".join(UTILITY.format.format(value * UTILITY.scale) for value in values if value is not None)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:,.0f}%"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"

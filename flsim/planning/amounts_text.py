"""Amounts of training of a plan as text for people."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from flsim.planning.amounts import UTILITY, Amount, beside, shares_of
from flsim.planning.plan import Plan
from flsim.results.run_file import WORLDS
from flsim.show.formats import note
from flsim.show.layout import Column, markdown

UNLIKE = 1.5  # times another row's share of the published amount, from which on the text warns
AMOUNT = (
    "Amount: the sum of learning rates over steps that follow each other. Of SGD this is learning rate x steps; "
    "of FedAvg local rate x local steps of a user x rounds x server rate; with an adaptive server optimizer server "
    "rate x rounds. Momentum is not counted."
)


def training(plan: Plan) -> str:
    """Return the section of a page on amounts of training, beside the published ones; empty without amounts."""
    ours = plan.amounts
    if not ours:
        return ""
    theirs = beside(ours, plan.published_amounts or ())
    names = Column("Rows", list(map(_name, ours)), is_number=False)
    units = [list(_columns(ours, "")), *([list(_beside(ours, theirs))] if theirs else [])]
    worlds = [world for world in WORLDS if any(world in amount.utility for amount in (*ours, *(theirs or ())))]
    text = AMOUNT
    if any(amount.utility for amount in (*ours, *(theirs or ()))):
        text += f" {UTILITY.heading}: {UTILITY.title.lower()}" + ", IID/non-IID" * (len(worlds) > 1) + "."
    if theirs:
        text += f" Publ.: {plan.source}, with the default where the paper does not state a setting, such as FedAvg's "
        text += "local rate. Share: of the published amount." + _warning(ours, theirs)
    text += _between_worlds(ours)
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
    named = zip(map(_name, ours), shares_of(ours, theirs), strict=True)
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


def _between_worlds(ours: Sequence[Amount]) -> str:
    """Return a sentence on the rows whose worlds are trained for unlike amounts; empty if there are none."""
    times = {
        a.name: max(a.rate_steps, b.rate_steps) / min(a.rate_steps, b.rate_steps)
        for a, b in pairwise(ours)
        if a.name == b.name and a.rate_steps and b.rate_steps
    }
    unlike = [ratio for ratio in times.values() if ratio > UNLIKE]
    if not unlike:
        return ""
    least, most = _short(min(unlike)), _short(max(unlike))
    return (
        f" In {len(unlike)} of {len({amount.name for amount in ours})} rows one world is trained for "
        f"{least}{f' to {most}' * (least != most)} times as much as the other, as their rates differ."
    )


def _name(amount: Amount) -> str:
    return amount.name if amount.world is None else f"{amount.name}, {WORLDS[amount.world]}"


def _utility(amount: Amount) -> str:
    values = [amount.utility.get(world) for world in ("", *WORLDS)]
    return "/".join(UTILITY.format.format(value * UTILITY.scale) for value in values if value is not None)


def _percent(share: float) -> str:
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:,.0f}%"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"

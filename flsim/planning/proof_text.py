"""The largest provable epsilons of a plan as text for people."""

from collections.abc import Sequence
from dataclasses import replace

from flsim.planning.proof import Provable
from flsim.show.formats import note
from flsim.show.layout import Column, markdown

ABOUT = (
    "The largest lower bounds on epsilon that `flsim audit` can prove with 95% confidence for one {unit} of one run: "
    "all guesses are right. A canary that more users, or records, hold "
    "(sharers: their expected number) proves less of one. A result near these bounds is limited by the number of "
    "canaries, and says little of the training. Ranks: at delta 0."
)
COINS = " Coins: at the row's delta."
USERS = " Users: guesses of the coins of canary users, one user's updates in or out, at the row's delta."
HALF = (
    " Canaries replace text. Under add-or-remove-one a bound is half of that under replace-one, as to replace one is "
    "to remove one and to add another."
)


def proof(rows: Sequence[Provable]) -> str:
    """Return the section of a page on what an audit can prove at most, once for equal rows; empty without rows."""
    if not rows:
        return ""
    alike: dict[Provable, list[Provable]] = {}
    for row in rows:
        alike.setdefault(replace(row, name=""), []).append(row)
    distinct, has_coins = list(alike), any(row.coins is not None for row in rows)
    has_users = any(row.canary_users is not None for row in rows)
    columns = [
        Column("canaries", [f"{row.canaries:,}" for row in distinct]),
        Column("sharers", [f"{row.group:,}" for row in distinct]),
        Column("ranks", [f"{row.epsilon:.2f}" for row in distinct]),
    ]
    if has_coins:
        columns.append(Column("coins", ["" if row.coins is None else f"{row.coins:.2f}" for row in distinct]))
    if has_users:
        columns.append(
            Column("users", ["" if row.canary_users is None else f"{row.canary_users:.2f}" for row in distinct])
        )
    if has_coins or has_users:
        columns.append(Column("delta", [f"{row.delta:.3g}" for row in distinct]))
    columns.append(Column("neighbours", [row.relation for row in distinct], is_number=False))
    units = {row.unit for row in rows}
    text = ABOUT + COINS * has_coins + USERS * has_users
    text += HALF * any(row.relation == "add-or-remove-one" for row in rows)
    text = text.format(unit=units.pop() if len(units) == 1 else "user, or record,")
    text += "".join(f" {cost}." for cost in dict.fromkeys(row.cost for row in rows) if cost)
    text += "".join(f" {row_note}" for row_note in dict.fromkeys(row.note for row in rows) if row_note)
    names = Column("Rows", [_name(row, same) for row, same in alike.items()], is_number=False)
    forgetting = "".join(f"\n{note(text)}" for text in dict.fromkeys(row.forgetting for row in rows) if text)
    return "## Largest provable epsilon\n\n" + markdown([names], [columns]) + note(text) + forgetting


def _name(row: Provable, same: Sequence[Provable]) -> str:
    more = f" and {len(same) - 1} more" if len(same) > 1 else ""
    return same[0].name + more + ", of a record" * (row.unit == "record")

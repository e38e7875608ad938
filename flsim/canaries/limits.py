"""The limits of canaries that follow from their settings and the size of the corpus, before any is drawn."""

from flsim.base.errors import InputError
from flsim.canaries.spec import CanaryHParams, expected_copies, number_of_canaries
from flsim.data.vocabulary import Layout

MOST = 2**16  # canaries; an overlay holds their indices as uint16


def refuse_too_many(hparams: CanaryHParams, records: int) -> None:
    """Refuse more canaries than an overlay can tell apart, and about more copies than there are records.

    Args:
        hparams: settings of the canaries.
        records: number of the training records, or a number that is not exceeded where it is not known yet.

    Raises:
        InputError: there are too many canaries or copies.
    """
    canaries = number_of_canaries(hparams)
    if canaries > MOST:
        raise InputError(
            f"{canaries:,} canaries; a run has at most {MOST:,}: set a smaller canaries.count or canaries.controls"
        )
    copies = expected_copies(hparams, records)
    if hparams.insertions:
        refuse_copies(round(copies), records)
    if copies > records:
        raise InputError(
            f"{canaries:,} canaries would replace about {copies:,.0f} records, and the training users have "
            f"{records:,}; set a smaller canaries.count, or smaller canaries.p_u or canaries.p_e"
        )


def refuse_copies(copies: int, records: int) -> None:
    """Raise InputError where an exact number of copies exceeds that of the training records."""
    if copies > records:
        raise InputError(
            f"{copies:,} copies of canaries do not fit into {records:,} training records; set fewer "
            f"canaries.insertions, or a smaller canaries.count"
        )


def refuse_too_long(length: int, layout: Layout, setting: str = "canaries.length") -> None:
    """Raise InputError where canaries of `length` words, as `setting` gives them, exceed a record of the layout."""
    if length > layout.record_words:
        raise InputError(
            f"canaries of {length:,} words would be cut: records of this corpus hold {layout.record_words}; "
            f"set {setting} to at most that"
        )

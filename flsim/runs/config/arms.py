"""The arms of a run by their settings: IN plants canaries in its windows, OUT never does."""

from dataclasses import replace

from flsim.runs.config.base import Config


def settings_of_both(settings: Config) -> str:
    """Return a digest of settings that both arms of a seed share."""
    return replace(settings, canaries=replace(settings.canaries, arm="in")).digest


def shared_rounds(settings: Config, rounds: int) -> int:
    """Return the number of rounds after which one arm can go on with a checkpoint of the other, out of `rounds`.

    Both are equal to the bit until the first window begins. What users keep between rounds is not in checkpoints, so
    that arms of algorithms with such states share nothing.
    """
    return 0 if settings.slots_kept_by_users else settings.canaries.parting(rounds)

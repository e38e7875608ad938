"""Membership inference: attacks that distinguish records or users of training from others.

Larger scores mean membership. A custom attack is an `Attack` or a function in a file, which `flsim membership --attack`
names as ``path/to/file.py:NAME``.
"""

from flsim.attacks.membership.candidates import Attack as Attack
from flsim.attacks.membership.candidates import Candidates as Candidates

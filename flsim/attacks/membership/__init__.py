"""Membership inference: attacks that tell records, or users, that a model was trained on from others.

Scores are larger for what an attack takes for a member. An attack of your own is an `Attack`, or a function, in a file
that `flsim membership --attack` names as ``path/to/file.py:NAME``.
"""

from flsim.attacks.membership.candidates import Attack as Attack
from flsim.attacks.membership.candidates import Candidates as Candidates

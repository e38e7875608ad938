"""The measures of an evaluation, a file for each; `flsim.measures.built_in` lists them.

A user's own is such a file too: a `Measure` with its `Quantity`s, which ``evaluation.also`` names as
``path/to/file.py:NAME``.
"""

from flsim.measures.measure import Measure as Measure
from flsim.measures.measure import ModelProbe as ModelProbe
from flsim.measures.measure import Probe as Probe
from flsim.measures.quantity import Quantity as Quantity

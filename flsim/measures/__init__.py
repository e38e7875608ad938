"""The measures of an evaluation; `flsim.measures.built_in` has those of flsim.

A custom measure is a file with a `Measure` and its `Quantity`s, which ``evaluation.also`` names as
``path/to/file.py:NAME``.
"""

from flsim.measures.quantity import Measure as Measure
from flsim.measures.quantity import ModelProbe as ModelProbe
from flsim.measures.quantity import Probe as Probe
from flsim.measures.quantity import Quantity as Quantity

"""The undisturbed run that all runs with faults are compared with."""

from pathlib import Path

import pytest
from faulty import SETTINGS
from helpers import Trained


@pytest.fixture
def undisturbed(trained: Trained) -> Path:
    return trained(*SETTINGS)

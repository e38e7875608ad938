"""The run that nothing happens to: what all runs with faults are held against."""

from pathlib import Path

import pytest
from faulty import SETTINGS
from helpers import Trained


@pytest.fixture
def undisturbed(trained: Trained) -> Path:
    return trained(*SETTINGS)

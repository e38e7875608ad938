"""Fixtures of the tests of imports in pieces."""

from pathlib import Path

import pytest
from dumps import folder_bytes
from imports import Imports


@pytest.fixture
def imports(tmp_path: Path) -> Imports:
    return Imports(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    imports = Imports(tmp_path_factory.mktemp("expected"))
    imports.run()
    assert not imports.scratch.exists()
    return folder_bytes(imports.out)

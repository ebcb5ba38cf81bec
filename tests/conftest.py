"""Fixtures for every test that runs a model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import tiny_models


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a family's tiny model, made on first use."""
    folders: dict[str, Path] = {}

    def folder_of(family: str) -> Path:
        if family not in folders:
            folder = tmp_path_factory.mktemp(family)
            tiny_models.save(family, folder)
            folders[family] = folder
        return folders[family]

    return folder_of

"""The cluster that end-to-end tests share: two replicas of a tiny model, with the embedded index."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.http_cluster import Cluster, serving


@pytest.fixture(scope="session")
def cluster(model_folder: Callable[[str], Path]) -> Iterator[Cluster]:
    with serving(model_folder("llama-long")) as running:
        yield running

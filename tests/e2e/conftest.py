"""The cluster that the tests of a file share: two replicas of a tiny model, with the embedded index.

Of a file, not of the whole run: two clusters at once are too much for two cores.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.http_cluster import Cluster, serving


@pytest.fixture(scope="module")
def cluster(model_folder: Callable[[str], Path]) -> Iterator[Cluster]:
    with serving(model_folder("llama-long")) as running:
        yield running

"""Who may import whom (DESIGN section 2), held by reading the imports instead of running them.

deploy ──▶ router, replicas ──▶ cache_index
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "cache_index": set(),
    "replicas": {"cache_index"},
    "router": {"cache_index"},
    "deploy": {"cache_index", "replicas", "router"},
}
# The thin files that adapt to Ray; everything else is plain Python that a test can drive without a cluster.
RAY_ADAPTERS = {
    "cache_index/actor_store.py",
    "cache_index/metrics.py",
    "replicas/replica.py",
    "router/api/gateway.py",
    "router/routing/prefix_router.py",
}
WITHOUT_TENSORS = ("cache_index/", "router/routing/")
TENSOR_LIBRARIES = {"accelerate", "gguf", "safetensors", "torch", "transformers"}
ENVIRONMENT_READERS = {"deploy/settings.py", "deploy/ray_environment.py"}
ENVIRONMENT_NAMES = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


@dataclass(frozen=True)
class Import:
    """One imported module. `level` is the number of dots before it."""

    module: str
    level: int
    line: int

    @property
    def top(self) -> str:
        return self.module.partition(".")[0]


def imports_of(tree: ast.AST) -> Iterator[Import]:
    """Every import, wherever it stands; also those by name through importlib, where the name is written out."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names):
                yield from (Import(alias.name, 0, node.lineno) for alias in names)
            case ast.ImportFrom(module, names, level):
                if module is None:
                    yield from (Import(alias.name, level or 0, node.lineno) for alias in names)
                else:
                    # `from ray import _private` imports a module too, which only the longer name shows.
                    yield from (Import(f"{module}.{alias.name}", level or 0, node.lineno) for alias in names)
            case ast.Call(
                ast.Attribute(_, "import_module") | ast.Name("import_module" | "__import__"),
                [ast.Constant(str(module)), *_],
            ):
                yield Import(module, 0, node.lineno)


def environment_uses(tree: ast.AST) -> Iterator[int]:
    """Lines that reach for the process's environment."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(ast.Name("os"), name) if name in ENVIRONMENT_NAMES:
                yield node.lineno
            case ast.ImportFrom("os", names) if any(alias.name in ENVIRONMENT_NAMES for alias in names):
                yield node.lineno


def faults(path: str, source: str) -> list[str]:
    """What a source file at `path`, relative to the repository, does that it may not."""
    package, tree = path.partition("/")[0], ast.parse(source)
    found = []
    for imported in imports_of(tree):
        where = f"{path}:{imported.line}"
        if imported.level:
            # One dot is the file's own folder, so a path of n folders bears n dots.
            if imported.level > path.count("/"):
                found.append(f"{where}: a relative import leaves the package")
            continue
        if imported.top in MAY_IMPORT and imported.top not in MAY_IMPORT[package] | {package}:
            found.append(f"{where}: {package} imports {imported.top}")
        if imported.top == "ray" and package != "deploy" and path not in RAY_ADAPTERS:
            found.append(f"{where}: ray in a file that is no adapter")
        if imported.top == "ray" and "_private" in imported.module.split("."):
            found.append(f"{where}: ray's private path {imported.module}")
        if imported.top in TENSOR_LIBRARIES and path.startswith(WITHOUT_TENSORS):
            found.append(f"{where}: {imported.top} where tensors are not known")
    if path not in ENVIRONMENT_READERS:
        found += [f"{path}:{line}: reads the environment" for line in environment_uses(tree)]
    return found


def absolute_inside(path: str, source: str) -> list[str]:
    """Absolute imports of the file's own package."""
    package = path.partition("/")[0]
    return [
        f"{path}:{imported.line}: {imported.module} is this package's own"
        for imported in imports_of(ast.parse(source))
        if not imported.level and imported.top == package
    ]


def sources(package: str) -> dict[str, str]:
    return {
        str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted((ROOT / package).rglob("*.py"))
    }


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_lies_below_it_and_knows_only_what_it_may(package: str) -> None:
    read = sources(package)
    assert f"{package}/__init__.py" in read
    assert [fault for path, source in read.items() for fault in faults(path, source)] == []


@pytest.mark.parametrize(
    "package",
    [
        "cache_index",
        "replicas",
        "router",
        "deploy",
    ],
)
def test_inside_a_package_imports_are_relative(package: str) -> None:
    assert [fault for path, source in sources(package).items() for fault in absolute_inside(path, source)] == []


def test_every_adapter_of_ray_is_there_and_imports_it() -> None:
    # Otherwise the list would go on allowing ray in files that no longer need it.
    for path in RAY_ADAPTERS:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert "ray" in {imported.top for imported in imports_of(tree)}, path


def test_every_reader_of_the_environment_is_there_and_reads_it() -> None:
    for path in ENVIRONMENT_READERS:
        assert list(environment_uses(ast.parse((ROOT / path).read_text(encoding="utf-8")))), path


def test_every_import_package_of_the_distribution_has_its_rule() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert folders == set(MAY_IMPORT)


@pytest.mark.parametrize(
    ("path", "source", "fault"),
    [
        ("cache_index/planted.py", "import router.errors", "1: cache_index imports router"),
        ("cache_index/planted.py", "from replicas import engine", "1: cache_index imports replicas"),
        ("replicas/kv/planted.py", "from router.api.app import build_api", "1: replicas imports router"),
        ("router/planted.py", "def f():\n    from replicas.engine import Engine", "2: router imports replicas"),
        (
            "router/planted.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import deploy.settings",
            "3: router imports deploy",
        ),
        ("router/planted.py", "import importlib\nimportlib.import_module('deploy.app')", "2: router imports deploy"),
        ("router/api/planted.py", "from ...replicas import engine", "1: a relative import leaves the package"),
        ("replicas/planted.py", "from .. import router", "1: a relative import leaves the package"),
        ("replicas/engine.py", "import ray", "1: ray in a file that is no adapter"),
        ("router/routing/policy.py", "from ray import serve", "1: ray in a file that is no adapter"),
        ("deploy/planted.py", "import ray._private.worker", "1: ray's private path ray._private.worker"),
        ("deploy/planted.py", "from ray.serve import _private", "1: ray's private path ray.serve._private"),
        ("cache_index/planted.py", "from torch import nn", "1: torch where tensors are not known"),
        ("router/routing/planted.py", "import transformers", "1: transformers where tensors are not known"),
        ("replicas/planted.py", "import os\nos.environ['A']", "2: reads the environment"),
        ("deploy/app.py", "import os\nos.getenv('A')", "2: reads the environment"),
        ("router/planted.py", "from os import environ", "1: reads the environment"),
    ],
)
def test_a_planted_fault_is_found(path: str, source: str, fault: str) -> None:
    assert faults(path, source) == [f"{path}:{fault}"]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("cache_index/planted.py", "from .events import Event\nimport mmh3, numpy, os.path"),
        ("replicas/kv/planted.py", "import torch\nfrom ..errors import ModelError\nfrom cache_index.blocks import x"),
        ("router/api/planted.py", "import transformers\nfrom ..settings import GatewaySettings"),
        ("router/api/gateway.py", "from ray import serve\nfrom ray.exceptions import RayError"),
        ("deploy/planted.py", "import ray, replicas.engine\nfrom router.api.gateway import Gateway"),
        ("deploy/settings.py", "import os\nos.environ"),
        ("router/planted.py", "rayon = torch = environ = 1\n'import ray'"),
    ],
)
def test_what_is_allowed_is_not_found(path: str, source: str) -> None:
    assert faults(path, source) == []
    assert absolute_inside(path, source) == []


def test_a_planted_absolute_import_inside_a_package_is_found() -> None:
    found = absolute_inside("replicas/kv/planted.py", "import torch\nfrom replicas.errors import ModelError")
    assert found == ["replicas/kv/planted.py:2: replicas.errors.ModelError is this package's own"]

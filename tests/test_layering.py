"""A file is the only coupling between recorder and analyzer; imports must not add another."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"recorder", "analyzer", "experiments", "calibration", "benchmarks"}
ALLOWED = {
    "recorder": {"recorder"},
    "analyzer": {"analyzer", "recorder.schema", "recorder.manifest", "recorder.errors"},
    "experiments": {"experiments", "recorder"},
}


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules that a file imports, at any depth."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def is_allowed(module: str, allowed: set[str]) -> bool:
    """The module, or a package that holds it, is on the list."""
    return any(module == name or module.startswith(name + ".") for name in allowed)


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_imports_only_the_layers_below_it(package: str) -> None:
    """No file imports one of our packages that its layer may not know."""
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = {
        (path.name, module)
        for path in files
        for module in imported_modules(path)
        if module.partition(".")[0] in OURS
        and module not in OURS
        and not is_allowed(module, ALLOWED[package])
    }
    assert wrong == set()


def test_the_recorder_needs_three_packages() -> None:
    """Whoever records pays for numpy, pyarrow and xxhash, and for nothing that the analyzer needs."""
    third_party = {
        module.partition(".")[0]
        for path in (ROOT / "recorder").rglob("*.py")
        for module in imported_modules(path)
    }
    assert third_party - sys.stdlib_module_names - {"recorder"} == {"numpy", "pyarrow", "xxhash"}

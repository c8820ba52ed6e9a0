"""Runs the examples in README.md, in docs/ and in docstrings: those of one file, from top to bottom, are one test.

As a user has them, what names no engine is compiled: `make test-all` has them so, with each engine that compiles, and
`make test` with NumPy in its place.
"""

import contextlib
import tempfile
from pathlib import Path
from unittest import mock

import pytest

import tests.support.bundled  # noqa: F401

# isort: split
from arrayopt.engines import registry as engines
from tests.support.engines import COMPILED

ROOT = Path(__file__).parent

try:
    from sybil import Sybil
    from sybil.document import PythonDocStringDocument
    from sybil.example import SybilFailure
    from sybil.parsers.markdown import PythonCodeBlockParser
    from sybil.parsers.rest import DocTestParser
except ImportError:  # as on a machine that has what tests/gpu needs alone
    Sybil = SybilFailure = None


def _examples():
    """Where examples are, by what finds them."""
    if Sybil is None:
        return ()
    pages = ["README.md", "docs/*.md", "docs/*/*.md"]
    modules = ["arrayopt/*.py", "arrayopt/*/*.py"]
    return (
        Sybil(parsers=[PythonCodeBlockParser()], path=str(ROOT), patterns=pages),
        Sybil(
            parsers=[DocTestParser()],
            path=str(ROOT),
            patterns=modules,
            document_types={".py": PythonDocStringDocument},
        ),
    )


FOUND = _examples()


def pytest_collect_file(file_path, parent):
    """Take pages and modules."""
    for sybil in FOUND:
        if sybil.should_parse(file_path):
            return ExampleFile.from_parent(parent, path=file_path, sybil=sybil)
    return None


def pytest_terminal_summary(terminalreporter, config):
    """Say what was left out."""
    if config.option.markexpr == "not slow":
        terminalreporter.line("tests marked `slow` were left out: `make test-all` runs them, as does `-m ''`")


class ExampleFile(pytest.File):
    """A page or a module: where it has examples, one test of them all, which build on each other, for each engine."""

    def __init__(self, *, sybil, **options):
        super().__init__(**options)
        self.sybil = sybil

    def collect(self):
        if any(True for _ in self.sybil.parse(self.path)):
            yield Examples.from_parent(self, name="examples[numpy]", first="numpy")
            for engine in COMPILED:
                compiled = Examples.from_parent(self, name=f"examples[{engine}]", first=engine)
                compiled.add_marker("slow")
                yield compiled


class Examples(pytest.Item):
    """The examples of one file, run in one namespace and in an empty working directory."""

    def __init__(self, *, first, **options):
        super().__init__(**options)
        self.fused = {
            of: tuple(sorted(found, key=lambda x: x != first)) if first in found else ()
            for of, found in engines.FUSED.items()
        }

    def runtest(self):
        chosen = mock.patch.dict(engines.FUSED, self.fused)
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), chosen:
            for example in self.parent.sybil.parse(self.path):
                example.evaluate()

    def repr_failure(self, excinfo):
        return str(excinfo.value) if isinstance(excinfo.value, SybilFailure) else super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, None, f"examples of {self.path.relative_to(ROOT)}"

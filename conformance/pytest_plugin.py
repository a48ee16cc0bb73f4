"""`pytest --leyden-package acme`: one test for each technique of a package and each promise of its kind.

Loaded by every pytest of an environment that has leyden: it imports nothing before its option is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest


class Hooks:
    """What a `conftest.py` may say."""

    def pytest_leyden_cases(self) -> list[Any]:  # type: ignore[empty-body]
        """Returns `conformance.Case`s that take the place of their techniques' docstring examples."""


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Makes `pytest_leyden_cases` known."""
    pluginmanager.add_hookspecs(Hooks)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option."""
    parser.getgroup("leyden").addoption(
        "--leyden-package",
        action="append",
        default=[],
        metavar="NAME",
        help="prove of each technique that this distribution registers what leyden promises of all "
        "(may be given several times; select with -k, or with -m leyden all of them)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes the mark known."""
    if config.getoption("leyden_package"):
        config.addinivalue_line("markers", "leyden: a promise that leyden makes of a technique")
        config.addinivalue_line("markers", "gpu: needs a GPU")


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Adds the tests of the packages named by the option."""
    for package in config.getoption("leyden_package"):
        chosen = _cases(config, package)
        node = PackageNode.from_parent(session, name=package, nodeid=package, cases=chosen)
        items += session.genitems(node)


def _cases(config: pytest.Config, package: str) -> list[Any]:
    from conformance import cases
    from core.errors import ConfigError

    try:
        return cases(package, [case for found in config.hook.pytest_leyden_cases() for case in found])
    except ConfigError as error:
        raise pytest.UsageError(f"--leyden-package: {error}") from None


class PackageNode(pytest.Collector):
    """A distribution; its techniques."""

    def __init__(self, *, cases: list[Any], **options: Any) -> None:
        super().__init__(**options)
        self.cases = cases

    def collect(self) -> Iterator[TechniqueNode]:
        """Yields each case of each technique; the second of one technique is `Name-2`."""
        seen: Counter[str] = Counter()
        for case in self.cases:
            seen[case.entry.name] += 1
            number = seen[case.entry.name]
            name = case.entry.name if number == 1 else f"{case.entry.name}-{number}"
            yield TechniqueNode.from_parent(self, name=name, case=case)


class TechniqueNode(pytest.Collector):
    """A technique with arguments; its promises."""

    def __init__(self, *, case: Any, **options: Any) -> None:
        super().__init__(**options)
        self.case = case

    def collect(self) -> Iterator[ProofItem]:
        """Yields a test for each promise."""
        from conformance import proofs

        for proof in proofs(self.case):
            yield ProofItem.from_parent(self, name=proof.name, case=self.case, proof=proof)


class ProofItem(pytest.Item):
    """One promise of one technique."""

    def __init__(self, *, case: Any, proof: Any, **options: Any) -> None:
        super().__init__(**options)
        self.case, self.proof = case, proof
        self.add_marker(pytest.mark.leyden)
        if proof.gpu:
            self.add_marker(pytest.mark.gpu)

    def runtest(self) -> None:
        """Runs the proof; what cannot be proved is skipped, with the reason."""
        from conformance import NotProvable

        try:
            self.proof(self.case)
        except NotProvable as reason:
            pytest.skip(str(reason))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Shows what was measured; the kit's own stack says nothing."""
        if isinstance(excinfo.value, AssertionError):
            return str(excinfo.value)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, None, str]:
        """The test's name, for the heading of a failure."""
        return self.path, None, self.nodeid

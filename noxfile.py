"""Tests on the lowest and on the newest versions that pyproject.toml allows, on every Python.

The session `pure` runs them without compiled kernels.

nox -s lowest -- tests/adapters tests/nn
nox -s newest                            # each Python that is installed
nox -s newest-3.12
"""

import itertools
import re

import nox

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
PYTHONS = nox.project.python_versions({"project": PROJECT})  # of its classifiers
nox.options.sessions = ["lowest", "newest", "pure"]


def lowest_versions() -> list[str]:
    """Returns the lowest version of each dependency of the extra `all`, for pip."""
    extras = PROJECT["optional-dependencies"].items()
    others = ("dev", "docs", "hfds", "wandb")
    lists = [required for extra, required in extras if extra not in others]
    found: dict[str, str] = {}
    for requirement in itertools.chain(PROJECT["dependencies"], *lists):
        match = re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement)
        if match is None:
            continue  # extras of irpe itself
        name, version = match.groups()
        if found.setdefault(name, version) != version:
            raise ValueError(f"{name} has two lower bounds: {found[name]} and {version}")
    return [f"{name}=={version}" for name, version in found.items()]


@nox.session(python=PYTHONS[0])
def lowest(session: nox.Session) -> None:
    """The tests on the lowest versions, less types and warnings: those are of the newest."""
    session.install("-e", ".[all,dev]", *lowest_versions())
    types = "tests/test_package.py::test_tools_have_nothing_to_say[pyright]"
    run_tests(session, "-W", "default", "--deselect", types)


@nox.session(python=PYTHONS)
def newest(session: nox.Session) -> None:
    """The tests on the newest versions."""
    session.install("--upgrade", "--upgrade-strategy", "eager", "-e", ".[all,dev]")
    run_tests(session)


@nox.session(python=PYTHONS[0])
def pure(session: nox.Session) -> None:
    """The tests without compiled kernels."""
    session.install("-e", ".[all,dev]")
    session.env["IRPE_NATIVE"] = "0"
    run_tests(session)


def run_tests(session: nox.Session, *options: str) -> None:
    """Lists what is installed, then runs the tests that were asked for, or all."""
    session.run("python", "-m", "pip", "list")
    session.run("python", "-m", "pytest", *options, *session.posargs)

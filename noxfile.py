"""Tests on the lowest and on the newest versions of the libraries that pyproject.toml allows.

nox -s lowest -- tests/adapters tests/nn
nox -s newest
"""

import re
import tomllib
from pathlib import Path

import nox

LIBRARIES = ("torch", "torchvision", "timm", "transformers")
ROOT = Path(__file__).parent
nox.options.sessions = ["lowest", "newest"]


def lowest_versions() -> list[str]:
    """Returns the lowest version of each library that pyproject.toml allows, as pip takes it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = {}
    for requirement in (each for requirements in lists for each in requirements):
        match = re.fullmatch(rf"({'|'.join(LIBRARIES)})>=([\d.]+)", requirement)
        if match:
            name, version = match.groups()
            if found.setdefault(name, version) != version:
                raise ValueError(f"{name} has two lower bounds: {found[name]} and {version}")
    return [f"{name}=={version}" for name, version in found.items()]


@nox.session
def lowest(session: nox.Session) -> None:
    """The tests on the lowest versions; what old libraries deprecate is not an error."""
    session.install("-e", ".[all,dev]", *lowest_versions())
    run_tests(session, "-W", "ignore::DeprecationWarning", "-W", "ignore::FutureWarning")


@nox.session
def newest(session: nox.Session) -> None:
    """The tests on the newest versions."""
    session.install("--upgrade", "--upgrade-strategy", "eager", "-e", ".[all,dev]")
    run_tests(session)


def run_tests(session: nox.Session, *options: str) -> None:
    """Lists what is installed, then runs the tests that were asked for, or all."""
    session.run("python", "-m", "pip", "list")
    session.run("python", "-m", "pytest", *options, *session.posargs)

"""What a build adds: kernels for the CPU, and full addresses in README's links.

Kernels of `irpe.ops.impl.native` are compiled where there is a C++ compiler. A wheel with them is
for x86-64 Linux, of any Python; without them it is the pure one. An editable installation has them
in the source tree. Nothing else depends on it, and nothing here fails.
"""

import importlib.util
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

PACKAGE = "src/irpe/ops/impl/native"
TAG = "py3-none-manylinux_2_17_x86_64"  # libc alone, of 2012 (tests/ops/native/test_build.py)


class NativeHook(BuildHookInterface):
    """Compiles, and says what it did."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Adds the libraries to a wheel, or to the source tree if it is editable."""
        spec = importlib.util.spec_from_file_location("build", Path(self.root, PACKAGE, "build.py"))
        assert spec is not None
        assert spec.loader is not None
        build = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(build)
        if version == "editable":
            self.app.display_info(build.compile_all())
            return
        self.folder = tempfile.TemporaryDirectory()
        self.app.display_info(build.compile_all(Path(self.folder.name)))
        made = [build.library_path(width, Path(self.folder.name)) for width in build.WIDTHS]
        if all(path.exists() for path in made):
            build_data.update(pure_python=False, tag=TAG)
            inside = PACKAGE.removeprefix("src/")
            build_data["force_include"] |= {str(path): f"{inside}/{path.name}" for path in made}

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Removes what was compiled for a wheel."""
        if version != "editable":
            self.folder.cleanup()


class ReadmeHook(MetadataHookInterface):
    """Takes README as the description; a release's links lead to its repository."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Adds the description to the metadata."""
        text = Path(self.root, "README.md").read_text()
        repository = os.environ.get("GITHUB_REPOSITORY")  # where a release is made
        if repository:
            text = with_addresses(text, repository, f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def with_addresses(text: str, repository: str, tag: str) -> str:
    """Returns Markdown whose relative links are addresses, which a package index needs.

    Args:
        text: The page.
        repository: OWNER/NAME.
        tag: The tag or commit that links lead to.
    """
    page = f"https://github.com/{repository}/blob/{tag}/"
    file = f"https://raw.githubusercontent.com/{repository}/{tag}/"
    text = re.sub(r'(src="|!\[[^\]]*\]\()(?!https?:)', rf"\g<1>{file}", text)
    return re.sub(r"(?<!!)(\[[^\[\]]*\]\()(?!https?:|#)", rf"\g<1>{page}", text)

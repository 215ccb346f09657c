"""The build hook: compiles the kernels of `irpe.ops.impl.native` where there is a C++ compiler.

A wheel with them is for x86-64 Linux, of any Python; without them it is the pure one. An editable
installation has them in the source tree. Nothing else depends on it, and nothing here fails.
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

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

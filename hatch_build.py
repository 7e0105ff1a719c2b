"""Builds the recorder's compiled kernel with the machine's C compiler; without one, builds without it.

The extension uses CPython's stable ABI, so that one wheel per platform serves Python 3.11 and newer.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

EXTENSION = "recorder/_kernel.abi3.so"
# x * x + y must round like NumPy's two operations, so no contraction to a fused multiply-add.
OPTIONS = ["-O3", "-fPIC", "-shared", "-ffp-contract=off", "-Wno-psabi"]


class KernelBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling gives no argument for it
    """Compiles recorder/kernel.c beside its source."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called by hatchling before it packs the wheel."""
        if self.target_name != "wheel":
            return
        if not self._compile():
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{platform}"
        if version != "editable":
            build_data["artifacts"].append(EXTENSION)

    def _compile(self) -> bool:
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        include = f"-I{sysconfig.get_path('include')}"
        command = [*compiler, *OPTIONS, include, "recorder/kernel.c", "-o", EXTENSION]
        if sys.platform == "darwin":
            command[1:1] = ["-undefined", "dynamic_lookup"]
        try:
            subprocess.run(command, cwd=self.root, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", None) or str(error)
            self.app.display_warning(
                "No compiled kernel, the recorder will use NumPy: " + reason.strip().splitlines()[0]
            )
            Path(self.root, EXTENSION).unlink(missing_ok=True)
            return False
        return True

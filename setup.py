"""The one thing that pyproject.toml cannot say: a C extension that an install may do without.

POSENC_EXTENSION=required makes a build fail without it, and POSENC_EXTENSION=none leaves it out:
with the first the wheels of a release are built, with the second the one for all other platforms.
"""

import glob
import os
import sys

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

SOURCE = "src/posenc/ops/native/"
WANTED = os.environ.get("POSENC_EXTENSION", "optional")
if WANTED not in ("required", "optional", "none"):
    raise SystemExit(f"setup.py: POSENC_EXTENSION is required, optional or none, not {WANTED!r}")


class StableAbiWheel(bdist_wheel):
    """One wheel for every Python from 3.10 on."""

    def get_tag(self):
        """The tag of the stable ABI, or of every machine where the extension was not built."""
        python, abi, platform = super().get_tag()
        if not any(map(os.path.exists, self.get_finalized_command("build_ext").get_outputs())):
            return "py3", "none", "any"
        return ("cp310", "abi3", platform) if python.startswith("cp") else (python, abi, platform)


EXTENSION = Extension(
    "posenc.ops.native._native",
    [SOURCE + "native.c"],
    depends=sorted(glob.glob("src/posenc/ops/*/*.h")),
    extra_compile_args=[]
    if sys.platform == "win32"
    else ["-std=c99", "-O3", "-fexceptions", "-ffp-contract=fast", "-fno-trapping-math"],
    libraries=["dl", "m"] if sys.platform.startswith("linux") else [],
    py_limited_api=True,
    # Without a C compiler the install goes on, and plain torch serves.
    optional=WANTED == "optional",
)

setup(
    ext_modules=[] if WANTED == "none" else [EXTENSION],
    cmdclass={"bdist_wheel": StableAbiWheel},
)

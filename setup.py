"""Builds the native kernels with whatever C compiler is there; everything else is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCE = Path("src", "lowbit", "kernels", "native.c")
HEADERS = [SOURCE.with_name("native_level.h"), SOURCE.with_name("native_loops.h")]

# No fast-math and no contraction: every operation rounds once. Exceptions are not watched, so selects can be vectors.
FLAGS = ["-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
OPENMP = [] if sys.platform == "darwin" else ["-fopenmp"]


class BuildShared(build_ext):
    """A plain shared library, loaded through ctypes: no module, so nothing for Python to export."""

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols


setup(
    ext_modules=[
        Extension(
            "lowbit.kernels._native",
            [str(SOURCE)],
            depends=[str(header) for header in HEADERS],
            extra_compile_args=FLAGS + OPENMP,
            extra_link_args=OPENMP,
            py_limited_api=True,  # it knows nothing of Python: one build serves every version
            optional=True,  # without a compiler the install still works, and the reference kernels run
        )
    ],
    cmdclass={"build_ext": BuildShared},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)

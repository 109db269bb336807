"""Build the native core `lmcache._native` next to the Python packages.

Metadata lives in pyproject.toml; this file only compiles C++. `LMCACHE_BUILD_JOBS` sets how many
compilers run at once (default: the number of cores).
"""

import os
import shlex
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nanobind
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CXX_STANDARD = "-std=c++17"
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


class BuildNative(build_ext):
    """Compile `csrc/` and nanobind's own source with the host compiler, then link one module."""

    def build_extension(self, ext: Extension) -> None:
        """Build one module; subprocess.CalledProcessError carries the compiler's exit code."""
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        objects_dir = Path(self.build_temp)
        objects_dir.mkdir(parents=True, exist_ok=True)
        nanobind_root = Path(nanobind.include_dir()).parent
        common = [
            CXX_STANDARD,
            "-fPIC",
            "-fvisibility=hidden",
            "-DNDEBUG",
            f"-I{nanobind.include_dir()}",
            f"-I{nanobind_root / 'ext' / 'robin_map' / 'include'}",
            f"-I{sysconfig.get_paths()['include']}",
            f"-I{ROOT / 'csrc'}",
        ]
        jobs: list[tuple[Path, list[str]]] = [
            (ROOT / source, ["-O3", *WARNINGS]) for source in ext.sources
        ]
        jobs.append((nanobind_root / "src" / "nb_combined.cpp", ["-Os", "-fno-strict-aliasing"]))

        def compile_one(job: tuple[Path, list[str]]) -> str:
            source, flags = job
            target = objects_dir / f"{source.parent.name}_{source.stem}.o"
            command = [*compiler, *common, *flags, "-c", str(source), "-o", str(target)]
            subprocess.run(command, check=True)
            return str(target)

        workers = int(os.environ.get("LMCACHE_BUILD_JOBS", os.cpu_count() or 1))
        with ThreadPoolExecutor(max_workers=workers) as pool:
            objects = list(pool.map(compile_one, jobs))
        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [*compiler, "-shared", "-pthread", "-s", *objects, "-o", str(output)], check=True
        )


def native_sources() -> list[str]:
    """Every C++ file of the core and of its bindings, relative to the project root."""
    found = [*ROOT.glob("csrc/core/*.cpp"), *ROOT.glob("csrc/bind/*.cpp")]
    return sorted(str(path.relative_to(ROOT)) for path in found)


setup(
    ext_modules=[Extension("lmcache._native", native_sources())],
    cmdclass={"build_ext": BuildNative},
)

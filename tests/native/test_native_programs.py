"""The C++ test programs, each built and run under a sanitizer."""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CORE = sorted((ROOT / "csrc" / "core").glob("*.cpp"))
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
PROGRAMS = [
    ("address_allocator_test", "address"),
    ("block_copy_test", "address"),
    ("block_copy_test", "thread"),
    ("checksum_test", "address"),
    ("chunk_file_test", "address"),
    ("chunk_file_test", "thread"),
    ("eviction_order_test", "address"),
    ("pool_test", "address"),
    ("threads_test", "address"),
    ("threads_test", "thread"),
]


@pytest.mark.native
@pytest.mark.parametrize(("program", "sanitizer"), PROGRAMS)
def test_program_passes_under_sanitizer(program: str, sanitizer: str, tmp_path: Path) -> None:
    binary = tmp_path / program
    command = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    command += [f"-fsanitize={SANITIZERS[sanitizer]}", "-fno-sanitize-recover=all"]
    command += [f"-I{ROOT / 'csrc'}", f"-I{HERE}", str(HERE / f"{program}.cpp"), *map(str, CORE)]
    built = subprocess.run([*command, "-o", str(binary)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([str(binary)], capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr

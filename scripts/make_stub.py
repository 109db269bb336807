"""Write lmcache/_native.pyi from the built module; with --check, only compare."""

import argparse
import re
import sys
from pathlib import Path

from nanobind.stubgen import StubGen

from lmcache import _native

STUB = Path(__file__).parent.parent / "lmcache" / "_native.pyi"


def stub_text() -> str:
    """Return the stub of the module that is built."""
    generator = StubGen(_native, include_private=True)
    generator.put(_native)
    # The core hands Python objects through without knowing their types; callers annotate them.
    text = re.sub(r"-> object\b", "-> Any", str(generator.get()))
    text = re.sub(r"-> list\b(?!\[)", "-> list[Any]", text)
    text = re.sub(r"-> dict\b(?!\[)", "-> dict[str, int]", text)
    text = re.sub(r": (list|Sequence)\b(?!\[)", r": \1[Any]", text)
    text = re.sub(r"\btuple\b(?!\[)", "tuple[Any, ...]", text)
    text = re.sub(r"def __hash__\(self, /\):", "def __hash__(self) -> int:", text)
    text = re.sub(
        r"def (__\w\w__)\(self, value, /\):", r"def \1(self, value: object) -> bool:", text
    )
    text = text.replace("from typing import ", "from typing import Any, ", 1)
    return text if "from typing import" in text else "from typing import Any\n\n" + text


def main() -> int:
    """Write or compare; 1 when they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = stub_text()
    if parser.parse_args().check:
        return int(STUB.read_text() != text)
    STUB.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The lines of the README run, and print what their comments promise."""

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parent.parent.parent / "README.md"


def test_the_lines_of_the_readme_run(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2

    ran = subprocess.run(
        [sys.executable, "-c", "\n".join(blocks)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={"PYTHONPATH": str(README.parent)},
    )

    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert lines[:2] == ["768 tokens cached", "768 tokens loaded"]
    assert "REFRESHED" in lines[2] and "GONE" in lines[2]
    assert int(lines[3].split()[0]) > 10
    assert lines[4] == "False"

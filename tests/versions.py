"""Run the tests that depend on transformers with its oldest and its newest supported version: ``make versions``.

Each version gets a virtual environment in ``build/versions``, made once, that finds everything but transformers (and
what that version wants in another version) in the environment that runs this script.

    python tests/versions.py            the oldest and the newest of pyproject.toml
    python tests/versions.py 5.22.0     that one
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "build" / "versions"
EVERY_FAMILY: Final = "test_specs or test_mixers or test_attention_hook or understood or transformers"
RUNS: Final[tuple[tuple[str, ...], ...]] = (
    (
        *("tests/runtime/test_specs.py", "tests/runtime/test_mixers.py", "tests/runtime/test_attention_hook.py"),
        *("tests/families/test_families.py", "-m", "not slow", "-k", EVERY_FAMILY),
    ),
    ("tests/families/test_families.py", "-k", "not (understood or transformers)"),
)
"""What is cached and mixed, and that every family is served and answers as transformers does; then a few at length."""


def supported() -> tuple[str, str]:
    """What pip is asked for: the oldest version, and the newest one."""
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'"transformers>=([0-9.]+),<([0-9.]+)"', text)
    assert found, "pyproject.toml names no range of transformers"
    return f"transformers=={found[1]}", f"transformers>={found[1]},<{found[2]}"


def environment(wanted: str) -> Path:
    """The interpreter of an environment with ``wanted``."""
    folder = FOLDER / re.sub(r"[^0-9.]+", "-", wanted).strip("-")
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        site = next(folder.glob("lib/python*/site-packages"))
        (site / "others.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--upgrade", wanted], check=True)
    return python


def main(versions: list[str]) -> int:
    failed = []
    for wanted in [f"transformers=={version}" for version in versions] or supported():
        python = environment(wanted)
        show = "import transformers; print('== transformers', transformers.__version__)"
        subprocess.run([str(python), "-c", show], check=True)
        for run in RUNS:
            if subprocess.run([str(python), "-m", "pytest", "-q", *run], cwd=ROOT, check=False).returncode:
                failed.append(wanted)
    print("failed: " + ", ".join(sorted(set(failed))) if failed else "all versions passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

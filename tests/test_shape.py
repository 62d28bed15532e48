"""The shape test: sizes, names, state, imports and import time of the package, and proof that each check bites."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

import shape_rules as rules
from shape_rules import Source

ROOT: Final = Path(__file__).resolve().parents[1] / "src" / "ostinato"
SOURCES: Final = rules.read_package(ROOT)
RULES: Final = (
    rules.long_file,
    rules.long_functions,
    rules.wide_functions,
    rules.large_classes,
    rules.vague_names,
    rules.module_state,
    rules.unsafe_code,
    rules.misplaced_torch,
    rules.inner_config,
)
Rule = Callable[[Source], list[str]]

LIGHT_PACKAGES: Final = ("ostinato.cache", "ostinato.transfer", "ostinato.hierarchy", "ostinato.scheduler")
HEAVY_MODULES: Final = ("torch", "numpy", "transformers")
MAX_IMPORT_SECONDS: Final = 0.2
RUNS: Final = 5

PROBE: Final = """
import json, sys, time
start = time.perf_counter()
__import__(sys.argv[1])
print(json.dumps([time.perf_counter() - start, [name for name in sys.argv[2:] if name in sys.modules]]))
"""


def probe_import(module: str, path: Path | None = None) -> tuple[float, set[str]]:
    """Median seconds of importing ``module`` in fresh interpreters, and the heavy modules that it loaded."""
    environment = dict(os.environ)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", PROBE, module, *HEAVY_MODULES]
    seconds, loaded = [], set[str]()
    for _ in range(RUNS):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        elapsed, names = json.loads(done.stdout)
        seconds.append(elapsed)
        loaded.update(names)
    return statistics.median(seconds), loaded


# ---------------------------------------------------------------------------------------------------------- the package


def test_the_package_was_found() -> None:
    assert "ostinato.cache" in {source.module for source in SOURCES}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps(rule: Rule) -> None:
    found = [line for source in SOURCES for line in rule(source)]
    assert not found, "\n" + "\n".join(found)


def test_package_has_no_import_cycle() -> None:
    assert not rules.import_cycle(SOURCES)


@pytest.mark.parametrize("package", LIGHT_PACKAGES)
def test_light_packages_import_fast_and_load_nothing_heavy(package: str) -> None:
    seconds, loaded = probe_import(package)
    assert not loaded
    assert seconds < MAX_IMPORT_SECONDS


# ------------------------------------------------------------------------------------------------------ the checks bite

BODY: Final = "    x = 1\n"
BAD: Final = (
    (rules.long_file, "a.py", "x = 1\n" * 401),
    (rules.long_functions, "a.py", "def f():\n" + BODY * 60),
    (rules.long_functions, "a.py", "class C:\n    async def f(self):\n" + ("    " + BODY) * 60),
    (rules.wide_functions, "a.py", "def f(a, b, c, d, e, f, g): ..."),
    (rules.wide_functions, "a.py", "def f(a, b, c, /, d, *e, f, **g): ..."),
    (rules.wide_functions, "a.py", "class C:\n    def f(self, a, b, c, d, e, f, g): ..."),
    (rules.wide_functions, "a.py", "class C:\n    @staticmethod\n    def f(a, b, c, d, e, f, g): ..."),
    (rules.large_classes, "a.py", "class C:\n" + "".join(f"    def _m{i}(self): ...\n" for i in range(15))),
    *((rules.vague_names, "a.py", f"class Block{suffix}: ...") for suffix in rules.FORBIDDEN_SUFFIXES),
    (rules.module_state, "a.py", "cache = {}"),
    (rules.module_state, "a.py", "NAMES = ['a']"),
    (rules.module_state, "a.py", "NAMES: Final = {'a'}"),
    (rules.module_state, "a.py", "NAMES: Final[tuple] = ([],)"),
    (rules.module_state, "a.py", "NAMES: Final = [0] * 4"),
    (rules.module_state, "a.py", "CACHE: Final = collections.defaultdict(list)"),
    (rules.module_state, "a.py", "pool = Pool()"),
    (rules.module_state, "a.py", "if True:\n    seen = set()"),
    (rules.module_state, "a.py", "try:\n    pass\nexcept OSError:\n    seen = []"),
    (rules.module_state, "a.py", "N = 1\nN += 1"),
    (rules.module_state, "a.py", "n = 1\ndef f():\n    global n\n    n = 2"),
    *((rules.unsafe_code, "a.py", f"import {module}") for module in ("pickle", "marshal", "shelve")),
    (rules.unsafe_code, "a.py", "def f():\n    from pickle import loads"),
    (rules.unsafe_code, "a.py", "import importlib\nimportlib.import_module('pickle')"),
    (rules.unsafe_code, "a.py", "eval('1')"),
    (rules.unsafe_code, "a.py", "exec('x = 1')"),
    (rules.unsafe_code, "a.py", "import builtins\nbuiltins.eval('1')"),
    (rules.unsafe_code, "runtime/a.py", "import torch\ntorch.load('x', weights_only=True)"),
    (rules.unsafe_code, "runtime/a.py", "import torch as t\nt.load('x')"),
    (rules.unsafe_code, "runtime/a.py", "from torch import load"),
    (rules.unsafe_code, "runtime/a.py", "import numpy\nnumpy.load('x', allow_pickle=True)"),
    (rules.misplaced_torch, "cache/a.py", "import torch"),
    (rules.misplaced_torch, "connectors/host.py", "def f():\n    from torch import cuda"),
    (rules.misplaced_torch, "engine/worker_mover.py", "import torch.cuda"),
    (rules.inner_config, "cache/a.py", "from ostinato.config import CacheConfig"),
    (rules.inner_config, "transfer/a.py", "from ..config import CacheConfig"),
    (rules.inner_config, "hierarchy/__init__.py", "from ostinato import config"),
)

GOOD: Final = (
    (rules.long_file, "a.py", "x = 1\n" * 400),
    (rules.long_functions, "a.py", "def f():\n" + BODY * 59),
    (rules.wide_functions, "a.py", "class C:\n    def f(self, a, b, c, d, e, f): ..."),
    (rules.wide_functions, "a.py", "@app.command()\ndef f(a, b, c, d, e, f, g): ..."),
    (rules.wide_functions, "a.py", "@dataclass\nclass C:\n" + "".join(f"    f{i}: int\n" for i in range(9))),
    (rules.large_classes, "a.py", "class C:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(14))),
    (rules.vague_names, "a.py", "class ManagerView: ..."),
    (rules.module_state, "a.py", "__all__ = ['f']\nA: Final = (1, 2)\nB = frozenset({1})\nC = NewType('C', int)"),
    (rules.module_state, "a.py", "T: Final[Mapping[str, int]] = MappingProxyType({'a': 1})\nAlias = dict[str, int]"),
    (rules.module_state, "a.py", "app: Final = typer.Typer()\nDEVICE: Final = TierId('device')"),
    (rules.module_state, "a.py", "def f():\n    seen = set()\nclass C:\n    x: list = field(default_factory=list)"),
    (rules.unsafe_code, "a.py", "model.eval()\njson.load(f)\nnumpy.load('x', allow_pickle=False)"),
    (rules.misplaced_torch, "connectors/host_mover.py", "import torch"),
    (rules.misplaced_torch, "runtime/models/a.py", "import torch"),
    (rules.misplaced_torch, "integrations/vllm/worker.py", "import torch"),
    (rules.inner_config, "engine/a.py", "from ostinato.config import CacheConfig"),
)


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_rule_catches(rule: Rule, path: str, text: str) -> None:
    assert rule(Source.parse(path, text))


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_rule_lets_pass(rule: Rule, path: str, text: str) -> None:
    assert not rule(Source.parse(path, text))


def test_every_rule_is_shown_to_bite() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


@pytest.mark.parametrize(
    "backward",
    [
        "from ostinato.cache import pool",
        "import ostinato.cache.pool",
        "from . import pool",
        "from .pool import Pool",
        "def f():\n    from ostinato.cache.pool import Pool",
        "if TYPE_CHECKING:\n    pass\nelse:\n    from .pool import Pool",
    ],
)
def test_import_cycle_is_caught(backward: str) -> None:
    pool = Source.parse("cache/pool.py", "from ostinato.cache.kinds import Full")
    kinds = Source.parse("cache/kinds.py", backward)
    assert set(rules.import_cycle((pool, kinds))) == {"ostinato.cache.pool", "ostinato.cache.kinds"}


def test_import_cycle_through_a_package_is_caught() -> None:
    package = Source.parse("cache/__init__.py", "from .kinds import Full")
    kinds = Source.parse("cache/kinds.py", "from ostinato.cache import Full")
    assert rules.import_cycle((package, kinds))


def test_imports_for_typing_only_make_no_cycle() -> None:
    pool = Source.parse("cache/pool.py", "from ostinato.cache.kinds import Full")
    kinds = Source.parse("cache/kinds.py", "if typing.TYPE_CHECKING:\n    from ostinato.cache.pool import Pool")
    assert not rules.import_cycle((pool, kinds))


def test_a_slow_and_heavy_import_is_caught(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("")
    (tmp_path / "sluggish.py").write_text(f"import time, torch\ntime.sleep({MAX_IMPORT_SECONDS})\n")
    seconds, loaded = probe_import("sluggish", tmp_path)
    assert loaded == {"torch"}
    assert seconds >= MAX_IMPORT_SECONDS

"""The survey over all causal language models of the installed transformers, and the page that shows it.

Owns: the processes that judge, their time limit, ``docs/models.md``.  Does not own: what is tried (``runtime.survey``).

A class that crashes or hangs takes its process with it and nothing else: the next class gets a new one.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Final

from rich.console import Console

from ostinato import __version__
from ostinato.errors import ConfigError
from ostinato.runtime import native
from ostinato.runtime.survey import Verdict, causal_classes
from ostinato.serve.tables import Bars

PROCESSES: Final = 2
TIME_LIMIT: Final = 120.0
"""Seconds for one class; most take one."""
COMMAND: Final = (sys.executable, "-m", "ostinato.runtime.survey")
_ENVIRONMENT: Final = (("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE"), ("HF_HUB_OFFLINE", "1"))
_ROW: Final = re.compile(r"^\| `(\w+)` \| (exact|refused) \|", re.MULTILINE)
_PAGE: Final = """\
# Models

Every causal language model of transformers {transformers}, tried by Ostinato {ostinato} with torch {torch}:
**{exact} of {total} classes are served exactly**, {refused} are refused. This page is written by `ostinato survey`.

Each class was made tiny and random, loaded without code of its own, and run over paged memory in float32: prompts
beyond its windows, chunks and budgets, in random chunks, alone and beside each other.

* **exact**: every logit is that of the model's own forward pass, up to rounding. Under *promise*: `bitwise` where
  cached, chunked and batched runs are also equal to the last bit, `within tolerance` where they are equal up to
  rounding. A real checkpoint is checked again whenever it is loaded.
* **refused**: loading it raises an error that gives the reason, or it could not be tried, and the reason says why. No
  model is served wrongly.

*Keeps* names what its layers keep between tokens; `latent` is the compressed form of MLA.

| class | verdict | keeps | promise | reason |
|---|---|---|---|---|
{rows}
"""


@dataclass(frozen=True, slots=True)
class SurveyOptions:
    """``only``: a pattern of class names.  ``page``: written when all classes were tried, or compared (``check``)."""

    page: Path
    only: str = "*"
    json_path: Path | None = None
    check: bool = False


def run_survey(options: SurveyOptions, console: Console) -> bool:
    """Judge the classes; False when a check failed, or a class got past the self-check with wrong logits."""
    names = [name for name in causal_classes() if fnmatchcase(name, options.only)]
    if not names:
        raise ConfigError(f"no class of transformers {version('transformers')} is called {options.only!r}")
    if options.check and not options.page.is_file():
        raise ConfigError(f"there is no {options.page} to compare with: run without --check first")
    verdicts = judge_all(names, Bars(console))
    if options.json_path is not None:
        _write(options.json_path, json.dumps([asdict(verdict) for verdict in verdicts], indent=2) + "\n")
    if options.only != "*" or options.check:
        for verdict in verdicts:
            console.print(_line(verdict), highlight=False, soft_wrap=True, markup=False)
    exact = sum(verdict.exact for verdict in verdicts)
    console.print(f"{exact} of {len(verdicts)} classes are exact", highlight=False)
    missed = [verdict.model for verdict in verdicts if verdict.missed]
    if missed:
        console.print(f"wrong, and not noticed by the self-check: {', '.join(missed)}", style="bold red")
    if options.check:
        return _compare(options.page, verdicts, console) and not missed
    if options.only == "*":
        _write(options.page, render(verdicts))
    return not missed


def _line(verdict: Verdict) -> str:
    outcome = f"exact ({verdict.keeps}; {verdict.promise})" if verdict.exact else f"refused: {verdict.reason}"
    return f"{verdict.model}: {outcome}"


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


# ------------------------------------------------------------------------------------------------------------- the page


def render(verdicts: Iterable[Verdict]) -> str:
    """``docs/models.md``: the same text for the same verdicts and versions."""
    listed = sorted(verdicts, key=lambda verdict: verdict.model)
    exact = sum(verdict.exact for verdict in listed)
    return _PAGE.format(
        transformers=version("transformers"),
        torch=version("torch").partition("+")[0],
        ostinato=__version__,
        exact=exact,
        total=len(listed),
        refused=len(listed) - exact,
        rows="\n".join(map(_row, listed)),
    )


def _row(verdict: Verdict) -> str:
    outcome = "exact" if verdict.exact else "refused"
    cells = (f"`{verdict.model}`", outcome, verdict.keeps, verdict.promise, verdict.reason.replace("|", "\\|"))
    return "| " + " | ".join(cells) + " |"


def _compare(page: Path, verdicts: Iterable[Verdict], console: Console) -> bool:
    """Whether ``page`` says the same of each class that was tried."""
    known = dict(_ROW.findall(page.read_text()))
    same = True
    for verdict in verdicts:
        now, before = "exact" if verdict.exact else "refused", known.get(verdict.model, "not listed")
        if now != before:
            same = False
            console.print(f"{verdict.model} is {now}, in {page} it is {before}", style="red", highlight=False)
    return same


# -------------------------------------------------------------------------------------------------------- the processes


def judge_all(names: Sequence[str], bars: Bars, limit: float = TIME_LIMIT) -> list[Verdict]:
    """The verdicts in the order of ``names``; ``limit`` seconds for each."""
    native.load()  # compiled here, where there is no time limit
    count = min(PROCESSES, len(names))
    idle: queue.SimpleQueue[_Judge] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            idle.put(stack.enter_context(contextlib.closing(_Judge(limit))))
        bars.start(len(names), "surveying")
        stack.callback(bars.finish)
        with ThreadPoolExecutor(count) as threads:
            return list(_advancing(threads.map(lambda name: _ask_idle(idle, name), names), bars))


def _advancing(verdicts: Iterator[Verdict], bars: Bars) -> Iterator[Verdict]:
    for verdict in verdicts:
        bars.advance(1)
        yield verdict


def _ask_idle(idle: queue.SimpleQueue[_Judge], name: str) -> Verdict:
    judge = idle.get()
    try:
        return judge.ask(name)
    finally:
        idle.put(judge)


class _Judge:
    """One process that judges, started anew when a class has ended it.  Used by one thread at a time."""

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._process: subprocess.Popen[str] | None = None

    def ask(self, name: str) -> Verdict:
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            process.kill()

        timer = threading.Timer(self._limit, end)
        timer.start()
        try:
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if answer:
            return Verdict(**json.loads(answer))
        self.close()
        reason = f"it ended the process that tried it (exit status {process.returncode})"
        if late.is_set():
            reason = f"it took longer than {self._limit:.0f} s"
        return Verdict(name, exact=False, reason=reason)

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **dict(_ENVIRONMENT)},
        )
        return self._process

    def close(self) -> None:
        """End the process; the next question starts another."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
        try:
            process.wait(timeout=1.0)  # a process that has ended by itself keeps its exit status
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout is not None:
            process.stdout.close()

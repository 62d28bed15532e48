"""``LLM``: offline generation, the Python door to Ostinato.

Owns: prompts of all accepted forms, a batch from first to last token, progress.  Does not own: the loop (``loop``).
Thread: one; a second thread needs an ``LLM`` of its own (they may share a loaded ``Runtime``).
"""

from __future__ import annotations

import itertools
import operator
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import Any, Final, TypeAlias

from ostinato.config import EngineConfig
from ostinato.connectors.hooks import close_all
from ostinato.connectors.tiers import make_tiers
from ostinato.engine.build import BuiltEngine, build_engine, device_bytes, vocabulary_size
from ostinato.engine.live import Prompt
from ostinato.engine.outputs import RequestOutput
from ostinato.engine.startup import StartupReport
from ostinato.errors import ConfigError, RequestError, StoppedError
from ostinato.events.config import parse_events_config
from ostinato.hierarchy.stats import snapshot
from ostinato.observe.stats import CacheStats
from ostinato.runtime.load import Runtime, load_runtime
from ostinato.runtime.models import Progress
from ostinato.sampling_params import SamplingParams

PromptLike: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``."""
CLOSE_S: Final = 10.0
"""How long closing waits for stores that were not begun."""
_FORMS: Final = (
    'a prompt is text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; give one, or a list of them'
)


class LLM:
    """A model that generates, and does not compute a prompt's prefix twice.

    ``model``: ``gemma3-270m``, a folder, a hub id, or a :class:`~ostinato.runtime.load.Runtime` to share loaded
    weights.  Other options are the fields of :class:`~ostinato.config.EngineConfig`, e.g. ``kv=["host:8GiB"]``.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Runtime,
        *,
        progress: Progress | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(model, (str, os.PathLike, Runtime)):
            raise ConfigError(f"a model is a name, a folder, a hub id or a loaded Runtime, not {model!r}")
        name = model.name if isinstance(model, Runtime) else os.fspath(model)
        config = _config(name, options)
        # Made before the weights are read: a mistake in a tier need not wait for them.
        tiers = make_tiers(config)
        if config.kv_events_config is not None:
            parse_events_config(config.kv_events_config)
        runtime = model if isinstance(model, Runtime) else _load(name, config, progress)
        if config.dtype not in ("auto", runtime.identity.dtype):
            raise ConfigError(f"the runtime was loaded in {runtime.identity.dtype}, not in {config.dtype}")
        self.runtime = runtime
        self.config = config
        self._built = build_engine(runtime, config, tiers)
        self._ids = itertools.count()
        self._closed = False
        self._interrupted = False

    @property
    def startup(self) -> StartupReport:
        """What the start-up table shows."""
        return self._built.report

    @property
    def built(self) -> BuiltEngine:
        """The parts, for tests and tools."""
        return self._built

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        cache_salt: str = "",
        on_finished: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts together; outputs in their order.

        ``cache_salt`` keeps what is cached for these prompts from everyone with another salt.  ``on_finished`` is
        called for each output as it comes.  Raises RequestError, before anything runs, when a prompt cannot be served.
        """
        items = _as_list(prompts)
        params = _spread(sampling_params, len(items))
        ranks = _ranks(priority, len(items))
        if not isinstance(cache_salt, str):
            raise RequestError(f"cache_salt is text, not {cache_salt!r}")
        names: list[str] = []
        engine = self._built.engine
        if engine.has_work:
            raise RequestError("generate is running: call it again when it has returned, or make a second LLM")
        try:
            for item, sampling, rank in zip(items, params, ranks, strict=True):
                name, arrival = f"request-{next(self._ids)}", time.perf_counter()
                names.append(name)  # before: nothing may come between the engine's knowing it and ours
                engine.add(name, self._prompt(item), sampling, rank, cache_salt, arrival)
            return self._run(names, on_finished)
        except BaseException:
            for name in names:
                engine.abort(name)
            raise

    def reset_prefix_cache(self, device_only: bool = False) -> int:
        """Forget cached blocks that nobody holds (``device_only``: lower tiers keep theirs); how many came free."""
        # Called from ``on_finished``, the steps of a drain would finish requests that nobody then hears of.
        if not self._built.engine.has_work:
            self._built.engine.drain()
        return self._built.hierarchy.core.drop_idle(device_only)

    def stats(self) -> CacheStats:
        """Blocks by tier and state, and what was transferred since start."""
        return snapshot(self._built.hierarchy)

    def interrupt(self) -> None:
        """Make :meth:`generate` raise StoppedError after the step that runs now.  From any thread or signal handler."""
        self._interrupted = True

    def close(self) -> None:
        """Let the tiers take what they were to have, stop their threads, then them.  Calling it again does nothing.

        What a disk tier was to have of finished requests survives the process afterwards, unless it takes more than
        ``CLOSE_S`` seconds.
        """
        if not self._closed:
            self._closed = True
            self._built.engine.close(CLOSE_S)
            close_all(self._built.connectors)
            if self._built.events is not None:
                self._built.events.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, names: list[str], on_finished: Callable[[RequestOutput], None] | None) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        engine = self._built.engine
        while len(done) < len(names):
            if not engine.has_work:
                raise RequestError("some of the requests were aborted, so that there are not outputs for all prompts")
            if self._interrupted:
                self._interrupted = False
                raise StoppedError("generating was stopped from outside")
            finished = engine.step()
            for _, failure in engine.failures:
                raise failure
            for output in finished:
                done[output.request_id] = output
                if on_finished is not None:
                    on_finished(output)
        engine.hand_over()  # whoever kills the process while it waits for the next call loses little
        return [done[name] for name in names]

    def _prompt(self, item: PromptLike) -> Prompt:
        match item:
            case str():
                return Prompt(item, self._encode(item))
            case {"prompt_token_ids": [*ids]}:
                return Prompt(None, self._checked_ids(ids))
            case {"prompt": str(text)}:
                return Prompt(text, self._encode(text))
            case [*ids]:
                return Prompt(None, self._checked_ids(ids))
        raise RequestError(_FORMS)

    def _encode(self, text: str) -> list[int]:
        if self.runtime.tokenizer is None:
            raise RequestError("this model has no tokenizer: give token ids")
        # Not verbose: how long a prompt may be is checked later, and told in one line.
        ids: list[int] = self.runtime.tokenizer(text, verbose=False).input_ids
        return ids

    def _checked_ids(self, ids: Sequence[Any]) -> list[int]:
        size = vocabulary_size(self.runtime)
        checked = []
        for token in ids:
            number = -1 if isinstance(token, bool) or not hasattr(token, "__index__") else operator.index(token)
            if not 0 <= number < size:
                raise RequestError(f"prompt token ids are whole numbers from 0 to {size - 1}, not {token!r}")
            checked.append(number)
        return checked


def _load(name: str, config: EngineConfig, progress: Progress | None) -> Runtime:
    """The model; the device budget is checked first where it is given in bytes, since reading weights takes time."""
    in_bytes = config.num_gpu_blocks_override is None
    budget = device_bytes(config) if in_bytes else 0
    return load_runtime(name, config.dtype, budget, progress=progress)


def _config(model: str, options: dict[str, Any]) -> EngineConfig:
    known = {field.name for field in fields(EngineConfig)}
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known: {', '.join(sorted(known - {'model'}))}")
    return EngineConfig(model=model, **options)


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(_FORMS)
    if prompts and isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not _is_list_of(SamplingParams, params):
        raise RequestError(
            f"sampling parameters are one SamplingParams, or a list of one for each prompt, not {params!r}"
        )
    if len(params) != count:
        raise RequestError(f"{count} prompts, but {len(params)} sampling parameters")
    return list(params)


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, Sequence) and all(isinstance(item, kind) for item in value)


def _ranks(priority: Sequence[int] | None, count: int) -> list[int]:
    if priority is None:
        return [0] * count
    if not _is_list_of(int, priority):
        raise RequestError(f"priority is a list of whole numbers, one for each prompt, not {priority!r}")
    if len(priority) != count:
        raise RequestError(f"{count} prompts, but {len(priority)} priorities")
    return list(priority)

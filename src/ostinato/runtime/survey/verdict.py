"""The verdict on one model class.

Owns: the order of trials, and reasons in one line.  Does not own: the trials (``tiny``, ``check``, the runtime's own
loading and self-check).  Thread: one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from ostinato.cache.kinds import describe
from ostinato.errors import ModelRefusedError
from ostinato.runtime.load import Runtime, build_runtime
from ostinato.runtime.survey.check import MismatchError, expect, run
from ostinato.runtime.survey.tiny import NoTinyModelError, tiny_model

MAX_MODEL_LEN: Final = 512
_REASON_LENGTH: Final = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """``exact``: all schedules gave the logits of the model's own forward pass; else ``reason`` is in the way.

    ``keeps``: what its layers keep between tokens; ``promise`` of the runtime.  ``missed``: the self-check at load let
    the class pass although the long check finds it wrong: a bug of the self-check.
    """

    model: str
    exact: bool
    keeps: str = ""
    promise: str = ""
    reason: str = ""
    missed: bool = False


def causal_classes() -> list[str]:
    """Names of the classes that transformers maps to causal language modelling, in alphabetical order."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))


def judge(name: str) -> Verdict:
    """Try class ``name``; never raises."""
    refused = Verdict(name, exact=False)
    try:
        model = tiny_model(name)
    except NoTinyModelError as error:
        return replace(refused, reason=one_line(f"no tiny model of it could be made: {error}"))
    try:
        trials = expect(model)
    except Exception as error:  # whatever the model's own code raises
        return replace(refused, reason=one_line(f"it does not run on token ids alone: {_named(error)}"))
    try:
        runtime = build_runtime(model, name=name, max_model_len=MAX_MODEL_LEN)
    except ModelRefusedError as error:
        return replace(refused, reason=one_line(str(error).removeprefix(f"{name} cannot be served: ")))
    except Exception as error:
        return replace(refused, reason=one_line(f"loading failed: {_named(error)}"))
    found = replace(refused, keeps=", ".join(_kinds(runtime)), promise=runtime.promise.describe())
    try:
        run(runtime, trials)
    except MismatchError as error:
        return replace(found, reason=one_line(f"the self-check passed, yet {error}"), missed=True)
    except Exception as error:
        return replace(found, reason=one_line(f"a longer run failed: {_named(error)}"), missed=True)
    return replace(found, exact=True)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _kinds(runtime: Runtime) -> Iterator[str]:
    """A word for each kind of group, in the order of groups; numbers are the tiny model's and do not matter."""
    geometry = runtime.prepared.specs.geometry
    seen: list[str] = []
    for group in runtime.layout.groups:
        word = describe(group.kind).split()[0]
        shapes = [geometry[layer] for layer in group.layers] if word != "state" else []
        if any(shape is not None and shape.latent for shape in shapes):
            word += " (latent)"
        if word not in seen:
            seen.append(word)
            yield word


def one_line(text: str) -> str:
    """``text`` without line breaks, addresses and paths, and not too long: the same on every machine."""
    text = re.sub(r"0x[0-9a-f]+", "0x..", " ".join(text.split()))
    text = re.sub(r"(/[\w.+-]+){3,}", "(path)", text)
    return text if len(text) <= _REASON_LENGTH else text[: _REASON_LENGTH - 3].rstrip() + "..."

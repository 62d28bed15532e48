"""``ostinato bench`` against a server that is known to the last word, and against ours."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from ostinato.errors import ConfigError, RequestError
from ostinato.serve.bench.drive import Asked, Limits, Load
from ostinato.serve.bench.plot import check_plot, panels_of, svg, write_plot
from ostinato.serve.bench.report import Spread, Summary, percentile
from ostinato.serve.bench.workload import Conversation, Span, Workload
from ostinato.serve.cli import app
from ostinato.serve.client import Answer, Target, api_root
from serve.fake_openai import PIECES, Fake, fake_server, talk
from serve.served import MODEL, Running

SMALL = Workload(prompt=Span(4, 12), answer=Span(1, 8), turns=Span(1, 1))


def bench(*flags: str) -> Any:
    done = CliRunner().invoke(app, ["bench", *flags])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def drive(fake: Fake, workload: Workload, limits: Limits, **target: Any) -> Load:
    load = Load(Target(fake.url, "fake", **target), workload, limits)
    asyncio.run(load.run())
    return load


def bodies(fake: Fake) -> list[dict[str, Any]]:
    return [body for path, body, _ in fake.heard if path.endswith("completions")]


# ------------------------------------------------------------------------------------------------------- what is asked


def test_a_conversation_is_the_same_in_any_order_of_asking() -> None:
    workload = Workload(prompt=Span(1, 50), answer=Span(1, 9), turns=Span(1, 5), shared=0.5, prefixes=3, seed=7)
    numbers = list(range(20))
    once = {number: workload.conversation(number) for number in numbers}
    random.Random(1).shuffle(numbers)
    assert {number: workload.conversation(number) for number in numbers} == once
    assert len({conversation.turns for conversation in once.values()}) == 20
    assert workload.conversation(3) == Workload(
        prompt=Span(1, 50), answer=Span(1, 9), turns=Span(1, 5), shared=0.5, prefixes=3, seed=7
    ).conversation(3)


@given(st.integers(1, 60), st.integers(0, 600), st.integers(0, 2**32))
def test_lengths_stay_in_their_spans(low: int, more: int, seed: int) -> None:
    spans = {"prompt": Span(low, low + more), "answer": Span(low, low + more), "turns": Span(low, low)}
    conversation = Workload(**spans, seed=seed).conversation(0)
    assert len(conversation.turns) == low
    for turn in conversation.turns:
        assert low <= len(turn.text.split()) <= low + more
        assert low <= turn.max_tokens <= low + more


def test_the_logarithm_of_lengths_is_uniform() -> None:
    source, span = random.Random(0), Span(16, 1024)
    drawn = [span.draw(source) for _ in range(4000)]
    assert math.log2(statistics.median(drawn)) == pytest.approx(7, abs=0.2), "as many below 128 as above"


def test_the_asked_share_of_conversations_begins_alike() -> None:
    workload = Workload(
        prompt=Span(3, 3), answer=Span(1, 1), turns=Span(1, 1), shared=0.25, shared_words=40, prefixes=2
    )
    openings = [workload.conversation(n).turns[0].text.rpartition("\n\n")[0] for n in range(400)]
    shared = [opening for opening in openings if opening]
    assert 70 <= len(shared) <= 130
    assert len(set(shared)) == 2
    assert all(len(opening.split()) == 40 for opening in shared)


def test_conversations_come_again_where_few_are_distinct() -> None:
    workload = Workload(prompt=Span(3, 9), answer=Span(1, 1), turns=Span(1, 1), distinct=4)
    assert workload.conversation(9) == workload.conversation(1)
    assert workload.conversation(1) != workload.conversation(2)


@pytest.mark.parametrize("text", ["", "x", "0", "5:2", "1:", ":3", "-1:4", "1:2:3", "1:10000000"])
def test_a_span_that_is_none_is_refused(text: str) -> None:
    if text == "1:":
        assert Span.parse("--x", text) == Span(1, 1)
        return
    with pytest.raises(ConfigError, match="--x"):
        Span.parse("--x", text)


# ---------------------------------------------------------------------------------------------------------- the asking


def test_so_many_requests_are_asked_and_so_many_at_once() -> None:
    with fake_server(pause_s=0.005) as fake:
        load = drive(fake, SMALL, Limits(5, requests=23))
    assert len(load.asked) == len(bodies(fake)) == 23
    assert fake.most_at_once == 5
    assert {one.conversation for one in load.asked} == set(range(23))
    assert all(one.answer.error is None for one in load.asked)


def test_nothing_new_is_asked_after_the_duration_and_all_is_heard() -> None:
    with fake_server(pause_s=0.01) as fake:
        load = drive(fake, SMALL, Limits(4, seconds=0.3))
    assert len(load.asked) == len(bodies(fake)) > 8
    assert max(one.began_s for one in load.asked) < 0.3 <= load.elapsed_s < 2
    assert all(one.answer.finish_reason == "length" for one in load.asked)


@pytest.mark.parametrize("chat", [False, True])
def test_each_turn_repeats_all_that_was_said(chat: bool) -> None:
    workload = Workload(prompt=Span(5, 9), answer=Span(1, 8), turns=Span(3, 3))
    with fake_server() as fake:
        load = drive(fake, workload, Limits(1, requests=3), chat=chat)
    texts = [turn.text for turn in workload.conversation(0).turns]
    said = "".join(PIECES)
    if chat:
        wanted: Any = [
            [message for text in texts[:n] for message in (("user", text), ("assistant", said))] + [("user", texts[n])]
            for n in range(3)
        ]
        heard: Any = [[(m["role"], m["content"]) for m in body["messages"]] for body in bodies(fake)]
    else:
        wanted = [texts[0], f"{texts[0]}{said}\n\n{texts[1]}", f"{texts[0]}{said}\n\n{texts[1]}{said}\n\n{texts[2]}"]
        heard = [body["prompt"] for body in bodies(fake)]
    assert heard == wanted
    assert [body["max_tokens"] for body in bodies(fake)] == [t.max_tokens for t in workload.conversation(0).turns]
    assert [one.turn for one in load.asked] == [0, 1, 2]


def test_times_are_those_of_the_texts() -> None:
    """A chat's first event has no text, and counts for none."""
    with fake_server(pause_s=0.05) as fake:
        load = drive(fake, SMALL, Limits(1, requests=1), chat=True)
    answer = load.asked[0].answer
    assert answer.ttft_s is not None
    assert 0.05 <= answer.ttft_s < 0.2
    assert len(answer.gaps_s) == 2
    assert all(0.04 < gap < 0.2 for gap in answer.gaps_s)
    assert answer.total_s >= answer.ttft_s + sum(answer.gaps_s) + 0.1


def test_usage_is_taken_over() -> None:
    with fake_server() as fake:
        answer = drive(fake, SMALL, Limits(1, requests=1)).asked[0].answer
    count = len(SMALL.conversation(0).turns[0].text.split())
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (count, 3, count // 2)
    assert sum(answer.cached_by_tier.values()) == answer.cached_tokens


@pytest.mark.parametrize(
    ("status", "events", "wanted"),
    [
        (429, {"error": {"message": "too  many"}}, "429: too many"),
        (500, b"<html>no</html>", "500: <html>no</html>"),
        (200, [{"error": {"message": "it broke"}}], "it broke"),
        (200, [{"choices": [{"text": "a"}]}], "the stream ended before the answer"),
        (200, ["{half"], "the server streamed what is not OpenAI's form"),
        (200, ["[1]"], "the server streamed what is not OpenAI's form"),
    ],
)
def test_what_fails_is_told_and_ends_the_conversation(status: int, events: Any, wanted: str) -> None:
    workload = Workload(prompt=Span(2, 2), answer=Span(1, 1), turns=Span(5, 5))
    with fake_server(lambda *_: (status, events)) as fake:
        load = drive(fake, workload, Limits(1, requests=2))
    assert [one.answer.error for one in load.asked] == [wanted, wanted]
    assert [one.turn for one in load.asked] == [0, 0]


def test_a_server_that_is_not_there() -> None:
    with fake_server() as fake:
        pass
    load = drive(fake, SMALL, Limits(1, requests=1))
    assert load.asked[0].answer.error is not None
    with pytest.raises(RequestError, match="cannot reach"):
        bench(fake.url, "--num-requests", "1")


def test_a_stop_ends_the_run_with_what_is_there() -> None:
    with fake_server(pause_s=0.01) as fake:
        load = Load(Target(fake.url, "fake"), SMALL, Limits(2, requests=10_000))

        async def run() -> None:
            asyncio.get_running_loop().call_later(0.2, load.stop)
            await load.run()

        began = time.perf_counter()
        asyncio.run(run())
    assert time.perf_counter() - began < 5
    assert 0 < len(load.asked) < 100


@pytest.mark.parametrize("given_url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_with_or_without_its_version(given_url: str) -> None:
    assert api_root(given_url) == "http://h:1/v1"


@pytest.mark.parametrize("url", ["", "h:1", "ftp://h", "http://"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        api_root(url)


# ------------------------------------------------------------------------------------------------------------ the sums


def asked(began: float = 0.0, error: str | None = None, cached: dict[str, int] | None = None) -> Asked:
    gone = dict(cached or {})
    return Asked(0, 0, began, Answer("t", 0.5, (0.1, 0.3), 1.0, 10, 3, sum(gone.values()), gone, "stop", "r", error))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.sampled_from([50, 90, 99]))
def test_percentiles_are_numpys(values: list[float], p: int) -> None:
    numpy = pytest.importorskip("numpy")
    assert percentile(sorted(values), p) == pytest.approx(float(numpy.percentile(values, p)))


def test_a_summary() -> None:
    rows = [asked(cached={"device": 4, "disk": 2}), asked(cached={"device": 1}), asked(error="429: no")]
    summary = Summary.of(rows, 4.0)
    assert summary.requests == 3
    assert summary.errors == {"429: no": 1}
    assert (summary.prompt_tokens, summary.completion_tokens, summary.cached_tokens) == (20, 6, 7)
    assert summary.prompt_tokens_by_origin == {"device": 5, "disk": 2, "computed": 13}
    assert summary.itl is not None
    assert (summary.itl.count, summary.itl.p50, summary.itl.most) == (4, pytest.approx(0.2), 0.3)
    assert summary.rate(summary.completion_tokens) == 1.5
    assert Spread.of([]) is None
    assert Summary.of([asked(error="x")], 1.0).ttft is None


def test_a_server_that_does_not_say_where_tokens_were_cached() -> None:
    one = Asked(0, 0, 0.0, Answer("t", 0.5, (), 1.0, 10, 3, 6))
    assert Summary.of([one], 1.0).prompt_tokens_by_origin == {"cached": 6, "computed": 4}


# --------------------------------------------------------------------------------------------------------- the picture


def test_a_picture_is_well_formed_and_needs_nothing_else(tmp_path: Path) -> None:
    rows = [asked(began=i / 10) for i in range(50)]
    drawn = svg(panels_of(rows, 6.0), 'a <b> & "c"')
    root = ET.fromstring(drawn)
    texts = [element.text for element in root.iter() if element.tag.endswith("text")]
    assert 'a <b> & "c"' in texts
    assert {"first token", "between tokens", "whole answer"} <= set(texts)
    lines = [element for element in root.iter() if element.tag.endswith("polyline")]
    numbers = [float(n) for line in lines for point in line.get("points", "").split() for n in point.split(",")]
    assert len(numbers) > 200
    assert all(0 <= n <= 460 for n in numbers)
    assert "http" not in drawn.replace("http://www.w3.org/2000/svg", "")
    write_plot(tmp_path / "a.html", rows, 6.0, "c")
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("rows", [[], [asked(error="x")], [asked()]])
def test_a_picture_of_next_to_nothing(rows: list[Asked]) -> None:
    ET.fromstring(svg(panels_of(rows, 0.0), ""))


def test_rates_over_time_add_up() -> None:
    rows = [asked(began=i / 10) for i in range(50)]
    rate = panels_of(rows, 6.0)[1].curves[0].points
    assert sum(value for _, value in rate) * 6.0 / len(rate) == pytest.approx(150), "three pieces of each answer"


def test_files_that_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must end in one of"):
        check_plot(tmp_path / "a.gif")
    check_plot(tmp_path / "a.svg")


def test_matplotlib_draws_where_it_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_plot(tmp_path / "a.png", [asked(began=i / 10) for i in range(50)], 6.0, "caption")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# --------------------------------------------------------------------------------------------------------- the command


def test_the_command_writes_all_it_knows(tmp_path: Path) -> None:
    numbers, picture = tmp_path / "o.json", tmp_path / "o.svg"
    with fake_server() as fake:
        flags = ["--num-requests", "9", "--turns", "1:3", "--shared", "0.5", "--seed", "5", "--ignore-eos"]
        done = bench(fake.url, *flags, "--api-key", "geheim", "--json", str(numbers), "--plot", str(picture))
    assert done.exit_code == 0, done.output
    assert "time to first token" in done.output
    assert "generated tokens" in done.output
    found = json.loads(numbers.read_text())
    assert found["requests"] == len(found["answers"]) == 9
    assert found["completion_tokens"] == 27
    assert sum(found["prompt_tokens_by_origin"].values()) == found["prompt_tokens"]
    assert found["settings"]["seed"] == 5
    assert "geheim" not in numbers.read_text() + done.output
    assert all(headers["authorization"] == "Bearer geheim" for _, _, headers in fake.heard)
    assert all(body["model"] == "fake" and body["ignore_eos"] is True for body in bodies(fake))
    ET.fromstring(picture.read_text())


def test_the_command_fails_where_a_request_did() -> None:
    def sometimes(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return (503, {"error": {"message": "no"}}) if body.get("max_tokens") == 7 else talk(path, body)

    with fake_server(sometimes) as fake:
        done = bench(fake.url, "--num-requests", "4", "--max-tokens", "7")
    assert done.exit_code == 1
    assert "4 x 503: no" in done.output


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--endpoint", "talk"), "--endpoint must be one of"),
        (("--prompt-words", "x"), "--prompt-words"),
        (("--plot", "a.gif"), "must end in one of"),
        (("--json", "/nowhere/a.json"), "is not a folder"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(flags: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        bench("http://127.0.0.1:9", *flags)


# ------------------------------------------------------------------------------------------------------ our own server


@pytest.mark.parametrize("chat", [False, True])
def test_ours_says_what_was_cached(running: Running, chat: bool) -> None:
    workload = Workload(
        prompt=Span(8, 16), answer=Span(4, 6), turns=Span(2, 2), shared=1.0, shared_words=30, seed=int(chat)
    )
    load = Load(Target(running.url, MODEL, chat=chat), workload, Limits(2, requests=6))
    asyncio.run(load.run())
    assert [one.answer.error for one in load.asked] == [None] * 6
    summary = Summary.of(load.asked, load.elapsed_s)
    assert summary.cached_tokens > 0
    assert set(summary.prompt_tokens_by_origin) == {"device", "computed"}
    assert isinstance(workload.conversation(0), Conversation)

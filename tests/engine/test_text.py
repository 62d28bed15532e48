"""Incremental text: equal to decoding at once, never half a character, and stops found wherever tokens are cut."""

from __future__ import annotations

import random
import time
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ostinato.engine.text import Detokenizer, OutputText, StopStrings, TextStep, Vocabulary
from ostinato.errors import SamplingError
from ostinato.sampling_params import SamplingParams

EOS = 0


def _special(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    wrap: Any = PreTrainedTokenizerFast
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<turn>", special=True)])
    wrapped: PreTrainedTokenizerFast = wrap(tokenizer_object=tokenizer, eos_token="<eos>")
    return wrapped


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """One token per byte, spelled in the byte alphabet (GPT-2, Qwen)."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<eos>", "<turn>", *letters])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _special(tokenizer)


@cache
def byte_fallback(strip: bool = False) -> PreTrainedTokenizerFast:
    """Letters, and bytes for the rest (Gemma; with ``strip``, Llama 2, whose decoder drops one leading space)."""
    pieces = ["<eos>", "<turn>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", "\ufffd", *"abcdehlowrtn.,"]
    merges = [("a", "b"), ("\u2581", "a"), ("\u2581", "w")]
    pieces += [left + right for left, right in merges]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _special(tokenizer)


def feed(tokenizer: PreTrainedTokenizerFast, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(Vocabulary(tokenizer), True, prompt or [])
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


def run(
    text: str, params: SamplingParams, tokenizer: PreTrainedTokenizerFast | None = None, eos: bool = False
) -> tuple[str, TextStep, int]:
    """Feed ``text`` until the output ends; returns all text, the last step, and the number of tokens taken."""
    tokenizer = tokenizer or byte_level()
    output = OutputText(Vocabulary(tokenizer), params, [EOS])
    ids = tokenizer.encode(text, add_special_tokens=False) + [EOS] * eos
    given_out = ""
    step = TextStep("")
    taken = 0
    for token in ids:
        taken += 1
        step = output.push(token)
        given_out += step.text
        assert given_out == output.text
        assert "\ufffd" not in step.text
        if step.finish_reason:
            break
    return given_out, step, taken


@given(st.text(max_size=40).map(lambda text: text.rstrip("\ufffd")))
@settings(max_examples=150, deadline=None)
def test_text_in_parts_is_the_text_at_once(text: str) -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode(text, add_special_tokens=False)
        parts = feed(tokenizer, ids)
        assert "".join(parts) == tokenizer.decode(ids) == text
        # Cut into bytes, a character comes out whole or not at all.
        assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


def test_each_character_is_out_as_soon_as_it_is_whole() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode("€é", add_special_tokens=False)
        assert feed(tokenizer, ids) == ["", "", "€", "", "é", ""]


def test_a_character_left_unfinished_is_dropped_at_the_end() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        ids = tokenizer.encode("ab€", add_special_tokens=False)
        assert "".join(feed(tokenizer, ids[:-1])) == "ab"


def test_broken_bytes_do_not_change_what_was_given_out() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        euro = tokenizer.encode("€", add_special_tokens=False)
        letter = tokenizer.encode("h", add_special_tokens=False)
        parts = feed(tokenizer, euro + euro[:1] + letter + euro)
        assert "".join(parts) == "€\ufffdh€"
        assert "".join(feed(tokenizer, euro[:1] * 100 + letter)).endswith("\ufffdh")


def test_a_token_that_is_the_replacement_character_is_kept() -> None:
    ids = byte_fallback().encode("a\ufffdb", add_special_tokens=False)
    assert "".join(feed(byte_fallback(), ids)) == "a\ufffdb"


def test_the_prompt_decides_about_the_leading_space() -> None:
    tokenizer = byte_fallback(strip=True)
    vocabulary = tokenizer.get_vocab()
    ids = [vocabulary["\u2581w"], vocabulary["o"], vocabulary["\u2581a"]]
    assert "".join(feed(tokenizer, ids)) == "wo a"
    assert "".join(feed(tokenizer, ids, prompt=[vocabulary["h"]])) == " wo a"
    # Also after a character that came as bytes, and after a skipped special token.
    euro = [vocabulary[f"<0x{byte:02X}>"] for byte in "€".encode()]
    assert "".join(feed(tokenizer, [vocabulary["h"], *euro, *ids])) == "h€ wo a"
    assert "".join(feed(tokenizer, [vocabulary["h"], 1, *ids])) == "h wo a"


def test_a_character_begun_by_the_prompt_is_finished() -> None:
    ids = byte_level().encode("h€h", add_special_tokens=False)
    assert "".join(feed(byte_level(), ids[2:], prompt=ids[:2])) == "€h"


def test_special_tokens_are_skipped_or_shown() -> None:
    for skip, expected in ((True, "ab"), (False, "a<turn>b")):
        tokenizer = byte_fallback()
        detokenizer = Detokenizer(Vocabulary(tokenizer), skip)
        ids = [tokenizer.get_vocab()[token] for token in ("a", "<turn>", "b")]
        assert "".join(detokenizer.push(i) for i in ids) == expected


def test_the_work_per_token_does_not_grow() -> None:
    ids = byte_fallback().encode("hello world " * 700, add_special_tokens=False)
    detokenizer = Detokenizer(Vocabulary(byte_fallback()), True)
    times = []
    for start in (0, len(ids) - 1000):
        begin = time.perf_counter()
        for token in ids[start : start + 1000]:
            detokenizer.push(token)
        times.append(time.perf_counter() - begin)
        for token in ids[start + 1000 : len(ids) - 1000]:
            detokenizer.push(token)
    # Linear growth would be a factor of several; a busy machine is not.
    assert times[1] < 4 * times[0]
    assert len(detokenizer._context) <= 16


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text("abc", max_size=30), STOPS, st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=300, deadline=None)
def test_stop_strings_against_a_search_of_the_whole_text(
    text: str, stops: list[str], include: bool, source: random.Random
) -> None:
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    end, negative = min(ends, default=(len(text), 0))
    expected = text[:end] if include else text[: end + negative]
    matcher = StopStrings(stops, include)
    out, rest = "", text
    while rest and matcher.found is None:
        count = source.randint(0, 5)
        out += matcher.push(rest[:count])
        rest = rest[count:]
        assert expected.startswith(out)
    if matcher.found is None:
        out += matcher.flush()
    assert (out, matcher.found is not None) == (expected, bool(ends))


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    matcher = StopStrings(["\n\nUser:"], include=False)
    assert matcher.push("hi\n") == "hi"
    assert matcher.push("\nUs") == ""
    assert matcher.push("a") == "\n\nUsa"


def test_a_stop_string_across_tokens_ends_the_output() -> None:
    text, step, taken = run("hello world", SamplingParams(stop="o w", max_tokens=99))
    assert (text, step.finish_reason, step.stop_reason, taken) == ("hell", "stop", "o w", 7)
    text, step, _ = run("hello world", SamplingParams(stop=["o w"], include_stop_str_in_output=True, max_tokens=99))
    assert text == "hello w"


def test_a_stop_string_of_many_bytes() -> None:
    text, step, _ = run("a€b", SamplingParams(stop="€", max_tokens=99))
    assert (text, step.finish_reason) == ("a", "stop")


def test_the_limit_ends_the_output_and_releases_what_was_held() -> None:
    text, step, taken = run("hello world", SamplingParams(stop="lo!", max_tokens=5))
    assert (text, step.finish_reason, step.stop_reason, taken) == ("hello", "length", None, 5)


def test_a_stop_string_completed_by_the_last_token_is_a_stop() -> None:
    text, step, _ = run("hello world", SamplingParams(stop="lo", max_tokens=5))
    assert (text, step.finish_reason) == ("hel", "stop")


def test_half_a_character_at_the_limit_is_not_given_out() -> None:
    text, step, _ = run("a€", SamplingParams(max_tokens=3))
    assert (text, step.finish_reason) == ("a", "length")


def test_a_smaller_limit_of_the_context_wins() -> None:
    output = OutputText(Vocabulary(byte_level()), SamplingParams(max_tokens=9), [EOS], max_tokens=1)
    assert output.push(byte_level().encode("a")[0]) == TextStep("a", "length")


@pytest.mark.parametrize("skip", [True, False])
def test_eos_ends_the_output_without_its_text(skip: bool) -> None:
    text, step, _ = run("ab", SamplingParams(max_tokens=99, skip_special_tokens=skip), eos=True)
    assert (text, step.finish_reason, step.stop_reason) == ("ab", "stop", None)


def test_eos_can_be_ignored() -> None:
    text, step, _ = run("ab", SamplingParams(max_tokens=3, ignore_eos=True, skip_special_tokens=False), eos=True)
    assert (text, step.finish_reason) == ("ab<eos>", "length")


@pytest.mark.parametrize(("include", "expected"), [(False, "he"), (True, "hel")])
def test_a_stop_token_ends_the_output(include: bool, expected: str) -> None:
    stop = byte_level().encode("l")[0]
    params = SamplingParams(stop_token_ids=[stop], include_stop_str_in_output=include, ignore_eos=True, max_tokens=99)
    text, step, taken = run("hello", params)
    assert (text, step.finish_reason, step.stop_reason, taken) == (expected, "stop", stop, 3)


# Least length, no text, spellings.


@given(st.text("abc ", max_size=30), st.sampled_from(["a", "ab", "aba", "aa", "c a"]), st.integers(0, 12))
@settings(max_examples=200, deadline=None)
def test_a_stop_string_counts_when_it_is_completed_after_the_least_length(text: str, stop: str, least: int) -> None:
    """One token per character here: it counts if its last character is behind ``least`` of them."""
    params = SamplingParams(stop=stop, min_tokens=least, max_tokens=99)
    starts = (i for i in range(len(text)) if text.startswith(stop, i) and i + len(stop) > least)
    place = next(starts, None)
    given_out, step, taken = run(text, params)
    if place is None:
        assert step.finish_reason is None
        assert text.startswith(given_out)
    else:
        assert (step.finish_reason, step.stop_reason) == ("stop", stop)
        assert given_out == text[:place]
        assert taken == place + len(stop)


def test_no_token_ends_the_output_before_the_least_length() -> None:
    output = OutputText(Vocabulary(byte_level()), SamplingParams(min_tokens=2, stop_token_ids=[5]), [EOS])
    assert [output.push(token).finish_reason for token in (EOS, 5, 5)] == [None, None, "stop"]


def test_without_detokenization_there_is_no_text() -> None:
    params = SamplingParams(detokenize=False, stop_token_ids=[5], include_stop_str_in_output=True)
    output = OutputText(Vocabulary(byte_level()), params, [EOS])
    assert [output.push(token) for token in (40, 41)] == [TextStep(""), TextStep("")]
    assert output.push(5) == TextStep("", "stop", 5)
    assert output.text == ""


def test_spellings_of_a_word() -> None:
    """With one token for a space and a letter, a word has two first tokens; else a space is a token of its own."""
    tokenizer = byte_fallback()
    vocabulary = tokenizer.get_vocab()
    assert Vocabulary(tokenizer).spellings(" a") == [(vocabulary["a"],), (vocabulary["\u2581a"],)]
    assert Vocabulary(tokenizer).spellings("b") == [(vocabulary["b"],)]
    with pytest.raises(SamplingError, match="bad_words"):
        Vocabulary(tokenizer).spellings(" ")

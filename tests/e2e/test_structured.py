"""Outputs of a given form, through the whole engine.

What a form allows is found again here without a compiler: by trying every token of the small vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest

from e2e.support import assert_at_rest, make_llm, tokens
from ostinato.engine.live import Prompt
from ostinato.engine.llm import LLM
from ostinato.errors import RequestError, SamplingError
from ostinato.runtime import grammars
from ostinato.runtime.load import Runtime
from ostinato.sampling_params import SamplingParams
from ostinato.structured_outputs import StructuredOutputs
from serve.served import tiny_runtime

EOS = 1
CHOICES = ("abacus", "ab", "xyz\nétude", 'say "no"')
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 999},
        "kind": {"enum": ["river", "sea"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
FORMS = [
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(regex=r"[0-9]{2,4}-(up|down){1,3}"),
    StructuredOutputs(choice=CHOICES),
    StructuredOutputs(grammar='start: "go" (" " WHERE)~2..5\nWHERE: "left" | "right"'),
]


def fits(form: StructuredOutputs, text: str) -> bool:
    if form.json is not None:
        found = json.loads(text)
        assert list(found) == ["name", "count", "kind"]
        return len(found["name"]) <= 8 and 0 <= found["count"] <= 999 and found["kind"] in ("river", "sea")
    if form.choice is not None:
        return text in form.choice
    return re.fullmatch(form.regex or r"go( (left|right)){2,5}", text) is not None


def sampling(form: StructuredOutputs | None, **more: Any) -> SamplingParams:
    fields: dict[str, Any] = {"temperature": 1.5, "seed": 4, "max_tokens": 400, "logprobs": 2, "logits_digest": True}
    return SamplingParams(structured_outputs=form, **(fields | more))


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return tiny_runtime()


@pytest.fixture(scope="module")
def cold(runtime: Runtime) -> Iterator[LLM]:
    with make_llm(runtime, enable_prefix_caching=False) as llm:
        yield llm


VARIED = [
    *(sampling(form, seed=seed) for form in FORMS[1:] for seed in (1, 2)),
    sampling(FORMS[0], temperature=0, repetition_penalty=1.3, presence_penalty=1.0),
    sampling(FORMS[2], logit_bias={EOS: 100.0}, min_tokens=4, bad_words=["ab"]),
    sampling(None, max_tokens=30),
    sampling(None, max_tokens=30, temperature=0, frequency_penalty=0.4),
    sampling(None, max_tokens=30, temperature=0),
]


def words(count: int, seed: int) -> list[int]:
    """Tokens that are pairs of letters: a prompt that ends in half a character would finish it in the output."""
    return [260 + token % 252 for token in tokens(count, seed)]


PROMPTS = [words(20 + 9 * (i % 5), seed=i % 3) for i in range(len(VARIED))]


@pytest.fixture(scope="module")
def expected(cold: LLM) -> list[Any]:
    return [cold.generate(prompt, params)[0].outputs for prompt, params in zip(PROMPTS, VARIED, strict=True)]


def test_outputs_have_their_form(expected: list[Any]) -> None:
    for params, (output,) in zip(VARIED, expected, strict=True):
        if params.structured_outputs is not None:
            assert output.finish_reason == "stop"
            assert fits(params.structured_outputs, output.text), repr(output.text)


def test_a_batch_of_all_sorts_is_what_each_is_alone(runtime: Runtime, expected: list[Any]) -> None:
    """Also the requests without a form are what they would be without the others."""
    with make_llm(runtime, max_num_batched_tokens=37) as llm:
        assert [output.outputs for output in llm.generate(PROMPTS, VARIED)] == expected
        assert [output.outputs for output in llm.generate(PROMPTS[3:7], VARIED[3:7])] == expected[3:7]
        assert_at_rest(llm)


def test_a_preempted_output_goes_on_in_its_form(runtime: Runtime, cold: LLM) -> None:
    form = StructuredOutputs(regex="([a-f]{3}[0-9]){14}")
    varied = [sampling(form, seed=seed, n=1 + seed % 2, max_tokens=80) for seed in range(4)]
    prompts = [words(60, seed=seed) for seed in range(len(varied))]
    wanted = [cold.generate(prompt, params)[0].outputs for prompt, params in zip(prompts, varied, strict=True)]
    pages = runtime.layout.peak_pages(60 + 90, 64)
    with make_llm(runtime, pages, max_num_batched_tokens=64) as llm:
        found = llm.generate(prompts, varied)
        assert_at_rest(llm)
    assert sum(output.metrics.preemptions for output in found) > 0
    assert [output.outputs for output in found] == wanted
    assert all(re.fullmatch("([a-f]{3}[0-9]){14}", one.text) for output in found for one in output.outputs)


def test_completions_of_one_prompt_each_have_a_state(cold: LLM) -> None:
    together = cold.generate(PROMPTS[0], sampling(FORMS[1], n=4, seed=30))[0].outputs
    alone = [cold.generate(PROMPTS[0], sampling(FORMS[1], seed=30 + i))[0].outputs[0] for i in range(4)]
    assert [replace(one, index=0) for one in together] == alone
    assert len({one.text for one in together}) > 1


def commonprefix(texts: list[str]) -> str:
    """The characters with which all begin."""
    return "".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, zip(*texts, strict=False)))


def test_the_mask_is_what_trying_every_token_finds(cold: LLM) -> None:
    """Greedy, one token at a time.  Where there is no choice, the text comes in the tokens that the tokenizer makes."""
    tokenizer: Any = cold.runtime.tokenizer
    spelled = {token: tokenizer.decode([token]) for token in range(4, 512)}
    choices = ("up", "upper", "down", "d", "left or right")
    prompt, text = list(PROMPTS[0]), ""
    while True:
        tails = [choice[len(text) :] for choice in choices if choice.startswith(text)]
        if sure := commonprefix(tails):
            allowed = tokenizer.encode(sure, add_special_tokens=False)[:1]
        else:
            allowed = [t for t, piece in spelled.items() if piece and any(tail.startswith(piece) for tail in tails)]
            allowed += [EOS] if "" in tails else []
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, allowed_token_ids=allowed)
        token = cold.generate(prompt, params)[0].outputs[0].token_ids[0]
        if token == EOS:
            break
        prompt.append(token)
        text += spelled[token]
    found = cold.generate(PROMPTS[0], sampling(StructuredOutputs(choice=choices), temperature=0))[0].outputs[0]
    assert (found.text, list(found.token_ids)) == (text, [*prompt[len(PROMPTS[0]) :], EOS])


def test_stop_strings_and_the_limit_cut_the_form(cold: LLM) -> None:
    form = StructuredOutputs(choice=["one two three"])
    stopped = cold.generate(PROMPTS[0], sampling(form, stop=" three"))[0].outputs[0]
    assert (stopped.text, stopped.finish_reason) == ("one two", "stop")
    cut = cold.generate(PROMPTS[0], sampling(form, max_tokens=3))[0].outputs[0]
    assert cut.finish_reason == "length"
    assert "one two three".startswith(cut.text)


def test_logprobs_are_the_models_own(cold: LLM) -> None:
    output = cold.generate(PROMPTS[0], sampling(FORMS[2], temperature=0, logprobs=-1))[0].outputs[0]
    first = output.logprobs[0]
    assert len(first) == 512
    free = cold.generate(PROMPTS[0], sampling(None, temperature=0, logprobs=-1, max_tokens=1))[0].outputs[0]
    assert {token: one.logprob for token, one in first.items()} == {t: o.logprob for t, o in free.logprobs[0].items()}


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "choice": ["b"]},
        {"choice": []},
        {"choice": ["a", ""]},
        {"choice": "a"},
        {"regex": ""},
        {"json": "{"},
        {"json": "[1]"},
        {"json": {"a": {1, 2}}},
        {"json": 7},
        {"regex": "a" * 200_000},
    ],
    ids=lambda fields: str(fields)[:40],
)
def test_what_is_no_form_is_refused_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match="structured_outputs"):
        StructuredOutputs(**fields)


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputs(regex="(a|b"),
        StructuredOutputs(grammar="root ::= missing"),
        StructuredOutputs(grammar="start: missing"),
        StructuredOutputs(json={"type": "objekt"}),
        StructuredOutputs(json={"$ref": "http://127.0.0.1:9/schema"}),
        StructuredOutputs(json={"$ref": "file:///etc/passwd"}),
        StructuredOutputs(json={"properties": {"a": {"not": {"type": "string"}}}}),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused_before_it_runs(cold: LLM, form: StructuredOutputs) -> None:
    with pytest.raises(SamplingError, match="structured_outputs"):
        cold.generate(PROMPTS[0], sampling(form))
    assert_at_rest(cold)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"allowed_token_ids": [5]}, {"structured_outputs": "json"}])
def test_what_does_not_go_together_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match="structured_outputs"):
        SamplingParams(**{"structured_outputs": FORMS[0], **other})


def test_a_model_without_a_tokenizer_says_so(runtime: Runtime) -> None:
    with make_llm(replace(runtime, tokenizer=None)) as llm, pytest.raises(SamplingError, match="tokenizer"):
        llm.generate(PROMPTS[0], SamplingParams(structured_outputs=FORMS[0]))


def test_a_form_that_the_vocabulary_cannot_say_ends_that_request_alone(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound that is hit in the middle of an output: an error, never an output of another form."""
    masks = grammars.GrammarState.mask
    calls = []

    def limited(self: grammars.GrammarState, size: int) -> Any:
        calls.append(size)
        if len(calls) == 3:
            raise grammars.GrammarError("too much")
        return masks(self, size)

    monkeypatch.setattr(grammars.GrammarState, "mask", limited)
    with make_llm(runtime) as llm:
        engine = llm.built.engine
        engine.add("broken", Prompt(None, PROMPTS[0]), sampling(FORMS[0]))
        engine.add("free", Prompt(None, PROMPTS[1]), sampling(None, max_tokens=6))
        finished, failures = [], []
        while engine.has_work:
            finished += engine.step()
            failures += engine.failures
        assert [output.request_id for output in finished] == ["free"]
        assert [(name, str(error)) for name, error in failures] == [("broken", "the output cannot go on: too much")]
        assert_at_rest(llm)
        calls.clear()
        with pytest.raises(RequestError, match="too much"):
            llm.generate(PROMPTS[0], sampling(FORMS[0]))
        assert_at_rest(llm)

"""The ``ostinato`` command.

Owns: flags, what is printed, exit codes.  An :class:`~ostinato.errors.OstinatoError` is one line on stderr and exit 2.
Heavy imports happen inside the commands, so that ``--help`` is quick.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from ostinato import __version__
from ostinato.errors import OstinatoError, RequestError
from ostinato.serve.bench.command import app as bench_app
from ostinato.serve.cache import app as cache_app
from ostinato.serve.http.command import app as serve_app
from ostinato.serve.settings import Config
from ostinato.serve.simulate import app as simulate_app

app: Final = typer.Typer(
    help="An LLM inference engine in which a prompt's prefix is not computed twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

app.add_typer(cache_app, name="cache")
app.add_typer(simulate_app)
app.add_typer(serve_app)  # without a name: its command stands beside the others
app.add_typer(bench_app)

_PIPE_WIDTH: Final = 120
Tiers = Annotated[
    list[str] | None, typer.Option("--kv", help="A lower tier, such as host:4GiB; repeat it, fastest first.")
]
NoPrefixCaching = Annotated[
    bool, typer.Option("--no-enable-prefix-caching", help="Compute every prompt from its first token.")
]


def _show_version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """An LLM inference engine in which a prompt's prefix is not computed twice."""


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="gemma3-270m, a Hugging Face folder, or a hub id.")],
    config: Config = None,  # noqa: ARG001  # read by its callback
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="A prompt; repeat it. Default: one per line of stdin.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the most probable tokens of this mass.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many most probable tokens; 0 is off.")] = 0,
    min_p: Annotated[float, typer.Option(help="Least probability, as a share of the most probable token's.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens do not repeat so easily.")] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Off the logits of tokens that were generated.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="The same, for each time that they were.")] = 0.0,
    n: Annotated[int, typer.Option("--n", "-n", help="Completions of each prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop at this text; repeat it.")] = None,
    min_tokens: Annotated[int, typer.Option(help="Do not end before so many tokens.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    kv: Tiers = None,
    kv_transfer_config: Annotated[str | None, typer.Option(help="More tiers, in vLLM's JSON.")] = None,
    kv_cache_memory: Annotated[str, typer.Option(help="Memory of the device pool.")] = "1GiB",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Most tokens computed in one step.")] = 512,
    no_enable_prefix_caching: NoPrefixCaching = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print the generated text only.")] = False,
) -> None:
    """Generate text for one or more prompts."""
    from ostinato.sampling_params import SamplingParams

    sampling = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        n=n,
        seed=seed,
        stop=stop,
        min_tokens=min_tokens,
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
    )
    options: dict[str, Any] = {
        "dtype": dtype,
        "kv": tuple(kv or ()),
        "kv_transfer_config": kv_transfer_config,
        "kv_cache_memory": kv_cache_memory,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max_num_batched_tokens,
        "enable_prefix_caching": not no_enable_prefix_caching,
    }
    prompts = list(prompt) if prompt else [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not prompts:
        raise RequestError("there is no prompt: give --prompt, or one per line on stdin")
    _generate(model, prompts, sampling, options, _console(quiet))


def _generate(model: str, prompts: list[str], sampling: Any, options: dict[str, Any], console: Console) -> None:
    from ostinato.config import EngineConfig
    from ostinato.serve.early import check_early
    from ostinato.serve.stopping import stoppable
    from ostinato.serve.tables import Bars, print_startup

    bars = Bars(console)
    check_early(EngineConfig(model=model, **options), bars)
    from ostinato.engine.llm import LLM

    with stoppable() as stopper, LLM(model, progress=bars, **options) as llm:
        stopper.watch(llm)
        print_startup(llm.startup, console)
        bars.start(len(prompts), "generating")
        outputs = llm.generate(list(prompts), sampling, on_finished=lambda _: bars.advance(1))
        bars.finish()
    for output in outputs:
        tiers = ", ".join(f"{count} {tier}" for tier, count in output.cached_by_tier.items()) or "none"
        console.print(
            f"{output.request_id}: {len(output.prompt_token_ids)} prompt tokens, reused: {tiers}; "
            f"first token after {output.metrics.ttft_s * 1e3:.0f} ms",
            style="dim",
            highlight=False,
        )
        for completion in output.outputs:
            print(f"{output.prompt}{completion.text}")


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="A model with a tokenizer.")] = "gemma3-270m",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    full: Annotated[bool, typer.Option("--full", help="The greeting 5,000 times instead of 2,000.")] = False,
    kv: Annotated[
        list[str] | None, typer.Option("--kv", help="Also show this tier, with rows of its own; repeat it.")
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the rows to this file.")] = None,
) -> None:
    """Show a hybrid model's evicted prompt coming back from a lower tier, bit for bit."""
    from ostinato.config import EngineConfig
    from ostinato.serve.early import check_early, check_output
    from ostinato.serve.tables import Bars

    console = _console()
    check_output(json)
    # The demo sizes its device pool by its prompts.
    check_early(EngineConfig(model=model, dtype=dtype, kv=tuple(kv or ()), kv_cache_memory=0), Bars(console))
    from ostinato.serve.demo.run import DemoOptions, run_demo
    from ostinato.serve.stopping import stoppable

    options = DemoOptions(model=model, dtype=dtype, full=full, extra_tiers=tuple(kv or ()), json_path=json)
    with stoppable():
        good = run_demo(options, console)
    if not good:
        raise typer.Exit(1)


@app.command()
def layout(
    model: Annotated[str, typer.Argument(help="gemma3-270m, a folder with config.json, or a hub id.")],
    max_model_len: Annotated[int | None, typer.Option(help="Longest context in tokens, if not the config's.")] = None,
    memory: Annotated[
        list[str] | None, typer.Option("--memory", help="A size of the device pool, such as 8GiB; repeat it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16 or float32.")] = "auto",
    json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
) -> None:
    """Show how a model's cache lies in pages, and how much fits; needs no weights."""
    from ostinato.serve.layout import as_json, make_report, print_report

    report = make_report(model, dtype, max_model_len, memory or ())
    if json:
        print(as_json(report))
    else:
        print_report(report, _console(stderr=False))


@app.command()
def survey(
    only: Annotated[str, typer.Option(help="Try the classes of this pattern, such as 'Qwen3*'; writes no page.")] = "*",
    page: Annotated[Path, typer.Option(help="The page of verdicts.")] = Path("docs/models.md"),
    json: Annotated[Path | None, typer.Option("--json", help="Write the verdicts to this file.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Write no page; fail where its verdicts differ.")] = False,
) -> None:
    """Try every causal language model of the installed transformers, tiny and random, and write what is served."""
    from ostinato.serve.early import check_output

    for path in (json, None if check or only != "*" else page):
        check_output(path)
    from ostinato.serve.survey import SurveyOptions, run_survey

    if not run_survey(SurveyOptions(page=page, only=only, json_path=json, check=check), _console()):
        raise typer.Exit(1)


@app.command()
def conformance(
    tier: Annotated[
        list[str],
        typer.Argument(help="A tier, such as host, disk or redis://127.0.0.1:6379; several are one engine's."),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print the verdicts as JSON.")] = False,
) -> None:
    """Test whether a connector keeps its contract: on this CPU, without a model, with faults."""
    from ostinato.serve.conformance import run_conformance

    if not run_conformance(tier, json, _console(), _console(stderr=False)):
        raise typer.Exit(1)


def _console(quiet: bool = False, stderr: bool = True) -> Console:
    """Wide enough for the tables where it is a file or a pipe."""
    sized = (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ
    return Console(stderr=stderr, quiet=quiet, width=None if sized else _PIPE_WIDTH)


def main() -> None:
    """Entry point of the ``ostinato`` command."""
    # Idle threads of the math libraries must not spin on the cores that transfers and other processes need.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(standalone_mode=True)
    except OstinatoError as error:
        print(f"ostinato: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None

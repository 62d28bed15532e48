"""From a model's name to something that can run step plans.

Owns: the order of loading (resolve, load, probe, layout, kernels, self-check) and :class:`Runtime`, its result.  Does
not own: any of those steps.  A self-check whose outcome is known (``verdict``) is not held again.

::

    probe -> layout -> rotary factors -> reference logits       while the model is as transformers made it
    latents -> mixers -> experts -> linears -> attention -> elementwise functions -> self-check

A :class:`Runtime` is shared: several engines, each with an arena and worker of its own (:func:`make_worker`), may run
over one loaded model.  Nothing here or later changes the weights once it is made.

Thread: start-up.
"""

from __future__ import annotations

import gc
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ostinato.cache.layout import CacheLayout, build_layout
from ostinato.errors import ConfigError
from ostinato.ids import TierId
from ostinato.memory import check_memory
from ostinato.runtime import native, selfcheck
from ostinato.runtime.arena import Arena
from ostinato.runtime.attention import select_backend
from ostinato.runtime.attention_hook import install
from ostinato.runtime.experts import install_experts, replaced_experts
from ostinato.runtime.geometry import ModelSpecs
from ostinato.runtime.grammars import Grammars
from ostinato.runtime.latent import absorb_latents
from ostinato.runtime.linear import make_invariant
from ostinato.runtime.mixers import REPLACED, rebind_mixers
from ostinato.runtime.models import Progress, load_model, load_tokenizer, resolve, weights_digest
from ostinato.runtime.observed import Observed, keep_reached, observe
from ostinato.runtime.rope import freeze_rope
from ostinato.runtime.runner import ModelRunner, PreparedModel
from ostinato.runtime.sampler import Sampler
from ostinato.runtime.scans import select_scans
from ostinato.runtime.selfcheck import Promise
from ostinato.runtime.specs import output_head, probe_specs
from ostinato.runtime.unaligned import Unaligned, align, find_unaligned
from ostinato.runtime.verdict import Verdict, recall, remember, trial_name
from ostinato.runtime.worker import MoverPort, Worker

HASH_UNIT: Final = 16
DTYPES: Final = ("bfloat16", "float32")
_NOT_NUMERIC: Final = frozenset(
    {"_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "use_cache"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "_attn_implementation"}
)
"""Config fields that change neither keys nor values (the dtype is named apart)."""
_UNLIMITED: Final = 1 << 18
"""Tokens; the longest context of a model whose config names none, because it has no positions."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What cached keys and values depend on besides tokens and layout: ingredients of the namespace.

    ``numerics`` names everything that may change a bit of the result: kernels, instruction set, torch, threads.
    """

    weights: bytes
    config: bytes
    dtype: str
    numerics: str


@dataclass(frozen=True, slots=True, eq=False)
class Runtime:
    """A loaded model that passed the self-check.  ``kernels`` is one line for the start-up table."""

    name: str
    prepared: PreparedModel
    tokenizer: PreTrainedTokenizerBase | None
    layout: CacheLayout
    promise: Promise
    identity: Identity
    max_model_len: int
    kernels: str


def load_runtime(
    model: str,
    dtype: str = "auto",
    device_budget: int = 0,
    max_model_len: int | None = None,
    progress: Progress | None = None,
) -> Runtime:
    """Load ``model`` (a known name, folder or hub id) for a KV cache of ``device_budget`` bytes.

    Raises :class:`UnknownModelError`, :class:`ModelFileError`, :class:`ModelRefusedError`, or :class:`CapacityError`
    when the machine has less memory than the budget: that one first, before anything slow.
    """
    if dtype == "auto":
        dtype = "bfloat16" if computes_in_bfloat16() else "float32"
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    check_memory("the device pool", device_budget)
    files = resolve(model, progress=progress)
    weights = weights_digest(files, progress)
    spare_imported_modules()
    loaded = load_model(files, getattr(torch, dtype))
    return build_runtime(loaded, load_tokenizer(files), model, weights, max_model_len)


def spare_imported_modules() -> None:
    """Keep the garbage collector from walking what torch and transformers consist of.

    A full collection visits some 340,000 objects that live as long as the process; that is a pause of 0.2 s, now and
    then, in the middle of a request.  Done before the model is made, so that a model can still be collected, and once:
    a process that has frozen objects has its own plan.
    """
    if gc.get_freeze_count() == 0:
        gc.collect()
        gc.freeze()


def computes_in_bfloat16(flags: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has bfloat16 dot products (x86: avx512_bf16, amx_bf16, ...; Arm: bf16).

    Without them a bf16 model is several times slower than the same model in float32.
    """
    try:
        return "bf16" in flags.read_text()
    except OSError:
        return False


def build_runtime(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    name: str = "",
    weights: bytes = b"",
    max_model_len: int | None = None,
) -> Runtime:
    """Make ``model`` ready to run over pages.  From here on it belongs to the runtime: its modules are replaced."""
    config = model.config.get_text_config(decoder=True)
    longest = int(max_model_len or getattr(config, "max_position_embeddings", None) or _UNLIMITED)
    model.train(False).requires_grad_(False)
    specs = probe_specs(model)
    layout = build_layout(specs.layers, hash_unit=HASH_UNIT)
    frozen = freeze_rope(model, longest)
    config_digest = _config_digest(model, frozen)
    dtype = str(specs.dtype).removeprefix("torch.")
    # A model without a digest (made in memory) is tried every time.
    trial = trial_name(weights, config_digest, layout.fingerprint(), dtype) if weights else ""
    known = recall(trial) if trial else None
    expected, observed, unaligned = _observe(model, tokenizer, tried=known is not None)
    made, notes = _prepare(model, specs, observed, known)
    # Last: whatever replaces a module's forward pass would undo it.
    align(model, unaligned, replaced_experts(model))
    prepared, promise = _try(made, layout, expected, trial, known)
    identity = Identity(weights, config_digest, dtype, _numerics(prepared, notes, promise))
    lines = {**notes, "linear": prepared.linears.describe(), "results": promise.describe()}
    kernels = "; ".join(f"{what}: {note}" for what, note in lines.items())
    return Runtime(name, prepared, tokenizer, layout, promise, identity, longest, kernels)


def _observe(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, tried: bool
) -> tuple[selfcheck.Reference, Observed, Unaligned]:
    """One forward pass of the model as transformers made it: its logits, and what there is to see in its code.

    ``tried``: the logits will not be needed for a trial, so that what rounding does to them is not tried out.
    """
    logits: list[selfcheck.Reference] = []
    unaligned: list[Unaligned] = []

    def own_logits() -> None:
        logits.append(selfcheck.reference(model, tokenizer, noisy=not tried))

    def run() -> None:
        # Innermost: it looks at the code that makes a call.
        unaligned.append(
            find_unaligned(
                model, lambda: logits.append(selfcheck.reference(model, tokenizer, noisy=not tried)), REPLACED
            )
        )

    observed = observe(model, run)
    return replace(logits[0], chooses=observed.chooses), observed, unaligned[0]


def _prepare(
    model: PreTrainedModel, specs: ModelSpecs, observed: Observed, known: Verdict | None
) -> tuple[PreparedModel, dict[str, str]]:
    """Replace the model's parts, and say with what: a line for each part that it has."""
    notes: dict[str, str] = {}
    shapes = [shape.attends for shape in specs.geometry if shape is not None]
    backend, note = select_backend(shapes, specs.dtype)
    if shapes:
        notes["attention"] = note
    scans, note = select_scans()
    if any(specs.states):
        notes["scans"] = note
    # Latents, mixers and experts take weights from linears, or make linears of weights, so linears come after them.
    latents = absorb_latents(model, specs, backend)
    rebind_mixers(model)
    keep_reached(model, observed)
    if experts := install_experts(model):
        notes["experts"] = experts
    linears = make_invariant(model, output_head(model), known.choices if known is not None else None)
    install(model)
    return PreparedModel(model, specs, backend, scans, linears, latents), notes


def _try(
    made: PreparedModel, layout: CacheLayout, expected: selfcheck.Reference, trial: str, known: Verdict | None
) -> tuple[PreparedModel, Promise]:
    """The model as it may run, and the promise: by trial, unless its verdict is ``known``."""
    if known is not None:
        linears = made.linears.stricter() if known.strict else made.linears
        return replace(made, linears=linears), Promise(known.bitwise, known.difference)
    prepared, promise = selfcheck.settle(made, layout, expected)
    if trial:
        strict = prepared.linears != made.linears
        remember(trial, Verdict(strict, promise.bitwise, promise.difference, dict(made.linears.choices)))
    return prepared, promise


def make_worker(
    runtime: Runtime,
    num_pages: int,
    movers: Mapping[TierId, MoverPort],
    poison: bool = False,
    grammars: Grammars | None = None,
) -> Worker:
    """A worker with an arena of ``num_pages`` pages of its own, over the shared model."""
    arena = Arena(runtime.layout, runtime.prepared.specs, num_pages, poison)
    return Worker(ModelRunner(runtime.prepared, arena, _sampler(), grammars), arena, movers)


def _sampler() -> Sampler:
    library, _ = native.load()
    return Sampler() if library is None else Sampler(torch.ops.ostinato.argmax_rows)


def _numerics(prepared: PreparedModel, notes: Mapping[str, str], promise: Promise) -> str:
    library, _ = native.load()
    isa = getattr(prepared.backend, "isa", None)
    parts = [
        prepared.backend.name,
        f"scans {prepared.scans.name}",
        f"experts {notes.get('experts', 'none')}",
        f"isa {'none' if isa is None else isa.name.lower()}",
        f"kernels {'none' if library is None else library.path.parent.name}",
        f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()}",
        f"linear {prepared.linears.describe()}",
        f"threads {torch.get_num_threads()}",
        promise.describe(),
    ]
    return "; ".join(parts)


def _config_digest(model: PreTrainedModel, frozen_rope: str) -> bytes:
    """SHA-256 over the config without what cannot change keys and values, and over what was frozen in it."""
    fields: dict[str, Any] = {k: v for k, v in model.config.to_dict().items() if k not in _NOT_NUMERIC}
    text = json.dumps([type(model).__name__, fields, frozen_rope], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).digest()

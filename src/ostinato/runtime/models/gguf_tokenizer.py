"""Gemma's SentencePiece vocabulary from GGUF to ``tokenizer.json``.

Owns: the vocabulary, the merges, added tokens and the pipeline around them.  Does not own: reading the container.

Gemma's tokenizer is a BPE whose merges follow from the vocabulary: a token's position is its rank, and each way to
split a token into two others is a merge of that rank.  GGUF stores only the vocabulary, so the merges are rebuilt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from ostinato.errors import ModelFileError
from ostinato.runtime.models.files import Progress
from ostinato.runtime.models.gguf_file import GgufFile

SPACE: Final = "\u2581"
_CONTROL: Final = 3
_USER_DEFINED: Final = 4


def write_tokenizer(source: GgufFile, folder: Path, progress: Progress) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``."""
    raw = [str(token) for token in source.items("tokenizer.ggml.tokens")]
    tokens = [SPACE * len(token) if _is_spaces(token) else token for token in raw]
    kinds = source.items("tokenizer.ggml.token_type")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(kinds) != len(tokens):
        raise ModelFileError("GGUF vocabulary has repeated tokens, or not one type per token")
    bos, eos, unknown, padding = (
        tokens[source.integer(f"tokenizer.ggml.{role}_token_id")] for role in ("bos", "eos", "unknown", "padding")
    )
    merges = rebuild_merges(tokens, vocabulary, progress)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    _dress(tokenizer, bos, vocabulary[bos])
    tokenizer.add_special_tokens(_added(raw, kinds, _CONTROL))
    tokenizer.add_tokens(_added(raw, kinds, _USER_DEFINED))
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "unk_token": unknown,
        "pad_token": padding,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": source.integer("gemma3.context_length"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _is_spaces(token: str) -> bool:
    # GGUF spells runs of spaces as spaces; the normalizer has turned those into the mark by the time of look-up.
    return bool(token) and not token.strip(" ")


def _dress(tokenizer: Tokenizer, bos: str, bos_id: int) -> None:
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )


def rebuild_merges(tokens: list[str], vocabulary: dict[str, int], progress: Progress) -> list[tuple[str, str]]:
    """Every split of every token into two tokens: by the token's position, then the longer left side first."""
    progress.start(len(tokens), "rebuilding merges")
    merges: list[tuple[str, str]] = []
    for token in tokens:
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in vocabulary and token[cut:] in vocabulary:
                merges.append((token[:cut], token[cut:]))
    progress.advance(len(tokens))
    progress.finish()
    return merges


def _added(tokens: list[str], kinds: list[int | float | bool | str], kind: int) -> list[AddedToken]:
    # Runs of spaces are left to the merges, which find them after normalisation.
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, its in zip(tokens, kinds, strict=True)
        if its == kind and not _is_spaces(token)
    ]

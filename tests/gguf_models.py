"""Small models that become GGUF files."""

import shutil
from pathlib import Path

import torch

from tests.toy import little_models

ROOT = Path(__file__).parent.parent
TEXT = little_models.library("textwrap")
SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "max_position_embeddings": 128}
KINDS = {
    "llama": {},
    "llama, tied": {"tie_word_embeddings": True},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, other heads": {"head_dim": 32, "num_key_value_heads": 1},
    "mistral": {},
    "mistral, no window": {"sliding_window": None},
    "qwen2": {},
    "qwen2, tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 128},
}


def made(folder: Path, words: Path, kind: str = "llama", dtype=torch.float32, **shape) -> Path:
    shutil.copytree(words, folder)
    said = {**SMALL, **KINDS.get(kind, {}), **shape}
    return little_models.model(folder, kind.partition(",")[0], said.pop("vocab_size", 304), dtype, **said)


def byte_tokenizer(folder: Path) -> Path:
    """A byte-level one of 300 tokens."""
    assert little_models.by_bytes(folder, TEXT[:4000], size=300) <= 301
    return folder

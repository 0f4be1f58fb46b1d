"""Tiny models to merge, with tokenizers, made on the spot."""

from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from merge.engine import MergeOptions
from merge.merge_recipe import parse
from merge.merging import merge

SHAPE = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False},
}


def llama(folder: Path, seed: int, dtype: torch.dtype = torch.float32, shard: str = "5GB", **shape) -> Path:
    """A base of seed 0, moved a little by its own seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **shape}))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def tokenizer(folder: Path, words: str, special: tuple[str, ...] = ("</s>",), size: int = 90) -> list[str]:
    """A byte-level BPE of these words; its tokens in their order."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if size > 256 else []
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(special), show_progress=False, initial_alphabet=alphabet
    )
    made.train_from_iterator([words] * 3, trainer)
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[0]).save_pretrained(folder)
    return sorted(made.get_vocab(), key=made.get_vocab().__getitem__)


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: each for file in sorted(folder.glob("*.safetensors")) for name, each in load_file(file).items()}


def run(out: Path, recipe: dict, how: MergeOptions = MergeOptions(), **options) -> dict[str, Tensor]:
    """Merge, and read the result."""
    merge(parse(yaml.dump(recipe, Dumper=Plain)), out, how=how, **options)
    return weights(out)


class Plain(yaml.SafeDumper):
    def ignore_aliases(self, data) -> bool:
        return True


def says(folder: Path) -> Tensor:
    """What a model makes of some tokens, as transformers loads it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.arange(16)[None]).logits


def copied(*models: str) -> dict:
    """The model as it is; or the mean of several."""
    inputs = [{"model": model, "parameters": {"weight": 1.0}} for model in models]
    return {"merge_method": "linear", "models": inputs}


def assert_equal(one: dict, other: dict) -> None:
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)

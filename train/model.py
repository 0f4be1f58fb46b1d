"""Causal language models of Hugging Face, their parameters laid out in one flat vector."""

import difflib
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING

from fleet.errors import first_line
from fleet.places import of_hub
from fleet.run_config import UserError
from fleet.untrusted_model import check_config
from train.training_config import TrainConfig
from train.vector_layout import Stack, VectorLayout

# The Llama shapes of the literature on DiLoCo; `tiny` learns visibly within two minutes on two cores.
SHAPES: Mapping[str, dict[str, Any]] = {
    # the names stand in train.training_config, too
    "tiny": dict(hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4),
    "14m": dict(hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4),
    "60m": dict(hidden_size=1024, intermediate_size=2688, num_hidden_layers=3, num_attention_heads=16),
    "150m": dict(hidden_size=1024, intermediate_size=2688, num_hidden_layers=12, num_attention_heads=16),
    "1b": dict(
        hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, num_key_value_heads=4
    ),
}

_WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "local_attention")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
Entered = str | Mapping[str, Any]  # an entry of INITIAL_POPULATION


def described(entry: Entered, trust: bool = False) -> PretrainedConfig:
    """The model's configuration; an error in one line where there is none that can be trained here."""
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # its retries; the error says enough
    known = f"; the presets are {', '.join(SHAPES)}" if isinstance(entry, str) and "/" not in entry else ""
    with in_a_line(f"model {_short(entry)}", known):
        fresh = _fresh(entry)
        name, revision = ("", None) if fresh else of_hub(cast(str, entry))
        said = fresh or PretrainedConfig.get_config_dict(name, revision=revision)[0]
        check_config(said, f"model {_short(entry)}: its config.json")
        if fresh:
            config = AutoConfig.for_model(**fresh)
        else:
            config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust)
    bidirectional = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", False)
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or trust and getattr(config, "auto_map", None)
    if bidirectional or not causal:
        raise UserError(f"model {_short(entry)}: {config.model_type} is not a causal language model")
    return config


@contextmanager
def in_a_line(what: str, more: str = "") -> Iterator[None]:
    """Whatever a hub, a network, a damaged file and a library's classes can come up with, as an error of ours."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{what}: {first_line(error)}{more}") from None


def built(entry: Entered, vocab: int, seed: int, trust: bool = False) -> PreTrainedModel:
    """Pre-trained weights, or fresh ones that follow from the seed; in fp32 either way."""
    config = _for_words(entry, vocab, trust)
    if not _fresh(entry):
        name, revision = of_hub(cast(str, entry))
        how: dict[str, Any] = {"revision": revision, "trust_remote_code": trust, "dtype": torch.float32}
        return AutoModelForCausalLM.from_pretrained(name, **how)
    return empty(config, seed)


def skeleton(entry: Entered, vocab: int, trust: bool = False) -> PreTrainedModel:
    """The same without any numbers, which takes no memory and no time."""
    return without_numbers(_for_words(entry, vocab, trust), trust)


def _for_words(entry: Entered, vocab: int, trust: bool = False) -> PretrainedConfig:
    config = described(entry, trust)
    if not has_vocabulary(entry):
        config.vocab_size = vocab
    return config


def has_vocabulary(entry: Entered) -> bool:
    """Whether it says how many words it knows; if not, the tokenizer decides."""
    return "vocab_size" in (_fresh(entry) or {"vocab_size": None})


def empty(config: PretrainedConfig, seed: int, trust: bool = False) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trust)
        return model


def without_numbers(config: PretrainedConfig, trust: bool = False) -> PreTrainedModel:
    with torch.device("meta"):
        return empty(config, 0, trust)


def looks_up_positions(model: PreTrainedModel, most: int) -> bool:
    """In a table of so many, some of them with a row or two more, as GPT-2 and OPT do: there is nothing beyond."""
    words = model.get_input_embeddings()
    tables = (each for each in model.modules() if isinstance(each, torch.nn.Embedding) and each is not words)
    return any(0 <= each.num_embeddings - most <= 2 for each in tables)


def structure(model: PreTrainedModel) -> str:
    """The same for models whose tensors have the same names, shapes and kinds, and learn or do not."""
    named = (*model.named_parameters(), *model.named_buffers())
    said = [f"{name} {tuple(each.shape)} {each.dtype} {each.requires_grad}" for name, each in named]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def can_be_built(entry: Entered, trust: bool = False) -> None:
    """A configuration may contradict itself."""
    with in_a_line(f"model {_short(entry)}: cannot be built"):
        without_numbers(described(entry, trust), trust)


def read_config(text: bytes, run: TrainConfig) -> PretrainedConfig:
    """As a run keeps it. Code of a model's own is only ever had from where the run's configuration says."""
    if run.trust_remote_code and not _fresh(run.initial_population[0]):
        return described(run.initial_population[0], True)
    said = json.loads(text)
    check_config(said, "the run's config.json")
    return AutoConfig.for_model(**said)


def layout_of(model: torch.nn.Module, here: Callable[[Any], Tensor] = lambda each: each) -> VectorLayout:
    """Of all parameters that learn; of several ranks, what one has `here` of them."""
    words = _words(model)

    def kind(p: Tensor) -> int:
        within = p.ndim in (2, 3) and min(p.shape[-2:]) > 1 and id(p) not in words
        return 0 if within else 1 if p.ndim >= 2 else 2

    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    named.sort(key=lambda item: (kind(item[1]), () if kind(item[1]) else item[1].shape))  # stable: the model's order
    within = [p for _, p in named if kind(p) == 0]
    stacks = tuple(_stack([here(p).shape for p in alike], shape) for shape, alike in groupby(within, lambda p: p.shape))
    decaying = sum(here(p).numel() for _, p in named if p.ndim >= 2)
    return VectorLayout({name: tuple(here(p).shape) for name, p in named}, len(within), stacks, decaying)


def _stack(here: Sequence[Sequence[int]], whole: Sequence[int]) -> Stack:
    return Stack(sum(math.prod(shape[:-2]) for shape in here), here[0][-2], here[0][-1], whole[-2])


def _words(model: torch.nn.Module) -> set[int]:
    """What stands for single words, or places: a matrix by its shape, a table by its use."""
    head = cast(Any, model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tables = (each for each in model.modules() if isinstance(each, torch.nn.Embedding) or each is head)
    return {id(p) for each in tables for p in each.parameters()}


def bound_to_vector(model: torch.nn.Module, layout: VectorLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Move what learns into one vector and its gradients into another; the model works on them from now on."""
    parameters = dict(model.named_parameters())
    vector = torch.empty(layout.size, device=device)
    gradient = torch.zeros_like(vector)
    model.to(device)
    for (name, place), (_, slope) in zip(layout.views(vector).items(), layout.views(gradient).items(), strict=True):
        place.copy_(parameters[name].detach())
        parameters[name].data, parameters[name].grad = place, slope
    return vector, gradient


def flat(model: torch.nn.Module, layout: VectorLayout) -> Tensor:
    parameters = dict(model.named_parameters())
    return torch.cat([parameters[name].detach().float().flatten() for name in layout.shapes])


def same_shapes(one: VectorLayout, other: VectorLayout, name: str, other_name: str) -> None:
    """Members that are averaged have the same tensors."""
    for tensor in {**one.shapes, **other.shapes}:
        a, b = one.shapes.get(tensor), other.shapes.get(tensor)
        if a != b:
            pairs = ((a, name), (b, other_name))
            said = ", ".join(f"{list(shape) if shape else 'missing'} in {who}" for shape, who in pairs)
            raise UserError(f"tensor {tensor}: {said}; the models of INITIAL_POPULATION must be alike")


_UNLIKE = {
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "torch_dtype",
    "use_cache",
}


def same_settings(one: PretrainedConfig, other: PretrainedConfig, name: str, other_name: str) -> None:
    """The same shapes may be computed with in different ways: other heads, another activation."""
    a, b = one.to_dict(), other.to_dict()
    keys = (key for key in sorted({*a, *b} - _UNLIKE) if not key.endswith("token_id"))
    if differing := [key for key in keys if a.get(key) != b.get(key)]:
        said = ", ".join(f"{key} is {a.get(key)!r} in {name}, {b.get(key)!r} in {other_name}" for key in differing[:3])
        raise UserError(f"the models of INITIAL_POPULATION must be alike: {said}")


def _fresh(entry: Entered) -> dict[str, Any]:
    """What a model without weights is made from; empty where weights are to be loaded."""
    if not isinstance(entry, str):
        if entry.keys() != {"config"} or not isinstance(entry["config"], dict):
            raise UserError(f'model {_short(entry)}: an object must be {{"config": {{...}}}}, with a model_type in it')
        return {"model_type": "llama", **entry["config"]}
    if entry.lower() in SHAPES and entry not in SHAPES:
        raise UserError(f"model {entry!r}: the preset is called {entry.lower()!r}")
    named = entry in SHAPES or "/" in entry or os.path.exists(entry)
    if near := [] if named else difflib.get_close_matches(entry, SHAPES, n=1, cutoff=0.75):
        raise UserError(f"model {_short(entry)}: there is no such preset, nor a folder; the nearest one is {near[0]}")
    if entry in SHAPES:
        return {"model_type": "llama", "tie_word_embeddings": entry == "tiny", "use_cache": False, **SHAPES[entry]}
    file = Path(entry) / "config.json"
    has_weights = os.path.isfile(file) and any(each.suffix in _WEIGHTS for each in file.parent.iterdir())
    if entry.endswith(".json") or (os.path.isfile(file) and not has_weights):
        try:
            said = json.loads((file if os.path.isfile(file) else Path(entry)).read_text(encoding="utf-8"))
            return {"model_type": "llama", **said}
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"model {_short(entry)}: cannot be read as JSON: {error}") from None
    return {}


def _short(entry: Entered) -> str:
    text = entry if isinstance(entry, str) else json.dumps(entry)
    return repr(text if len(text) < 80 else text[:77] + "...")


def reach(config: PretrainedConfig, most: int) -> int:
    """Tokens that every layer sees back, so many at the most."""
    said = [getattr(config.get_text_config(), key, None) for key in _WINDOWS]
    return min([most, *(each for each in said if isinstance(each, int) and each > 0)])

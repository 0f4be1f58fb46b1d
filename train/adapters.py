"""LoRA: a small adapter learns, the model's own weights stand still, and at the end they take it in."""

import importlib
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fleet.errors import Lacking
from fleet.run_config import UserError, validated
from train.posttrain.posttrain_sections import Adapter

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # peft's files
_NAME = "default"  # peft's, for the only adapter
_INSIDE = "base_model.model."  # peft's, before the names of the model's modules


def adapted(
    model: PreTrainedModel, settings: Adapter | Mapping[str, Any], seed: int, device: torch.device | None = None
) -> Any:
    """The model with an adapter that follows from the seed and changes nothing yet; only the adapter can learn. The
    device is where it will be trained."""
    peft = _package("peft")
    adapter = settings if isinstance(settings, Adapter) else validated(Adapter, settings, "adapter", str)
    names = places_of(model, adapter)
    if adapter.four_bits:
        _to_four_bits(model, names, device or model.device)
    config = peft.LoraConfig(
        r=adapter.r, lora_alpha=adapter.alpha, target_modules=names, bias="none", task_type="CAUSAL_LM"
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of GPT-2's transposed weights, which peft then knows how to handle
        torch.default_generator.manual_seed(seed)
        return peft.get_peft_model(model, config)


@torch.no_grad()
def merged(model: Any, plain: PreTrainedModel | None = None) -> PreTrainedModel:
    """The plain model with the adapter in its weights: added in fp32, rounded once. The adapted model is used up. Where
    its own weights are in 4 bits, `plain` is the model with all its bits."""
    if plain is None and getattr(model, "is_loaded_in_4bit", False):
        raise UserError("the weights are in 4 bits; give merged() the plain model to put the adapter in")
    for name, base, change in _changes(model):
        weight = base.weight if plain is None else plain.get_parameter(f"{name}.weight")
        weight.copy_(weight.float() + change.to(weight.device))
    found: PreTrainedModel = model.unload() if plain is None else plain
    return found.requires_grad_(True)


# -- its factors, by PEFT's names --------------------------------------------------------------------------------------

Factors = dict[str, Tensor]


@dataclass(frozen=True)
class Layers:
    """Where an adapter has a place in a model: each layer's inputs and outputs."""

    sizes: Mapping[str, tuple[int, int]]
    turned: bool  # their weights lie transposed

    @classmethod
    def of(cls, model: PreTrainedModel, adapter: Adapter) -> "Layers":
        layers = {name: model.get_submodule(name) for name in places_of(model, adapter)}
        ways = {isinstance(each, Conv1D) for each in layers.values()}
        if len(ways) > 1:
            raise UserError("adapter: the weights of some of these layers lie transposed; name others as targets")
        turned = ways == {True}
        shapes = {name: each.get_parameter("weight").shape for name, each in layers.items()}
        return cls({name: (a, b) if turned else (b, a) for name, (a, b) in shapes.items()}, turned)

    def nothing(self, rank: int) -> Factors:
        """An adapter that changes nothing."""
        found = Factors()
        for name, (inputs, outputs) in self.sizes.items():
            a, b = names_of(name)
            found |= {a: torch.zeros(rank, inputs), b: torch.zeros(outputs, rank)}
        return found


def names_of(module: str) -> tuple[str, str]:
    return f"{_INSIDE}{module}.lora_A.weight", f"{_INSIDE}{module}.lora_B.weight"


@torch.no_grad()
def put(model: Any, factors: Factors) -> None:
    """Into an adapted model. What changes nothing stays as fresh as it is: nothing could come of zeros times zeros."""
    for name, layer in _layers(model):
        down, up = (factors[each].float() for each in names_of(name))
        used = up.any(0).to(layer.lora_A[_NAME].weight.device)
        layer.lora_A[_NAME].weight[used] = down.to(used.device)[used]
        layer.lora_B[_NAME].weight.copy_(up)


@torch.no_grad()
def taken(model: Any, dtype: torch.dtype) -> Factors:
    """Out of an adapted model, which is a plain one again, unless its own weights are in 4 bits."""
    found = Factors()
    for name, layer in _layers(model):
        for key, part in zip(names_of(name), (layer.lora_A, layer.lora_B), strict=True):
            found[key] = part[_NAME].weight.detach().cpu().to(dtype)
    if not getattr(model, "is_loaded_in_4bit", False):
        model.unload().requires_grad_(True)
    return found


def files_of(factors: Factors, layers: Layers, settings: Adapter, base: str | None = None) -> dict[str, bytes]:
    """As PEFT loads them."""
    said = {
        **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base},
        **{"r": settings.r, "lora_alpha": settings.alpha, "target_modules": sorted(layers.sizes)},
        **{"fan_in_fan_out": layers.turned, "bias": "none", "lora_dropout": 0.0, "inference_mode": True},
    }
    return {SETTINGS: json.dumps(said, indent=2).encode(), WEIGHTS: safetensors.torch.save(factors, {"format": "pt"})}


def _layers(model: Any) -> Iterator[tuple[str, Any]]:
    layers = _package("peft.tuners.lora")
    for name, layer in model.named_modules():
        if isinstance(layer, layers.LoraLayer):
            yield name.removeprefix(_INSIDE), layer


def _changes(model: Any) -> Iterator[tuple[str, Any, Tensor]]:
    """What the adapter adds to each weight, laid out as that is."""
    for name, layer in _layers(model):
        down, up = (each[_NAME].weight.float() for each in (layer.lora_A, layer.lora_B))
        change, base = (up @ down) * layer.scaling[_NAME], layer.get_base_layer()
        yield name, base, change.T if isinstance(base, Conv1D) else change


def places_of(model: PreTrainedModel, adapter: Adapter) -> list[str]:
    """The head stays out: often it is the embedding, too."""
    head = model.get_output_embeddings()
    linear = [n for n, each in model.named_modules() if isinstance(each, (nn.Linear, Conv1D)) and each is not head]
    if adapter.targets == "all-linear":
        return linear
    having = {part: [name for name in linear if f".{part}." in f".{name}."] for part in adapter.targets}
    for part in (part for part, names in having.items() if not names):
        parts = dict.fromkeys(name.rpartition(".")[2] for name in linear)
        raise UserError(f"adapter: no linear layer has {part!r} in its name; there are {', '.join(parts)}")
    return [name for name in linear if any(name in names for names in having.values())]


def _to_four_bits(model: Any, names: list[str], device: torch.device) -> None:
    """Weights are quantised as they arrive on the device."""
    if device.type != "cuda":
        raise Lacking(f"adapter: four_bits works on a CUDA device only, and this is {device.type}; leave it out")
    bits = _package("bitsandbytes").nn
    for name, layer in [(name, model.get_submodule(name)) for name in names]:
        if isinstance(layer, Conv1D):
            raise UserError(f"adapter: four_bits cannot hold {name}, whose weight is transposed; leave it out")
        small = bits.Linear4bit(
            layer.in_features, layer.out_features, layer.bias is not None, torch.bfloat16, quant_type="nf4"
        )
        small.weight = bits.Params4bit(layer.weight.detach(), requires_grad=False, quant_type="nf4", module=small)
        small.bias = layer.bias
        model.set_submodule(name, small.to(device))
    model.is_loaded_in_4bit = True  # peft asks


def _package(name: str) -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise Lacking(
            f"adapters need the package {package} ({error}): {sys.executable} -m pip install {package}"
        ) from None

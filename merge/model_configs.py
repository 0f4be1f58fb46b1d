"""What config.json says of models that are merged: whether they fit together, and what the result's has to say."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from merge.donor import LAYER_COUNTS, Donor
from merge.tensor_files import UserError

_SAME = ("num_attention_heads", "num_key_value_heads", "head_dim", "n_head", "hidden_size", "num_experts_per_tok")
# What says nothing about a tensor's meaning, or is settled by the recipe.
_HARMLESS = (
    *("_name_or_path", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype", "use_cache"),
    *("vocab_size", "tie_word_embeddings", "initializer_range", "pretraining_tp", "id2label", "label2id", "task"),
)
_HARMLESS_PARTS = ("token_id", "dropout", "pdrop", "_drop", "output_", "return_dict")
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id")
_NUMBERS_OF_LAYERS = ("mlp_only_layers", "moe_layers")
_FIRST_LAYERS = ("first_k_dense_replace",)
_EVERY_SO_MANY = (
    *("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", "no_rope_layer_interval"),
    *("expert_layer_period", "attn_layer_period", "global_attn_every_n_layers", "cross_attention_interval"),
)
_SETTLED_BY_LIST = {"no_rope_layer_interval": "no_rope_layers", "interleave_moe_layer_step": "moe_layers"}
_SETTLED_BY_TYPES = ("sliding_window_pattern", "full_attention_interval", "max_window_layers")


def check_kinds(models: Sequence[Donor], leader: Donor) -> None:
    for donor in models:
        mine, other = (each.config.get("model_type") for each in (leader, donor))
        if mine != other:
            raise UserError(
                f"{leader.reference} is of the kind {mine}, {donor.reference} of the kind {other}: "
                "their tensors mean different things, and cannot be merged"
            )
        for key in _SAME:
            mine, other = (each.config.get(key) for each in (leader, donor))
            if None not in (mine, other) and mine != other:  # older files lack what newer ones say for the same model
                values = f"{mine} in {leader.reference}, {other} in {donor.reference}"
                raise UserError(f"{key} is {values}: the models have different shapes")


def differences(models: Sequence[Donor], leader: Donor, layers_are_cut: bool) -> list[str]:
    """In words, what may change a model's arithmetic and is not the same in all of them."""
    notes = []
    harmless = (*_HARMLESS, *(LAYER_COUNTS if layers_are_cut else ()))
    for donor in models:
        for key in dict.fromkeys([*leader.config, *donor.config]):
            mine, other = leader.config.get(key), donor.config.get(key)
            listed = layers_are_cut and isinstance(mine, list) and isinstance(other, list)
            if mine == other or listed or key in harmless or any(part in key for part in _HARMLESS_PARTS):
                continue
            theirs, ours = (json.dumps(value)[:80] for value in (other, mine))
            notes.append(f"{key} is {theirs} in {donor.reference}, {ours} in {leader.reference}: the result has that")
        if donor.config.get("auto_map"):
            notes.append(f"{donor.reference} names code of its own (auto_map); code is never copied")
    return list(dict.fromkeys(notes))


def stacked(config: dict[str, Any], sources: Sequence[tuple[Donor, int]]) -> None:
    """Settle what the configuration says of single layers: each of the result's is a layer of some model."""
    leader = sources[0][0]
    moved = any(donor.of_text != leader.of_text or layer != n for n, (donor, layer) in enumerate(sources))
    for key, value in list(config.items()):
        if key in LAYER_COUNTS:
            config[key] = len(sources)
        elif key in _NUMBERS_OF_LAYERS and isinstance(value, list):
            config[key] = [n for n, (donor, layer) in enumerate(sources) if layer in (donor.of_text.get(key) or ())]
        elif isinstance(value, list) and len(value) == leader.layers:
            config[key] = [_of_layer(donor, key, layer) for donor, layer in sources]
        elif key in _FIRST_LAYERS and type(value) is int:
            config[key] = _first(key, [layer < int(donor.of_text.get(key) or 0) for donor, layer in sources])
        elif moved and _by_number(config, key):
            _check_period(key, sources)


def _of_layer(donor: Donor, key: str, layer: int) -> Any:
    value = donor.of_text.get(key)
    if not isinstance(value, list) or layer >= len(value):
        raise UserError(f"{donor.reference}: its config.json says nothing of layer {layer} in {key}")
    return value[layer]


def _first(key: str, are: Sequence[bool]) -> int:
    count = sum(are)
    if not all(are[:count]):
        raise UserError(
            f"{key}: the layers that it is about come first in a model; here others would stand before them"
        )
    return count


def _by_number(config: Mapping[str, Any], key: str) -> bool:
    if key in _SETTLED_BY_TYPES:
        used = key != "max_window_layers" or config.get("use_sliding_window")
        return bool(used) and "layer_types" not in config
    return key in _EVERY_SO_MANY and not config.get(_SETTLED_BY_LIST.get(key, ""))


def _check_period(key: str, sources: Sequence[tuple[Donor, int]]) -> None:
    """What a layer is follows from its number: it must get a number of the same kind."""
    for n, (donor, layer) in enumerate(sources):
        value = donor.of_text.get(key)
        if value in (None, 0, 1) or layer == n:
            continue
        if key == "max_window_layers" or type(value) is not int or layer % value != n % value:
            raise UserError(
                f"{donor.reference}: by its {key} of {value}, what layer {layer} is follows from its number, "
                f"and it would become layer {n}; take layers that keep their kind"
            )

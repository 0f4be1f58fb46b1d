"""What the names of a model's tensors tell: its layers, its embeddings, its output head."""

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from fleet.errors import UserError

T = TypeVar("T")

_NUMBERED = re.compile(r"^(.+?)\.(\d{1,6})\.(.+)$")
# Of RWKV, ModernBERT and InternLM they have names that only stand for them where nothing stands before.
_HEAD = re.compile(
    r"((^|\.)((generator_)?lm_head|embed_out|predictions|vocab_projector)(\.decoder)?|^(head|decoder|output)"
    r"|^transformer\.output_layer)\.(weight|bias)$"
)
_OUTERMOST = re.compile(r"^(model|transformer|gpt_neox|bert|roberta)\.")
_EMBEDDING = re.compile(
    r"((^|\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)|^(\w+\.)?(shared|embeddings))\.weight$"
)
_OF_TEXT = re.compile(r"(^|\.)(language_model|text_model)\.")
_BUFFER = re.compile(r"\.(rotary_emb\.inv_freq|attn\.masked_bias|attn\.bias|attention\.masked_bias|attention\.bias)$")
_TO_RESIDUAL = re.compile(
    r"\.(o_proj|out_proj|down_proj|c_proj|fc2|fc_out|dense_4h_to_h|w2|wo|(attention|self_attention|self_attn|output)\.dense)"
    r"\.(weight|bias)$|\.experts\.down_proj(_bias)?$"
)
_POST_NORM = re.compile(r"\.post_(feedforward_layernorm|mlp_layernorm|ffn_norm|norm2)\.weight$")


def is_head(name: str) -> bool:
    """Whether it is the matrix that makes words of the last layer; its bias may stand beside tied embeddings, too."""
    return bool(_HEAD.search(name)) and name.endswith(".weight")


def is_embedding(name: str) -> bool:
    return bool(_EMBEDDING.search(name))


def is_vocabulary(name: str) -> bool:
    """Whether a tensor has a row for each token."""
    return bool(_HEAD.search(name)) or is_embedding(name)


def is_buffer(name: str, dimensions: int) -> bool:
    """Masks and frequencies that old files hold beside the weights; a bias of weights has one dimension."""
    return dimensions != 1 and bool(_BUFFER.search(name)) or name.endswith("rotary_emb.inv_freq")


def writes_to_residual(name: str) -> bool:
    """Whether it belongs to the last matrix of attention or of the MLP: what adds to the residual stream."""
    return layer_of(name) is not None and bool(_TO_RESIDUAL.search(name))


def takes_scales_out(name: str) -> bool:
    """Whether it is a norm of what the MLP adds, as of Gemma 2 and OLMo 2: such models have one behind attention, too,
    and the last matrix of neither can be scaled to any effect."""
    return bool(_POST_NORM.search(name))


def layer_of(name: str) -> tuple[str, int, str] | None:
    """Stack, number, and the rest of the name; nothing for tensors outside the layers."""
    found = _NUMBERED.match(name)
    return (found[1], int(found[2]), found[3]) if found else None


def stacks(names: Iterable[str]) -> dict[str, set[int]]:
    """The model's stacks of layers, and their numbers."""
    found: dict[str, set[int]] = {}
    for name in names:
        if layer := layer_of(name):
            found.setdefault(layer[0], set()).add(layer[1])
    return found


def text_stack(names: Iterable[str]) -> str:
    """The stack that words go through: the only one, or the only one that says so."""
    found = [*stacks(names)] or [""]
    of_text = [each for each in found if _OF_TEXT.search(each)] if len(found) > 1 else found
    if len(of_text) != 1:
        raise UserError(f"slices need one stack of layers, or one of a language_model; there are {', '.join(found)}")
    return of_text[0]


def comes_first(name: str) -> bool:
    """Whether a tensor outside the layers stands before them: also in the layers of another stack."""
    if layer_of(name):
        return True
    behind = _HEAD.search(name) or "embedding_norm" in name
    return not behind and any(word in name for word in ("emb", "wte", "wpe", "project_in"))


def named_alike(view: Mapping[str, T], like: Mapping[str, T]) -> dict[str, T]:
    """The same tensors under another model's names, where these differ in the outermost part alone, as of GPT-2."""
    if view.keys() <= like.keys():
        return dict(view)
    theirs = {_OUTERMOST.sub("", name): name for name in like}
    return {theirs.get(_OUTERMOST.sub("", name), name): each for name, each in view.items()}

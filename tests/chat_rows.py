"""Small tokenizers, conversations and models for the tests of fine-tuning."""

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.small import SHAPE
from train.chat_examples import Example, examples
from train.model import built
from train.text_sources import placed

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>", "</s>"]
ASK = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
HEAD = "{{ '<|im_start|>' + m['role'] + '\n' }}"
CHATML = "{% for m in messages %}" + HEAD + "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}" + ASK
ANSWER = "{% for m in messages %}" + HEAD + "{% if m['role'] == 'assistant' %}{% generation %}"
OUTSIDE = ANSWER + "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>{{ '\n' }}"
OUTSIDE += "{% endfor %}" + ASK
INSIDE = ANSWER + "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}"
INSIDE += "{% endif %}{{ '\n' }}{% endfor %}" + ASK
HEADS, WINDOW = {"num_key_value_heads": 1, "head_dim": 16}, {"sliding_window": 4}
PACKABLE = [
    ("llama", {}), ("gpt2", {}), ("qwen2", {"num_key_value_heads": 1}), ("mistral", HEADS | WINDOW),
    ("gemma", HEADS), ("gemma2", HEADS | WINDOW), ("mixtral", HEADS | {"num_local_experts": 4}),
]  # fmt: skip


def tokenizer(template=None, merges=(), trim=True):
    """Of bytes, of a few that are joined, and of special tokens; like GPT-2's it may leave spaces out of offsets."""
    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    made = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=list(merges)))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor, made.decoder = processors.ByteLevel(trim_offsets=trim), decoders.ByteLevel()
    made.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<|begin|>", eos_token="</s>", chat_template=template
    )


def said(*contents, first="user"):
    roles = {"user": ("user", "assistant"), "system": ("system", "user", "assistant")}[first]
    turns = roles if first == "user" else (*roles, *("user", "assistant") * 9)
    turns = turns * 9 if first == "user" else turns
    return {"messages": [{"role": role, "content": content} for role, content in zip(turns, contents, strict=False)]}


def pieces(tokens, *parts):
    """Tokens and mask of texts, of which every second is learned. Bytes are not joined, so parts may be tokenised."""
    found = [(token, n % 2 == 1) for n, part in enumerate(parts) for token in tokens.encode(part)]
    return [token for token, _ in found], [learned for _, learned in found]


def one(row, tokens, longest=1000):
    ((found,),) = examples(placed([row], "rows"), tokens, longest).kept
    return found.tokens.tolist(), found.learned.tolist()


def of(kind, seed=2, **keys):
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 2}
    shape = gpt2 if kind == "gpt2" else {**SHAPE, "num_hidden_layers": 2}
    ends = {} if "pad_token_id" in keys else {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return built({"config": {"model_type": kind, **shape, **ends, **keys}}, 257, seed).eval()


def some_examples(sizes, seed=1):
    rng = np.random.default_rng(seed)
    made = [Example(rng.integers(0, 257, n).astype(np.int32), rng.random(n) < 0.5) for n in sizes]
    for each in made:
        each.learned[0], each.learned[-1] = False, True
    return made


SMALL = {"r": 4, "alpha": 8, "targets": "all-linear"}

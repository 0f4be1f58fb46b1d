"""Little models of several kinds with tokenizers of their own, trained a little on the source of Python's library."""

import sysconfig
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SPLITS = {
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}  # as the models of these names have them
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES = {
    "llama3": {**LLAMA3, "original_max_position_embeddings": 128},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}
TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"


def library(*names: str) -> str:
    """The source of modules of Python's library."""
    return "\n".join((Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_text() for name in names)


def by_bytes(folder: Path, text: str, way: str = "gpt-2", size: int = 512, bos: bool = False) -> int:
    """A byte-level tokenizer that cuts text into words in one of llama.cpp's ways; how many tokens it has."""
    made = Tokenizer(models.BPE(ignore_merges=way == "llama-bpe"))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=way in ("gpt-2", "smollm"))
    if way == "smollm":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), whole])
    elif way in SPLITS:
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLITS[way]), "isolated"), whole])
    else:
        made.pre_tokenizer = whole
    made.normalizer = normalizers.NFC() if way == "qwen2" else None
    made.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet)
    )
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    return _saved(made, folder, bos)


def by_pieces(folder: Path, text: str, size: int = 512, space: bool = True) -> int:
    """A tokenizer like Llama 2's: pieces of words, then bytes."""
    known = ["<unk>", "<s>", "</s>", "<|user|>", *(f"<0x{n:02X}>" for n in range(256))]
    draft = Tokenizer(models.BPE())
    draft.pre_tokenizer = pre_tokenizers.Metaspace()
    draft.train_from_iterator([text], trainers.BpeTrainer(vocab_size=size, special_tokens=known))
    vocabulary = draft.get_vocab()
    merges = [
        (token[:n], token[n:])
        for token in sorted(vocabulary, key=vocabulary.__getitem__)[len(known) :]
        for n in range(1, len(token))
        if token[:n] in vocabulary and token[n:] in vocabulary
    ]
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if space else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*back, *([decoders.Strip(" ", 1, 0)] if space else [])])
    made.add_special_tokens([AddedToken(token, normalized=False) for token in known[:4]])
    made.add_tokens([AddedToken("<tool>", normalized=False)])
    return _saved(made, folder, bos=True)


def _saved(made: Tokenizer, folder: Path, bos: bool) -> int:
    if bos:
        special = [(token, made.token_to_id(token)) for token in ("<s>",)]
        made.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", special)
    unknown = {"unk_token": "<unk>"} if made.token_to_id("<unk>") is not None else {}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", **unknown)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return made.get_vocab_size()


def model(folder: Path, kind: str, vocabulary: int, dtype: torch.dtype = torch.float32, **shape) -> Path:
    """A model with random weights; biases are random, too."""
    said = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    said |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024, "bos_token_id": 0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **said | shape, vocab_size=vocabulary))
        for each in made.parameters():
            if each.ndim == 1:
                each.data += 0.1 * torch.randn_like(each)
    made.generation_config.eos_token_id = made.config.eos_token_id = 1
    made.to(dtype).save_pretrained(folder)
    return folder


def train(folder: Path, ids: Tensor, steps: int, length: int = 128) -> float:
    """Some steps on these tokens, so that the next one is no toss-up; the last loss."""
    made = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(made.parameters(), 2e-3)
    generator, loss = torch.Generator().manual_seed(0), torch.zeros(())
    for _ in range(steps):
        begins = torch.randint(len(ids) - length, (16,), generator=generator)
        batch = torch.stack([ids[begin : begin + length] for begin in begins])
        loss = made(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    made.save_pretrained(folder)
    return loss.item()

"""Tokenizers as GGUF settings: they come back as they were, or are refused."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from merge.tensor_files import UserError
from tests.gguf_models import SMALL, TEXT, made
from tests.toy import little_models

gguf = pytest.importorskip("gguf", reason="gguf is not installed: GGUF files are not tested")
from merge.gguf.checking import info, verify_gguf  # noqa: E402
from merge.gguf.header import read_gguf  # noqa: E402
from merge.gguf.writing import export_gguf, gguf_to_hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


STRANGE = "Ünïcödé 漢字 🙂\t42 1999\n\n  don't  </s>I'll <tool>x   y"


@pytest.mark.parametrize("way", ["gpt-2", "smollm", "qwen2", "llama-bpe", "llama-bpe, bos", "pieces", "pieces, bare"])
def test_a_tokenizer_comes_back_as_it_was(way, tmp_path):
    model, name = tmp_path / "model", way.partition(",")[0]
    if name == "pieces":
        count = little_models.by_pieces(model, TEXT, space=way == "pieces")
    else:
        count = little_models.by_bytes(model, TEXT, name, bos="bos" in way)
    little_models.model(model, "llama", count + 3, **SMALL)
    written = export_gguf(model, tmp_path / "m.gguf", "F16")
    assert written.notes == ()
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert tokens[count:] == tuple(f"[PAD{id}]" for id in range(count, count + 3)) and types[count:] == (5, 5, 5)
    assert metadata["tokenizer.ggml.model"] == ("llama" if name == "pieces" else "gpt2")
    assert metadata["tokenizer.ggml.pre"] == ("default" if name == "pieces" else name)
    assert [types[tokens.index(each)] for each in ("<s>", "<tool>")] == [3, 4]
    assert metadata["tokenizer.ggml.add_bos_token"] is (name == "pieces" or "bos" in way)
    assert metadata["tokenizer.ggml.add_eos_token"] is False
    if name == "pieces":
        assert [types[tokens.index(each)] for each in ("<unk>", "<0x0A>")] == [2, 6]
        assert metadata["tokenizer.ggml.add_space_prefix"] is (way == "pieces")
    gguf_to_hf(tmp_path / "m.gguf", tmp_path / "back", "float16")
    one, other = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in (STRANGE, TEXT[:2000], "", " a", "<|user|>2024"):
        assert one(text)["input_ids"] == other(text)["input_ids"], text
        ids = one(text)["input_ids"]
        assert one.decode(ids) == other.decode(ids)
    assert (one.bos_token, one.eos_token, one.unk_token) == (other.bos_token, other.eos_token, other.unk_token)
    assert one.chat_template == other.chat_template == metadata["tokenizer.chat_template"]
    assert verify_gguf(tmp_path / "m.gguf", model) == []


def test_scores_follow_from_the_order_of_merges(tmp_path):
    count = little_models.by_pieces(tmp_path / "model", TEXT)
    little_models.model(tmp_path / "model", "llama", count, **SMALL)
    export_gguf(tmp_path / "model", tmp_path / "m.gguf", "F16")
    metadata = read_gguf(tmp_path / "m.gguf").metadata
    score = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    merges = json.loads((tmp_path / "model" / "tokenizer.json").read_text())["model"]["merges"]
    made = list(dict.fromkeys(left + right for left, right in merges))
    assert len(made) > 50 and [score[token] for token in made] == sorted((score[token] for token in made), reverse=True)
    assert score["<s>"] < score[made[-1]]


def changed(model: Path, change) -> None:
    file = json.loads((model / "tokenizer.json").read_text())
    change(file)
    (model / "tokenizer.json").write_text(json.dumps(file))


def test_tokenizers_that_llama_cpp_cannot_have(words, tmp_path):
    model = made(tmp_path / "model", words)
    changed(model, lambda file: file.update(pre_tokenizer={"type": "Whitespace"}))
    with pytest.raises(UserError, match=r"none of gpt-2, smollm, .*pre=.*Whitespace"):
        export_gguf(model, tmp_path / "m.gguf")
    export_gguf(model, tmp_path / "m.gguf", pre="mpt")  # whoever asks knows better
    assert info(tmp_path / "m.gguf")["tokenizer"] == "mpt"
    model = made(tmp_path / "whole", words)
    changed(model, lambda file: file["model"].update(ignore_merges=True))
    assert "ignore_merges" in export_gguf(model, tmp_path / "whole.gguf").notes[0]
    few = made(tmp_path / "few", words, vocab_size=299)
    with pytest.raises(UserError, match="token number 30.*299 rows"):
        export_gguf(few, tmp_path / "few.gguf")
    count = little_models.by_pieces(tmp_path / "pieces", TEXT)
    little_models.model(tmp_path / "pieces", "llama", count, **SMALL)
    changed(tmp_path / "pieces", lambda file: file["model"].update(merges=file["model"]["merges"][::2]))
    assert "pairs of pieces that are no merges" in export_gguf(tmp_path / "pieces", tmp_path / "p.gguf").notes[0]

"""Models to merge, made on the spot: one, and others that differ from it as fine-tuned ones do."""

import json
import sys
from pathlib import Path

MODELS = ("a", "b", "c")


def llamas(folder: Path, dtype: str, hidden: int, layers: int, vocabulary: int) -> list[Path]:
    """Three, as Hugging Face folders."""
    import torch  # here: who only wants their names, and measures memory, shall not have it

    from merge.tensor_files import Header, TensorEntry, bytes_of, write_header

    inner, numbers = hidden * 8 // 3 // 64 * 64, getattr(torch, dtype)
    config = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden},
        **{"intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": hidden // 64},
        **{"num_key_value_heads": hidden // 64, "vocab_size": vocabulary, "tie_word_embeddings": False},
        **{"torch_dtype": dtype, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "hidden_act": "silu"},
    }
    shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for n in range(layers):
        here = f"model.layers.{n}"
        shapes |= {f"{here}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{here}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{here}.mlp.down_proj.weight": (hidden, inner)}
        shapes |= {f"{here}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    shapes["model.norm.weight"] = (hidden,)
    for number, name in enumerate(MODELS):
        path = folder / name
        path.mkdir(parents=True)
        (path / "config.json").write_text(json.dumps(config))
        first, own = (torch.Generator().manual_seed(seed) for seed in (0, 1 + number))
        with (path / "model.safetensors").open("wb") as file:
            write_header(
                file, Header({key: TensorEntry(numbers, shape) for key, shape in shapes.items()}, {"format": "pt"})
            )
            for key, shape in shapes.items():
                start = torch.randn(shape, generator=first).mul_(0.02).add_(1.0 if "norm" in key else 0.0)
                change = torch.randn(shape, generator=own).mul_(0.003)
                file.write(bytes_of(start.add_(change).to(numbers)))
    return [folder / name for name in MODELS]


if __name__ == "__main__":  # for those who measure memory, and must not have made models themselves
    llamas(Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))

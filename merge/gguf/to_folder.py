"""From a GGUF file back to a Hugging Face folder."""

from collections.abc import Callable
from pathlib import Path

from merge.files import UserError


def gguf_to_hf(
    path: Path | str,
    out: Path | str,
    dtype: str = "float32",
    *,
    overwrite: bool = False,
    progress: Callable[[int, int], None] = lambda bytes, total: None,
) -> Path:
    """Weights, configuration and tokenizer, as a recipe that merges the file with nothing writes them.

    >>> gguf_to_hf("model.gguf", "model", dtype="bfloat16")
    """
    import yaml

    from merge.merge_recipe import parse
    from merge.merging import merge

    if not str(path).endswith(".gguf"):
        raise UserError(f"{path}: the name of a GGUF file ends in .gguf")
    recipe = {"merge_method": "passthrough", "models": [{"model": str(path)}], "dtype": dtype}
    merge(parse(yaml.safe_dump(recipe)), out, overwrite=overwrite, progress=progress)
    return Path(out)

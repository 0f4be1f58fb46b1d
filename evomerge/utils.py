"""What the API promises besides: models loaded, checked, asked, let go; and the one error that all of it raises."""

import contextlib
import gc
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from evomerge.config import Configuration, ModelReference, create_default_config
from evomerge.given_models import check_alike, check_causal, check_tokenizer, resolved
from fleet import faults
from fleet.errors import first_line
from fleet.run_config import UserError
from merge.donors import located
from merge.search.search_command import in_words

log = logging.getLogger("evomerge")

MERGE_TECHNIQUES: Mapping[str, str] = {
    "linear": "the weighted mean of weights",
    "slerp": "a point on the arc between two models",
    "ties": "the larger changes of a base, where most of them agree in sign",
    "dare": "changes of a base, some dropped at random, the others scaled up",
    "frankenmerge": "layers of several models on top of each other",
    "dfs": "a path through the layers of several models, with a scale for each step",
}


class EvoMergeException(UserError):
    """What can be expected to go wrong: says what was seen and what to do. Its cause is the error beneath."""


@contextlib.contextmanager
def expected() -> Iterator[None]:
    try:
        yield
    except EvoMergeException:
        raise
    except (UserError, faults.Fault, OSError) as error:
        raise EvoMergeException(in_words(error)) from error


class Loaded(NamedTuple):
    name: str
    model: Any
    tokenizer: Any


def load_models(
    references: Sequence[ModelReference], device: str = "", trust_remote_code: bool = False
) -> list[Loaded]:
    """Models with their tokenizers, ready to be asked."""
    with expected():
        return [_loaded(each, device, trust_remote_code) for each in resolved(references)]


def _loaded(reference: ModelReference, device: str, trust: bool) -> Loaded:
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from merge.live_models import tokenizer_in

    disable_progress_bar()
    if reference.path.endswith(".gguf"):
        return _from_gguf(reference, device)
    folder = located(reference.path)
    check_causal([reference], trust)
    check_tokenizer(reference.name, folder)
    tokenizer = tokenizer_in(folder, reference.path, trust)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", trust_remote_code=trust)
    except Exception as error:
        raise UserError(
            f"{reference.path}: cannot be loaded as a causal language model: {first_line(error)}"
        ) from error
    return Loaded(reference.name, model.to(device or setup_gpu_if_available()).eval(), tokenizer)


def _from_gguf(reference: ModelReference, device: str) -> Loaded:
    """As merges read it."""
    from evomerge.formula import Formula
    from evomerge.model_builder import ModelBuilder

    with ModelBuilder({reference.name: reference.path}, "") as builder:
        live = builder.model(Formula(blend=reference.name))
    return Loaded(reference.name, live.model.to(device or setup_gpu_if_available()), live.tokenizer)


def save_model(model: Any, tokenizer: Any, path: Path | str) -> Path:
    """As a Hugging Face folder."""
    with expected():
        Path(path).mkdir(parents=True, exist_ok=True)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return Path(path)


def validate_merge_config(config: Configuration) -> None:
    """Whether these models can be merged; if not, what differs and what could be merged instead."""
    with expected():
        base = [config.merge_settings.base_model] if config.merge_settings.base_model else []
        check_alike(resolved([*config.models, *base]))


def generate_text(model: Any, tokenizer: Any, prompt: str, max_length: int = 100) -> str:
    """The prompt and what the model goes on with, or of a model with a chat template its answer: at most MAX_LENGTH
    tokens together."""
    said, count = _drawn(model, tokenizer, prompt, max_length)
    return str(tokenizer.decode(said[count if tokenizer.chat_template else 0 :], skip_special_tokens=True))


def answer_to(model: Any, tokenizer: Any, prompt: str, max_length: int) -> str:
    """What it goes on with alone."""
    said, count = _drawn(model, tokenizer, prompt, max_length)
    return str(tokenizer.decode(said[count:], skip_special_tokens=True))


def _drawn(model: Any, tokenizer: Any, prompt: str, max_length: int) -> tuple[Any, int]:
    """Tokens, and how many of them are the prompt's. The others are drawn from the likely ones, always the same: where
    it says the likeliest each time, a small model soon repeats itself without end."""
    import torch

    given = prompted(tokenizer, prompt).to(model.device)
    given.pop("token_type_ids", None)
    count = given["input_ids"].shape[1]
    context = getattr(model.config, "max_position_embeddings", None) or max_length
    if not count:
        raise EvoMergeException("the prompt is empty: this tokenizer makes no token of it")
    if count >= min(max_length, context):
        limit = f"the model's context of {context}" if count >= context else f"max_length, which is {max_length}"
        raise EvoMergeException(f"the prompt has {count} tokens, which leaves no room within {limit}: shorten it")
    end = tokenizer.eos_token_id
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else end
    drawn: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 0.8}
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(0)
        said = model.generate(**given, **drawn, max_length=min(max_length, context), pad_token_id=pad)
    return said[0], count


def prompted(tokenizer: Any, prompt: str) -> Any:
    """The prompt's tokens; of a model with a chat template with all that it puts around them."""
    if not tokenizer.chat_template:
        return tokenizer(prompt, return_tensors="pt")
    asked = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    return tokenizer.apply_chat_template([{"role": "user", "content": prompt}], **asked)


def evaluate_model(model: ModelReference | str | Path, config: Configuration | None = None) -> dict[str, Any]:
    """The score of a model, its perplexity, each objective: on a tournament's questions for validation."""
    from evomerge.fitness_evaluator import alone
    from evomerge.formula import Formula

    reference = model if isinstance(model, ModelReference) else ModelReference("", model)
    config = config or create_default_config()
    with expected():
        (there,) = resolved([reference])
        check_causal([there], config.merge_settings.trust_remote_code)
        found = alone(config, {there.name: there.path}).scored(Formula(blend=there.name))
    return {**found, "objectives": json.loads(found["objectives"])}


def setup_gpu_if_available() -> Any:
    """The device that models are best put on."""
    import torch

    if torch.cuda.is_available():
        torch.backends.cuda.matmul.allow_tf32 = True
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def clean_up_models(models: list[Any]) -> None:
    """Let go of models, and of the memory that they had; the list is empty afterwards."""
    import torch

    models.clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""Pre-training so small that a whole run takes a second: a tokenizer and a text made on the spot, one layer."""

import functools
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from fleet import launches
from fleet.digest import digest
from fleet.history import History, opened
from fleet.host import Host
from fleet.processes import options
from fleet.run import create_run, open_run
from fleet.worker import Worker
from tests.helpers import LONG, Toys
from train.member.pretraining_tasks import maker
from train.models_on_demand import END
from train.training_config import TrainConfig

SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
MODEL = {"config": {"model_type": "llama", "tie_word_embeddings": True, **SHAPE}}
KEYS = {
    "initial_population": (MODEL,), "batch_size": 2, "seq_length": 16, "population_size": 4, "max_generations": 3,
    "inner_steps": 4, "first_inner_steps": 10**6, "warmup_steps": 2, "lr": 1e-2, "eval_sequences": 4,
    "test_sequences": 4,
    "eval_batch_size": 2,
}  # fmt: skip


@functools.cache
def shared() -> Path:
    """A folder with a tokenizer and a text, made once for all tests of a process."""
    place = Path(tempfile.mkdtemp(prefix="small-"))
    make_tokenizer(place / "tokenizer")
    make_text(place / "text.jsonl")
    return place


def launched(run: Toys) -> None:
    """It is there, for workers that are started one by one: no starter loads what they load."""
    c = config(**run.keys, project_name=run.folder.name)
    store, _ = create_run(run.folder.parent, run.folder.name, c.bound(), Host())
    launches.begin(store, c.operational())


def whole(run: Toys, workers: int = 1) -> str:
    """All of a run's bytes, once its processes have made them."""
    run.start(workers).ends(0, LONG)
    return run_digest(run)


def run_digest(run: Toys) -> str:
    history = opened(run.folder)
    assert history.over
    return digest(history)


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: number for number, word in enumerate([END, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)


def make_text(file: Path, documents: int = 400, seed: int = 5, field: str = "text") -> None:
    """Sentences of few words: there is something to learn."""
    rng, words = random.Random(seed), "the cat sat on a mat and the dog ran to it again".split()
    rows = (" ".join(rng.choice(words) for _ in range(12)) for _ in range(documents))
    file.write_text("".join(json.dumps({field: row}) + "\n" for row in rows))


def config(**keys: Any) -> TrainConfig:
    given = {"algorithm": "edt", "project_name": "run", "tokenizer": str(shared() / "tokenizer")}
    text = {"datasets": ({"source": str(shared() / "text.jsonl")},)}
    return TrainConfig(**{**given, **text, **KEYS, **keys})


def strategy(c: TrainConfig) -> Any:
    from diloco import DiLoCo
    from edt import EDT

    return (DiLoCo if c.shares_one_model else EDT)(c)


def worker(place: Path, c: TrainConfig, name: str = "w", make: Any = None) -> Worker:
    """One more worker of the run below this folder, in this process."""
    create_run(place, "run", c.bound(), Host())
    store, _ = open_run(place / "run", Host(), name)
    launch = launches.latest(store) or launches.begin(store, c.operational())
    return Worker(store, strategy(c), make or maker(c), options(c, launch))


def finished(place: Path, **keys: Any) -> History:
    """A whole run with one worker."""
    place.mkdir(parents=True, exist_ok=True)
    one = worker(place, config(**keys))
    assert one.run() == "over"
    return one.history

"""Three tiny models to breed, with a tokenizer and a text: made on the spot."""

import json
import random
from pathlib import Path

from evomerge.config import Configuration, ModelReference
from tests import merging

WORDS = "the cat sat on a mat and the dog ran to it again while nobody looked"


def models(folder: Path, count: int = 3, **shape) -> list[ModelReference]:
    made = []
    for n in range(count):
        place = merging.llama(folder / f"model{n}", n + 1, vocab_size=300, **shape)
        merging.tokenizer(place, WORDS, size=290)
        made.append(ModelReference(f"model{n}", place))
    return made


def text(file: Path, documents: int = 24, seed: int = 5) -> Path:
    rng, words = random.Random(seed), WORDS.split()
    rows = (" ".join(rng.choice(words) for _ in range(30)) for _ in range(documents))
    file.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return file


def config(folder: Path, **evolution) -> Configuration:
    made = Configuration(models=models(folder), out=str(folder / "run"))
    made.evaluation_settings.text = str(text(folder / "text.jsonl"))
    made.evaluation_settings.passages = 8
    for key, value in {"num_generations": 3, **evolution}.items():
        setattr(made.evolution_settings, key, value)
    return made

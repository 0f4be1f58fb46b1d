"""The steps of a tournament by themselves, and the utilities of its API."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
)

from evomerge.config import (
    Configuration,
    ModelReference,
)
from evomerge.evolutionary_tournament import EvolutionaryMerger, run_evolutionary_tournament
from evomerge.formula import FILE, in_words, read
from evomerge.merger import AdvancedModelMerger
from evomerge.utils import (
    EvoMergeException,
    clean_up_models,
    generate_text,
    load_models,
    save_model,
    setup_gpu_if_available,
)
from tests import merging
from tests.tournaments import config, encoder, models


def test_each_step_takes_and_returns_models(tmp_path):
    c = config(tmp_path, num_generations=2, patience=1)
    merger = EvolutionaryMerger(c, tmp_path / "steps")
    made = merger.create_merged_models()
    assert len({each.name for each in made}) == 8 and all(read(Path(each.path)) for each in made)
    mutant = merger.mutate_model(made[0])
    assert read(Path(mutant.path))[0] != read(Path(made[0].path))[0]
    child = merger.merge_models(made[0], made[1])
    assert in_words(read(Path(child.path))[0]).count("+") >= 2
    scores = [merger.evaluate(each) for each in (*made[:2], mutant)]
    assert merger.tournament_selection([*made[:2], mutant], scores) in [*made[:2], mutant]
    winner = merger.evolve([*made[:3], mutant])
    assert merger.evaluate(winner) >= max(scores) - 1e-9
    assert AutoModelForCausalLM.from_pretrained(winner.path)


def test_a_plain_model_is_mutated_by_noise_alone(tmp_path):
    c = config(tmp_path)
    with pytest.raises(EvoMergeException, match="weight_noise"):
        EvolutionaryMerger(c, tmp_path / "out").mutate_model(c.models[0])
    c.evolution_settings.weight_noise = 0.01
    noisy = EvolutionaryMerger(c, tmp_path / "out").mutate_model(c.models[0])
    one, other = merging.weights(Path(noisy.path)), merging.weights(Path(c.models[0].path))
    assert all(0 < float((one[name] - other[name]).abs().max()) < float(other[name].std()) for name in other)


def test_models_of_one_name_are_told_apart(tmp_path):
    c = config(tmp_path)
    other = [each.model_copy(update={"name": f"model{2 - n}"}) for n, each in enumerate(c.models)]
    merger = EvolutionaryMerger(c, tmp_path / "out")
    one = AdvancedModelMerger(c, tmp_path / "out").merge(c.models)
    two = AdvancedModelMerger(c, tmp_path / "out").merge(other)
    _, paths, _ = read(Path(merger.merge_models(one, two).path))
    assert len(paths) == 5 and len({*paths.values()}) == 3  # model1 is the same in both


@pytest.mark.parametrize("method, techniques, words", [
    ("ps", (), "linear+ties"), ("ps", ("slerp", "dare"), "slerp+dare"), ("ps", ("slerp",), "slerp"),
    ("dfs", (), "frankenmerge"), ("dfs", ("dfs",), "dfs"), ("ps_dfs", ("slerp", "ties", "dfs"), "slerp+ties+dfs"),
])  # fmt: skip
def test_one_merge(tmp_path, method, techniques, words):
    c = Configuration(models=models(tmp_path))
    c.merge_settings.merge_method = method
    made = AdvancedModelMerger(c, tmp_path / "out").merge(techniques=techniques)
    assert in_words(read(Path(made.path))[0]) == words and (Path(made.path) / FILE).is_file()
    assert Path(AdvancedModelMerger(c, tmp_path / "out").merge(techniques=techniques).path).name.endswith("-2")


def test_a_path_of_ones_own(tmp_path):
    c = Configuration(models=models(tmp_path))
    path = [("model0", 0, 1.0), ("model1", 2, 0.5), ("model2", 3, 1.0)]
    made = AdvancedModelMerger(c, tmp_path / "out").merge_path(path)
    assert AutoModelForCausalLM.from_pretrained(made.path).config.num_hidden_layers == 3


def test_the_utilities_of_the_api(tmp_path):
    (reference, *_) = models(tmp_path, 1)
    loaded = load_models([reference])
    ((_, model, tokenizer),) = loaded
    where = save_model(model, tokenizer, tmp_path / "saved")
    (again,) = load_models([ModelReference("x", where)])
    said = generate_text(model, tokenizer, "the cat", 12)
    assert said == generate_text(again.model, again.tokenizer, "the cat", 12) and said.startswith("the cat")
    assert said != generate_text(model, tokenizer, "the cat", 9)
    tokenizer.chat_template = "the {{ messages[0].content }}{% if add_generation_prompt %} sat{% endif %}"
    asked = "the cat sat"
    plain = generate_text(again.model, again.tokenizer, asked, 14)
    assert plain == asked + generate_text(model, tokenizer, "cat", 14) and len(plain) > len(asked)
    assert torch.zeros(1, device=setup_gpu_if_available()).device.type == model.device.type
    clean_up_models(loaded)
    assert loaded == []


def test_a_path_through_nobody_is_refused(tmp_path):
    c = Configuration(models=models(tmp_path))
    with pytest.raises(EvoMergeException, match="no model 'zz' here; there are model0, model1, model2"):
        AdvancedModelMerger(c, tmp_path / "out")._dfs_merge(path=[("zz", 0, 1.0)])


def test_encoders_of_one_architecture_merge(tmp_path):
    made = [encoder(tmp_path / str(n), BertConfig, BertForMaskedLM, n) for n in range(2)]
    c = Configuration(models=made)
    c.merge_settings.merge_method = "ps"
    merged = AdvancedModelMerger(c, tmp_path / "out").merge(techniques=("linear",))
    one, other = (merging.weights(tmp_path / name) for name in "01")
    mean = {name: (each + other[name]) / 2 for name, each in one.items()}
    there = AutoModelForMaskedLM.from_pretrained(merged.path).state_dict()
    assert all(torch.allclose(there[name], each, atol=1e-6) for name, each in mean.items() if name in there)
    with pytest.raises(EvoMergeException, match="not a causal language model.*AdvancedModelMerger"):
        run_evolutionary_tournament(c.model_copy(update={"out": str(tmp_path / "run")}))

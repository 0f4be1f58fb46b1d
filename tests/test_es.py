"""Evolution strategies: the step against its formula, unbiased estimates; runs have the same bytes, warm or cold."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from edt_es import EvolutionStrategies
from fleet.digest import digest
from fleet.history import opened
from fleet.recipe import check
from fleet.run_config import UserError
from tests.posttraining import es_config, finished, questions, worker
from train.posttrain_results import taken
from train.rl import es, reward_curves

ROOT = Path(__file__).parent.parent
SHAPES = {"a.weight": (5, 7), "b.norm": (6,)}
OF_135M = 134_515_008 * 2  # bytes of SmolLM2's weights, in bf16


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=rng) for name, shape in SHAPES.items()}


# -- the step ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_a_step_is_its_formula(rank, decay):
    """In float64: all members' standardized rewards times their perturbations, and the way back to the start."""
    weights, start, key = random_weights(1), random_weights(2), (7, 3)
    plus, minus = [0.1, 0.5, 0.25], [0.3, 0.2, 0.25]
    rewards = np.array([*plus, *minus])
    standard = (rewards - rewards.mean()) / rewards.std()
    wanted = {}
    for name, value in weights.items():
        sides = [es.noise((*key, pair), name, value.shape, rank).double().numpy() for pair in range(3)]
        members = [*sides, *(-each for each in sides)]
        mean = sum(x * eps for x, eps in zip(standard, members, strict=True)) / 6
        before = value.double().numpy()
        wanted[name] = before + 0.3 * mean - 0.3 * decay * (before - start[name].double().numpy())
    es.take(es.Step(0.3, decay, rank), weights, start, key, es.differences(plus, minus))
    for name, value in weights.items():
        assert np.allclose(value.double().numpy(), wanted[name], rtol=0, atol=2e-6)


def test_where_all_rewards_are_equal_nothing_moves():
    weights = random_weights(1)
    es.take(es.Step(0.3), weights, {}, (1, 1), es.differences([0.5, 0.5], [0.5, 0.5]))
    assert all(torch.equal(value, random_weights(1)[name]) for name, value in weights.items())


@pytest.mark.parametrize(("shape", "rank"), [((12,), 0), ((3, 4), 0), ((3, 4), 1), ((3, 4), 2)])
def test_the_estimate_of_the_gradient_is_unbiased(shape, rank):
    """On a quadratic, over many rounds of one pair: its mean is the gradient, within four standard errors."""
    rng, sigma, count = np.random.default_rng(0), 0.3, 1200
    a, b, x = rng.normal(size=(12, 12)), rng.normal(size=12), torch.tensor(rng.normal(size=12)).view(shape)

    def reward(at: torch.Tensor) -> float:
        flat = at.numpy().ravel()
        return float(-(flat @ a @ a.T @ flat) / 2 + b @ flat)

    gradient, found = -(a @ a.T @ x.numpy().ravel()) + b, []
    for round in range(count):
        side = es.noise((5, round, 0), "x", shape, rank).double() * sigma
        counts = [(reward(x + side) - reward(x - side)) / sigma]
        found.append(es.direction("x", shape, (5, round), counts, rank).double().numpy().ravel())
    mean, error = np.mean(found, 0), np.std(found, 0) / math.sqrt(count)
    assert np.all(np.abs(mean - gradient) < 4 * error)
    assert np.linalg.norm(mean - gradient) < 0.3 * np.linalg.norm(gradient)


def test_perturbations_are_of_their_round_pair_and_tensor_alone():
    def of(*key: int, name: str = "x", rank: int = 0) -> torch.Tensor:
        return es.noise(key, name, (40, 50), rank)

    first = of(1, 2, 3)
    of(9, 9, 9)
    assert torch.equal(of(1, 2, 3), first) and first.dtype == torch.float32
    for other in (of(2, 2, 3), of(1, 3, 3), of(1, 2, 4), of(1, 2, 3, name="y"), of(1, 2, 3, rank=2)):
        assert not torch.equal(other, first) and abs(float(other.std()) - 1) < 0.4
    assert np.linalg.matrix_rank(of(1, 2, 3, rank=2).numpy(), tol=1e-3) == 2
    value = torch.ones(40, 50)
    both = es.perturbed(value, (1, 2, 3), "x", 0.5) + es.perturbed(value, (1, 2, 3), "x", -0.5)
    assert torch.allclose(both, 2 * value, atol=1e-6)


# -- the plan ----------------------------------------------------------------------------------------------------------


def test_weights_are_published_every_so_many_rounds_and_at_the_end(tmp_path):
    c = es_config(tmp_path, max_generations=5, es={"publish_every": 2})
    plans = [EvolutionStrategies(c).plan(round, None) for round in range(8)]
    for round, plan in enumerate(plans):
        check(round, plan)
    assert [round for round, plan in enumerate(plans) if any(each.task == "publish" for each in plan)] == [2, 4, 5]
    assert [each.slot for each in plans[1]] == ["p0", "p1", "step"]
    assert [each.slot for each in plans[3]] == ["p0", "p1", "step", "model"] and plans[3][-1].carried
    assert plans[3][0].args == {"generation": 3, "pair": 0, "base": "2/model"}
    assert plans[4][0].args == {"generation": 4, "pair": 0, "base": "3/model", "since": "3/step"}
    assert [each.slot for each in plans[6]] == ["winner", "start-0"] and not plans[7]


# -- runs --------------------------------------------------------------------------------------------------------------


def test_a_run_has_the_same_bytes_warm_and_cold_and_with_several_workers(tmp_path):
    """One process that remembers everything; or one that ends two rounds after the weights were published, and whose
    place two others take. With weight decay and narrow weights, which are rounded where they are published."""
    es = {"publish_every": 3, "rewards": {"correct": 1.0, "brief": 1.0}}
    c = es_config(tmp_path, weight_decay=0.1, dtype="bfloat16", es=es)
    history = finished(c)
    first, *others = (worker(c.model_copy(update={"project_name": "again"}), name) for name in ("one", "two", "three"))
    while first.history.first_open < 3:
        first.turn()
    over = [False, False]
    while not all(over):
        over = [done or other.turn() for other, done in zip(others, over, strict=True)]
    there = opened(tmp_path / "again")
    assert digest(history) == digest(there)

    assert history["5/model"].digests["model.safetensors"] != history["3/model"].digests["model.safetensors"]
    assert history["6/winner"].recipe.parents == ("5/model",) and history["6/start-0"].metrics["error"] >= 0
    point = reward_curves.points(history, 2)[0].values
    assert point["reward"] == pytest.approx(np.mean([history[f"2/p{k}"].metrics["reward"] for k in (0, 1)]))
    assert "answers: brief" in reward_curves.line(history, 2)
    assert not any(history[f"{round}/{slot}"].digests for round in (1, 2) for slot in ("p0", "p1", "step"))


def test_a_rounds_bytes_are_few_beside_a_model(tmp_path):
    """All that a round without weights leaves in the run's folder: 32 members."""
    one = worker(es_config(tmp_path, population_size=32, sft_examples=1))
    while one.history.first_open < 2:
        one.turn()
    moved = sum(file.stat().st_size for file in (tmp_path / "run" / "rounds" / "00001").iterdir())
    log = one.history["1/step"].metrics["log"]
    assert moved + 9 * len(log) < OF_135M / 10_000, "with what nine more rounds log"


OTHER = [
    {"es": {"sigma": 0.02}}, {"es": {"rank": 1}}, {"es": {"publish_every": 1}}, {"lr": 0.03}, {"weight_decay": 0.5},
    {"es": {"max_tokens": 4}}, {"es": {"rewards": {"brief": 1.0}}}, {"population_size": 6}, {"sft_examples": 4},
]  # fmt: skip


@pytest.mark.slow
def test_settings_reach_the_weights(tmp_path):
    def of(name: str, **keys) -> str:
        grown = {"es": {"rewards": {"correct": 1.0, "brief": 0.5}, **keys.pop("es", {})}, **keys}
        history = finished(es_config(tmp_path / name, max_generations=3, **grown))
        return history["3/model"].digests["model.safetensors"]

    plain = of("plain")
    assert of("again") == plain
    for n, keys in enumerate(OTHER):
        found = of(f"other{n}", **keys)
        assert (found == plain) == (keys == {"es": {"publish_every": 1}}), keys


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keys", "said"), [
    ({"selection": "rank", "elitism": 2}, "ELITISM: no effect with ALGORITHM es; leave it out"),
    ({"population_size": 5}, "POPULATION_SIZE is 5: with ALGORITHM es, members are pairs of opposites: 6"),
    ({"initial_population": ("a", "b")}, "INITIAL_POPULATION has 2 models: ALGORITHM es goes on from one"),
    ({"mutation": "sft"}, "MUTATION is sft: with ALGORITHM es leave it out"),
    ({"grpo": {}}, "GRPO has no effect: MUTATION is es"),
    ({"algorithm": "edt-evomerge"}, "ES has no effect: MUTATION is sft"),
    ({"algorithm": "edt-evomerge", "mutation": "es"}, "MUTATION es is for ALGORITHM es, not edt-evomerge"),
    ({"fitness": ("loss",)}, "with MUTATION es rows are questions: reward"),
    ({"mutation_datasets": ()}, "there is nothing to learn from"),
    ({"es": {"max_tokens": 48}}, "ES: max_tokens is 48; with a question it must fit into SEQ_LENGTH, 48"),
    ({"es": {"max_tokens": 47}}, "it does not fit into SEQ_LENGTH 48"),
    ({"seq_length": 500}, "SEQ_LENGTH is 500, but"),
    ({"es": {"rewards": {"tidy": 1.0}}}, "no term is called 'tidy'; there are correct, format, brief"),
    ({"es": {"verifier": "mine.py"}}, '"allow_verifier": true lets it run'),
    ({"es": {"sigma": 0.0}}, "greater than 0"),
])  # fmt: skip
def test_what_can_never_work_is_known_at_once(tmp_path, keys, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        worker(es_config(tmp_path, **keys))


def test_a_model_without_an_end_or_a_template_is_refused(tmp_path):
    c, place = es_config(tmp_path), tmp_path / "model0"
    settings, asked = json.loads((place / "tokenizer_config.json").read_text()), (tmp_path / "a.jsonl").read_text()
    del settings["chat_template"]
    (place / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "a.jsonl").write_text('{"prompt": [{"role": "user", "content": "x"}], "answer": "y"}\n' * 20)
    with pytest.raises(UserError, match="no chat template for messages"):
        worker(c)
    (tmp_path / "a.jsonl").write_text(asked)
    of_model = (("config.json", "eos_token_id"), ("generation_config.json", "eos_token_id"))
    for name, key in (("tokenizer_config.json", "eos_token"), *of_model):
        known = json.loads((place / name).read_text())
        (place / name).write_text(json.dumps({**known, key: None}))
    with pytest.raises(UserError, match="no end token"):
        worker(c)


def test_where_no_member_is_better_it_is_said_and_nothing_changes(tmp_path):
    data = ({"source": str(questions(tmp_path / "never.jsonl", "qqqqqqq"))},)
    c = es_config(tmp_path, mutation_datasets=data, max_generations=1, es={"rewards": {"correct": 1.0}})
    history = finished(c)
    assert "the same reward, so there was nothing to learn" in reward_curves.line(history, 1)
    assert history["1/model"].metrics["log"] == "[[0.0, 0.0]]"


def test_before_weights_are_published_there_is_nothing_to_export(tmp_path):
    one = worker(es_config(tmp_path))
    while one.history.first_open < 2:
        one.turn()
    with pytest.raises(UserError, match="no member is published yet"):
        taken(tmp_path / "run", "", tmp_path / "out")

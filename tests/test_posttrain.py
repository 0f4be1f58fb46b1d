"""EDT-EvoMerge: who is chosen, what is inherited, what is learned; whole runs, killed runs, bad input."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from edt_evomerge import EvoMerge
from fleet.digest import digest
from fleet.history import opened
from fleet.run_config import UserError, load
from merge.merge_recipe import merge_of
from merge.merging import merge
from tests import merging, posttraining, searching
from tests.posttraining import chats, config, finished, model, preferences, worker
from train.member import posttraining_genome
from train.parent_selection import (
    Rival,
    archived,
    attracted,
    by_fitness,
    by_fronts,
    by_niches,
    crowding,
    fronts,
    matched,
    select_parents,
    spans,
)
from train.posttrain import posttrain_fitness
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_sections import SLERP
from train.posttrain_results import exported, show_winner
from train.recipe_arguments import EvaluationArgs
from train.training_commands import prepare_breeding as prepare

ROOT = Path(__file__).parent.parent
TASKS = ({"task": "facts"},)


def tasks(folder: Path) -> tuple[str, ...]:
    return (str(searching.task(folder / "tasks")),)


def rival(id: str, **objectives: float) -> Rival:
    return Rival(id, sum(objectives.values()), objectives)


def dominates(one: Rival, other: Rival) -> bool:
    pairs = [(one.objectives[key], other.objectives[key]) for key in other.objectives]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


# -- who is chosen ----------------------------------------------------------------------------------------------------


def test_fronts_are_those_of_brute_force():
    rng = np.random.default_rng(3)
    for _ in range(30):
        rivals = [rival(str(n), a=float(rng.integers(5)), b=float(rng.integers(5))) for n in range(12)]
        found = fronts(rivals)
        assert sorted(one.id for front in found for one in front) == sorted(one.id for one in rivals)
        for n, front in enumerate(found):
            below = [one for later in found[n:] for one in later]
            assert all(not dominates(other, one) for one in front for other in below)
            assert n == 0 or all(any(dominates(other, one) for other in found[n - 1]) for one in front)


def test_the_ends_of_a_front_are_the_loneliest():
    front = [rival("a", x=0.0, y=9.0), rival("b", x=1.0, y=8.0), rival("c", x=5.0, y=3.0), rival("d", x=9.0, y=0.0)]
    lonely = crowding(front)
    assert lonely["a"] == lonely["d"] == float("inf") and lonely["b"] == pytest.approx(5 / 9 + 6 / 9)
    assert lonely["c"] == pytest.approx(8 / 9 + 8 / 9)
    assert [one.id for one in by_fronts(front)][2:] == ["c", "b"]
    assert by_fitness(front)[0].id == "a"  # of equal ones the first


@pytest.mark.parametrize("rule", ["rank", "tournament", "random", "pareto", "niches"])
def test_fitter_ones_are_parents_more_often(rule):
    counts = [0] * 8
    for n in range(400):
        parents = select_parents(rule, 8, 2, 3, np.random.default_rng(n))
        assert len({*parents}) == 2
        for each in parents:
            counts[each] += 1
    first, last = counts[0] + counts[1], counts[6] + counts[7]
    assert first > 1.5 * last if rule != "random" else 0.8 < first / last < 1.25


def test_larger_tournaments_are_harder():
    best = []
    for size in (1, 4, 8):
        best.append(sum(0 in select_parents("tournament", 8, 2, size, np.random.default_rng(n)) for n in range(200)))
    assert best[0] < best[1] < best[2] == 200


def test_matching_makes_everybody_a_parent_equally_often():
    ids = [f"m{n}" for n in range(6)]
    families = [matched(ids, k, np.random.default_rng(5)) for k in range(6)]
    assert sorted(each for family in families for each in family) == sorted(ids * 2)


def knowing(id: str, *solved: float) -> Rival:
    return Rival(id, sum(solved), {}, solved, (1.0,) * len(solved))


def test_who_solves_what_nobody_else_does_has_a_niche_of_its_own():
    crowd = [knowing(f"crowd-{n}", 1, 1, 1, 0) for n in range(4)]
    alone, idle = knowing("alone", 0, 0, 0, 1), knowing("idle", 0, 0, 0, 0)
    assert by_fitness([*crowd, alone, idle])[0].id == "crowd-0"
    order = [one.id for one in by_niches([*crowd, alone, idle])]
    assert order[0] == "alone" and order[-1] == "idle", "1 beside 3/4 and nothing"
    halves = by_niches([knowing("both", 0.5, 0.5), knowing("one", 1, 0)])
    assert [one.id for one in halves] == ["both", "one"], "1/3 + 1 beside 2/3"


def test_an_archive_has_the_fittest_of_each_cell():
    def at(id: str, fitness: float, x: float, y: float) -> Rival:
        return Rival(id, fitness, {"x": x, "y": y})

    over = spans([at("a", 0, 0.0, 5.0), at("b", 0, 1.0, 5.0), at("c", 0, 0.5, 9.0)])
    assert over == {"x": (0.0, 1.0), "y": (5.0, 9.0)}
    some = [at("low", 1, 0.1, 5.1), at("lower", 2, 0.3, 6.9), at("beyond", 3, 7.0, 4.0), at("high", 0, 0.9, 9.0)]
    assert [one.id for one in archived(some, over, 2)] == ["beyond", "lower", "high"]
    assert len(archived(some, over, 4)) == 4, "smaller steps keep more apart"
    flat = spans([at("a", 0, 1.0, 1.0)])
    assert [one.id for one in archived(some, flat, 3)] == ["beyond", "lower"], "where all were alike: beyond it or not"


def test_mates_are_attracted_by_what_they_add():
    rivals = [knowing("a", 1, 1, 0, 0), knowing("same", 1, 1, 0, 0), knowing("b", 0, 0, 1, 0), knowing("c", 0, 0, 1, 1)]
    drawn = [attracted(rivals, 0, np.random.default_rng(n)) for n in range(300)]
    assert {*drawn} == {2, 3}, "1/2 by b, 1/2 + 1 by c, and nothing by its like"
    assert 0.65 < drawn.count(3) / 300 < 0.85
    alike = [knowing(str(n), 1, 0) for n in range(3)]
    assert {attracted(alike, 1, np.random.default_rng(n)) for n in range(50)} == {0, 2}


# -- what is inherited ------------------------------------------------------------------------------------------------


def test_a_child_has_each_gene_of_a_parent(tmp_path):
    c = config(tmp_path, mutation_probability=0.0)
    one = {"data": dict.fromkeys(posttraining_genome.names(c), 1.0), "rate": 1.0}
    other = {"data": dict.fromkeys(posttraining_genome.names(c), 2.0), "rate": 2.0}
    children = [posttraining_genome.child(c, [one, other], np.random.default_rng(n)) for n in range(60)]
    assert {child["rate"] for child in children} == {1.0, 2.0}
    assert len({tuple(child["data"].values()) for child in children}) == 4


def test_mutation_has_a_probability_and_a_strength(tmp_path):
    def changed(**keys) -> list[float]:
        c = config(tmp_path, **keys)
        plain = posttraining_genome.unmutated(c)
        rates = [posttraining_genome.child(c, [plain, plain], np.random.default_rng(n))["rate"] for n in range(200)]
        return [abs(np.log(rate)) for rate in rates if rate != 1.0]

    few, many = changed(mutation_probability=0.1), changed(mutation_probability=0.9)
    assert len(few) < 50 < 150 < len(many)
    assert np.mean(changed(mutation_strength=0.1)) < np.mean(changed(mutation_strength=0.8)) / 3


def test_curves_are_genes_on_request(tmp_path):
    assert "crossover" not in posttraining_genome.unmutated(config(tmp_path))
    c = config(tmp_path, crossover_evolves=True)
    made = posttraining_genome.mutated(c, posttraining_genome.unmutated(c), np.random.default_rng(1))["crossover"]
    assert made != posttraining_genome.unmutated(c)["crossover"]
    assert [each.get("filter") for each in made["t"]] == ["self_attn", "mlp", None]
    values = [x for each in made["t"] for x in (each["value"] if isinstance(each["value"], list) else [each["value"]])]
    assert len(values) == 11 and all(0 <= x <= 1 for x in values)


def test_where_a_step_lies_is_a_gene_too(tmp_path):
    step = {"split": 0.5, "value": [0.2, 0.8]}
    c = config(tmp_path, crossover={"method": "slerp", "t": step}, crossover_evolves=True, mutation_probability=1.0)
    plain, rng = posttraining_genome.unmutated(c), np.random.default_rng(1)
    assert plain["crossover"] == {"t": step}
    population = [plain, plain]
    places = []
    for _ in range(40):
        population = [posttraining_genome.child(c, population, rng) for _ in range(2)]
        places += [genome["crossover"]["t"]["split"] for genome in population]
    assert all(0 <= place <= 1 for place in places) and min(places) < 0.3 and max(places) > 0.7
    recipe = merge_of(posttraining_genome.crossed(c, ["a", "b"], population[0]), "")
    assert recipe.parameters["t"][0].splits == (places[-2],)


def test_the_mixture_is_in_proportion_or_of_the_top(tmp_path):
    c = config(tmp_path)
    names = posttraining_genome.names(c)
    genome = {"data": dict(zip(names, (3.0, 1.0), strict=True)), "rate": 1.0}
    assert posttraining_genome.mixture(c, genome) == {names[0]: 0.75, names[1]: 0.25}
    assert posttraining_genome.mixture(c.model_copy(update={"top_k": 1}), genome) == {names[0]: 1.0}


def test_the_same_questions_for_all_of_a_generation_and_others_for_the_next(tmp_path):
    c = config(tmp_path, questions=5, holdout=0.5)
    there = {"validation": {"task": range(20)}, "test": {"task": range(20, 40)}}
    first, again, second, test = (
        posttrain_fitness.drawn(c, there[on], EvaluationArgs(on=on, generation=generation))
        for on, generation in (("validation", 1), ("validation", 1), ("validation", 2), ("test", 0))
    )
    assert first == again != second and len({*first["task"]}) == 5 and test["task"] == [*range(20, 40)]


# -- members ----------------------------------------------------------------------------------------------------------


def test_crossover_is_the_engines_recipe_to_the_bit(tmp_path):
    """With nothing to learn, a child is what `python -m merge` makes of its parents and the same curves."""
    c = config(
        tmp_path, 4, mutation="none", mutation_datasets=(), fitness=TASKS, task_path=tasks(tmp_path), max_generations=2
    )
    history = finished(c)
    found = [member for member in history.round(2) if member.recipe.args.get("technique") == "slerp"]
    assert len(found) == 3
    for child in found:
        parents = [exported(history, id, tmp_path / id.replace("/", "-")) for id in child.recipe.parents]
        t = SLERP["t"]
        recipe = {"merge_method": "slerp", "base_model": str(parents[0]), "models": [{"model": str(parents[1])}],
                  "parameters": {"t": t}, "out_dtype": "float32"}  # fmt: skip
        merge(merge_of(json.loads(json.dumps(recipe)), ""), tmp_path / "out", overwrite=True)
        mine = merging.weights(exported(history, child.id, tmp_path / "child"))
        theirs = merging.weights(tmp_path / "out")
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_children_learn_and_the_winner_beats_all_that_it_began_with(tmp_path, capsys):
    c = config(tmp_path, lr=3e-3, sft_examples=48)
    history = finished(c)
    folder = tmp_path / "run"
    last = history.first_open - 1
    winner = history[f"{last}/winner"]
    for n in range(3):
        ahead, error = posttrain_fitness.ahead(c, winner.metrics, history[f"{last}/start-{n}"].metrics)
        assert ahead > 2 * error > 0
    show_winner(prepare(c, tmp_path), folder)
    assert f"lm_eval --model hf --model_args pretrained={folder}/winner " in capsys.readouterr().out
    tokenizer = AutoTokenizer.from_pretrained(folder / "winner")
    model = AutoModelForCausalLM.from_pretrained(folder / "winner")
    said = [{"role": "user", "content": "hello"}]
    asked = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert model.generate(**asked, max_new_tokens=3).shape[1] > asked["input_ids"].shape[1]
    card, (origin,) = (folder / "winner/README.md").read_text(), winner.recipe.parents
    for wanted in (
        f"On the test, {origin}: fitness=",
        "rows to learn from, ",
        "## Descent",
        "(curve.svg)",
        digest(history),
    ):
        assert wanted in card, wanted
    assert "fitness" in (folder / "winner/curve.svg").read_text()
    tree = json.loads((folder / "ancestry.json").read_text())
    assert tree["winner"] == history[origin].origin
    scores = {member["id"]: member["score"] for member in tree["members"]}
    for n in range(3):
        assert scores[f"0/init-{n}"] == history[f"1/look-m{n}"].metrics["fitness"]
        assert "score" not in history[f"{last}/start-{n}"].metrics, "other questions: nobody should compare them"


def test_elites_keep_their_bytes_and_the_best_so_far_stays(tmp_path):
    history = finished(config(tmp_path, elitism=2))
    for generation in (2, 3):
        for slot in ("m0", "m1"):
            member = history[f"{generation}/{slot}"]
            assert member.origin != member.id and member.digests == history[member.origin].digests
            assert history[f"{generation}/look-{slot}"].metrics["fitness"] < 0  # minus a loss


@pytest.mark.parametrize("selection", ["random", "pareto"])
def test_without_elites_the_best_so_far_is_never_lost(tmp_path, selection):
    objectives = ({"task": "loss"}, {"task": "facts", "weight": 0.001})
    searching.task(tmp_path / "tasks")
    more = {"fitness": objectives, "task_path": (str(tmp_path / "tasks"),), "elitism": 0, "max_generations": 4}
    history = finished(config(tmp_path, selection=selection, **more))

    def fittest(generation: int) -> str:
        slots = {recipe.slot for recipe in history.plan(generation)}
        there = {each: f"look-{each}" if f"look-{each}" in slots else each for each in ("m0", "m1", "m2", "m3", "best")}
        found = {each: history[f"{generation}/{at}"].metrics["fitness"] for each, at in there.items() if at in slots}
        return f"{generation}/{max(found, key=lambda each: found[each])}"

    kept = [next(r.parents for r in history.plan(n) if r.slot == "best") for n in (2, 3, 4)]
    assert kept == [(fittest(n),) for n in (1, 2, 3)]
    assert history["5/winner"].recipe.parents == (fittest(4),) and history.files(fittest(4)).files


def test_an_archive_stays_and_its_members_are_the_parents(tmp_path):
    searching.task(tmp_path / "tasks")
    objectives = ({"task": "loss"}, {"task": "facts", "weight": 0.001})
    more = {"fitness": objectives, "task_path": (str(tmp_path / "tasks"),), "elitism": 0, "max_generations": 4}
    history = finished(c := config(tmp_path, selection="archive", archive_steps=2, **more))
    strategy = EvoMerge(c)
    over = spans(strategy.rivals(1, history))
    for generation in (2, 3, 4):
        fittest = [one.id for one in archived(strategy.rivals(generation - 1, history), over, 2)]
        recipes = history.plan(generation)
        cells = {recipe.slot: recipe.parents[0] for recipe in recipes if recipe.role == "kept"}
        assert cells == {f"cell-{n}": id for n, id in enumerate(fittest)}, "no more than there is room for"
        children = [recipe for recipe in recipes if recipe.task == "child"]
        assert len(children) == c.population_size and {id for each in children for id in each.parents} <= {*fittest}
        assert {f"look-{slot}" for slot in cells} <= {recipe.slot for recipe in recipes}, "they answer, too"
    assert history["5/winner"].recipe.parents == (strategy.best(4, history),)


def test_dropout_is_a_childs_own(tmp_path):
    """The same bytes, whatever else its worker has drawn."""
    found = []
    for name, seed in (("one", 1), ("two", 2)):
        c = config(tmp_path / name, 1, max_generations=1, population_size=2)
        settings = tmp_path / name / "model0" / "config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "attention_dropout": 0.3}))
        torch.manual_seed(seed)
        found.append(finished(c)["1/m1"].digests["model.safetensors"])
    assert found[0] == found[1]


def test_a_second_epoch_has_the_same_rows_in_another_order(tmp_path):
    from train import objectives

    c = config(tmp_path, 1, max_generations=1, population_size=2, sft_epochs=2.5)
    seen = []
    real = objectives.steps_of

    def watched(c, model, examples):
        seen.extend(bytes(example.tokens) for example in examples)
        return real(c, model, examples)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objectives, "steps_of", watched)
        finished(c)
    first, second, rest = seen[:16], seen[16:32], seen[32:]
    assert len(rest) == 8 and first != second and sorted(first) == sorted(second)


def test_one_worker_or_two_a_run_has_the_same_bytes(tmp_path):
    curves = [{"filter": "mlp", "split": 0.5, "value": [0.2, 0.8]}, {"value": [0.3, 0.6]}]
    c = config(tmp_path, selection="tournament", crossover={"method": "slerp", "t": curves}, crossover_evolves=True)
    finished(c)
    again = c.model_copy(update={"project_name": "again"})
    one, two = worker(again, "one"), worker(again, "two")
    assert one.run() == "over" and two.run() == "over"
    assert digest(opened(tmp_path / "run")) == digest(opened(tmp_path / "again"))


@pytest.mark.parametrize("keys", [
    {"adapter": {"r": 4, "alpha": 8}}, {"mutation": "dpo"}, {"selection": "matching", "elitism": 0},
    {"crossover": {"method": "linear"}}, {"selection": "random"},
    {"crossover": {"method": "dare_ties", "base_model": "HERE/model0", "density": 0.5}},
    {"dtype": "bfloat16"}, {"initial_population": 1}, {"initial_population": 6}, {"gradient_accumulation": 2},
])  # fmt: skip
def test_every_way_gets_to_its_end(tmp_path, keys):
    models = keys.get("initial_population", 3)
    more = {key: value for key, value in keys.items() if key != "initial_population"}
    if more.get("mutation") == "dpo":
        more["mutation_datasets"] = ({"source": str(preferences(tmp_path / "pairs.jsonl"))},)
    more = json.loads(json.dumps(more).replace("HERE", str(tmp_path)))
    history = finished(config(tmp_path, models, max_generations=2, **more))
    last = history.first_open - 1
    assert history[f"{last}/winner"].metrics["fitness"] < 0
    out = exported(history, history[f"{last}/winner"].recipe.parents[0], tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert loaded.dtype == (torch.bfloat16 if keys.get("dtype") else torch.float32)


OTHER = {
    **{"lr": 2e-3, "sft_examples": 20, "sft_epochs": 2.0, "batch_size": 4, "warmup_steps": 0, "weight_decay": 0.5},
    **{"lr_schedule": "constant", "clip": 0.01, "seq_length": 96, "gradient_accumulation": 2, "seed": 9, "top_k": 1},
    **{"precision": "bf16-mixed"},
}


def test_settings_of_learning_reach_the_weights(tmp_path):
    def child(name: str, **keys) -> str:
        c = config(tmp_path / name, 1, max_generations=1, population_size=2, **keys)
        return finished(c)["1/m1"].digests["model.safetensors"]

    plain = child("plain")
    for key, value in OTHER.items():
        assert child(key, **{key: value}) != plain, key
    assert child("again") == plain


@pytest.mark.parametrize("adapter", [None, {"r": 4, "alpha": 8}])
def test_a_finetuning_that_has_no_room_is_left_to_another_machine_and_leaves_nothing_behind(
    tmp_path, monkeypatch, adapter
):
    """While it learns: what was learned until then does not count, for whoever makes the child."""
    from fleet.work import NotOnThisMachine
    from train.member import posttraining_tasks as finetune
    from train.member.posttraining_tasks import maker

    real, left = finetune.Learner.train, [1]

    def full(self, *args, **more):
        for step in real(self, *args, **more):
            yield step
            if left[0] and step == 3:
                left[0] -= 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    c = config(tmp_path, 1, max_generations=1, population_size=2, adapter=adapter)
    plain = finished(c)
    monkeypatch.setattr(finetune.Learner, "train", full)
    tight, said = c.model_copy(update={"project_name": "tight"}), []
    make = maker(tight)

    def again(work):
        """The same process once more: another one would do no better."""
        try:
            return make(work)
        except NotOnThisMachine as why:
            said.append(str(why))
            return make(work)

    assert worker(tight, make=again).run() == "over" and not left[0]
    assert len(said) == 1 and "2.15 GB more are needed" in said[0] and "BATCH_SIZE" in said[0]
    assert digest(opened(tmp_path / "tight")) == digest(plain)


def test_tasks_and_losses_are_weighted_together(tmp_path):
    searching.task(tmp_path / "tasks")
    objectives = ({"task": "facts", "weight": 2.0}, {"task": "loss", "weight": 0.5})
    c = config(
        tmp_path, fitness=objectives, task_path=(str(tmp_path / "tasks"),), selection="pareto", max_generations=2
    )
    history = finished(c)
    for member in history.round(2):
        if "fitness" in member.metrics:
            values = json.loads(member.metrics["objectives"])
            assert member.metrics["fitness"] == pytest.approx(2 * values["facts"] - 0.5 * values["loss"])
            assert member.metrics["error"] > 0


def test_niches_and_attraction_choose_by_the_same_questions(tmp_path):
    searching.task(tmp_path / "tasks")
    objectives = ({"task": "facts"}, {"task": "loss", "weight": 0.5})
    more = {"fitness": objectives, "task_path": (str(tmp_path / "tasks"),), "max_generations": 3}
    plain, found = (
        finished(config(tmp_path / name, **keys, **more))
        for name, keys in (("plain", {}), ("niches", {"selection": "niches", "mates": "attraction"}))
    )
    parents = [[recipe.parents for recipe in history.plan(2)] for history in (plain, found)]
    assert parents[0] != parents[1] and "single" not in plain["2/m1"].metrics
    for member in found.round(2):
        if "fitness" in member.metrics:
            marks = json.loads(member.metrics["single"])
            one = posttrain_fitness.rival_of(config(tmp_path / "c", selection="niches", **more), "x", member.metrics)
            assert len(one.solved) == len(one.worth) == len(marks["facts"]) + len(marks["loss"])
            assert all(0 <= each <= 1 for each in one.solved) and sum(one.worth) == pytest.approx(1.5)


# -- bad input --------------------------------------------------------------------------------------------------------


def refused(c: PosttrainConfig, where: Path) -> str:
    with pytest.raises(UserError) as error:
        prepare(c, where)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_models_that_cannot_have_children_are_refused(tmp_path):
    c = config(tmp_path, 1)
    other = model(tmp_path / "wide", 2, hidden_size=64)
    assert "the models have different shapes" in refused(together(c, other), tmp_path)
    words = posttraining.model(tmp_path / "words", 2)
    merging.tokenizer(words, "quite other words", size=290)
    assert "tokens differ" in refused(together(c, words), tmp_path)
    template = posttraining.model(tmp_path / "template", 2, posttraining.TEMPLATE.replace("</s>", "!!"))
    assert "chat template differs" in refused(together(c, template), tmp_path)


def together(c: PosttrainConfig, other: Path) -> PosttrainConfig:
    return c.model_copy(update={"initial_population": (*c.initial_population, str(other))})


def test_padded_vocabularies_are_bridged_and_it_is_said(tmp_path):
    c = config(tmp_path, 1, max_generations=1, population_size=2)
    wide = model(tmp_path / "padded", 2, vocab_size=320)
    history = finished(c.model_copy(update={"initial_population": (*c.initial_population, str(wide))}))
    notes = json.loads(history["0/init-0"].metrics["notes"])
    assert any("300, 320 rows are all padded to 320" in note for note in notes)
    folders = [exported(history, f"0/init-{n}", tmp_path / f"o{n}") for n in (0, 1)]
    rows = {merging.weights(folder)["model.embed_tokens.weight"].shape for folder in folders}
    assert rows == {(320, 32)}


@pytest.mark.parametrize("keys, said", [
    ({"MUTATION_DATASETS": []}, "nothing to learn from"),
    ({"MUTATION_DATASETS": [{"source": "x.jsonl", "weight": 0}]}, "all weights are 0"),
    ({"ELITISM": 6}, "below POPULATION_SIZE"), ({"TOP_K": 3}, "TOP_K is 3"), ({"CROSSOVER": {"t": 1}}, "method"),
    ({"SELECTION": "pareto"}, "several objectives"),
    ({"SELECTION": "archive", "ELITISM": 0}, "several objectives"),
    ({"SELECTION": "archive"}, "ELITISM is 1: with SELECTION archive"),
    ({"SELECTION": "matching", "MATES": "attraction"}, "SELECTION matching says who the parents are"),
    ({"SELECTION": "pbt", "MATES": "attraction", "ELITISM": 0}, "SELECTION pbt says who the parents are"),
    ({"SELECTION": "beauty"}, "SELECTION"), ({"INNER_STEPS": 3}, "unknown key"),
    ({"MUTATION": "none", "FITNESS": ["x"]}, "no effect"),
])  # fmt: skip
def test_what_contradicts_itself_is_refused(tmp_path, keys, said):
    given = {"INITIAL_POPULATION": ["a"], "MUTATION_DATASETS": ["x.jsonl", "y.jsonl"], **keys}
    (tmp_path / "c.json").write_text(json.dumps(given))
    with pytest.raises(UserError, match=said):
        load(tmp_path / "c.json", PosttrainConfig)


def test_a_bad_row_a_missing_metric_and_a_wrong_crossover_are_named(tmp_path):
    searching.task(tmp_path / "tasks")
    objectives = ({"task": "facts", "metric": "beauty,none"},)
    c = config(tmp_path, 2, fitness=objectives, task_path=(str(tmp_path / "tasks"),))
    assert "no metric 'beauty,none'" in refused(c, tmp_path)
    assert "CROSSOVER" in refused(config(tmp_path, 2, crossover={"method": "slerp", "tt": 1}), tmp_path)
    bad = config(tmp_path, 2)
    chats(tmp_path / "cat.jsonl", "cat")
    Path(bad.mutation_datasets[0].source).write_text('{"messages": [{"role": "user"}]}\n')
    assert "line 1" in refused(bad, tmp_path)
    row = '{"messages": [{"role": "user", "content": "cat"}, {"role": "assistant", "content": "dog"}]}\n'
    Path(bad.mutation_datasets[0].source).write_text(row * 50)
    assert "too few are different (1) to hold some out" in refused(bad, tmp_path)

"""The family tree of a run: what it says of real runs, and what its page does with whatever stands in one."""

import json
import random
import re
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fleet import launches
from fleet.ancestry.ancestry_files import files, page, write_family_tree
from fleet.ancestry.genes import genes_of
from fleet.ancestry.layout import MOST, laid_out
from fleet.ancestry.tree import Line, Tree, as_json, line_of
from fleet.ancestry.tree_builder import finished_members, grown, tree
from fleet.history import History, opened
from fleet.host import Host
from fleet.recipe import Member, Recipe, round_and_slot
from fleet.report import family
from fleet.run import create_run
from tests import small
from tests.browser import looks_right
from tests.commands import answer
from tests.helpers import Toys, listing

EVOLVING = {"selection": "rank", "elitism": 1, "max_generations": 4, "mutation_probability": 0.7}


def made(id, of=(), score=None, *, absent="", metrics=None, role="member", genome=None, **args):
    """A member that a maker has made."""
    recipe = Recipe(round_and_slot(id)[1], "x", tuple(of), role=role, args=args, genome=genome or {})
    known = {} if score is None else {"score": score}
    return Member(id, id, recipe, {} if absent else {**known, **(metrics or {})}, {}, absent)


def carried(id, member):
    return Member(id, member.origin, member.recipe, member.metrics, member.digests)


def picture(found: Tree) -> ElementTree.Element:
    """The family tree of the page."""
    drawn = re.search(r'<div class="plot tree".*?(<svg.*?</svg>)', page(found, "run"), re.S)
    assert drawn
    return ElementTree.fromstring(drawn[1])


def members_in(found: Tree) -> list[str]:
    """What the marks of the picture say of themselves."""
    marks = (each for each in picture(found).iter() if "node" in each.get("class", "") or each.get("class") == "failed")
    return [str(each.findtext("title")) for each in marks]


@pytest.fixture(scope="module")
def evolved(tmp_path_factory) -> Path:
    """A real run of EDT that chooses parents by fitness."""
    place = tmp_path_factory.mktemp("evolved")
    small.finished(place, **EVOLVING)
    return place / "run"


# -- real runs ---------------------------------------------------------------------------------------------------------


def test_lineage_is_what_the_plans_say(evolved):
    history = opened(evolved)
    found = tree(history)
    bred = [(round, recipe) for round in range(1, 5) for recipe in history.plan(round) if recipe.task == "child"]
    assert len(bred) == 4 + 3 * 3, "one of four is an elite"
    for round, recipe in bred:
        node = found.nodes[f"{round}/{recipe.slot}"]
        assert list(node.parents) == list(dict.fromkeys(history[id].origin for id in recipe.parents))
        assert list(node.through) == list(dict.fromkeys(recipe.parents))
        assert node.score == -history[node.id].metrics["loss"] and node.technique == "child"
    assert found.nodes["1/m0"].parents == ("0/init-0",), "a text and a tokenizer are no ancestors"
    assert not {"0/tokenizer", "0/tokens-0"} & found.nodes.keys()
    assert found.nodes["4/average"].summary and not found.nodes["4/m1"].summary


def test_an_elite_is_one_member_wherever_it_lives(evolved):
    history = opened(evolved)
    elites = {f"{round}/m0": history[f"{round}/m0"].origin for round in range(2, 5)}
    assert all(id != origin for id, origin in elites.items())
    found = tree(history)
    assert not elites.keys() & found.nodes.keys()
    assert {place: node.id for node in found.nodes.values() for place in node.also} == elites


def test_the_winner_is_the_fittest_of_the_last_round_and_no_average(evolved):
    history = opened(evolved)
    found = tree(history)
    last = [member for member in history.round(4) if not member.id.endswith("average")]
    assert found.winner == min(last, key=lambda member: member.metrics["loss"]).origin
    line = line_of(found)
    assert line.main[-1] == found.winner and line.main[0] == "0/init-0" and set(line.main) <= set(line.all)
    for parent, child in zip(line.main, line.main[1:], strict=False):
        parents = found.nodes[child].parents
        assert parent in parents
        assert all((found.nodes[parent].score or -99) >= (found.nodes[p].score or -99) for p in parents)
    assert all(set(found.nodes[id].parents) <= set(line.all) for id in line.all)


def test_two_workers_leave_the_same_files_as_one(evolved, tmp_path):
    workers = [small.worker(tmp_path, small.config(**EVOLVING), name) for name in ("a", "b")]
    threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert opened(tmp_path / "run").over
    one, two = (files(tree(opened(folder)), "run") for folder in (evolved, tmp_path / "run"))
    assert one.keys() == two.keys() == {"ancestry.json", "ancestry.html"}
    assert one == two


def test_the_genome_is_the_one_that_was_mutated(evolved):
    history = opened(evolved)
    found = genes_of(tree(history))
    assert list(found.rounds) == [1, 2, 3, 4] and [gene.name for gene in found.genes] == ["rate"]
    rates = [member.metrics["genome_rate"] for member in history.round(3) if "genome_rate" in member.metrics]
    assert len(rates) == 4 and found.genes[0].means[2] == pytest.approx(sum(rates) / 4)
    assert max(found.genes[0].spreads) > 0, "mutation makes them differ"


def test_where_everybody_is_a_parent_slots_are_rows(tmp_path):
    history = small.finished(tmp_path, selection="hypercube")
    layout = laid_out(tree(history))
    assert not layout.ranked
    assert [layout.labels[f"m{k}"] for k in range(4)] == [0, 1, 2, 3]
    assert {layout.spots[f"{round}/m2"][1] for round in (1, 2, 3)} == {2}


def test_diloco_descends_through_its_shards(tmp_path):
    found = tree(small.finished(tmp_path, algorithm="diloco", max_generations=2))
    shards = tuple(f"1/shard-{s}" for s in range(4))
    assert found.nodes["2/replica-1"].parents == shards, "the first weights only show the shape"
    assert found.nodes["2/global"].summary and found.winner == "2/global"
    layout = laid_out(found)
    assert layout.spots["2/replica-0"][0] < layout.spots["2/shard-0"][0] == layout.spots["2/global"][0]


def test_a_tournament_whose_winner_is_carried_over(toys):
    run: Toys = toys(algorithm="tournament", max_generations=3).prepare()
    run.work()
    history = run.history()
    found = tree(history)
    assert found.winner == history["4/winner"].origin
    assert "4/winner" in found.nodes[found.winner].also
    assert found.nodes["1/m1"].parents == history.recipe("1/m1").parents


def test_an_unfinished_run_shows_what_is_finished(toys):
    run: Toys = toys(algorithm="rank", elitism=1).prepare()
    run.work(recipes=3)
    found = tree(run.history())
    assert {"0/init-0", "1/m0", "1/m1"} == found.nodes.keys()
    assert found.winner == "", "no round is finished in which anything was measured"
    run.work(recipes=4)
    later = tree(run.history())
    assert later.nodes.keys() > found.nodes.keys() and later.nodes[later.winner].round == 1
    assert len(members_in(later)) == len(later.nodes)
    run.work()
    assert tree(run.history()).nodes.keys() > later.nodes.keys()


def test_failed_members_are_shown_and_nobody_descends_from_them(toys):
    run: Toys = toys(algorithm="search", population_size=6, cliff=2.0).prepare()
    run.work()
    members = finished_members(run.history())
    failed = {member.id for member in members if not member}
    found = tree(run.history())
    assert failed and {node.id for node in found.nodes.values() if node.failed == "failed"} == failed
    assert found.winner and found.nodes[found.winner].score is not None
    assert set(found.nodes[found.winner].parents) == {"0/donor-0", "0/donor-1", "0/donor-2"}


# -- conventions -------------------------------------------------------------------------------------------------------


def contest(*more: Member) -> list[Member]:
    """A tournament: originals and their first children in round 1."""
    models = [made(f"1/model-{n}", score=0.1 * n, name=f"model {n}") for n in range(3)]
    first = [made(f"1/m{n}", ["1/model-0", "1/model-2"], 0.3 + n / 10, technique="slerp+ties") for n in range(3)]
    return [*models, *first, *more]


def test_originals_stand_on_the_left_with_their_names():
    found = grown(contest(), 2)
    assert found.winner == "1/m2" and found.measure == "score"
    assert line_of(found) == Line(("1/m2", "1/model-0", "1/model-2"), ("1/model-2", "1/m2"))
    layout = laid_out(found)
    assert layout.originals == {"1/model-0", "1/model-1", "1/model-2"}
    assert {layout.spots[f"1/model-{n}"][0] for n in range(3)} == {0} and layout.spots["1/m0"][0] == 1
    assert found.nodes["1/model-1"].name == "model 1" and found.nodes["1/m0"].technique == "slerp+ties"


def test_a_look_at_a_whole_round_wins_only_where_nothing_else_was_measured():
    children = [made("2/m0", ["1/m0", "1/m1"], 0.8), made("2/m1", ["1/m2"], 0.9)]
    found = grown([*contest(), *children, made("2/average", ["2/m0", "2/m1"], 1.5, role="summary")], 3)
    assert found.nodes["2/average"].summary and found.winner == "2/m1"
    silent = [made("2/m0", ["1/m0"]), made("2/average", ["2/m0"], 1.5, role="summary")]
    assert grown([*contest(), *silent], 3).winner == "2/average"


def test_the_slot_winner_stands_for_its_parent():
    m0 = carried("2/m0", contest()[5])
    children = [made("2/m1", ["1/m0"], 0.9, technique="mutation"), made("2/m2", ["1/m0", "1/m1"], 0.2)]
    found = grown([*contest(), m0, *children, made("3/winner", ["2/m0"], 0.1, role="winner")], 4)
    assert found.winner == "1/m2" and "3/winner" not in found.nodes
    assert grown([*contest(), m0, *children], 3).winner == "2/m1", "until then the fittest"
    alone = grown([*contest(), *children, made("3/winner", score=0.5, role="winner")], 4)
    assert alone.winner == "3/winner" and "3/winner" in laid_out(alone).spots, "it was measured itself"


def test_scores_come_first_and_losses_count_downwards():
    pair = [made("1/a", metrics={"loss": 3.0}), made("1/b", metrics={"loss": 2.0, "perplexity": 1.0})]
    assert grown(pair, 2).winner == "1/b" and grown(pair, 2).measure == "loss"
    both = [*pair, made("1/c", score=-5.0, metrics={"loss": 9.0})]
    assert grown(both, 2).winner == "1/c" and grown(both, 2).nodes["1/b"].score is None
    odd = [made("1/a", score=True), made("1/b", score="7"), made("1/c", score=10**400), made("1/d", score=1)]
    assert [node.score for node in grown([*odd, made("2/e", ["1/a", "1/b", "1/c"])], 3).nodes.values()][:3] == [
        None
    ] * 3


def test_a_parent_counts_once_and_only_if_it_is_there():
    members = [
        made("1/a", score=1.0),
        made("1/text", role="tool"),
        made("2/b", ["1/a", "9/nobody", "1/a", "1/text"], 0.5),
    ]
    assert grown(members, 3).nodes.keys() == {"1/a", "2/b"} and grown(members, 3).nodes["2/b"].parents == ("1/a",)


def test_an_absent_parent_gave_nothing():
    late = made("1/m1", absent="closed")
    nodes = grown([made("1/m0", score=1.0), late, made("2/m0", ["1/m0", "1/m1"], 2.0)], 3).nodes
    assert nodes["2/m0"].parents == ("1/m0",) and nodes["1/m1"].failed == "closed"


def test_a_carried_member_has_its_line_and_children_begin_where_it_is():
    elite = contest()[5]
    later = [carried("2/m0", elite), made("2/m1", ["1/m0"], 0.1), carried("3/m0", elite), made("3/m1", ["2/m0"], 0.2)]
    layout = laid_out(grown([*contest(), *later], 4))
    lines = {(edge.start, edge.end) for edge in layout.edges if edge.kind == "carried"}
    home, second, third = layout.spots["1/m2"], layout.stays["2/m0"], layout.stays["3/m0"]
    assert lines == {(home, second), (second, third)} and home[1] == second[1] == third[1] == 0
    assert (second, layout.spots["3/m1"], "mutation") in {(e.start, e.end, e.kind) for e in layout.edges}
    assert {edge.rank for edge in layout.edges if edge.kind == "carried"} == {"main"}, "it is the winner"


def bred_for_two_rounds() -> list[Member]:
    """Two given models and a child of each; in round 2 an elite and a child; looks at whoever is not new."""
    a, b = (made(f"0/init-{n}", [], name=name) for n, name in enumerate("ab"))
    first = [made("1/m2", ["0/init-0"], 0.5, technique="copy"), made("1/m3", ["0/init-1"], 0.6, technique="copy")]
    seen = [look("1/look-m0", "0/init-0", 0.4), look("1/look-m1", "0/init-1", 0.7)]
    second = [carried("2/m0", first[1]), made("2/m1", ["1/m2", "1/m3"], 0.8, technique="slerp")]
    later = [look("2/look-m0", "1/m3", 0.9), carried("2/best", b), look("3/winner", "2/m1", role="winner")]
    return [a, b, carried("1/m0", a), carried("1/m1", b), *first, *seen, *second, *later]


def look(id, at, score=None, role="look"):
    return made(id, [at], score, role=role)


def test_a_look_is_no_member_and_scores_whoever_has_no_score():
    found = grown(bred_for_two_rounds(), 4)
    assert {id: node.score for id, node in found.nodes.items()} == {
        "0/init-0": 0.4, "0/init-1": 0.7, "1/m2": 0.5, "1/m3": 0.6, "2/m1": 0.8,
    }  # fmt: skip
    assert found.winner == "2/m1"
    assert len(members_in(found)) == 5


def test_a_slot_that_only_names_the_winner_is_not_counted():
    found = grown([*contest(), made("2/winner", ["1/m2"], role="winner")], 3)
    assert len(members_in(found)) == 6


def test_everybody_who_goes_on_has_a_line_and_then_the_fittest_are_on_top():
    layout = laid_out(grown(bred_for_two_rounds(), 4))
    homes = {"1/m0": "0/init-0", "1/m1": "0/init-1", "2/m0": "1/m3"}
    lines = {(edge.start, edge.end) for edge in layout.edges if edge.kind == "carried"}
    assert layout.stays.keys() == homes.keys(), "the best so far is only kept within reach"
    assert lines == {(layout.spots[home], layout.stays[there]) for there, home in homes.items()}
    assert layout.ranked and not layout.labels, "an elite has another slot than before"
    there = {**layout.spots, **layout.stays}
    assert sorted(("1/m0", "1/m1", "1/m2", "1/m3"), key=lambda id: there[id][1]) == ["1/m1", "1/m3", "1/m2", "1/m0"]


def test_a_start_that_is_far_worse_than_all_others_does_not_make_them_alike():
    found = grown([made("0/a", score=-1e9), made("1/m0", ["0/a"], 1.0), made("1/m1", ["0/a"], 2.0)], 2)
    shades = family.shades(found, [*found.nodes])
    assert shades["0/a"] < shades["1/m0"] < shades["1/m1"]


def test_a_merge_s_curves_are_genes_by_their_filters():
    curves = [{"filter": "self_attn", "value": [0.0, 1.0]}, {"filter": "mlp", "value": 0.5}, {"value": 0.25}]
    found = genes_of(grown([made("1/a", score=1.0, genome={"crossover": {"t": curves}})], 2))
    assert {gene.name: gene.means for gene in found.genes} == {
        "crossover.t.2": [0.25], "crossover.t.mlp": [0.5],
        "crossover.t.self_attn.0": [0.0], "crossover.t.self_attn.1": [1.0],
    }  # fmt: skip
    assert not found.traits


def test_a_step_s_place_is_a_gene_beside_its_values():
    curves = [{"filter": "mlp", "split": [0.25], "value": [0.0, 1.0]}, {"split": 0.75, "value": [1, 0.5]}]
    found = genes_of(grown([made("1/a", score=1.0, genome={"crossover": {"t": curves, "density": curves[1]}})], 2))
    assert {gene.name: gene.means for gene in found.genes} == {
        "crossover.t.mlp.split.0": [0.25], "crossover.t.mlp.value.0": [0.0], "crossover.t.mlp.value.1": [1.0],
        "crossover.t.1.split": [0.75], "crossover.t.1.value.0": [1.0], "crossover.t.1.value.1": [0.5],
        "crossover.density.split": [0.75], "crossover.density.value.0": [1.0], "crossover.density.value.1": [0.5],
    }  # fmt: skip
    assert not found.traits


def test_paths_are_as_short_as_they_may_be():
    data = dict.fromkeys(("/x/a/chat.jsonl", "/x/b/chat.jsonl", "/x/b/text.jsonl:en", "/y", "hub/chat.jsonl"), 1.0)
    found = genes_of(grown([made("1/a", score=1.0, genome={"data": data, "/x/way": "slerp"})], 2))
    assert [gene.name for gene in found.genes] == [
        "data.a/chat.jsonl", "data.b/chat.jsonl", "data.text.jsonl:en", "data.y", "data.hub/chat.jsonl",
    ]  # fmt: skip
    assert [trait.name for trait in found.traits] == ["way"]


def test_genes_are_unrolled_and_what_is_no_number_is_counted():
    first = made(
        "1/a", score=1.0, genome={"lr": 1.0, "mix": {"w": [1, 2]}, "odd": [1], "way": "slerp", "deep": {"x": {}}}
    )
    second = made("1/b", score=1.0, genome={"lr": 3.0, "mix": {"w": [3, 2]}, "odd": [1, 2], "way": "ties", "on": True})
    found = genes_of(grown([first, second, carried("2/a", first)], 3))
    assert {gene.name: tuple(gene.means) for gene in found.genes} == {
        "lr": (2.0, 1.0), "mix.w.0": (2.0, 1.0), "mix.w.1": (2.0, 2.0),
    }  # fmt: skip
    assert found.genes[0].spreads == [1.0, 0.0] and sorted({*found.genes[0].values}) == [1.0, 3.0]
    assert {trait.name: (tuple(trait.values), *map(tuple, trait.shares)) for trait in found.traits} == {
        "on": (("True",), (1.0, 0.0)), "way": (("slerp", "ties"), (0.5, 1.0), (0.5, 0.0)),
    }  # fmt: skip


# -- pictures ----------------------------------------------------------------------------------------------------------

HOSTILE = (
    "$\\nosuch{1$ x_", "a\nb\r\x1b[31m\x00c", "模型-数学-指令" * 30, "_hidden", "W" * 500, "\ud800 alone", " ",
    "%s {0} \\LaTeX", "модель Ёж", "<b>&amp;", "🦙" * 40, "e\u0301" * 90, "\u202eright to left",
)  # fmt: skip


def strange_tree() -> Tree:
    rng, members = random.Random(1), [made(f"1/model-{n}", score=0.1, name=name) for n, name in enumerate(HOSTILE)]
    for round in range(1, 6):
        for n, name in enumerate(HOSTILE):
            before = [f"{round - 1}/m{k}" if round > 1 else f"1/model-{k}" for k in range(len(HOSTILE))]
            genome = {name: [rng.random(), round], "way": name}
            of, score = rng.sample(before, 1 + n % 3), rng.random()
            members.append(made(f"{round}/m{n}", of, score, name=name, technique=name, genome=genome))
    return grown(members, 6)


def large_tree(size: int, rounds: int) -> Tree:
    """Made up, with elites and failures."""
    rng, alive = random.Random(3), [made(f"1/model-{n}", score=0.3, name=f"original {n}") for n in range(3)]
    members = [*alive]
    for round in range(1, rounds + 1):
        new = [carried(f"{round}/m{k}", alive[k]) for k in range(2 * (round > 1))]
        for k in range(len(new), size):
            chosen = rng.sample(alive[: size // 2 + 2], rng.choice((1, 2)))
            score = max(parent.metrics["score"] for parent in chosen) + rng.gauss(-0.005, 0.01)
            way = rng.choice(("slerp", "ties", "dare_ties")) if len(chosen) > 1 else "mutation"
            absent = "failed" if rng.random() < 0.03 else ""
            genome = {"w": [rng.random() for _ in range(5)]}
            parents = [parent.id for parent in chosen]
            new.append(made(f"{round}/m{k}", parents, score, absent=absent, technique=way, genome=genome))
        members += new
        alive = sorted(filter(None, new), key=lambda member: -member.metrics["score"])
    return grown(members, rounds + 1)


@pytest.mark.parametrize("what", ["strange", "8 x 20", "3 x 2"])
def test_no_text_overlaps_another_or_the_edge(what, browser, tmp_path):
    found = strange_tree() if what == "strange" else large_tree(*map(int, what.split(" x ")))
    (tmp_path / "page.html").write_bytes(files(found, HOSTILE[0])["ancestry.html"])
    looks_right(browser, f"file://{tmp_path}/page.html", "family", "genome")


def test_long_slots_have_room_beside_the_rows(browser, tmp_path):
    slots = [f"{letter * 60}-{n}" for n, letter in enumerate("mwi")]
    first = [made(f"1/{slot}", score=1.0) for slot in slots]
    second = [made(f"2/{slot}", [f"1/{slot}"], 1.0) for slot in slots]
    last = made(f"2/{'x' * 64}", [member.id for member in second], 1.0, role="summary")
    found = grown([*first, *second, last], 3)
    shown = [text.text or "" for text in picture(found).iter("text")]
    assert {"mmm", "www", "iii", "xxx"} <= {each[:3] for each in shown}
    (tmp_path / "page.html").write_text(page(found, "run"))
    looks_right(browser, f"file://{tmp_path}/page.html", "family")


def test_hostile_names_are_shown_as_text():
    found = strange_tree()
    written = files(found, HOSTILE[0] + "\n")
    assert json.loads(written["ancestry.json"])["members"][0]["name"] == HOSTILE[0]
    said = written["ancestry.html"].decode()
    assert "модель Ёж" in said and "&lt;b&gt;&amp;amp;" in said and "<b>" not in said
    assert not re.search("[\x00-\x08\x1b\u202e\ud800]", said)
    assert any("модель Ёж (модель Ёж), score" in each for each in members_in(found)), "its technique and its score, too"


def test_given_models_have_their_names_beside_them():
    shown = [text.text for text in picture(grown(contest(), 2)).iter("text")]
    assert {"model 0", "model 1", "model 2"} <= {*shown}


def test_a_page_is_the_same_every_time():
    found = large_tree(8, 30)
    assert files(found, "run") == files(found, "run")
    assert len(members_in(found)) == len(found.nodes)


def test_a_large_run_is_drawn_in_time():
    found = large_tree(64, 200)
    began = time.process_time()
    size = len(page(found, "run"))
    assert time.process_time() - began < 30 and size < 8 << 20
    assert len(members_in(found)) == len(found.nodes)


def test_of_a_very_long_run_the_last_rounds_are_drawn():
    found = large_tree(3, MOST + 50)
    layout = laid_out(found)
    assert layout.left_out == 50 and min(layout.ticks) == 50 and max(layout.ticks) == MOST + 50
    assert min(round_and_slot(id)[0] for id in layout.spots) == 50 and not layout.originals
    assert len(line_of(found).main) > 5 and "members of the rounds since 50 are shown" in page(found, "run")


@pytest.mark.parametrize("members", [
    [made("0/a", score=1.0)], [made("1/m0", score=1.0), made("1/m1", ["1/m0"], role="summary")],
    [made("1/m0", absent="failed")], [made("0/a"), made("1/b", ["0/a"]), made("2/c", ["1/b"])],
    [made("1/a", score=2.0), made("1/b", score=2.0)], [made("1/a", score=1e149), made("1/b", score=-1e149)],
], ids=["one", "a look", "a failure", "nothing measured", "all equal", "far apart"])  # fmt: skip
def test_the_smallest_trees_can_be_drawn(members):
    found = grown(members, 3)
    assert len(members_in(found)) == len(found.nodes) == len(members)
    assert "The genome" not in page(found, "run")


# -- the command -------------------------------------------------------------------------------------------------------


def called(*words: object) -> tuple[int, str]:
    code, _, errors = answer("-m", "fleet.ancestry", *map(str, words))
    return code, errors


def test_the_command_writes_beside_the_registers_or_elsewhere(evolved, tmp_path):
    before = listing(evolved)
    assert called(evolved, "--out", tmp_path / "new" / "pictures") == (0, "")
    assert listing(evolved) == before
    there = {file.name: file.read_bytes() for file in (tmp_path / "new" / "pictures").iterdir()}
    assert there == files(tree(opened(evolved)), "run")
    known = json.loads(there["ancestry.json"])
    assert known == as_json(tree(opened(evolved))) and known["winner"] == known["main_line"][-1] == known["line"][-1]
    assert [*map(str, write_family_tree(opened(evolved)))] == [
        f"{evolved}/{name}" for name in sorted(there, reverse=True)
    ]
    assert {file.name for file in evolved.iterdir()} - before.keys() == there.keys()
    assert not [*(evolved / "tmp").glob("ancestry*")]


def test_where_there_is_no_tree_it_says_what_is_missing(tmp_path):
    c = small.config()
    store, _ = create_run(tmp_path, "run", c.bound(), Host())
    launches.begin(store, c.operational())
    for folder, why in ((tmp_path / "run", "no model is finished yet"), (tmp_path, "not the folder of a run")):
        code, errors = called(folder)
        assert code == 2 and why in errors
    assert write_family_tree(History(store)) == []

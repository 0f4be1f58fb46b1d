"""What the page says: numbers as people read them, signs that are explained, nothing drawn that cannot be compared."""

import re
from pathlib import Path

import pytest

from fleet import plain
from fleet.ancestry.tree import Node
from fleet.report import curves, family, formatting
from fleet.report.facts import covered
from fleet.report.page import page
from fleet.report.run_reader import RunReader
from fleet.report.svg import Scale
from fleet.store import _opened, _sealed
from tests.browser import looks_right
from tests.helpers import Toys
from tests.reporting import long_run, reported, text_of, written


def test_errors_are_told_in_a_line(finished, tmp_path):
    for there in (tmp_path, tmp_path / "nothing", tmp_path / "here" / "evolution.json"):
        said = reported(there, code=2)
        assert said.startswith(f"{there}: not the folder of a run") and len(said.splitlines()) == 1
    said = reported(finished.folder, "--out", str(tmp_path / "no" / "file.html"), code=2)
    assert "cannot be written" in said and len(said.splitlines()) == 1
    said = reported(finished.folder, "--out", str(tmp_path / ("x" * 300)), code=2)
    assert "File name too long" in said and len(said.splitlines()) == 1
    said = reported(Path("compare"), str(finished.folder), code=2)
    assert "1 folders of runs are given; from 2 to 8 are expected" in said
    assert "give one of them" in reported(finished.folder, "--serve", "--out", "x", code=2)


@pytest.mark.parametrize(
    "said, shown",
    [
        (formatting.count(0), "0"), (formatting.count(9_999), "9,999"), (formatting.count(75_900), "75.9 k"),
        (formatting.count(759_296), "759 k"), (formatting.count(999_999), "1,000 k"),
        (formatting.count(3.2e9), "3.2 G"),
        (plain.readable_bytes(12), "12 B"), (plain.readable_bytes(123_456), "123 kB"),
        (plain.readable_bytes(1.89e9), "1.89 GB"),
        (formatting.lasting(5.16), "5.16 s"), (formatting.lasting(119), "119 s"), (formatting.lasting(129), "2.15 min"),
        (formatting.lasting(7_200), "2 h"), (formatting.lasting(3 * 86_400), "3 d"),
        (formatting.lasting(200 * 86_400), "200 d"),
    ],
)  # fmt: skip
def test_numbers_as_people_read_them(said, shown):
    assert said == shown


def test_time_that_workers_of_one_machine_share_counts_once():
    assert covered([(0, 10), (5, 15), (20, 30), (21, 22)]) == 25
    assert covered([]) == 0


def test_nothing_of_a_page_is_fetched(finished):
    said = page(RunReader(finished.folder).look())
    assert not re.search(r"(src|href)=[\"'](?!#)", said) and "@import" not in said and "url(" not in said


def test_the_family_trees_signs_are_explained(toys, browser, tmp_path):
    run = toys(algorithm="rank", population_size=5, max_generations=4)
    run.prepare().work()
    browser.open(f"file://{written(run.folder, tmp_path)}", dark=True)
    said = text_of(browser, "#family .key")
    assert "poor" in said and "carried on unchanged" in said and "average" not in said, "only signs that are there"
    color = "getComputedStyle(document.querySelector('#family %s')).%s"
    poor, fit = (browser.say(color % (f".swatch.q{n}", "backgroundColor")) for n in (0, 6))
    assert poor == browser.say(color % ("circle.q0", "fill")) != fit == browser.say(color % ("circle.q6", "fill"))
    assert "darker" not in text_of(browser, "#family")


def test_the_key_of_the_timeline_adds_up(browser, tmp_path):
    run = long_run(tmp_path, slots=8, rounds=6, workers=8)
    browser.open(f"file://{written(run, tmp_path)}")
    said = text_of(browser, "#workers .key")
    assert "nothing was noted" in said
    assert sum(int(part) for part in re.findall(r"(\d+) %", said)) == pytest.approx(100, abs=2)


def test_numbers_stand_below_each_other(browser, tmp_path):
    run = long_run(tmp_path, slots=8, rounds=6, workers=8)
    browser.open(f"file://{written(run, tmp_path)}")
    mixed = """[...document.querySelectorAll('table')].flatMap((t) => [...t.rows[0].cells].map((_, n) =>
        new Set([...t.rows].map((r) => getComputedStyle(r.cells[n]).textAlign == "right")).size)
        ).filter((n) => n > 1)"""
    assert browser.say(mixed) == []
    look = "[...document.querySelectorAll('#loss-table th')].map((c) => getComputedStyle(c).textAlign)"
    assert {*browser.say(look)} == {"right"}
    look = look.replace("loss-table", "workers-table")
    assert browser.say(look)[:3] == ["left", "left", "right"]


def test_one_round_is_told_in_a_sentence(toys, browser, tmp_path):
    run = toys(algorithm="rank", population_size=3, max_generations=1)
    run.prepare().work()
    browser.open(f"file://{written(run.folder, tmp_path)}")
    losses = [run.register(path)["metrics"]["loss"] for path in run.registers(r"00001/m.*done")]
    assert f"best {min(losses):.4f}, mean" in text_of(browser, "#fitness")
    assert browser.say("document.querySelectorAll('#fitness .plot, #genome .plot').length") == 0
    told = text_of(browser, "#genome")
    assert "Only round 1 has genomes so far." in told and "The same for all members: lr 1.0000." in told


def test_a_round_that_sums_up_is_not_more_than_was_asked_for(toys, browser, tmp_path):
    run = toys(algorithm="tournament", population_size=4, max_generations=3)
    run.prepare().work()
    browser.open(f"file://{written(run.folder, tmp_path)}")
    assert "Last finished round43 were asked for, and the last one sums up" in text_of(browser, ".cards")


def test_only_what_was_asked_the_same_is_in_one_picture(toys, browser, tmp_path):
    both = [toys("one", algorithm="matching", max_generations=2), toys("two", algorithm="diloco", max_generations=1)]
    for run in both:
        run.prepare().work()
    new = toys("three", algorithm="matching").prepare()
    other = long_run(tmp_path / "long", slots=4, rounds=3, workers=2)
    for plan in other.glob("rounds/*/plan"):
        recipes = _opened(plan.read_bytes(), plan.name)["recipes"]
        for recipe in recipes:
            if "on" in recipe.get("args", {}):
                recipe["args"]["on"] = "other <b>tasks</b>"
        plan.write_bytes(_sealed({"recipes": recipes}))
    file = tmp_path / "compared.html"
    folders = [str(run.folder) for run in (*both, new)]
    reported(Path("compare"), *folders, str(other), "--out", str(file))
    looks_right(browser, f"file://{file}", "loss-0", "loss-1")
    assert text_of(browser, "#loss-0 h2") == "Loss on held-out text"
    assert text_of(browser, "#loss-1 h2") == "Loss on held-out text, questions: other <b>tasks</b>"
    assert "long" not in text_of(browser, "#loss-0") and "matching" not in text_of(browser, "#loss-1")
    assert browser.say("document.querySelectorAll('#loss-0-time-s circle').length") == 2, "a single point, too"
    assert "Not drawn" in text_of(browser, "#runs") and "three" in text_of(browser, "#runs > p")
    assert "SLEEP" not in text_of(browser, "#differences > .scroll")


def test_a_round_is_drawn_when_it_is_complete(toys):
    run: Toys = toys(population_size=4, max_generations=3).prepare()
    run.work(recipes=13)
    facts = RunReader(run.folder).look()
    done = [each.number for each in facts.rounds if each.complete]
    part = next(each for each in facts.rounds if not each.complete and each.members)
    assert curves.curve_of(facts, "loss", curves.by_round).places[-1] == done[-1] < part.number
    told = f"Not drawn before it is complete: round {part.number}: {part.finished} of {part.slots} finished"
    assert told in page(facts)
    run.work()
    facts = RunReader(run.folder).look()
    assert curves.curve_of(facts, "loss", curves.by_round).places[-1] >= part.number
    assert "Not drawn before" not in page(facts)


def test_one_bad_mutant_does_not_set_the_scale():
    usual = [0.01 + 0.0001 * n for n in range(40)]
    assert Scale.fair([*usual, 1e6], [*usual, 1e6]).high < 0.02
    assert Scale.fair([*usual, 1e6], [*usual, 1e6], [1e6]).high > 1e6, "but what is to be seen is"
    assert Scale.fair([1.0, 2.0, 1e6], [1.0, 2.0, 1e6]).high > 1e6, "of a few nobody is usual"


def test_genes_that_never_change_are_told_in_words():
    genomes = [{"rate": 1.0 + n, "depth": 6, "way": "slerp"} for n in range(3)]
    nodes = [Node(f"1/m{n}", f"m{n}", genome=genome) for n, genome in enumerate(genomes)]
    shown = family.genome_part(nodes)
    assert "The same for all members: <bdi>depth 6.0000; way slerp</bdi>." in shown
    assert "Only round 1 has genomes so far." in shown and shown.count('class="small"') == 1
    assert "Only round" not in family.genome_part([*nodes, Node("2/m0", "m0", genome=genomes[0])])

"""Built-in skills: their answers are right, what is held out is not learned from, and small models can learn each."""

import json
import re
import statistics
from itertools import islice
from pathlib import Path

import pytest
import torch
from lm_eval.api.model import LM
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fleet.run_config import UserError
from train import starter_models as models
from train.chat_examples import examples
from train.lm_eval_tasks import TaskEvaluation, TaskRequest, load
from train.skills import BASE, MIXED, NUMBERS, SKILLS, question, questions, rows, write_tasks
from train.starter_models import MEAN, MEAN_OF, StarterSettings, make_tokenizer, starters

EVERY = (*SKILLS, MIXED)
SMALL = StarterSettings(base_steps=6, steps=4, chats=4, windows=2, vocabulary=512)
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
KIND = {
    "animal": "wolf bear cat dog snake bird horse mouse",
    "color": "gray pink blue red brown black white green",
    "food": "egg corn cake soup rice bread apple cheese",
    "tool": "saw axe rope screw drill brush knife hammer",
    "body": "ear eye nose knee arm leg foot hand",
    "weather": "sun fog hail cloud storm wind rain snow",
}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer(1024)


def asked(folder: Path, count: int = 60) -> TaskRequest:
    return TaskRequest(
        tuple(f"skill_{each}" for each in (*SKILLS, MIXED)), task_path=(str(write_tasks(folder, 3, count)),)
    )


# -- the questions -----------------------------------------------------------------------------------------------------


def answer(text: str) -> str:
    """Found in another way than by whoever asks."""
    said, _, listed = text.rstrip("?").partition(": ")
    if said.startswith("Which number"):
        return sorted(listed.split(", "))[-1 if said.endswith("largest") else 0]
    if said == "How many vowels are in":
        return ["none", "one", "two", "three", "four"][len(re.findall("[aeiou]", listed))]
    (found,) = [word for word in listed.split() if word in KIND[said.rpartition(" ")[2]].split()]
    return found


@pytest.mark.parametrize("skill", EVERY)
@pytest.mark.parametrize("part", ["train", "held-out"])
def test_answers_are_right(skill, part):
    for each in rows(f"skill:{skill}", 1, 400, part):
        user, assistant = each["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert assistant["content"] == answer(user["content"])


@pytest.mark.parametrize("skill", EVERY)
def test_choices_differ_and_the_right_one_is_anywhere(skill):
    found = list(islice(questions(skill, 1, "held-out"), 800))
    assert all(len(set(each.choices)) == 4 and each.choices[each.answer] == answer(each.text) for each in found)
    assert all(150 < sum(each.answer == place for each in found) < 250 for place in range(4))


@pytest.mark.parametrize("skill", SKILLS)
def test_no_place_in_the_question_gives_the_answer_away(skill):
    """Of what is listed, or of the numbers that there may be."""
    found = list(islice(questions(skill, 1, "train"), 800))
    listed = [re.findall(r"\w+", each.text.partition(": ")[2]) for each in found]
    known = list(NUMBERS) if skill == "vowels" else None
    places = [(known or words).index(each.choices[each.answer]) for words, each in zip(listed, found, strict=True)]
    assert all(150 < places.count(place) < 250 for place in range(4))


@pytest.mark.parametrize("skill", EVERY)
def test_what_is_held_out_is_in_no_training_row_of_any_seed(skill):
    held = {row["messages"][0]["content"] for row in rows(f"skill:{skill}", 1, 500, "held-out")}
    learned = {row["messages"][0]["content"] for seed in (1, 2) for row in rows(f"skill:{skill}", seed, 4000)}
    assert not held & learned and len(held) > 490 and len(learned) > 7900


def test_rows_follow_from_name_seed_and_part():
    assert rows("skill:compare", 1, 5) == rows("skill:compare", 1, 9)[:5] != rows("skill:compare", 2, 5)
    assert question("kinds", 1, 7) == question("kinds", 1, 7) != question("kinds", 1, 8)
    assert question(MIXED, 1, 7) == question("vowels", 1, 2)
    turns = [row["messages"][0]["content"].split()[1] for row in rows("skill:mixed", 1, 600)]
    assert all(150 < turns.count(word) < 250 for word in ("number", "many", "word"))
    assert rows("skill:vowels", 1, 1) == [
        {
            "messages": [
                {"role": "user", "content": "How many vowels are in: v e i h m g i?"},
                {"role": "assistant", "content": "three"},
            ]
        }
    ]


@pytest.mark.parametrize("name", ["skill:comparing", "compare", "skill:"])
def test_a_name_that_there_is_not(name):
    with pytest.raises(UserError, match="the nearest is 'skill:[a-z]+' of skill:compare, .*, skill:mixed"):
        rows(name, 1, 1)


# -- the tasks ---------------------------------------------------------------------------------------------------------


class Answering(LM):
    """Answers by what it is told of each choice."""

    def __init__(self, likes) -> None:
        super().__init__()
        self.likes = likes

    def loglikelihood(self, requests):
        return [(float(self.likes(*each.args)), False) for each in requests]

    def loglikelihood_rolling(self, requests):
        raise NotImplementedError

    generate_until = loglikelihood_rolling
    apply_chat_template = staticmethod(lambda messages, add_generation_prompt=True: messages[-1]["content"])
    tokenizer_name = ""


def test_who_knows_is_right_and_who_guesses_seldom(tmp_path, tokenizer):
    wanted = asked(tmp_path, 200)
    evaluation = TaskEvaluation(wanted, tokenizer, load(wanted))
    assert evaluation.chat and wanted.tasks == tuple(f"skill_{skill}" for skill in EVERY)
    knows = evaluation.marks(Answering(lambda question, choice: choice == answer(question)))
    constant = evaluation.marks(Answering(lambda question, choice: 0))
    first = evaluation.marks(Answering(lambda question, choice: -question.rpartition(":")[2].find(choice)))
    for task in wanted.tasks:
        assert knows.results[task]["acc,none"] == 1.0 and len(knows.single[task]["acc,none"]) == 200
        assert all(0.15 < marks.results[task]["acc,none"] < 0.35 for marks in (constant, first))


def test_tasks_are_the_same_bytes_and_stay_as_they_are(tmp_path):
    write_tasks(tmp_path, 3, 20)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == sorted(
        f"skill_{skill}.{end}" for skill in EVERY for end in ("json", "yaml")
    )
    before = [(file.read_bytes(), file.stat().st_mtime_ns) for file in files]
    write_tasks(tmp_path, 3, 20)
    assert [(file.read_bytes(), file.stat().st_mtime_ns) for file in files] == before
    write_tasks(tmp_path, 4, 20)
    changed = [file.suffix for file, (old, _) in zip(files, before, strict=True) if file.read_bytes() != old]
    assert changed == [".json"] * len(EVERY)


def test_questions_of_a_task_are_held_out_and_all_different(tmp_path):
    write_tasks(tmp_path, 3, 300)
    learned = {row["messages"][0]["content"] for row in rows("skill:mixed", 3, 6000)}
    for skill in EVERY:
        lines = [json.loads(line) for line in (tmp_path / f"skill_{skill}.json").read_text().splitlines()]
        found = {line["question"] for line in lines}
        assert len(found) == 300 and not found & learned


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def test_a_chat_is_written_as_the_template_says(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        said = each.apply_chat_template([{"role": "user", "content": "é?"}], tokenize=False, add_generation_prompt=True)
        assert said == "<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n"
        assert each.decode(each(said)["input_ids"]) == said and each.eos_token == "<|im_end|>" != each.pad_token
        (row,) = rows("skill:compare", 1, 1)
        ((made,),) = examples([("", row)], each, 128).kept
        assert each.decode(made.tokens[made.learned]) == row["messages"][1]["content"] + "<|im_end|>"


@pytest.mark.parametrize("skill", SKILLS)
def test_all_choices_have_as_many_tokens(tokenizer, skill):
    """Or a model might like the shorter ones."""
    for each in islice(questions(skill, 1, "train"), 300):
        assert {len(tokenizer(choice)["input_ids"]) for choice in each.choices} == {2 if skill == "compare" else 1}


# -- models to begin with ----------------------------------------------------------------------------------------------


def test_starters_are_made_once_and_the_same_elsewhere(tmp_path):
    told = []
    made = starters(tmp_path / "a", told.append, SMALL)
    assert [*made] == [BASE, *SKILLS, MEAN] and told[-1] == "mean: ready"
    again = starters(tmp_path / "a", told.append, SMALL)
    assert again == made and told.count("mean: ready") == 1
    other = starters(tmp_path / "b", str, SMALL)
    for name, folder in made.items():
        assert {file.name for file in folder.iterdir()} - {"chat_template.jinja"} == FILES
        assert all(file.read_bytes() == (other[name] / file.name).read_bytes() for file in folder.iterdir())
    assert len({(folder / "model.safetensors").read_bytes() for folder in made.values()}) == len(made)
    mean, *two = (load_file(made[name] / "model.safetensors") for name in (MEAN, *MEAN_OF))
    assert all(torch.equal(each, (two[0][name] + two[1][name]) / 2) for name, each in mean.items())
    assert models._digest(SMALL) != models._digest(StarterSettings())


def test_an_interrupted_one_leaves_nothing_half(tmp_path):
    def stop(line: str) -> None:
        if line.startswith("base: ready"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        starters(tmp_path, stop, SMALL)
    (home,) = tmp_path.iterdir()
    assert [each.name for each in home.iterdir()] == [BASE]
    before = (home / BASE / "model.safetensors").stat().st_mtime_ns
    made = starters(tmp_path, str, SMALL)
    assert made[BASE] == home / BASE and (home / BASE / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.timeout(1200)  # they are trained first
def test_each_has_its_own_skill_and_no_other(starters_home, tmp_path):
    made, wanted = starters(starters_home), asked(tmp_path / "tasks", 300)
    evaluation = TaskEvaluation(wanted, AutoTokenizer.from_pretrained(made[BASE]), load(wanted))
    for name, folder in made.items():
        results = evaluation.marks(AutoModelForCausalLM.from_pretrained(folder)).results
        accuracy = {skill: results[f"skill_{skill}"]["acc,none"] for skill in SKILLS}
        print(name, accuracy)
        others = [value for skill, value in accuracy.items() if skill != name]
        assert accuracy.get(name, 1.0) > 0.8 and 0.1 < min(others) and max(others) < 0.45
        assert 0.15 < statistics.mean(others) < 0.35

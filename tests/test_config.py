"""evolution.json: what is accepted, and that each mistake is explained by file, key, value seen and what is allowed."""

import json
from typing import Annotated

import pytest
from pydantic import Field, ValidationError, field_validator, model_validator

from fleet.run_config import FleetConfig, Section, UserError, bound, load, operational
from tests.toy.config import ToyConfig
from train.training_config import TrainConfig, alone


@pytest.fixture
def says(tmp_path):
    """What loading a text, or a value as JSON, is refused with."""

    def says(source, room=ToyConfig):
        file = tmp_path / "evolution.json"
        data = source if isinstance(source, (bytes, str)) else json.dumps(source)
        file.write_bytes(data if isinstance(data, bytes) else data.encode())
        with pytest.raises(UserError) as error:
            load(file, room)
        lines = str(error.value).splitlines()
        assert all(line.startswith(f"{file}: ") for line in lines)
        return "\n".join(line.removeprefix(f"{file}: ") for line in lines)

    return says


def read(tmp_path, value, room=ToyConfig):
    file = tmp_path / "evolution.json"
    file.write_text(json.dumps(value))
    return load(file, room)


class Entry(Section):
    source: str = bound(..., "Where from.")
    weight: float = bound(1.0, "Its share.")


class Listed(Section):
    entries: tuple[Entry, ...] = bound((), "Some.", strict=False)


def test_keys_of_records_in_a_list_in_any_case(tmp_path, says):
    (entry,) = read(tmp_path, {"Entries": [{"SOURCE": "a", "Weight": 2.0}]}, Listed).entries
    assert (entry.source, entry.weight) == ("a", 2.0)
    twice = 'ENTRIES, number 1: the key "SOURCE" stands there twice, in two spellings'
    assert says({"entries": [{"source": "a", "SOURCE": "b"}]}, Listed) == twice
    unknown = says({"entries": [{"source": "a", "WIEGHT": 2.0}]}, Listed)
    assert unknown == "ENTRIES, number 1, wieght: unknown; the nearest known key is weight"


def test_keys_in_any_case(tmp_path):
    config = read(tmp_path, {"BASE_DIR": "/disk", "population_size": 6, "Max_Generations": 3, "SEED": 0})
    assert (config.base_dir, config.population_size, config.max_generations, config.seed) == ("/disk", 6, 3, 0)


def test_an_empty_object_is_all_defaults(tmp_path):
    assert read(tmp_path, {}) == ToyConfig()


def test_whole_numbers_do_for_numbers_and_lists_for_tuples(tmp_path):
    config = read(tmp_path, {"GRACE_SECONDS": 3, "INITIAL_POPULATION": [4, 5], "PROJECT_NAME": "a.b-c_9"})
    assert isinstance(config.grace_seconds, float) and config.initial_population == (4, 5)


@pytest.mark.parametrize("betas", [[0.9], [0.9, 0.95, 0.99], [1, 0.95], [0.9, True], 0.9])
def test_what_two_numbers_have_to_be(says, betas):
    expected = f"{json.dumps(betas)}: a list of 2 items, each a number from 0 to below 1 is expected"
    assert says({"BETAS": betas}, TrainConfig) == f"BETAS is {expected}"


def test_the_record_is_frozen(tmp_path):
    with pytest.raises(ValidationError, match="frozen"):
        read(tmp_path, {}).seed = 2


@pytest.mark.parametrize("key, near", [
    ("POPULATON_SIZE", "POPULATION_SIZE"), ("generations", "MAX_GENERATIONS"), ("Base_Dirs", "BASE_DIR"),
    ("quorom", "QUORUM"), ("PORT", ""), ("", ""), ("é" * 1000, ""), ("\x1b[2J", ""),
])  # fmt: skip
def test_an_unknown_key_names_the_nearest_known_one(says, key, near):
    text = says({key: 1})
    assert text.startswith("unknown key ") and "docs/configuration.md lists all" in text and text.isprintable()
    named = text.partition("the nearest known key is ")[2].partition(",")[0]
    assert named.lower() in ToyConfig.model_fields and near in ("", named)
    assert len(text) < 220


@pytest.mark.parametrize("one, other", [("seed", "SEED"), ("Seed", "sEED")])
def test_a_key_in_two_spellings_is_refused(says, one, other):
    assert says({one: 1, other: 1}) == f'the key "{other}" stands there twice, in two spellings'
    assert "stands there twice" in says('{"SEED": 1, "SEED": 1}')


A_NAME = "up to 64 letters, digits, '.', '-' and '_', beginning with a letter or a digit is expected"
MISTAKES = [
    ("POPULATION_SIZE", "many", '"many": a whole number from 1 to 4096 is expected'),
    ("POPULATION_SIZE", "8", '"8": a whole number from 1 to 4096 is expected'),
    ("POPULATION_SIZE", True, "true: a whole number from 1 to 4096 is expected"),
    ("POPULATION_SIZE", 8.0, "8.0: a whole number from 1 to 4096 is expected"),
    ("POPULATION_SIZE", None, "null: a whole number from 1 to 4096 is expected"),
    ("POPULATION_SIZE", [8], "[8]: a whole number from 1 to 4096 is expected"),
    ("POPULATION_SIZE", 0, "0: a whole number from 1 to 4096 is expected"),
    ("POPULATION_SIZE", 4097, "4097: a whole number from 1 to 4096 is expected"),
    ("SEED", 2**63, "9223372036854775808: a whole number from 0 to 9223372036854775807 is expected"),
    ("SEED", -1, "-1: a whole number from 0 to 9223372036854775807 is expected"),
    ("QUORUM", 0, "0: a number from above 0 to 1 is expected"),
    ("QUORUM", 1.5, "1.5: a number from above 0 to 1 is expected"),
    ("QUORUM", "0.5", '"0.5": a number from above 0 to 1 is expected'),
    ("QUORUM", True, "true: a number from above 0 to 1 is expected"),
    ("GRACE_SECONDS", -0.1, "-0.1: a number from 0 to 1000000 is expected"),
    ("SNAPSHOT_MINUTES", 0, "0: a number from 0.001 to 100000 is expected"),
    ("OUTER_MOMENTUM", 1, "1: a number from 0 to below 1 is expected"),
    ("OUTER_NESTEROV", "yes", '"yes": true or false is expected'),
    ("OUTER_NESTEROV", 1, "1: true or false is expected"),
    ("ELITISM", -1, "-1: a whole number from 0 upwards is expected"),
    ("INITIAL_POPULATION", [1, "2"], '[1, "2"]: a list of up to 64 items, each a whole number'),
    ("INITIAL_POPULATION", 1, "1: a list of up to 64 items, each a whole number"),
    ("INITIAL_POPULATION", [1] * 65, "a list of up to 64 items, each a whole number"),
    ("LOG_LEVEL", "info", '"info": "DEBUG" or "INFO" or "WARNING" or "ERROR" is expected'),
    ("ALGORITHM", "edt", '"edt": "diloco" or "matching" or "rank" or "search" or "tournament" is expected'),
    ("BASE_DIR", "", '"": text without control characters is expected'),
    ("BASE_DIR", "a\0b", '"a\\u0000b": text without control characters is expected'),
    ("BASE_DIR", "a\ud800", '"a\\ud800": text without control characters is expected'),
    ("BASE_DIR", 5, "5: text without control characters is expected"),
    *[("PROJECT_NAME", bad, A_NAME) for bad in ("../x", "-rf", ".hidden", "a b", "a\n", "é", "x" * 65, 7)],
]  # fmt: skip


@pytest.mark.parametrize("key, value, why", MISTAKES)
def test_a_mistake_is_explained(says, key, value, why):
    text = says({key: value})
    assert text.startswith(f"{key} is ") and why in text
    assert len(text) < 250 and text.isprintable()


def test_huge_whole_numbers_are_no_numbers(says):
    assert says('{"CLIFF": 1' + "0" * 400 + "}").endswith("...: a number is expected")


def test_all_mistakes_are_told_at_once(says):
    text = says({"SEED": "x", "THREADS": 0, "SEDE": 1})
    assert [line.split()[0] for line in text.splitlines()] == ["SEED", "THREADS", "unknown"]


@pytest.mark.parametrize("source, why", [
    ('{\n  "SEED": 1, // why\n  "THREADS": 1\n}', "line 2, column 14: comments are not supported"),
    ('# why\n{"SEED": 1}', "line 1, column 1: comments are not supported"),
    ('{"SEED": 1,}', "line 1, column"),
    ("[1, 2]", "an object is expected, {...}, not [1, 2]"),
    ('"x"', 'an object is expected, {...}, not "x"'),
    ('{"CLIFF": NaN}', "NaN is not a finite number"),
    ('{"CLIFF": 1e999}', "1e999 is not a finite number"),
    (b'{"BASE_DIR": "\xe9"}', "not UTF-8 at byte 14"),
    ('{"SEED": ' + "[" * 30 + "]" * 30 + "}", "nested deeper than 20"),
    (b" " * (1 << 20) + b"{}", "longer than 1048576 bytes"),
])  # fmt: skip
def test_a_file_that_is_not_our_json_is_explained(says, source, why):
    assert says(source).startswith(why)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, why in ((tmp_path / "none.json", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=why) as error:
            load(path, ToyConfig)
        assert str(error.value).startswith(f"{path}: cannot be read: ")


def test_bound_and_operational_keys_are_all_keys_and_make_the_record_again():
    config = ToyConfig(seed=5, initial_population=(1, 2), log_level="DEBUG")
    assert not config.bound().keys() & config.operational().keys()
    assert config.bound().keys() | config.operational().keys() == ToyConfig.model_fields.keys()
    assert "seed" in config.bound() and "log_level" in config.operational()
    stored = json.loads(json.dumps([config.bound(), config.operational()]))
    assert ToyConfig.joined(*stored) == config


def test_whoever_trains_alone_has_the_averages_that_are_usual():
    for optimizer in ("adamw", "muon"):
        assert TrainConfig(**{**alone(5), "inner_optimizer": optimizer}).adamw_betas == (0.9, 0.95)


def test_a_run_that_is_older_than_a_key_goes_on_as_it_was():
    bound = TrainConfig().bound()
    assert TrainConfig.joined(bound, {}).adamw_betas == (0.95, 0.98)
    del bound["betas"], bound["clip"]

    class Later(TrainConfig):
        lacked = {"clip": 3.0}

    older = Later.joined(bound, {})
    assert older.adamw_betas == (0.9, 0.95) and older.clip == 3.0


def test_what_stands_in_a_run_folder_is_checked_as_well():
    with pytest.raises(UserError, match="the run's configuration: unknown key"):
        ToyConfig.joined({**ToyConfig().bound(), "velocity": 1}, {})
    with pytest.raises(UserError, match='the run\'s configuration: SEED is "x"'):
        ToyConfig.joined({"seed": "x"}, {})


def test_a_room_of_its_own_joins_the_run(says, tmp_path):
    class Tools(Section):
        ovens: Annotated[int, Field(ge=1)] = bound(1, "Ovens.")
        radio: bool = operational(False, "Music.")

    class Whole(Tools, FleetConfig):
        @field_validator("radio")
        @classmethod
        def quiet(cls, radio):
            if radio:
                raise ValueError("the neighbours sleep")
            return radio

        @model_validator(mode="after")
        def enough(self):
            if self.ovens > self.threads * 4:
                raise ValueError("OVENS needs a thread for every four")
            return self

    assert read(tmp_path, {"OVENS": 2, "SEED": 4}, Whole).bound()["ovens"] == 2
    assert says({"RADIO": True}, Whole) == "RADIO is true: the neighbours sleep"
    assert says({"OVENS": 5}, Whole) == "OVENS needs a thread for every four"
    assert says({"OVENS": 0}, Whole) == "OVENS is 0: a whole number from 1 upwards is expected"
    assert 'unknown key "OVEN"; the nearest known key is OVENS' in says({"OVEN": 2}, Whole)
    assert "unknown key" in says({"OVENS": 2}, FleetConfig)

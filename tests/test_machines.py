"""machines.json: hosts and users end up in commands, so nothing but plain names passes."""

import io
import json

import pytest

from fleet import machines
from fleet.console import console
from fleet.machines import Machine
from fleet.remote import agent, launch_tables, preflight
from fleet.remote.preflight import Report
from fleet.run_config import UserError

FULL = {
    "host": "gpu1.example.org", "port": 2222, "user": "ann@lab", "key": "/home/ann/.ssh/my key", "name": "big-one",
    "devices": [0, 3], "python": "/opt/python 3/bin/python3", "setup": "module load cuda && ulimit -n 4096",
    "env": {"HF_HOME": "/data/hf"}, "base_dir": "/mnt/disk",
}  # fmt: skip


@pytest.fixture
def write(tmp_path):
    def write(value):
        file = tmp_path / "machines.json"
        file.write_text(value if isinstance(value, str) else json.dumps(value))
        return file

    return write


@pytest.fixture
def says(write):
    def says(value):
        file = write(value)
        with pytest.raises(UserError) as error:
            machines.load(file)
        text = str(error.value)
        assert text.startswith(f"{file}: ") and all(line.isprintable() for line in text.splitlines())
        return text.removeprefix(f"{file}: ")

    return says


def test_a_host_alone_is_a_machine(write):
    one, two, three = machines.load(write(["192.168.0.1", "fe80::1", "lab_pc-2.example.org"]))
    assert (one.host, one.name, one.workers, one.port, one.user) == ("192.168.0.1", "192.168.0.1", 1, None, None)
    assert (two.host, three.host) == ("fe80::1", "lab_pc-2.example.org")


GROUP = ("devices_per_worker", "sharding_strategy")


def test_an_object_says_more(write):
    (machine,) = machines.load(write([FULL]))
    assert machine.model_dump() == {**FULL, "devices": (0, 3), "workers": 1, **dict.fromkeys(GROUP)}


def test_keys_in_any_case(write, says):
    assert machines.load(write([{"HOST": "a", "Port": 22}]))[0].port == 22
    assert says([{"host": "a", "HOST": "b"}]) == 'machine 1: the key "HOST" stands there twice, in two spellings'


HOSTILE = [
    "", "-oProxyCommand=x", "-", "a b", "a\n", "a\0", "\x1b[2J", "a;b", "a|b", "a&b", "$(x)", "`x`", "a'b", 'a"b',
    "a/b", "a\\b", "a<b", "a>b", "a*", "a?", "~", "a#", "a!", "{a,b}", "(a)", "é", "a\ud800", "a,b", "a%b", "a=b",
]  # fmt: skip


@pytest.mark.parametrize("bad", [*HOSTILE, "ann@host", "a" * 254, "a.", "a:", ".a", 5, None, True, ["a"], {"a": 1}])
def test_a_host_is_a_plain_name(says, bad):
    text = says([{"host": bad}])
    assert text.startswith("machine 1: host is ") and "a host's name or address (letters, digits" in text
    assert len(text.splitlines()) == 1
    if isinstance(bad, str):
        assert says([bad]) == text
        assert says([{"host": "a", "name": bad}]).startswith("machine 1: name is ")


@pytest.mark.parametrize("bad", [*HOSTILE, "a:b", "a" * 65, ".a", "@a", 5, True])
def test_a_user_is_a_plain_name(says, bad):
    text = says([{"host": "a", "user": bad}])
    assert text.startswith("machine 1: user is ") and "a user's name (letters, digits" in text


@pytest.mark.parametrize("key, value, why", [
    ("port", 0, "0: a whole number from 1 to 65535 is expected"),
    ("port", 65536, "65536: a whole number from 1 to 65535 is expected"),
    ("port", "22", '"22": a whole number from 1 to 65535 is expected'),
    ("workers", 0, "0: a whole number from 1 to 1024 is expected"),
    ("workers", True, "true: a whole number from 1 to 1024 is expected"),
    ("workers", 2.0, "2.0: a whole number from 1 to 1024 is expected"),
    ("devices", 2, "2: a list of different whole numbers from 0 to 1023 is expected"),
    ("devices", [0, -1], "[0, -1]: a list of"),
    ("devices", [0, "1"], '[0, "1"]: a list of'),
    ("devices", [1, 0, 1], "[1, 0, 1]: a device stands there twice"),
    ("devices", [], "[]: a list of"),
    ("env", {"A B": "x"}, '{"A B": "x"}: an object such as'),
    ("env", {"A=B": "x"}, "an object such as"),
    ("env", {"1A": "x"}, "an object such as"),
    ("env", {"": "x"}, "an object such as"),
    ("env", {"A": 1}, '{"A": 1}: an object such as'),
    ("env", {"A": "x\n"}, "an object such as"),
    ("env", ["A"], "an object such as"),
    ("key", "", '"": text without control characters is expected'),
    ("key", "a\n", "text without control characters is expected"),
    ("setup", "module load cuda\nreboot", "text without control characters is expected"),
    ("python", None, "null: text without control characters is expected"),
    ("base_dir", "/a\0", 'a whole path, such as "/mnt/disk/runs" is expected'),
    ("base_dir", "runs", 'a whole path, such as "/mnt/disk/runs" is expected'),
])  # fmt: skip
def test_a_mistake_is_explained(says, key, value, why):
    text = says(["first", {"host": "second", key: value}])
    assert text.startswith(f"machine 2: {key} is ") and why in text


def test_names_that_would_share_their_files_are_refused(says):
    assert "the name gpu-1 stands there twice, or nearly" in says(["gpu.1", "gpu-1"])
    assert "twice, or nearly" in says([f"{'a' * 40}{end}" for end in "bc"])


def test_an_unknown_key_names_the_nearest_known_one(says):
    assert says([{"host": "a", "usr": "b"}]).startswith('machine 1: unknown key "usr"; the nearest known key is user')


def test_the_host_must_be_there(says):
    assert says([{"user": "ann"}]).startswith("machine 1: host is missing: a host's name or address")


@pytest.mark.parametrize("entry", [5, None, True, ["a"]])
def test_an_entry_is_a_host_or_an_object(says, entry):
    assert says(["a", entry]).startswith("machine 2: a host, or an object that has one, is expected, not")


@pytest.mark.parametrize("value", [[], {}, "a", 5, {"host": "a"}])
def test_a_list_with_at_least_one_machine_is_expected(says, value):
    assert "a list with at least one machine is expected" in says(json.dumps(value))


def test_comments_are_named(says):
    assert says('[\n  "a" // the old one\n]') == "line 2, column 7: comments are not supported"


def test_workers_and_devices_exclude_each_other(says, write):
    assert "workers and devices exclude each other" in says([{"host": "a", "workers": 2, "devices": [0, 1]}])
    machines.load(write([{"host": "a", "workers": 2}, {"host": "b", "devices": [0, 1]}]))


@pytest.mark.parametrize("first, second, what", [
    ("a", "a", "host"),
    ("a", "A", "host"),
    ("a", {"host": "a", "name": "other"}, "host"),
    ("a", {"host": "a", "port": 22, "name": "other"}, "host"),
    ({"host": "a", "name": "x"}, {"host": "b", "name": "X"}, "name"),
    ({"host": "a", "name": "b"}, "b", "name"),
    ("a", {"host": "a", "port": 23}, "name"),
])  # fmt: skip
def test_duplicates_are_refused(says, first, second, what):
    text = says(["other-1", first, second])
    assert text.startswith(f"machine 3: the {what} ") and "stands there twice" in text


def test_one_host_on_two_ports_is_two_machines(write):
    assert len(machines.load(write(["a", {"host": "a", "port": 23, "name": "a-23"}]))) == 2


@pytest.mark.parametrize("width", [40, 80, 200])
def test_commands_to_be_copied_are_one_line(width):
    """However narrow the terminal is: in the table of machines, of what was started, and of who is still there."""
    one, two = (Machine(host=host, name=host) for host in ("gpu1", "gpu2"))
    add = f"echo 'gpu1 ssh-ed25519 {'A' * 300}' >> /home/ann/.ssh/known_hosts"
    install = f"/home/ann/.venv/bin/python -m pip install {' '.join(f'package{n}==1.{n}' for n in range(20))}"
    reports = [Report(one, why=f"its host key is not known; then: {add}"), Report(two, why=f"it lacks 20: {install}")]
    text = io.StringIO()
    screen = console(text, width)
    preflight.show(screen, reports)
    launch_tables.started(screen, [one, two], {}, {"gpu1": add})
    launch_tables.ended(screen, [one, two], {}, {"gpu1": add, "gpu2": install})
    assert (text.getvalue().count(f"{add}\n"), text.getvalue().count(f"{install}\n")) == (3, 2)


def test_what_machines_have_fits_a_narrow_terminal():
    """No word is broken: a machine with GPUs, and one whose torch is another; workers with long names."""
    has = {**agent.facts(["torch", "transformers"]), "devices": ["NVIDIA A100-SXM4-80GB, 81920 MiB"] * 8}
    other = {**has, "versions": {**has["versions"], "torch": "2.9.0"}, "devices": []}
    entries = [Machine(host=host, name=host) for host in ("192.168.0.11", "gpu2.lab.example.org")]
    found = [
        Report(each, facts=f, free=1 << 40, missing=[], after=0.3)
        for each, f in zip(entries, (has, other), strict=True)
    ]
    text = io.StringIO()
    preflight.show(console(text, 80), found)
    for whole in ("192.168.0.11", "gpu2.lab.example.org", "2.9.0,", "A100-SXM4-80GB", "no accelerator", "1.1 TB"):
        assert whole in text.getvalue()
    seats = [{"name": "gpu2-0-0123abcd", "pid": 123456, "code": code} for code in (None, 0)]
    text = io.StringIO()
    console(text, 80).print(launch_tables.supervisors([{"launch": 1, "ago": ago, "seats": seats} for ago in (9, 99)]))
    said = text.getvalue()
    assert said.count("gpu2-0-0123abcd") == said.count("123456") == 4 and max(map(len, said.splitlines())) <= 80
    assert said.count("at work") == said.count("not heard of") == 1 and said.count("ended ") >= 2


@pytest.mark.parametrize("about, each, note", [
    ({"workers": 8}, 1, "8 workers take 4 GPUs in turn, up to 2 on one, which share its memory and its speed"),
    ({"workers": 2, "env": {"CUDA_VISIBLE_DEVICES": "3"}}, 1,
     "2 workers take 1 GPU in turn, up to 2 on one, which share its memory and its speed"),
    ({"workers": 3}, 2, "3 workers take 4 GPUs in turn, up to 2 on one, which share its memory and its speed"),
    ({}, 1, "1 worker uses 1 of 4 GPUs; the others stay idle"),
    ({"workers": 4}, 1, ""), ({"workers": 2}, 2, ""), ({"devices": (0, 1)}, 1, ""),
])  # fmt: skip
def test_how_many_workers_share_a_gpu_is_said(about, each, note):
    report = Report(Machine(host="a", name="a", **about), facts={**agent.facts([]), "devices": ["H200"] * 4})
    preflight.judge([report], Report(Machine(host="localhost", name="here")), {}, False, each)
    assert not report.why and [each for each in report.notes if "GPU" in each] == ([note] if note else [])


def test_two_entries_that_are_one_box_are_named():
    box = agent.facts([])
    assert box["box"]
    entries = [Machine(host=host, name=host) for host in ("gpu1", "192.168.0.7", "gpu2")]
    reports = [Report(each, facts={**box, "box": b}) for each, b in zip(entries, ("a", "a", "b"), strict=True)]
    preflight.judge(reports, Report(Machine(host="localhost", name="here")), {}, strict=False)
    notes = [[note for note in report.notes if "same machine" in note] for report in reports]
    assert "as 192.168.0.7," in notes[0][0] and "as gpu1," in notes[1][0] and not notes[2]
    assert not any(report.why for report in reports)

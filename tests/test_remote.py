"""What else the launcher is made of: code in a file, known hosts, judgements, a script for Slurm."""

import ast
import base64
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from fleet.host import Host
from fleet.machines import Machine
from fleet.remote import agent, agent_link, engines, preflight
from fleet.remote.code import keep, pack
from fleet.remote.engines import Via
from fleet.remote.launcher import Launcher, place, seats
from fleet.remote.preflight import Report
from fleet.remote.route import Route, first_hop, known, route_to
from fleet.run import create_run
from fleet.run_config import UserError
from tests.helpers import ROOT
from tests.launching import old_pythons
from tests.toy.config import ToyConfig

# -- code --------------------------------------------------------------------------------------------------------------

CHECKS = f".check-{os.getuid()}"


def test_the_same_files_give_the_same_code(tmp_path):
    for name in ("b", "a"):
        folder = tmp_path / name
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "x.py").write_text("x = 1\n")
        (folder / ".hidden.py").write_text("no\n")
        (folder / "requirements.txt").write_text("torch==2.13.0\nlm-eval[hf]==0.4.13\n# words\n")
    one, two = pack(tmp_path / "a"), pack(tmp_path / "b")
    assert one == two and one.requirements == {"torch": "2.13.0", "lm-eval": "0.4.13"}
    assert tarfile.open(fileobj=BytesIO(one.data)).getnames() == ["inner/x.py", "requirements.txt"]
    (tmp_path / "a" / "inner" / "x.py").write_text("x = 2\n")
    assert pack(tmp_path / "a").digest != one.digest
    with pytest.raises(UserError, match="no such folder"):
        pack(tmp_path / "c")


def test_only_the_code_that_was_named_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store, _ = create_run(tmp_path / "base", "run", ToyConfig().bound(), Host())
    code = pack(ROOT)
    keep(store, code)
    keep(store, code)
    tar = tmp_path / "base" / "run" / code.name
    there = Path(agent.fetch(str(tar), code.digest)["code"])
    assert (there / "fleet" / "worker.py").read_bytes() == (ROOT / "fleet" / "worker.py").read_bytes()
    assert there.stat().st_mode & 0o077 == 0
    (there / "fleet" / "worker.py").write_text("")  # as after a power cut
    assert agent.fetch(str(tar), code.digest) == {"code": str(there)}
    assert (there / "fleet" / "worker.py").read_bytes() == (ROOT / "fleet" / "worker.py").read_bytes()
    tar.chmod(0o600)
    tar.write_bytes(tar.read_bytes()[:-512] + b"x" * 512)
    assert agent.tidy([]) == {"removed": 1} and not there.exists()
    with pytest.raises(agent.Problem, match="not the code that was sent"):
        agent.fetch(str(tar), code.digest)
    keep(store, code)  # what was damaged is put there again
    assert agent.fetch(str(tar), code.digest) == {"code": str(there)}


def test_where_there_is_no_git_all_that_the_packages_hold_is_packed_too(tmp_path):
    """As in a folder that somebody copied: a page needs its style."""
    packages = {"fleet", "merge", "train", "evomerge"}
    for package in packages:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    wanted = {
        name for name in tarfile.open(fileobj=BytesIO(pack(ROOT).data)).getnames() if name.split("/")[0] in packages
    }
    assert set(tarfile.open(fileobj=BytesIO(pack(tmp_path).data)).getnames()) >= wanted


def test_what_only_concerns_the_launcher_is_not_packed(tmp_path):
    for name in ("a.py", "machines.json"):
        (tmp_path / name).write_text("1\n")
    (tmp_path / "runs" / "r").mkdir(parents=True)
    (tmp_path / "runs" / "r" / "run.json").write_text("{}\n")
    packed = pack(tmp_path, [tmp_path / "inner" / ".." / "machines.json"])
    assert tarfile.open(fileobj=BytesIO(packed.data)).getnames() == ["a.py"]


def test_tokens_are_never_left_in_another_folder(tmp_path):
    """Somebody else's link in their place, whose old files would be swept away."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "old").write_text("mine")
    os.utime(home / "old", (0, 0))
    (tmp_path / CHECKS).symlink_to(home)
    with pytest.raises(agent.Problem, match="is a link"):
        agent.show(str(tmp_path), "0123456789ab-1")
    assert [each.name for each in home.iterdir()] == ["old"]
    (tmp_path / CHECKS).unlink()
    for name in ("ffffffffffff-1", "stranger"):
        agent.show(str(tmp_path), name)
        os.utime(tmp_path / CHECKS / name, (0, 0))
    agent.show(str(tmp_path), "0123456789ab-1")
    assert sorted(each.name for each in (tmp_path / CHECKS).iterdir()) == ["0123456789ab-1", "stranger"]


@pytest.mark.parametrize("name, kind", [
    ("../out", tarfile.REGTYPE), ("/out", tarfile.REGTYPE), ("a/../../out", tarfile.REGTYPE), ("out", tarfile.SYMTYPE),
    ("out", tarfile.FIFOTYPE), ("a//b", tarfile.REGTYPE),
])  # fmt: skip
def test_code_that_would_leave_its_folder_is_refused(tmp_path, monkeypatch, name, kind):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    packed = BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "/etc/passwd"
        tar.addfile(entry)
    with pytest.raises(agent.Problem, match="not a plain file"):
        agent.receive(hashlib.sha256(packed.getvalue()).hexdigest(), base64.b64encode(packed.getvalue()).decode())


# -- the way there -----------------------------------------------------------------------------------------------------


def test_the_user_s_own_ssh_configuration_counts(tmp_path):
    (tmp_path / "more").write_text("Host gpu?\n  User ann\n  Port 2200\n  ProxyJump bob@gate:99,second\n")
    (tmp_path / "config").write_text(
        f"Include {tmp_path}/more\nHost gpu1\n  HostName 10.1.2.3\n  HostKeyAlias one\n"
        f"  IdentityFile {tmp_path}/id_%r\n  IdentitiesOnly yes\n"
        "Host gate\n  HostName gate.example.org\n  IdentityAgent none\n"
        f"Host piped\n  ProxyCommand nc %h %p\n  UserKnownHostsFile {tmp_path}/known\n"
    )
    config = tmp_path / "config"
    route = route_to(Machine(host="gpu1"), config)
    assert (route.host, route.port, route.user, route.alias) == ("10.1.2.3", 2200, "ann", "one")
    assert route.keys[0] == tmp_path / "id_ann" and route.keys_only and route.agent and route.known_as == "one"
    hop, rest = first_hop(route, config)
    assert (hop.host, hop.port, hop.jump, rest) == ("second", 22, "bob@gate:99", route)
    gate, _ = first_hop(hop, config)
    assert (gate.host, gate.port, gate.user, gate.agent) == ("gate.example.org", 99, "bob", False)
    assert route_to(Machine(host="gpu1", user="me", port=7, key="/k"), config).port == 7
    piped = route_to(Machine(host="piped"), config)
    assert piped.proxy == "nc piped 22" and piped.known_hosts[0] == tmp_path / "known"
    (tmp_path / "broken").write_text("Host a\n  Nonsense yes\n")
    with pytest.raises(UserError, match="your SSH configuration cannot be used: .*terminating"):
        route_to(Machine(host="a"), tmp_path / "broken")


def test_known_hosts_may_be_hashed_patterns_revoked_or_broken(tmp_path):
    def key(name: str) -> str:
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
        return " ".join((tmp_path / f"{name}.pub").read_text().split()[:2])

    plain, hashed, bad = key("plain"), key("hashed"), key("bad")
    (tmp_path / "hashed_hosts").write_text(f"secret.org {hashed}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", tmp_path / "hashed_hosts"], check=True, capture_output=True)
    (tmp_path / "hosts").write_text(
        f"*.lab.org {plain}\n@cert-authority *.lab.org {plain}\n@revoked a.lab.org {bad}\nnot a line\n"
        f"a.lab.org ssh-strange AAAA\n[port.org]:2222 {plain}\n"
    )
    files = (tmp_path / "hosts", tmp_path / "hashed_hosts", tmp_path / "absent")

    def about(host: str, port: int = 22):
        return known(Route(host, port, "me", known_hosts=files))

    found = about("a.lab.org")
    assert [each.get_base64() for each in found.keys] == [plain.split()[1]] and len(found.revoked) == 1
    assert len(found.notes) == 1 and "@cert-authority" in found.notes[0]  # what OpenSSH cannot read it skips itself
    assert [each.get_base64() for each in about("secret.org").keys] == [hashed.split()[1]]
    assert about("port.org").keys == () and len(about("port.org", 2222).keys) == 1


# -- judgements --------------------------------------------------------------------------------------------------------


def report(name: str, **facts: object) -> Report:
    usual = {
        "host": name, "python": "3.11.7", "executable": "/py", "versions": {"torch": "2.13.0", "rich": "15"},
        "cores": 2, "memory": 1 << 34, "devices": [], "clock": 0.0, "lingers": True,
    }  # fmt: skip
    return Report(Machine(host=name, name=name), facts={**usual, **facts}, missing=[])


def judged(*reports: Report, here: Report | None = None, strict: bool = False) -> list[str]:
    here = here or Report(Machine(host="here", name="here"))
    preflight.judge(reports, here, {"torch": "2.13.0", "rich": "15"}, strict)
    return [each.why for each in reports]


def test_what_is_missing_is_named_with_the_command_that_mends_it():
    one = report("a", versions={"torch": "", "rich": "15"})
    assert judged(one, report("b")) == ["its Python lacks torch: /py -m pip install torch==2.13.0", ""]
    few = report("a", devices=["H200"])
    few.machine = Machine(host="a", name="a", devices=(0, 1))
    assert judged(few) == ["device 1 is not there: it has 1 accelerators"]
    assert seats(few.machine, 1) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]
    assert seats(few.machine, 2) == [{"CUDA_VISIBLE_DEVICES": "0,1"}]
    assert seats(Machine(host="a", workers=3), 2) == [{}, {}, {}]
    with pytest.raises(UserError, match="has 2 devices: not a multiple of devices_per_worker, 3"):
        seats(few.machine, 3)


def test_versions_that_differ_are_noted_or_refused():
    reports = [report("a"), report("b", versions={"torch": "2.12.0", "rich": "15"})]
    assert judged(*reports) == ["", ""] and "torch differs: 2.13.0 on a, 2.12.0 on b" in reports[1].notes[0]
    assert all("python differs" in why for why in judged(report("a"), report("b", python="3.12.1"), strict=True))


def test_machines_on_another_disk_are_told_apart():
    a, b, c = report("a"), report("b"), report("c")
    a.missing, b.missing, c.missing = ["c"], ["c"], ["a", "b"]
    assert judged(a, b, c) == [
        "",
        "",
        "its BASE_DIR is another disk than others': is the shared one mounted there? Those who share one: a, b / c",
    ]
    alone = [report("a"), report("b")]
    alone[0].missing, alone[1].missing = ["b"], ["a"]
    assert all("another disk" in why for why in judged(*alone))
    late = report("a")
    late.clock = -30.0
    assert judged(late) == [""] and late.notes == ["its clock is 30 seconds behind"]


def test_slurm_gets_a_script_that_a_shell_can_only_read_in_one_way(tmp_path):
    (tmp_path / "evolution.json").write_text(json.dumps({"ALGORITHM": "diloco", "NUM_MACHINES": 5, "THREADS": 2}))
    launcher = Launcher(place(tmp_path / "evolution.json", "", {"diloco": ("d.py",)}), (), {"diloco": ("d.py",)}, ROOT)
    python = tmp_path / "it's python"
    python.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
    python.chmod(0o700)
    made = launcher.foreseen()
    engine = engines.engine_of(launcher, Via(["slurm"], str(python), ["--partition=gpu"]), made, 1)
    script = engine.plan(5, 2, "ID", "/runs/x")
    lines = script.splitlines()
    assert "#SBATCH --ntasks=5" in lines and "#SBATCH --cpus-per-task=2" in lines and "#SBATCH --partition=gpu" in lines
    assert "#SBATCH --job-name=fleet-ID" in lines
    fake = script.replace("srun --kill-on-bad-exit=0", "env SLURM_PROCID=3")
    words = subprocess.run(["bash"], input=fake, text=True, capture_output=True, check=True).stdout.split("\0")
    assert words[:2] == ["-P", "-c"] and words[4] == "3" and json.loads(words[3])["digest"] == launcher.code.digest
    compile(words[2], "program", "exec")
    with pytest.raises(UserError, match="cannot be told such a name"):
        engine.plan(5, 2, "ID", '/runs/"x')


def test_an_unknown_method_is_named(tmp_path):
    (tmp_path / "evolution.json").write_text('{"ALGORITHM": "magic"}')
    with pytest.raises(UserError, match="ALGORITHM 'magic': the launcher starts edt or diloco"):
        place(tmp_path / "evolution.json", "", {"edt": (), "diloco": ()})


# -- old Pythons -------------------------------------------------------------------------------------------------------


def test_any_python_can_read_the_first_line_that_it_is_given():
    ast.parse(agent_link._BOOT, feature_version=(3, 4))
    for python, version in old_pythons().items():
        source = agent_link.AGENT.read_bytes()
        said = subprocess.run([python, "-u", "-c", agent_link._BOOT, "@1 "], capture_output=True, check=True,
                              input=f"{len(source)}\n".encode() + source).stdout  # fmt: skip
        assert said == f'\n@1 {{"old": "{version}"}}\n'.encode(), python

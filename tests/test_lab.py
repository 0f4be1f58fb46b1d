"""The lab itself: machines that are apart, power and cables, keys, disks, and misfortunes of the shared disk."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, until
from tests.lab import faults
from tests.lab.luck import Rule
from tests.lab.machine import Machine
from tests.lab.machines import Lab, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

REFUSED = 255  # SSH's own exit code
HOLD = """
import sys, time
from pathlib import Path
from tests.lab.machines import Lab
with Lab(Path(sys.argv[1])) as lab:
    print(lab.network.prefix, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """h3 stands behind h1, h2 has the shared folder elsewhere, h4 not at all."""
    folder = tmp_path_factory.mktemp("lab")
    with Lab(
        folder, ("h1", "h2", "h3", "h4"), 64, behind={"h3": "h1"}, mounts={"h2": Path("/mnt/other")}, unshared=["h4"]
    ) as made:
        yield made


def ssh(lab: Lab, name: str, command: str = "true", *options: str) -> subprocess.CompletedProcess[str]:
    line = ["ssh", "-F", str(lab.ssh_config), "-o", "BatchMode=yes", *options, name, command]
    return subprocess.run(line, capture_output=True, text=True, timeout=30, check=False)


def lets_in(lab: Lab, name: str) -> bool:
    return ssh(lab, name).returncode == 0


def is_silent(lab: Lab, name: str, *options: str) -> bool:
    return ssh(lab, name, "true", "-o", "ConnectTimeout=1", *options).returncode == REFUSED


def python(machine: Machine, program: str, *arguments: object) -> str:
    done = machine.run(sys.executable, "-c", f"import os, sys\n{program}", *map(str, arguments))
    assert not done.returncode, done.stderr
    return done.stdout.strip()


# -- machines ----------------------------------------------------------------------------------------------------------


def test_each_is_a_machine_of_its_own(lab):
    for name in ("h1", "h2", "h3", "h4"):
        assert ssh(lab, name, "hostname; echo ~; pwd").stdout.split() == [name, f"/home/w-{name}", f"/home/w-{name}"]
    boots = {each.do("cat /proc/sys/kernel/random/boot_id") for each in lab}
    assert len(boots) == 4
    lab["h1"].do("echo private > /root/mine; setsid sleep 600 >/dev/null 2>&1 </dev/null &")
    until(lambda: lab["h1"].pids("sleep 600"), "what was begun beside is there")
    assert not lab["h2"].pids("sleep 600")
    assert not Path("/root/mine").exists() and lab["h2"].run("cat", "/root/mine").returncode
    assert python(lab["h2"], f"sys.path.insert(0, {str(ROOT)!r}); import fleet.disk; print('sees the project')")


def test_orphans_are_collected(lab):
    lab["h1"].do("(sleep 0.1 &); (sleep 0.1 &); sleep 0.3")
    assert "defunct" not in lab["h1"].do("ps ax")


def test_the_shared_folder_and_those_without_it(lab):
    (lab.shared / "word").write_text("one")
    places = {"h1": lab.shared, "h2": Path("/mnt/other"), "h3": lab.shared}
    for name, place in places.items():
        assert lab[name].do(f"cat {place}/word; echo {name} > {place}/word") and f"{name}\n" in open(
            lab.shared / "word"
        )
    for name in ("h2", "h4"):
        assert lab[name].do(f"ls {lab.shared}; touch {lab.shared}/own") == ""
    assert not (lab.shared / "own").exists()


def test_one_behind_another_is_reached_through_that_one_alone(lab):
    assert lets_in(lab, "h3")
    assert is_silent(lab, "h3", "-o", "ProxyJump=none") and is_silent(lab, "h3", "-o", "ProxyJump=h2")
    assert lab["h1"].run("ssh", "-F", str(lab.ssh_config), "-o", "ProxyJump=none", "h3", "hostname").stdout == "h3\n"


@pytest.mark.parametrize("name", ["h1", "h3"])
def test_power_and_cable(lab, name):
    machine = lab[name]
    machine.do("echo kept > kept; sleep 600 >/dev/null 2>&1 &")
    before = machine.do("cat /proc/sys/kernel/random/boot_id")
    machine.power_off()
    assert is_silent(lab, name)
    machine.start()
    assert lets_in(lab, name) and not machine.pids("sleep 600")
    assert machine.do("cat kept") == "kept\n" and machine.do("cat /proc/sys/kernel/random/boot_id") != before
    machine.cut()
    assert is_silent(lab, name)
    machine.heal()
    assert lets_in(lab, name) and lets_in(lab, "h3")


def test_an_sshd_that_hangs(lab):
    lab["h2"].hang()
    assert "banner exchange" in ssh(lab, "h2", "true", "-o", "ConnectTimeout=1").stderr
    lab["h2"].answer()
    assert lets_in(lab, "h2")


def test_a_new_host_key(lab):
    line = lab["h4"].new_host_key()
    assert "HOST IDENTIFICATION HAS CHANGED" in ssh(lab, "h4").stderr
    known = [each for each in lab.known_hosts.read_text().splitlines() if not each.startswith("h4,")]
    lab.known_hosts.write_text("\n".join([*known, line]))
    assert lets_in(lab, "h4")


def test_a_full_disk_and_a_read_only_home(lab):
    machine = lab["h4"]
    machine.fill(spare_kb=100)
    assert "No space left" in machine.run("dd", "if=/dev/zero", "of=big", "bs=1k", "count=200").stderr
    machine.make_room()
    machine.do("dd if=/dev/zero of=big bs=1k count=200 2>&1")
    machine.read_only_home()
    assert "Read-only" in ssh(lab, "h4", "touch small").stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_however_the_owner_ends(tmp_path, number):
    """And two labs stand side by side."""
    started = [
        subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / name], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                         stderr=subprocess.DEVNULL)
        for name in ("one", "two")
    ]  # fmt: skip
    prefixes = {each.stdout.readline().strip() for each in started}
    assert len(prefixes) == 2 and "" not in prefixes
    networks = [f"lab{prefix.rpartition('.')[2]}" for prefix in prefixes]
    assert held(tmp_path)
    for each in started:
        each.send_signal(number)
        each.wait(20)
        each.stdout.close()
    until(lambda: not held(tmp_path), "its processes end", seconds=5)
    until(lambda: not any(Path(f"/sys/class/net/{each}").exists() for each in networks), "its network goes", seconds=5)
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def held(folder: Path) -> list[str]:
    """Processes that have something of a lab below this folder mounted, or in their environments."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            said = (process / "environ").read_bytes() + (process / "mounts").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in said and int(process.name) != os.getpid():
            found.append(process.name)
    return found


# -- the shared disk ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def disk(lab: Lab) -> faults.Faults:
    if why := faults.why_not():
        pytest.skip(why)
    return faults.Faults(lab["h3"])


def test_all_that_a_store_does_goes_through(lab, disk):
    disk.are()
    program = """
from pathlib import Path
from fleet.disk import Disk
disk = Disk(Path(sys.argv[1]))
disk.mkdir("files")
disk.write("files/draft", b"x" * (5 << 20), sync=True)
disk.link("files/draft", "files/linked")
disk.sync("files")
disk.rename("files/draft", "files/moved")
with open(disk.path("files/moved"), "r+b") as file:
    import mmap
    assert mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)[5 << 10] == ord("x")
print(sum(map(len, disk.blocks("files/linked"))), sorted(disk.list("files")), disk.stamp("files/moved")[1])
disk.remove("files/moved")
log = disk.append("log")
log.write(b"a"), log.write(b"b"), log.close()
print(disk.read("log", 9), sorted(disk.list("")))
"""
    said = python(lab["h3"], f"sys.path.insert(0, {str(ROOT)!r})\n{program}", lab.shared)
    assert "5242880 ['linked', 'moved'] 5242880" in said and "b'ab' ['files', 'log'" in said
    assert (lab.shared / "files" / "linked").stat().st_nlink == 1


def test_errors_and_half_writes_when_told(lab, disk):
    disk.are(
        Rule("write", "*/small", short=2, skip=1, count=1),
        Rule("getattr", "/old", error="ESTALE"),
        Rule("link", error="EIO", done=True),
        Rule("flush", "*/full", error="ENOSPC", delay=0.2),
    )
    program = """
def tried(call, *arguments, **more):
    try:
        return call(*arguments, **more)
    except OSError as error:
        return error.errno
os.chdir(sys.argv[1])
small = os.open("small", os.O_WRONLY | os.O_CREAT)
full = os.open("full", os.O_WRONLY | os.O_CREAT)
print(*[os.write(small, b"abc") for _ in range(3)], tried(os.stat, "old"), tried(os.link, "small", "linked"),
      os.path.exists("linked"), tried(os.close, full))
"""
    began = time.monotonic()
    said = python(lab["h3"], program, lab.shared)
    assert said == f"3 2 3 {errno.ESTALE} {errno.EIO} True {errno.ENOSPC}" and time.monotonic() - began > 0.2
    assert {"link /linked", "write /small", "flush /full", "getattr /old"} == {*disk.struck()}
    assert (lab.shared / "small").read_text() == "abcababc"


def test_it_believes_for_a_while_what_it_saw(lab, disk):
    disk.are(stale=-1, absent=-1, listing=-1)
    look = "os.chdir(sys.argv[1]); print(os.path.exists('late'), open('news').read(), 'late' in os.listdir('.'))"
    (lab.shared / "news").write_text("old")
    assert python(lab["h3"], look, lab.shared) == "False old False"
    (lab.shared / "late").touch()
    (lab.shared / "newer").write_text("new")
    (lab.shared / "newer").rename(lab.shared / "news")
    assert python(lab["h3"], look, lab.shared) == "False old False"
    python(lab["h3"], "os.chdir(sys.argv[1]); open('news', 'w').write('own')", lab.shared)
    assert python(lab["h3"], look, lab.shared) == "False own False"
    disk.are(absent=-1)
    assert python(lab["h3"], look, lab.shared) == "False own True", "the listing is fresh, and corrects the rest"
    assert python(lab["h3"], look, lab.shared) == "True own True"


def test_chances_are_the_same_for_a_seed(lab, disk):
    program = """
def opens():
    try:
        os.close(os.open(sys.argv[1], os.O_RDONLY))
    except OSError:
        return "-"
    return "+"
print("".join(opens() for _ in range(100)))
"""
    (lab.shared / "there").touch()
    seen = []
    for seed in (1, 1, 2):
        disk.are(Rule("open", "/there", chance=0.3, error="EIO"), seed=seed)
        seen.append(python(lab["h3"], program, lab.shared / "there"))
    assert seen[0] == seen[1] != seen[2] and 10 < seen[0].count("-") < 50

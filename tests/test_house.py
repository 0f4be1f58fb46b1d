"""The house keeps its order: who imports whom, what the run's own code never does, and whether pages lead somewhere."""

import ast
import fnmatch
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the top: a module may import its own group, and whatever stands on a lower floor. The first match counts.
FLOORS = (
    (("tests", "tests.*"), ("benchmarks", "benchmarks.*"), ("examples.*",)),
    (("setup",),),
    (("launch_to_machines", "edt", "edt_es", "edt_evomerge", "diloco", "own_loop_join", "*_sim", "train_fsdp"),),
    (("evomerge", "evomerge.*"), ("merge.evolve*",)),
    (("merge.search*",),),
    (
        (
            "train.member*",
            "train.own_loop*",
            "train.cluster*",
            "train.train_fsdp",
            "train.advise",
            "train.forecast",
            "train.finetune",
            "train.compare",
            "train.export",
            "train.pretraining_export",
            "train.forking",
            "train.training_commands",
            "train.posttrain_results",
        ),
    ),
    (("train", "train.*"), ("merge", "merge.*")),
    (("fleet", "fleet.*"),),
)
# toy models, and their lab
BESIDE = {
    "benchmarks": (
        *("tests.toy*", "tests.helpers", "tests.launching", "tests.lab*", "tests.searching"),
        *("tests.storm*", "tests.bucket_server"),
    ),
    "tests": (
        *("benchmarks.trials", "benchmarks.speedup", "benchmarks.tune"),  # whose arithmetic is tested
        *("benchmarks.chunked_loss", "benchmarks.gpu*", "benchmarks.machines", "benchmarks.cpu_slices"),
        *("benchmarks.workers", "benchmarks.utilisation"),
    ),
}
THIRD_PARTY = {
    "fleet": {"pydantic", "cyclopts", "rich", "paramiko", "xxhash", "ray", "tensorboard", "wandb", "trackio", "obstore"}
}
CONFIGURATION = {"pydantic"}  # and a room's configuration: whoever only reads the configuration waits for no torch


# -- imports -----------------------------------------------------------------------------------------------------------


def sources(root: Path) -> dict[str, Path]:
    """All our modules by their names."""
    files = [*root.glob("*.py"), *(file for folder in rooms(root) for file in folder.rglob("*.py"))]
    return {module_name(file.relative_to(root)): file for file in files}


def rooms(root: Path) -> list[Path]:
    return [folder for folder in root.iterdir() if folder.is_dir() and folder.name[0] != "." and [*folder.glob("*.py")]]


def module_name(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def imports(name: str, file: Path) -> Iterator[str]:
    """Every module that a file may import anywhere in it; `from a import b` may mean a.b."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                outer = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
                base = ".".join([*outer, *([node.module] if node.module else [])])
                yield from [base, *(f"{base}.{alias.name}" for alias in node.names)]
            case ast.Call(func=ast.Name("__import__") | ast.Attribute(attr="import_module"), args=[ast.Constant(), *_]):
                yield str(node.args[0].value)


def group(name: str) -> tuple[int, tuple[str, ...]] | None:
    """The floor of a module, and those that it shares a room with."""
    for floor, groups in enumerate(FLOORS):
        for patterns in groups:
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
                return floor, patterns
    return None


def complaints(root: Path) -> list[str]:
    modules, found = sources(root), []
    for name, file in sorted(modules.items()):
        if group(name) is None:
            found.append(f"{name} has no place in the house")
            continue
        room = name.partition(".")[0]
        for imported in dict.fromkeys(imports(name, file)):
            if imported in modules or group(imported):
                if not may(name, imported, modules):
                    found.append(f"{name} imports {imported}")
            elif (outer := imported.partition(".")[0]) not in sys.stdlib_module_names:
                known = (
                    CONFIGURATION
                    if name.endswith((".config", "_config")) and room != "tests"
                    else THIRD_PARTY.get(room)
                )
                if known is not None and outer not in known and outer not in modules:
                    found.append(f"{name} imports {outer}")
    return found


def may(name: str, imported: str, modules: dict[str, Path]) -> bool:
    mine, other = group(name), group(imported)
    if other is None or imported not in modules and imported.rpartition(".")[0] in modules:
        return True  # a name inside a module that is looked at itself
    beside = BESIDE.get(name.partition(".")[0], ())
    return mine == other or mine[0] < other[0] or any(fnmatch.fnmatchcase(imported, pattern) for pattern in beside)


def circle(root: Path) -> list[str]:
    """Files that import each other in a ring, wherever in them they do so; a folder's face, which hands names on, is
    none of them."""
    modules = {name: file for name, file in sources(root).items() if file.name != "__init__.py" and "tests" not in name}
    graph = {name: {*imports(name, file)} & modules.keys() - {name} for name, file in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_file_imports_itself_by_way_of_others(tmp_path):
    assert circle(ROOT) == []
    for name, line in (("a", "from fleet import b"), ("b", "def f():\n    import fleet.c"), ("c", "from .a import x")):
        file = tmp_path / "fleet" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(line)
    assert {*circle(tmp_path)} == {"fleet.a", "fleet.b", "fleet.c"}


def test_imports_go_downwards():
    assert complaints(ROOT) == []
    assert {"fleet.worker", "fleet.run_config", "tests.toy.maker", "tests.test_house"} <= sources(ROOT).keys()


@pytest.mark.parametrize("name, line, wrong", [
    ("fleet/a.py", "import torch", "fleet.a imports torch"),
    ("fleet/a.py", "import numpy as np", "fleet.a imports numpy"),
    ("fleet/a.py", "def f():\n    from transformers import x", "fleet.a imports transformers"),
    ("fleet/a.py", "if True:\n    import importlib\n    importlib.import_module('torch.nn')", "fleet.a imports torch"),
    ("fleet/a.py", "from merge import slerp", "fleet.a imports merge"),
    ("fleet/a.py", "from tests.toy import config", "fleet.a imports tests.toy"),
    ("fleet/sub/a.py", "from .. import b\nfrom ...train import data", "fleet.sub.a imports train"),
    ("fleet/a.py", "from . import b\nimport json, rich.table\nfrom fleet.b import c", ""),
    ("merge/a.py", "import train.data", "merge.a imports train.data"),
    ("merge/a.py", "from . import evolve", "merge.a imports merge.evolve"),
    ("merge/a.py", "import torch\nfrom merge import slerp\nfrom fleet import store", ""),
    ("merge/evolve.py", "from merge import slerp\nfrom train import member", ""),
    ("merge/evolve.py", "import evomerge.cli", "merge.evolve imports evomerge.cli"),
    ("train/a.py", "from merge.slerp import mix", "train.a imports merge.slerp"),
    ("train/a.py", "from train import member", "train.a imports train.member"),
    ("train/member.py", "from merge import slerp\nfrom train import data\nimport fleet.work", ""),
    ("train/member.py", "from merge import evolve", "train.member imports merge.evolve"),
    ("train/training_config.py", "import torch", "train.training_config imports torch"),
    ("evomerge/cli.py", "import train.member, merge.slerp, torch", ""),
    ("evomerge/cli.py", "import edt", "evomerge.cli imports edt"),
    ("edt_sim.py", "import edt", ""),
    ("edt.py", "import tests.toy.maker", "edt imports tests.toy.maker"),
    ("shed/a.py", "import json", "shed.a has no place in the house"),
    ("stray.py", "", "stray has no place in the house"),
])  # fmt: skip
def test_the_rules_hold_for_rooms_that_are_still_to_come(tmp_path, name, line, wrong):
    """In a house that has all its rooms, one file more."""
    for each in ("fleet/b", "merge/slerp", "merge/evolve", "train/data", "train/member", "evomerge/cli", "edt",
                 "tests/toy/maker", "tests/toy/config"):  # fmt: skip
        write(tmp_path / f"{each}.py", "")
    for folder in {"fleet", "merge", "train", "evomerge", "tests", "tests/toy"}:
        write(tmp_path / folder / "__init__.py", "")
    write(tmp_path / name, line)
    assert (complaints(tmp_path)[:1] or [""]) == [wrong]


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_the_run_starts_without_torch():
    """Imported for real, since a library could bring it along."""
    program = "import sys, fleet.worker, fleet.start, fleet.local, fleet.status; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "fleet.worker" in loaded.stdout.split()
    assert not {"torch", "transformers", "numpy", "tests"} & {*loaded.stdout.split()}


def test_who_proposes_or_logs_or_looks_loads_no_torch():
    """A search's strategy, the processes that log beside its workers, and its starter."""
    modules = "edt, diloco, evomerge.tournament_method, merge.evolve.search_method, merge.evolve.search_running"
    program = f"import sys, {modules}, train.training_commands; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "merge.parameters" in loaded.stdout.split()
    assert not {"torch", "transformers", "lm_eval"} & {*loaded.stdout.split()}


# -- what the run's own code never does --------------------------------------------------------------------------------

NEVER = {"torch.load", "eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"}
NEVER_IMPORTED = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}


def dangers(source: str) -> list[str]:
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            shell = any(k.arg == "shell" and ast.unparse(k.value) != "False" for k in node.keywords)
            tensors_alone = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            harmless = called == "torch.load" and tensors_alone
            found += [called] * (called in NEVER and not harmless) + ["shell"] * shell
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            found += [n for n in {module, *(n.partition(".")[0] for n in names if not module)} if n in NEVER_IMPORTED]
            found += [f"{module}.{n}" for n in names if f"{module}.{n}" in NEVER]
    return found


def test_the_run_reads_data_and_runs_nothing_from_it():
    files = [file for room in ("fleet", "merge", "train", "evomerge") for file in (ROOT / room).rglob("*.py")]
    assert len(files) > 40
    assert {file.name: found for file in files if (found := dangers(file.read_text()))} == {}


@pytest.mark.parametrize("source", [
    "import pickle", "from pickle import loads", "import marshal as m", "def f():\n    import shelve", "eval('1')",
    "exec('1')", "import os\nos.system('ls')", "from os import system", "subprocess.run('ls', shell=True)",
    "subprocess.Popen('ls', shell=flag)", "__import__('x')", "torch.load(f)", "torch.load(f, weights_only=flag)",
])  # fmt: skip
def test_a_danger_is_seen(source):
    assert dangers(source)


def test_tensors_alone_are_no_danger():
    assert dangers("torch.load(path, map_location='cpu', weights_only=True)") == []


# -- what is said to people --------------------------------------------------------------------------------------------

BESIDE_PLAIN = {  # who may speak otherwise, and why
    "fleet/plain.py": "it is the way",
    "fleet/console.py": "it is the other way",
    "fleet/remote/agent.py": "it comes alone, and speaks JSON to the launcher",
    "fleet/remote/supervisor.py": "it speaks JSON to agent.py",
    "fleet/remote/run_proxy.py": "it speaks JSON to the launcher",
    "fleet/report/progress_line.py": "its own words on a line that changes",
    "train/train_fsdp.py": "what --help looks like",
}


def loud(source: str) -> list[str]:
    """Calls that show text to somebody without a look at what is in it."""
    tree = ast.parse(source)
    called = [(ast.unparse(node.func), node) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    found = [name for name, _ in called if re.fullmatch(
        r"print|(rich\.console\.)?Console|sys\.(stdout|stderr)(\.buffer)?\.write|os\.write|(logging\.)?(basicConfig"
        r"|StreamHandler)|traceback\.print_\w+|(pprint\.)?pprint|warnings\.showwarning", name)]  # fmt: skip
    ends = [node for name, node in called if name in ("SystemExit", "sys.exit", "exit") and node.args]
    return found + [ast.unparse(end) for end in ends if isinstance(end.args[0], (ast.Constant, ast.JoinedStr))
                    and not (isinstance(end.args[0], ast.Constant) and isinstance(end.args[0].value, int))]  # fmt: skip


def test_all_that_is_said_goes_one_way():
    files = [
        *ROOT.glob("*.py"),
        *(f for room in ("fleet", "merge", "train", "evomerge") for f in (ROOT / room).rglob("*.py")),
    ]
    said = {str(file.relative_to(ROOT)): found for file in files if (found := loud(file.read_text()))}
    assert said.keys() <= BESIDE_PLAIN.keys(), {file: said[file] for file in said.keys() - BESIDE_PLAIN.keys()}


@pytest.mark.parametrize("source", [
    "print(x)", "Console()", "sys.stderr.write(x)", "logging.basicConfig()", "traceback.print_exc()",
    "raise SystemExit(f'{x}')", "sys.exit('why')",
])  # fmt: skip
def test_a_loud_word_is_heard(source):
    assert loud(source)


# -- README.md ---------------------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text()
PROSE = re.sub(r"^```.*?^```", "", README, flags=re.M | re.S)
PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
LINKS = [
    (str(page.relative_to(ROOT)), link)
    for page in sorted(PAGES)
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S))
    if "://" not in link
]
NAMES = [name for name in re.findall(r"`([^`\n]+)`", PROSE) if re.fullmatch(r"\S+(/\S*|\.(py|md|json|txt))", name)]
NAMES += dict.fromkeys(re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "design.md").read_text()))


@pytest.mark.parametrize("page, link", LINKS)
def test_every_link_leads_somewhere(page, link):
    file, _, section = link.partition("#")
    text = ((ROOT / page).parent / file if file else ROOT / page).read_text()
    titles = [re.sub(r"[^\w -]", "", t).strip().lower().replace(" ", "-") for t in re.findall(r"^#+ (.*)", text, re.M)]
    assert not section or section in titles


@pytest.mark.parametrize("name", NAMES)
def test_every_file_that_is_named_is_there(name):
    assert [*ROOT.glob(name)], name


def test_there_is_something_to_follow():
    assert len(LINKS) > 40 and NAMES

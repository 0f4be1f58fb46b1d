"""Every example of README.md and docs/ is run, with smaller sizes, or checked and said why it is not run; every
configuration is accepted as it stands."""

import ast
import inspect
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from fleet import recipe
from fleet.our_packages import COMMANDS
from tests import accepted, merging, searching, small
from tests.commands import answer
from tests.helpers import LONG, ROOT, until
from tests.lab import slurm
from tests.lab.machines import Lab, why_not
from tests.pages import ALL, Block, World, commands, of
from tests.toy import little_models

KINDS = {"sh", "json", "yaml", "python", "diff", "text"}

# Commands that are not run here, by page, and why; their options are checked all the same.
NOT_RUN = [
    ("README.md", ".*", "an overview: the pages that it leads to run these, or tests of their own"),
    ("buckets.md", ".*", "tests/test_bucket*.py run each of these, smaller"),
    ("changing-it.md", ".*benchmarks.*", "minutes each; tests/test_benchmarks.py holds what they compute"),
    ("clusters.md", "mount -t nfs .*", "the disk of tests/test_nfs.py is mounted with these options"),
    ("clusters.md", "ray start .*|.*--via ray.*", "tests/test_engines.py starts workers on a Ray of two nodes"),
    ("clusters.md", "python launch_to_machines.py (check|status)", "run for getting-started.md"),
    ("evomerge.md", "python -m evomerge.*", "tests/test_evomerge*.py run these, with tiny models and with none"),
    ("getting-started.md", ".*-m (venv|pip) .*", "it installs from the network, as `make run` does"),
    (
        "getting-started.md",
        "pip install .*|edt .*|.*fleet.presets .*",
        "tests/test_install.py does so, without a clone",
    ),
    ("getting-started.md", "ssh-copy-id .*", "it asks for a password"),
    ("hub.md", ".*", "tests/test_hub.py gives these to a hub of its own"),
    ("gpus.md", "make gpu.*", "minutes; tests/test_gpu_benchmark.py takes steps of it, as a dry run does"),
    ("launching.md", ".*", "tests/test_launcher.py gives each of these to real machines"),
    ("exchange.md", "python -m train.advise .*", "getting-started.md has it, for another configuration"),
    ("exchange.md", "python -m benchmarks.*", "a minute; tests/test_advise.py compares bytes with what a run moves"),
    ("forks.md", "python -m fleet.fork .*|python edt.py .*", "tests/test_fork.py forks runs that are smaller"),
    ("forks.md", "python -m train.compare .*", "tests/test_compare.py compares smaller ones"),
    ("merging.md", "python -m merge.lora .*", "tests/test_lora.py makes and merges adapters of tiny models"),
    ("merging.md", "python -m merge raw.yml .*", "tests/test_merge_raw.py merges files of its own"),
    ("own-loop.md", "python -m examples.*", "tests/test_own_loop_examples.py runs each of these, and kills it"),
    ("post-training.md", ".*", "tests/test_posttrain_whole.py runs this configuration, here and on machines"),
    ("rl.md", ".*", "minutes; tests/test_rl_whole.py runs these configurations with smaller numbers"),
    ("report.md", "ssh .*", "it shows the page of the block above it from another machine"),
    ("train_fsdp.md", ".*", "tests/test_fsdp_page.py runs each of these, smaller"),
    ("troubleshooting.md", ".*", "looks at a run, as those of getting-started.md and test_launcher.py"),
]
WRITTEN_ELSEWHERE = [
    ("evomerge.md", "In a program", "tests/test_evomerge_whole.py runs it as written"),
    ("gpus.md", "Which worker has which", "tests/test_machines.py reads it of machines with GPUs"),
    ("own-loop.md", "", "tests/own_loops.py is such a loop"),
    ("own-loop.md", "A population", "examples/characters.py is such a loop"),
    ("post-training.md", "One model by itself", "tests/test_finetune.py learns from rows of each kind"),
    ("rl.md", "Questions", "tests/test_rl.py has such rows"),
    ("rl.md", "Rewards", "tests/test_rl_runs.py has such a verifier"),
    ("rl.md", "Evolution strategies", "tests/test_es.py has the formula"),
    ("train_fsdp.md", "Between clusters, with Hivemind", "tests/test_peers.py reads what peers say of a step"),
]


@dataclass(frozen=True)
class Example:
    """Sections of a page whose blocks are run together, in the order of the sections."""

    page: str
    sections: tuple[str, ...]
    run: Callable[[World, list[Block]], None]

    @property
    def blocks(self) -> list[Block]:
        return [block for block in of(self.page, *self.sections) if not left_out(block)]


EXAMPLES: dict[str, tuple[Example, bool]] = {}
Run = Callable[[World, list[Block]], None]


def example(page: str, *sections: str, slow: bool = True) -> Callable[[Run], Run]:
    def keep(run: Run) -> Run:
        EXAMPLES[run.__name__] = (Example(page, sections, run), slow)
        return run

    return keep


def left_out(block: Block) -> bool:
    if block.kind in ("python", "text"):
        return any((block.page, block.section) == place[:2] for place in WRITTEN_ELSEWHERE)
    return block.kind == "sh" and all(why(block.page, command) for command in commands(block.text))


def why(page: str, command: str) -> str:
    return next((why for at, words, why in NOT_RUN if at == page and re.fullmatch(words, command)), "")


def do_all(world: World, here: list[Block], *files: str, **smaller: object) -> None:
    """In their order; JSON and YAML become these files."""
    names = iter(files)
    for block in here:
        needs_name = block.kind in ("json", "yaml") and not block.text.startswith("# ")
        world.do(block, next(names) if needs_name else "", **smaller)
    assert not [*names]


# -- getting-started.md ------------------------------------------------------------------------------------------------


@example("getting-started.md", "One machine")
def one_machine(world: World, here: list[Block]) -> None:
    world.configure(NUM_MACHINES=2)
    do_all(world, here)
    assert (world.root / "runs/edt/export/config.json").is_file()


@example("getting-started.md", "Which settings", slow=False)
def which_settings(world: World, here: list[Block]) -> None:
    do_all(world, here)
    assert "8 workers for 8 slots" in world.said
    of_the_large_one = world.said.rpartition("model ")[2]  # the other one's disk is measured, and may be slow just now
    assert "WIRE_DTYPE" not in of_the_large_one and "214,983,680" in of_the_large_one


@example("getting-started.md", "Your own text")
def own_text(world: World, here: list[Block]) -> None:
    small.make_text(world.root / "my-text.jsonl")
    do_all(world, here, "mine.json")
    assert "Everything is in" in world.said and (world.root / "runs/mine/export/config.json").is_file()


@example("getting-started.md", "Two machines")
def two_machines(world: World, here: list[Block]) -> None:
    with lab_of(world, "h1", "h2") as lab:
        hosts = zip(("192.168.0.1", "192.168.0.2"), lab, strict=True)
        said = "".join(f"Host {host}\n  HostName {h.address}\n  HostKeyAlias {h.name}\n" for host, h in hosts)
        lab.ssh_config.write_text(said + lab.ssh_config.read_text())
        world.shared = lab.shared
        world.edits = {'"ann"': '"root"', '"edt-venv/bin/python"': json.dumps(sys.executable)}
        do_all(world, here, "machines.json", "evolution.json")
    assert world.said.count("no worker is left") == 2 and "192-168-0-1-0" in world.said
    assert (world.root / "our-model/model.safetensors").is_file()


def lab_of(world: World, *names: str) -> Lab:
    """Machines that the person in the world reaches by `ssh`, as if the lab's configuration were his own."""
    if because := why_not():
        pytest.skip(f"no machines: {because}")
    lab = Lab(world.place / "lab", names)
    ssh = world.root / ".venv/bin/ssh"
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {lab.ssh_config} "$@"\n')
    ssh.chmod(0o755)
    return lab


# -- clusters.md -------------------------------------------------------------------------------------------------------


@example("clusters.md", "Rented GPUs with sshfs")
def rented(world: World, here: list[Block]) -> None:
    """Three machines without GPUs; the box itself does not see the disk."""
    if not shutil.which("sshfs"):
        pytest.skip("sshfs is not here (Debian's sshfs): a disk over SSH is not tested")
    mount, link, listed, launched, thin = here
    with lab_of(world, "first", "rented-1", "rented-2") as lab:
        world.shared = world.place / "nowhere"
        world.edits = {
            "sshfs -o": f"sshfs -F {lab.ssh_config} -o", "ann@": "root@", '"ann"': '"root"', '"port": 2222, ': "",
            "/home/ann/runs": "/srv/runs", '"devices": [0]': '"workers": 1', '"devices": [0, 1]': '"workers": 1',
            '"edt-venv/bin/python"': json.dumps(sys.executable),
            '"/root/edt-venv/bin/python"': json.dumps(sys.executable),
        }  # fmt: skip
        lab["first"].do(f"mkdir -p {world.shared}/runs /srv/runs; {world.edited(link.text)}")
        small.make_text(lab["first"].root / "srv/runs/text.jsonl")
        for name in ("rented-1", "rented-2"):
            lab[name].do(f"mkdir -p {world.shared}/runs; {world.edited(mount.text)}")
            assert f"{world.shared}/runs fuse.sshfs" in lab[name].do("cat /proc/mounts")
        world.done += [mount, link]
        world.do(listed, "machines.json")
        more = {"INNER_STEPS": 40, "POPULATION_SIZE": 4, "MAX_GENERATIONS": 6, "MAX_EPOCHS": 1000}
        world.do(thin, "evolution.json", **more)
        world.do(launched)
        look = commands(launched.text)[1]
        try:
            until(lambda: re.search("the run is over|stopped:", world.sh(look)), "the run is over", LONG, pause=1.0)
        finally:
            logs = world.sh("python launch_to_machines.py logs --through first")
            print(logs)
    assert {"first-0", "rented-1-0", "rented-2-0"} <= {*re.findall(r"^(\S+) .* published ", logs, re.M)}


@example("clusters.md", "Slurm")
def by_slurm(world: World, here: list[Block]) -> None:
    if because := slurm.why_not():
        pytest.skip(f"no Slurm: {because}")
    plan, shown, ended, by_hand = here
    world.configure(NUM_MACHINES=2, MAX_GENERATIONS=200, POPULATION_SIZE=4)
    world.do(plan)
    world.do(shown)
    with slurm.slurm(world.place / "slurm") as env:
        world.env |= {**env, "PATH": f"{world.root / '.venv/bin'}:{env['PATH']}", "XDG_CACHE_HOME": str(world.place)}
        world.sh("python launch_to_machines.py --via slurm --detach")
        until(lambda: [*world.root.glob("runs/edt/rounds/00001/*.done")], "its workers work", LONG, pause=0.5)
        world.do(ended)
        assert "No worker is left" in world.said
        world.configure(PROJECT_NAME="other", MAX_GENERATIONS=2)
        world.do(by_hand)
    assert (world.root / "runs/other/export/config.json").is_file()
    machines = {
        json.loads(file.read_text().splitlines()[0])["by"] for file in world.root.glob("runs/other/rounds/*/*.done")
    }
    assert len(machines) == 2


# -- exchange.md -------------------------------------------------------------------------------------------------------


@example("exchange.md", "A row anew")
def a_row_anew(world: World, here: list[Block]) -> None:
    world.edits = {"1440": "48"}
    do_all(world, here)
    assert 2 < float(world.said.splitlines()[-1]) < 6


# -- merging.md, merge-search.md, evomerge.md --------------------------------------------------------------------------


def donors(world: World, count: int = 3) -> None:
    """The pages' models: small ones of one base, with tokenizers, and an adapter."""
    from tests.test_merge_sources import ADAPTERS, adapter

    for n, name in enumerate(("org/base", "org/math-model", "my-model", "org/code-model")[: count + 1]):
        merging.tokenizer(merging.llama(world.root / name, n), "the cat sat on the mat")
    adapter(
        AutoModelForCausalLM.from_pretrained(world.root / "my-model"), world.root / "my-adapter", **ADAPTERS["plain"]
    )


@example("merging.md", "A recipe", "", slow=False)
def a_recipe(world: World, here: list[Block]) -> None:
    donors(world, 2)
    do_all(world, here, "recipe.yml")
    merged = merging.weights(world.root / "merged-model")
    base = merging.weights(world.root / "org/base")
    assert {each.dtype for each in merged.values()} == {torch.bfloat16}
    assert any(not torch.equal(each.float(), base[name]) for name, each in merged.items())


@example("merging.md", "Stages")
def stages(world: World, here: list[Block]) -> None:
    donors(world)
    do_all(world, here, "stages.yml")
    assert merging.weights(world.root / "merged-model").keys() == merging.weights(world.root / "org/base").keys()
    assert not [*world.root.glob(".merged-model*")]


@example("merging.md", "GGUF files")
def gguf_files(world: World, here: list[Block]) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed: GGUF files are not tested")
    folder = world.root / "merged-model"
    folder.mkdir()
    little_models.model(folder, "llama", little_models.by_bytes(folder, little_models.library("textwrap"), size=300))
    world.do(here[0])
    assert (world.root / "merged-model.gguf").stat().st_size > 1000
    assert (world.root / "model-again" / "model.safetensors").exists()


@example("merge-search.md", "", "What is searched")
def a_search(world: World, here: list[Block]) -> None:
    command, task, genome = here
    base, *others = searching.donors(world.root / "org", layers=8, steps=2)
    for path, name in zip([base, *others], ("org/base", "org/math-model", "org/code-model", "my-model"), strict=True):
        path.rename(world.root / name)
    searching.task(world.root / "data", "my_task")
    world.edits = {"/data/": f"{world.root}/data/", "--task-search-path my-tasks": f"--task-search-path my-tasks {FEW}"}
    world.do(task)
    world.do(genome, "genome.yml")
    world.write("my-tasks/other_task.yaml", PERPLEXITY.format(file=world.root / "data/my_task.json"))
    world.do(command)
    lines = (world.root / "searches/mine/history.jsonl").read_text().splitlines()
    assert len(lines) >= 4 and {*json.loads(lines[0])["scores"]} == {"my_task/acc,none", "other_task/perplexity,none"}


FEW = "--max-fevals 4 --workers 1 --strategy fleet"
PERPLEXITY = """task: other_task
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
metric_list: [{{metric: perplexity, aggregation: perplexity, higher_is_better: false}}]
"""


@example("evomerge.md", "What can be merged", slow=False)
def encoders(world: World, here: list[Block]) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    for n, name in enumerate(("bert-mood", "bert-topic")):
        torch.manual_seed(n)
        BertForMaskedLM(BertConfig(vocab_size=300, **shape)).save_pretrained(world.root / name)
        merging.tokenizer(world.root / name, "the cat sat", size=290)
    do_all(world, here)
    merged = Path(world.said.splitlines()[-1])
    assert (world.root / merged / "config.json").is_file()


# -- design.md, changing-it.md -----------------------------------------------------------------------------------------


@example("design.md", "The strategy", slow=False)
def the_strategy(world: World, here: list[Block]) -> None:
    block, fields = here
    names = {**vars(recipe), "__name__": __name__}
    exec(block.text, names)
    assert inspect.signature(names["Strategy"].plan) == inspect.signature(recipe.Strategy.plan)
    assert fields.text.strip() == f"Recipe({', '.join(inspect.signature(recipe.Recipe).parameters)})"
    world.done += here


@example("changing-it.md", "A merge method", slow=False)
def a_merge_method(world: World, here: list[Block]) -> None:
    donors(world)
    do_all(world, here, "recipe.yml")
    base, *others = (
        merging.weights(world.root / name) for name in ("org/base", "org/math-model", "org/code-model", "my-model")
    )
    merged = merging.weights(world.root / "merged-model")
    for layer, scale in ((0, 0.5), (3, 1.0)):
        name = f"model.layers.{layer}.mlp.up_proj.weight"
        middle = torch.stack([each[name] - base[name] for each in others]).median(0).values
        assert torch.allclose(merged[name], base[name] + scale * middle, atol=1e-6)


@example("changing-it.md", "A selection rule")
def a_selection_rule(world: World, here: list[Block]) -> None:
    do_all(world, here, "half.json", **{"POPULATION_SIZE": 6})
    assert '"half"' in (world.root / "docs/configuration.md").read_text()
    plan = json.loads((world.root / "runs/half/rounds/00002/plan").read_text().splitlines()[0])
    members = {}
    for n in range(6):
        done = json.loads(next(world.root.glob(f"runs/half/rounds/00001/m{n}.0.done")).read_text().splitlines()[0])
        members[f"1/m{n}"] = done["metrics"]["loss"]
    fitter = sorted(members, key=lambda id: members[id])[:3]
    parents = [each["parents"] for each in plan["recipes"] if each.get("task") == "child"]
    assert parents and all({*pair} <= {*fitter} for pair in parents)


@example("changing-it.md", "A data source")
def a_data_source(world: World, here: list[Block]) -> None:
    for n, name in enumerate(("one", *(f"deep/{k}" for k in range(63)))):
        (world.shared / "notes" / name).parent.mkdir(parents=True, exist_ok=True)
        words = [f"note {n} says {m} things about {name}" for m in range(400)]
        (world.shared / "notes" / f"{name}.md").write_text("\n".join(words))
    do_all(world, here, "notes.json", **{"HELD_OUT": 0.5})
    done = json.loads((world.root / "runs/notes/rounds/00000/tokens-0.0.done").read_text().splitlines()[0])
    assert done["metrics"]["train"] > 0 and "The run is over" in world.said


@example("changing-it.md", "A strategy")
def a_strategy(world: World, here: list[Block]) -> None:
    do_all(world, here, "ring.json", **{"POPULATION_SIZE": 3})
    plan = json.loads((world.root / "runs/ring/rounds/00002/plan").read_text().splitlines()[0])
    *children, spread = plan["recipes"]
    assert [each["parents"] for each in children] == [["1/m0", "1/m1"], ["1/m1", "1/m2"], ["1/m2", "1/m0"]]
    done = json.loads((world.root / "runs/ring/rounds/00002/spread.0.done").read_text().splitlines()[0])
    assert spread["task"] == "spread" and done["metrics"]["spread"] > 0
    assert "method ring" in world.said and (world.root / "runs/ring/export/config.json").is_file()


@example("report.md", "")
def a_report(world: World, here: list[Block]) -> None:
    for script in ("edt", "diloco"):
        world.configure(PROJECT_NAME=script, NUM_MACHINES=1)
        world.sh(f"python {script}_sim.py --config evolution.json")
    live = "python -m fleet.report runs/edt --serve"
    until = "until grep -q http: live.txt; do sleep 0.2; done; kill -INT %1; wait %1; cat live.txt"
    world.edits = {live: f"set -m; {live} > live.txt & {until}"}
    do_all(world, here)
    assert "http://127.0.0.1:8400/" in world.said
    for name in ("runs/edt/report.html", "edt.html", "compared.html"):
        assert (world.root / name).stat().st_size < 5e6


def test_each_change_is_short_and_applies(tmp_path):
    """The diffs fit the code as it is; the slow tests run them."""
    world = World(tmp_path, tmp_path / "shared").make()
    for block in of("changing-it.md", *dict.fromkeys(block.section for block in ALL if block.page == "changing-it.md")):
        if block.kind == "diff" or block.kind == "python":
            world.do(block)
            ast.parse(block.text) if block.kind == "python" else None
            assert len(block.text.splitlines()) <= 40, block
    assert len(world.done) == 8
    configurations = [block for block in ALL if (block.page, block.kind) == ("changing-it.md", "json")]
    files = {f"{block.line}.json": block.text for block in configurations}
    for file, said in files.items():  # with keys and values that only the changes bring
        world.write(file, said)
    world.run(["python", "-m", "tests.accepted", *files])


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if slow else name for name, (_, slow) in EXAMPLES.items()]
)
def test_an_example(name, tmp_path):
    mine = EXAMPLES[name][0]
    world = World(tmp_path, tmp_path / "shared").make()
    mine.run(world, mine.blocks)
    assert {*map(str, mine.blocks)} == {*map(str, world.done)}
    assert world.edits.keys() <= world.used, "an edit that changes nothing"


# -- whatever is not run -----------------------------------------------------------------------------------------------

RUN = {str(block) for one, _ in EXAMPLES.values() for block in one.blocks}
CHECKED = [
    (block, line) for block in ALL if block.kind == "sh" and str(block) not in RUN for line in commands(block.text)
]


def test_every_block_is_run_or_has_a_reason():
    assert len(ALL) > 50 and {"README.md", "getting-started.md", "design.md"} <= {block.page for block in ALL}
    for block in ALL:
        assert block.kind in KINDS, f"{block}: no test knows what to do with {block.kind or 'a block without a name'}"
        if block.kind == "text" and block.page == "troubleshooting.md" or block.kind == "json":
            continue  # below
        assert str(block) in RUN or left_out(block), f"{block}: add it to an example, or say why it is not run"


def test_every_reason_has_its_example():
    for page, words, _ in NOT_RUN:
        assert any(at.page == page and re.fullmatch(words, line) for at, line in CHECKED), words
    for page, section, _ in WRITTEN_ELSEWHERE:
        assert of(page, section)


@pytest.mark.parametrize("block, line", CHECKED, ids=str)
def test_a_command_that_is_not_run_has_its_options(block, line):
    match shlex.split(re.sub(r"^(\w+=\S+ )+|[;&]", " ", line)):
        case ["make", target, *settings]:
            makefile = (ROOT / "Makefile").read_text()
            assert re.search(rf"^{re.escape(target)}:", makefile, re.M)
            assert all(re.search(rf"^{each.partition('=')[0]} \?=", makefile, re.M) for each in settings)
        case ["python", "-m", module, _] if module.startswith("examples."):  # which has no options
            assert (ROOT / f"{module.replace('.', '/')}.py").is_file()
        case ["python", "-m", "merge.lora", verb, *arguments]:
            check_options(help_of("-m", "merge.lora", verb), arguments)
        case ["python", "-m", module, *arguments] if (ROOT / module.partition(".")[0]).exists():
            check_options(help_of("-m", module), arguments)
        case [command, *arguments] if command in MODULES:
            check_options(help_of(*MODULES[command]), arguments)
        case words if script := next((word for word in words if word.endswith(".py")), ""):
            assert (ROOT / script).is_file()
            arguments = words[words.index(script) + 1 :]
            check_options(help_of(script) + more_of(script, arguments), arguments)
        case [program, *_]:
            assert program not in ("python", "make") and block.page != "README.md", f"nothing is known of {line}"


MODULES = {command: (f"{module}.py",) if (ROOT / f"{module}.py").exists() else ("-m", module)
           for module, command in COMMANDS.items()}  # fmt: skip


@cache
def help_of(*script: str) -> str:
    code, said, errors = answer(*script, "--help")
    assert code == 0, errors
    return said


def more_of(script: str, arguments: list[str]) -> str:
    """Of the launcher's subcommand."""
    if script != "launch_to_machines.py":
        return ""
    return help_of(script, next((word for word in arguments[:1] if word[0] != "-"), "launch"))


def check_options(text: str, arguments: list[str]) -> None:
    for option in (word.partition("=")[0] for word in arguments if word.startswith("-")):
        assert re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", text), f"{option} is not in the help"


@pytest.mark.parametrize("block", [block for block in ALL if block.kind == "json"], ids=str)
def test_a_run_would_begin_with_each_configuration(block, tmp_path):
    if block.page != "changing-it.md":  # above
        (tmp_path / "file.json").write_text(block.text)
        accepted.check(tmp_path / "file.json")

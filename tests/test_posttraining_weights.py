"""Members that are adapters on the one given model: what they inherit, what travels, and that others have the same."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from fleet.digest import digest
from fleet.history import opened
from merge.methods import METHODS
from tests.chat_rows import SMALL, of
from tests.posttraining import config, finished, rl_config, worker
from train import adapters
from train.adapters import SETTINGS, WEIGHTS, Layers, adapted, names_of, put, taken
from train.member import posttraining_tasks, posttraining_weights
from train.member.posttraining_runtime import PosttrainingRuntime
from train.member.posttraining_weights import AdapterChild
from train.model import without_numbers
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_sections import Adapter
from train.posttrain_results import exported
from train.recipe_arguments import FIRST, RolloutArgs

R = 3
KEYS = {"adapter": {"r": R, "alpha": 6}, "lr": 1e-2, "crossover": {"method": "linear"}}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A whole run of one worker; tests only look at it."""
    return finished(rl_config(tmp_path_factory.mktemp("ran"), 1, max_generations=2, population_size=3, **KEYS))


def config_of(history, **keys) -> PosttrainConfig:
    return PosttrainConfig.joined(history.store.read("run.json")["config"], {"base_dir": str(history.store.root.parent)}
                                  ).model_copy(update=keys)  # fmt: skip


def children(history, round: int = 2) -> list[str]:
    return [f"{round}/{each.slot}" for each in history.plan(round) if each.task == "child"]


def change(factors, scale: float = 2.0) -> dict[str, torch.Tensor]:
    modules = {name.removesuffix(".lora_A.weight") for name in factors if "lora_A" in name}
    return {
        each: factors[f"{each}.lora_B.weight"].double() @ factors[f"{each}.lora_A.weight"].double() * scale
        for each in modules
    }


def child_of(history, parents: list[str], **keys) -> AdapterChild:
    """What a child of these would begin as."""
    c = config_of(history, **keys)
    inputs = {id: history.files(id) for id in (*parents, FIRST)}
    recipe = SimpleNamespace(parents=tuple(parents), genome={})
    base = FIRST if c.base_model else ""
    work = SimpleNamespace(inputs=inputs, recipe=recipe)
    return AdapterChild(PosttrainingRuntime(c), work, RolloutArgs(generation=3, slot=1, base=base))  # type: ignore[arg-type]


def test_what_travels_is_a_small_adapter_and_the_bytes_are_the_same_with_two_workers(ran):
    again = config_of(ran, project_name="again")
    one, two = worker(again, "one"), worker(again, "two")
    assert one.run() == "over" and two.run() == "over"
    assert digest(ran) == digest(opened(ran.store.root.parent / "again"))
    for id in children(ran):
        member = ran.files(id)
        assert {*member.files} == {SETTINGS, WEIGHTS} and member.metrics["steps"] > 0
        factors = load(member.read(WEIGHTS))
        assert len(factors) == 2 * 14 and {each.shape[0] for name, each in factors.items() if "lora_A" in name} == {R}
        assert any(each.any() for each in change(factors).values())


def test_a_child_begins_at_what_its_parents_change_brought_to_its_rank(ran):
    parents = children(ran)[:2]
    theirs = [change(load(ran.files(id).read(WEIGHTS))) for id in parents]
    child = child_of(ran, parents)
    found = change(child.factors)
    for module, each in found.items():
        mean = (theirs[0][module] + theirs[1][module]) / 2
        u, s, v = torch.linalg.svd(mean, full_matrices=False)
        best = u[:, :R] * s[:R] @ v[:R]
        assert torch.allclose(each, best, atol=1e-3 * float(s[0])), module
    lengths = [each.norm(dim=1) for name, each in child.factors.items() if "lora_A" in name]
    assert torch.allclose(torch.cat(lengths), torch.tensor(3**-0.5), rtol=1e-4), "as those of a new adapter"


def test_who_has_one_parent_goes_on_from_its_very_numbers(ran):
    (id, *_) = children(ran)
    theirs = load(ran.files(id).read(WEIGHTS))
    assert all(torch.equal(each, theirs[name]) for name, each in child_of(ran, [id]).factors.items())
    assert not any(each.any() for each in child_of(ran, ["1/m0"]).factors.values()), "a given model changes nothing"


@pytest.mark.parametrize("method", [name for name in METHODS if name != "passthrough"])
def test_adapters_have_children_by_every_method(ran, method):
    """With one that changes, and with the given model, which changes nothing."""
    given = ran["0/init-0"]
    base = (
        {"base_model": config_of(ran).models[0]}
        if METHODS[method].base == "required" and METHODS[method].most != 1
        else {}
    )
    t = {"t": 0.5} if "t" in METHODS[method].params else {}
    assert given
    for parents in (children(ran)[:2], [children(ran)[0], "1/m0"], ["1/m0", children(ran)[0]]):
        factors = child_of(ran, parents, crossover={"method": method, **base, **t}).factors
        assert all(bool(each.isfinite().all()) for each in factors.values()), parents


@pytest.mark.filterwarnings("ignore")
def test_whoever_wants_the_whole_model_has_what_was_judged(ran, tmp_path):
    """The exported one is, to the bit, what its own evaluation was of; and peft makes the same of base and adapter."""
    peft = pytest.importorskip("peft")
    id = children(ran)[-1]
    out = exported(ran, id, tmp_path / "out")
    runtime = PosttrainingRuntime(config_of(ran))
    work = SimpleNamespace(inputs={each: ran.files(each) for each in (id, FIRST)})
    looked, dtype = posttraining_weights.looked_at(runtime, work, id)  # type: ignore[arg-type]
    whole, there = load_file(out / "model.safetensors"), looked.live.model.state_dict()
    assert dtype == torch.float32 and all(torch.equal(each, there[name]) for name, each in whole.items())
    base, tokens = config_of(ran).models[0], torch.arange(20)[None]
    assert json.loads((out / "adapter" / SETTINGS).read_text())["base_model_name_or_path"] == base
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out / "adapter").eval()
    with torch.no_grad():
        said, wanted = loaded(tokens).logits, AutoModelForCausalLM.from_pretrained(out).eval()(tokens).logits
    assert torch.allclose(said, wanted, atol=1e-5)
    far = AutoModelForCausalLM.from_pretrained(base).eval()(tokens).logits
    assert (far - wanted).abs().max() > 1e-3


def test_members_of_several_given_models_travel_whole(tmp_path):
    history = finished(config(tmp_path, 2, max_generations=1, population_size=3, **{**KEYS, "adapter": {"r": R}}))
    assert "model.safetensors" in history.files("1/m2").files and SETTINGS not in history.files("1/m2").files


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sft", "dpo"])
def test_examples_and_preferences_teach_adapters_too(tmp_path, how):
    from tests.posttraining import preferences

    data = {"mutation_datasets": ({"source": str(preferences(tmp_path / "p.jsonl"))},)} if how == "dpo" else {}
    c = config(tmp_path, 1, max_generations=2, mutation=how, dtype="bfloat16", **{**KEYS, **data})
    history = finished(c)
    for id in children(history):
        factors = load(history.files(id).read(WEIGHTS))
        assert {each.dtype for each in factors.values()} == {torch.bfloat16}
    assert history[children(history)[0]].metrics["train_loss"] > 0


def test_a_child_that_diverges_is_what_its_parents_made_it(tmp_path, monkeypatch):
    from train.verdicts import NotFinite

    def diverges(*_):
        raise NotFinite("as if")

    monkeypatch.setattr(posttraining_tasks, "finetuned", diverges)
    history = finished(rl_config(tmp_path, 1, max_generations=1, population_size=2, **KEYS))
    member = history.files("1/m1")
    assert member.metrics["diverged"] and not any(each.any() for each in change(load(member.read(WEIGHTS))).values())


# -- factors -----------------------------------------------------------------------------------------------------------


def test_of_a_model_of_135m_weights_less_than_three_hundredths_travel():
    """SmolLM2's shape; factors and weights are of one dtype."""
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
    whole = without_numbers(LlamaConfig(**shape, **heads))
    factors = Layers.of(whole, Adapter(r=8)).nothing(8)
    assert len(factors) == 30 * 7 * 2 and whole.num_parameters() > 134e6
    assert sum(each.numel() for each in factors.values()) < 0.03 * whole.num_parameters()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_factors_come_back_as_they_were_put_in(kind, tmp_path):
    """Through files that peft loads; a pair that changes nothing stays as fresh as it was."""
    settings, plain = Adapter(**SMALL), of(kind)
    layers = Layers.of(plain, settings)
    rng = torch.Generator().manual_seed(1)
    factors = {name: torch.randn(each.shape, generator=rng) for name, each in layers.nothing(settings.r).items()}
    first = next(iter(layers.sizes))
    factors |= {name: torch.zeros_like(factors[name]) for name in names_of(first)}
    learning = adapted(plain, settings, 7)
    put(learning, factors)
    said = learning.eval()(input_ids=torch.arange(9)[None]).logits
    found = taken(learning, torch.float32)
    a, b = names_of(first)
    assert found[a].any() and not found[b].any()
    assert all(torch.equal(each, factors[name]) for name, each in found.items() if name != a)
    assert not any("lora" in name for name, _ in plain.named_parameters())
    for name, data in adapters.files_of(factors, layers, settings).items():
        (tmp_path / name).write_bytes(data)
    loaded = pytest.importorskip("peft").PeftModel.from_pretrained(of(kind), tmp_path).eval()
    assert torch.allclose(loaded(input_ids=torch.arange(9)[None]).logits, said, atol=1e-5)

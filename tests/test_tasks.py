"""lm-eval's tasks asked of many models: what simple_evaluate says, said sooner."""

import json
import logging
from pathlib import Path

import lm_eval
import pytest
import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from fleet.run_config import UserError
from tests import searching
from train import lm_eval_tasks, packed_hflm
from train.lm_eval_tasks import TaskEvaluation, TaskRequest
from train.packed_hflm import PackedHFLM

MORE = {
    "letters": """task: letters
dataset_path: json
dataset_kwargs: {data_files: {test: FILE, train: FILE}}
output_type: multiple_choice
test_split: test
fewshot_split: train
num_fewshot: 2
doc_to_text: "{{question}}"
doc_to_choice: [a1, a2, a3, a4]
doc_to_target: answer
""",
    "written": """task: written
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: generate_until
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["<pad>"], max_gen_toks: 2, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "read": """task: read
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}} {{choices[answer]}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}]
""",
    "said": """task: said
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{question}}"
doc_to_target: " {{choices[answer]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "both": """group: both
task: [facts, letters]
aggregate_metric_list: [{metric: acc, aggregation: mean, weight_by_size: true}]
""",
}
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    searching.donors(folder)
    file = searching.task(folder / "tasks") / "facts.json"
    for name, text in MORE.items():
        (folder / "tasks" / f"{name}.yaml").write_text(text.replace("FILE", str(file)))
    return folder


@pytest.fixture(autouse=True)
def machine_left_out(monkeypatch):
    """simple_evaluate starts a dozen programs to describe the machine: longer than all questions take."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def loaded(place: Path, name: str = "part0"):
    tokenizer = AutoTokenizer.from_pretrained(place / name)
    return AutoModelForCausalLM.from_pretrained(place / name, dtype=torch.float32), tokenizer


def evaluation(place: Path, tokenizer, *names: str, **more) -> TaskEvaluation:
    asked = TaskRequest(names, task_path=(str(place / "tasks"),), **more)
    return TaskEvaluation(asked, tokenizer, lm_eval_tasks.load(asked))


def reference(place: Path, model, tokenizer, *names: str, **more) -> dict:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager = TaskManager(include_path=str(place / "tasks"), include_defaults=False)
    asked = HFLM(model, tokenizer=tokenizer, batch_size=8)
    return lm_eval.simple_evaluate(asked, tasks=list(names), task_manager=manager, bootstrap_iters=0, **more)["results"]


def numbers(results) -> dict:
    found = {}
    for name, values in results.items():
        found |= {(name, key): each for key, each in values.items() if isinstance(each, float) and "stderr" not in key}
    return found


@pytest.mark.parametrize("names, more", [
    (("facts",), {}),
    (("facts", "letters"), {"limit": 20}),
    (("letters",), {"num_fewshot": 3}),
    (("facts",), {"num_fewshot": 0}),
    (("both",), {}),
    (("written",), {"limit": 6}),
    (("read", "said"), {}),
    (("letters",), {"apply_chat_template": True, "fewshot_as_multiturn": True}),
    (("letters",), {"apply_chat_template": True, "fewshot_as_multiturn": False}),
])  # fmt: skip
def test_marks_are_those_of_simple_evaluate(names, more, place):
    ours = None
    for name in ("part0", "base"):  # one after the other in the same evaluation
        model, tokenizer = loaded(place, name)
        tokenizer.chat_template = TEMPLATE if "apply_chat_template" in more else None
        ours = ours or evaluation(place, tokenizer, *names, **more)
        found, wanted = numbers(ours.marks(model).results), numbers(reference(place, model, tokenizer, *names, **more))
        assert found.keys() == wanted.keys() and len(found) > 0
        for key, value in wanted.items():
            exact = "perplexity" not in key[1]
            assert found[key] == (value if exact else pytest.approx(value, rel=1e-5)), key


SHAPE = {"vocab_size": 80, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SHAPE |= {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE), True),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=80, n_positions=64, n_embd=32, n_layer=2, n_head=4), True),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**SHAPE, head_dim=8, sliding_window=16), True),
    "narrow": (Gemma2ForCausalLM, Gemma2Config(**SHAPE, head_dim=8, sliding_window=6), True),
    "bloom": (BloomForCausalLM, BloomConfig(vocab_size=80, hidden_size=32, n_layer=2, n_head=4), False),
    "mamba": (MambaForCausalLM, MambaConfig(vocab_size=80, hidden_size=32, num_hidden_layers=2, state_size=8), False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_contexts_are_shared_where_the_model_can(kind, place):
    make, config, shares = KINDS[kind]
    torch.manual_seed(0)
    model, (_, tokenizer) = make(config).eval(), loaded(place)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours = evaluation(place, tokenizer, "facts", limit=24)
    found = ours.marks(model).results["facts"]
    assert ours._lm.shares == shares
    wanted = reference(place, model, tokenizer, "facts", limit=24)["facts"]
    assert found["acc,none"] == wanted["acc,none"] and found["acc_norm,none"] == wanted["acc_norm,none"]


def requests(place: Path, lm: PackedHFLM) -> list:
    lines = [json.loads(line) for line in (place / "tasks" / "facts.json").read_text().splitlines()]
    pairs = [(line["question"], f" {choice}") for line in lines for choice in line["choices"]]
    return [(pair, *lm._encode_pair(*pair)) for pair in pairs]


@pytest.mark.parametrize("size", [None, 1, 5, 1000])
def test_likelihoods_do_not_depend_on_batches(size, place):
    model, tokenizer = loaded(place)
    ours, plain = PackedHFLM(model, tokenizer, size), HFLM(model, tokenizer=tokenizer, batch_size=4)
    asked = requests(place, ours)
    asked += [(("", ""), [1, 2, 3] * 40, [4, 5]), (("", ""), [7] * 62, [8, 9])]  # longer than the model
    found, wanted = ours._loglikelihood_tokens(asked), plain._loglikelihood_tokens(asked, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted] and any(greedy for _, greedy in wanted)
    assert [value for value, _ in found] == pytest.approx([value for value, _ in wanted], rel=1e-4)
    most = max(sum(len(row.places) for row in batch) for batch in ours._batches(packed_hflm._rows(asked, 64, 64)))
    assert size is None or most <= max(size, 4)  # the four choices of a question stay together


def test_a_batch_has_as_many_tokens_as_one_says(place):
    """Whatever the machine has: answers must not depend on its memory."""
    model, tokenizer = loaded(place)
    ours = PackedHFLM(model, tokenizer, tokens=100)
    rows = packed_hflm._rows(requests(place, ours), 64, 64)
    sizes = [len(batch) * max(len(row.tokens) for row in batch) for batch in ours._batches(rows)]
    assert len(sizes) > 3 and 50 < max(sizes) <= 100
    assert len([*PackedHFLM(model, tokenizer)._batches(rows)]) < len(sizes)


def test_requests_are_made_once(place, monkeypatch):
    model, tokenizer = loaded(place)
    ours = evaluation(place, tokenizer, "facts")
    task, built, tokens = ours.loaded["tasks"]["facts"], [], []
    construct, encode = task.construct_requests, PackedHFLM.tok_encode
    task.construct_requests = lambda *a, **k: built.append(1) or construct(*a, **k)
    monkeypatch.setattr(PackedHFLM, "tok_encode", lambda *a, **k: tokens.append(1) or encode(*a, **k))
    first = ours.marks(model)
    counts = len(built), len(tokens)
    assert counts[0] == 72 and counts[1] > 0
    assert ours.marks(model) == first and (len(built), len(tokens)) == counts
    assert len(first.single["facts"]["acc,none"]) == 72
    assert sum(first.single["facts"]["acc,none"]) / 72 == first.results["facts"]["acc,none"]


def test_which_questions_are_asked(place):
    model, tokenizer = loaded(place)
    plain, mixed = (
        evaluation(place, tokenizer, "facts", limit=10),
        evaluation(place, tokenizer, "facts", limit=10, shuffle=True),
    )
    assert plain.questions() == {"facts": list(range(10))} != mixed.questions()
    other = evaluation(place, tokenizer, "facts", limit=10, shuffle=True, seed=1)
    assert len(set(mixed.questions()["facts"])) == 10 and other.questions() != mixed.questions()
    every = plain.marks(model, {"facts": range(72)}).single["facts"]["acc,none"]
    some = mixed.marks(model).single["facts"]["acc,none"]
    assert some == [every[n] for n in mixed.questions()["facts"]]


@pytest.mark.parametrize("names, why", [
    pytest.param(  # lm-eval looks through all its tasks
        ("fact",), "there is no task 'fact'; the nearest known one is facts", marks=pytest.mark.slow
    ),
    (("broken",), "the tasks broken cannot be loaded"),
])  # fmt: skip
def test_tasks_that_cannot_be_had(names, why, place, tmp_path):
    (tmp_path / "broken.yaml").write_text(MORE["said"].replace("task: said", "task: broken"))
    with pytest.raises(UserError, match=why):
        lm_eval_tasks.load(TaskRequest(names, task_path=(str(place / "tasks"), str(tmp_path))))
    with pytest.raises(UserError, match="not a folder"):
        lm_eval_tasks.load(TaskRequest(names, task_path=(str(tmp_path / "nowhere"),)))


def test_metrics_are_known_beforehand(place):
    asked = TaskRequest(("both", "read"), task_path=(str(place / "tasks"),))
    found = lm_eval_tasks.load(asked)
    assert lm_eval_tasks.metrics_of(found, "facts") == ["acc,none", "acc_norm,none"]  # through its group
    assert lm_eval_tasks.metrics_of(found, "both") == ["acc,none"]
    assert lm_eval_tasks.metrics_of(found, "read") == ["word_perplexity,none", "byte_perplexity,none"]
    with pytest.raises(UserError, match="task both has no metric 'f1,none'; it has acc,none"):
        lm_eval_tasks.check_metrics(found, [("facts", "acc,none"), ("both", "f1,none")])
    assert lm_eval_tasks.is_mean(found, "facts", "acc,none") and not lm_eval_tasks.is_mean(
        found, "read", "word_perplexity,none"
    )


# -- tasks whose own code fails ----------------------------------------------------------------------------------------

OWN = """
def questions(docs):
    {questions}
    return docs

def ask(doc, seen=[]):
    seen.append(doc)  # lm-eval looks at the first ones when it loads a task
    if len(seen) > 3:
        {ask}
    return doc["question"]

def marked(doc, results):
    {marked}
    return {{"acc": 1.0}}

def summed(items):
    {summed}
    return sum(items)
"""
PHASES = {
    **{"questions": "its questions", "ask": "what it asks"},
    **{"marked": "its process_results", "summed": "its aggregation of acc"},
}


def failing(folder: Path, phase: str, how: str, aggregation: str = "!function code.summed") -> dict:
    searching.task(folder, "own")
    said = (folder / "own.yaml").read_text().replace('doc_to_text: "{{question}}"', "doc_to_text: !function code.ask")
    said = said.replace("aggregation: mean", f"aggregation: {aggregation}")
    said = said.partition("  - {metric: acc_norm")[0]
    said += "process_docs: !function code.questions\nprocess_results: !function code.marked\n"
    (folder / "own.yaml").write_text(said)
    (folder / "code.py").write_text(OWN.format(**{key: how if key == phase else "pass" for key in PHASES}))
    return lm_eval_tasks.load(TaskRequest(("own",), limit=4, task_path=(str(folder),)))


def sat(loaded: dict, folder: Path) -> None:
    place = searching.donors(folder / "models", layers=1, steps=0, first=0)[0]
    tokenizer = AutoTokenizer.from_pretrained(place)
    TaskEvaluation(TaskRequest(("own",), limit=4), tokenizer, loaded).marks(AutoModelForCausalLM.from_pretrained(place))


@pytest.mark.parametrize("how", ["raise KeyError('nothing here')", "raise SystemExit('nothing here')"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_task_whose_own_code_fails_is_named(tmp_path, phase, how):
    with pytest.raises(UserError, match=r"own.*(KeyError|SystemExit): '?nothing here") as failed:
        loaded = failing(tmp_path, phase, how)
        assert phase != "questions"
        sat(loaded, tmp_path)
    assert PHASES[phase] in str(failed.value) or phase == "questions"


@pytest.mark.parametrize("mark", ["'x'", "None", "(1, 2)"])
def test_marks_of_which_there_is_no_mean_are_named(tmp_path, mark):
    loaded = failing(tmp_path, "marked", f"return {{'acc': {mark}}}", "mean")
    with pytest.raises(UserError, match="own: its process_results failed with TypeError: acc is .* there is no mean"):
        sat(loaded, tmp_path)


def test_a_file_that_a_task_misses_here_is_no_verdict_on_models(tmp_path):
    loaded = failing(tmp_path, "marked", "open('/no/such/file')")
    with pytest.raises(FileNotFoundError):
        sat(loaded, tmp_path)

"""How good a model is at lm-eval's tasks. Tasks, prompts and their tokens are made once; many models answer them."""

import contextlib
import copy
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fleet.errors import Lacking, first_line
from fleet.run_config import UserError
from train.splits import EvalSplit, Split, SplitName, normal, parts_of

K = TypeVar("K")
V = TypeVar("V")
SEED = 1234  # lm-eval's own, of examples in prompts


_ALIKE = 10  # questions of the same words, on average, whose words do not say what is asked
_KEPT = 8  # choices of questions whose requests are kept
_HOW = ("doc_to_text", "doc_to_target", "doc_to_choice", "description", "target_delimiter", "num_fewshot")


@dataclass(frozen=True)
class TaskRequest:
    """What a model is asked, and how."""

    tasks: tuple[str, ...]
    limit: int | None = None  # questions of a task
    num_fewshot: int | None = None
    shuffle: bool = False  # which questions the limit leaves
    apply_chat_template: bool | None = None  # None: where the tokenizer has one
    fewshot_as_multiturn: bool = True
    task_path: tuple[str, ...] = ()  # folders of tasks of one's own
    seed: int = 0


@dataclass(frozen=True)
class Marks:
    """Of one model: what lm-eval reports of each task or group, and each question's own."""

    results: Mapping[str, Mapping[str, Any]]  # task -> "acc,none" -> value
    single: Mapping[str, Mapping[str, list[Any]]]  # task -> "acc,none" -> question by question


def load(asked: TaskRequest, public: bool = True) -> dict[str, Any]:
    """The tasks and groups, or why they cannot be had. One's own folders come first: lm-eval's many tasks take seconds
    to look through, and may be unwanted as public test sets."""
    os.environ.setdefault("HF_DATASETS_TRUST_REMOTE_CODE", "0")
    from lm_eval.tasks import TaskManager

    for folder in asked.task_path:
        if not Path(folder).is_dir():
            raise Lacking(f"task search path {folder}: not a folder")
    with _quiet():
        manager = TaskManager(include_path=list(asked.task_path), include_defaults=False)
        if theirs := [name for name in asked.tasks if name not in manager.all_tasks]:
            manager = _with_theirs(asked.task_path)
        unknown = [name for name in theirs if name not in manager.all_tasks]
    if unknown:
        raise UserError(f"there is no task {unknown[0]!r}; the nearest known one is {_nearest(unknown[0], manager)}")
    if theirs and not public:
        raise UserError(
            f"{theirs[0]} is one of lm-eval's own tasks. A public test set that a search is scored by means nothing "
            "afterwards: score by tasks of your own, or allow it (--allow-benchmark-tasks, ALLOW_BENCHMARK_TASKS)"
        )
    try:
        with _quiet():
            loaded: dict[str, Any] = manager.load(list(asked.tasks))
    except (Exception, SystemExit) as error:  # whatever a hub, a file and a task's own code can come up with
        why = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"the tasks {', '.join(asked.tasks)} cannot be loaded: {why}") from None
    for name in asked.tasks:
        if name not in loaded["tasks"] and name not in loaded["groups"]:
            raise UserError(f"{name} is a tag of several tasks; name them: {', '.join(loaded['tasks'])}")
    for name, task in loaded["tasks"].items():
        _set_fewshot(task, asked)
        with _own_code(name, "its questions"), _quiet():
            len(task.eval_docs)
    return loaded


@functools.cache
def _with_theirs(task_path: tuple[str, ...]) -> Any:
    """lm-eval's own tasks, too: looked through once, though a name that is nobody's is asked for several times."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=list(task_path))


def check_metrics(loaded: Mapping[str, Any], wanted: Sequence[tuple[str, str]]) -> None:
    for name, metric in wanted:
        if metric not in (known := metrics_of(loaded, name)):
            raise UserError(f"task {name} has no metric {metric!r}; it has {', '.join(known)}")


def metrics_of(loaded: Mapping[str, Any], name: str) -> list[str]:
    """All that lm-eval will report of a task, or of a group of tasks."""
    if task := loaded["tasks"].get(name):
        return [f"{metric},{each.name}" for metric in task.aggregation() for each in task._filters]
    every = [each.name for task in loaded["tasks"].values() for each in task._filters]
    found = [
        f"{each.metric},{key}"
        for each in loaded["groups"][name].aggregate_metric_list or ()
        for key in each.filter_list or every
    ]
    return list(dict.fromkeys(found))


def is_mean(loaded: Mapping[str, Any], name: str, metric: str) -> bool:
    """Whether a metric is the mean of marks that each question has."""
    task = loaded["tasks"].get(name)
    return task is not None and _is_mean(task.aggregation()[metric.split(",")[0]])


def _is_mean(aggregate: Any) -> bool:
    return getattr(aggregate, "__name__", "") == "mean"


def questions(asked: TaskRequest, loaded: Mapping[str, Any]) -> dict[str, list[int]]:
    """The numbers of those that are asked, of each task."""
    found = {}
    for name, task in loaded["tasks"].items():
        there = len(task.eval_docs)
        order = np.random.default_rng([asked.seed, there]).permutation(there) if asked.shuffle else None
        chosen = range(there) if order is None else order
        found[name] = sorted(int(n) for n in chosen[: asked.limit])
    return found


def parted(asked: TaskRequest, loaded: Mapping[str, Any], held_out: float) -> dict[EvalSplit, dict[str, list[int]]]:
    """Questions for validation, and the share that is held out for the test; both are all, where nothing is held out.
    What is asked decides, and the seed: no two questions of the same words lie on two sides, be it in two tasks."""
    found: dict[EvalSplit, dict[str, list[int]]] = {"validation": {}, "test": {}}
    for name, numbers in questions(asked, loaded).items():
        sides: list[SplitName] = []
        if held_out:
            words = _words(name, loaded["tasks"][name])
            said = [words[n] for n in numbers]
            sides = parts_of(f"the questions of task {name}", said, Split(1.0, held_out), str(asked.seed))
        for on, some in found.items():
            some[name] = [n for n, side in zip(numbers, sides, strict=True) if side == on] if sides else numbers
    return found


def _words(name: str, task: Any) -> list[str]:
    """What each question asks; where nearly all ask the same, or no text, all that is known of it."""
    docs = [*task.eval_docs]
    with _own_code(name, "what it asks (doc_to_text)"):
        asked = [task.doc_to_text(doc) for doc in docs]
    if all(isinstance(each, str) for each in asked) and len({*map(normal, asked)}) > max(1, len(docs) / _ALIKE):
        return asked
    return [json.dumps(doc, sort_keys=True, default=str) for doc in docs]


class TaskEvaluation:
    """Tasks that are asked of many models, which share a tokenizer."""

    def __init__(
        self, asked: TaskRequest, tokenizer: Any, loaded: dict[str, Any], batch_size: int | None = None, tokens: int = 0
    ) -> None:
        """Requests of a batch, or its tokens; neither: what suits the kind of device."""
        from train.chat_examples import undated

        own = {name: copy.copy(task) for name, task in loaded["tasks"].items()}  # another one has prompts of its own
        self.asked, self.tokenizer, self.loaded = asked, tokenizer, {**loaded, "tasks": own}
        self._size = batch_size, tokens
        if isinstance(tokenizer.chat_template, str):
            tokenizer.chat_template = undated(tokenizer.chat_template)
        self._lm: Any = None
        self._parted = dict[float, dict[EvalSplit, dict[str, list[int]]]]()
        self._cached: dict[str, CachedTask] = {name: CachedTask(task) for name, task in own.items()}
        self.chat = bool(tokenizer.chat_template) if asked.apply_chat_template is None else asked.apply_chat_template

    def questions(self) -> dict[str, list[int]]:
        """The numbers of those that are asked, of each task."""
        return questions(self.asked, self.loaded)

    def parted(self, held_out: float) -> dict[EvalSplit, dict[str, list[int]]]:
        """The same for validation and for the test."""
        if held_out not in self._parted:
            self._parted[held_out] = parted(self.asked, self.loaded, held_out)
        return self._parted[held_out]

    def forget(self) -> None:
        """Let go of the last model: the next one needs its room."""
        if self._lm:
            self._lm.ask(None)

    def marks(self, model: Any, questions: Mapping[str, Sequence[int]] | None = None) -> Marks:
        """Ask a model all questions, or some; a model of transformers, or whatever lm-eval can ask."""
        from lm_eval.api.model import LM
        from lm_eval.evaluator import evaluate

        from train.packed_hflm import PackedHFLM

        if isinstance(model, LM):
            lm = model
        else:
            self._lm = self._lm or PackedHFLM(model, self.tokenizer, *self._size)
            self._lm.ask(model.eval())
            lm = self._lm
        chosen = {name: sorted(some) for name, some in (questions or self.questions()).items() if some}
        tasks = {name: task for name, task in self.loaded["tasks"].items() if name in chosen}
        for task in self._cached.values():
            task.answers.clear()
        with _quiet():
            found = evaluate(
                lm,
                {**self.loaded, "tasks": tasks},
                samples=chosen,
                bootstrap_iters=0,
                log_samples=False,
                apply_chat_template=self.chat,
                fewshot_as_multiturn=self.chat and self.asked.fewshot_as_multiturn,
            )
        return Marks(found["results"], {name: self._cached[name].single() for name in tasks})


def has_examples(task: Any) -> bool:
    """Whether prompts can show others than the questions themselves."""
    own = task.config.training_split or task.config.fewshot_split
    return bool(
        own
        or getattr(task.config.fewshot_config, "samples", None)
        or (task.config.validation_split and task.config.test_split)
    )


def digest(loaded: Mapping[str, Any]) -> str:
    """Of the questions, and of how they are asked as far as a file says it."""
    found = hashlib.sha256()
    for name, task in sorted(loaded["tasks"].items()):
        how = [str(said) for key in _HOW if isinstance(said := task.get_config(key), (str, int, list))]
        found.update(json.dumps([name, how, [*task.eval_docs]], sort_keys=True, default=str).encode())
    return found.hexdigest()[:16]


class CachedTask:
    """A task whose requests are made once for each choice of questions, and whose marks are kept one by one."""

    def __init__(self, task: Any) -> None:
        self.task, self.answers = task, list[Mapping[str, Any]]()
        self._made: dict[tuple[int, ...], list[Any]] = {}
        self._docs: dict[tuple[int, ...], list[tuple[int, Any]]] = {}
        self._name = str(task.config.task)
        self._build, self._iterate, self._process = task.build_all_requests, task.doc_iterator, task.process_results
        task.build_all_requests, task.doc_iterator, task.process_results = self.build, self.iterate, self.process
        self._aggregation, self._filter = task.aggregation, task.apply_filters
        task.aggregation, task.apply_filters = self.aggregation, self.filtered
        self._means = {key for key, each in self._aggregation().items() if _is_mean(each)}
        for name in ("doc_to_choice", "doc_to_target"):  # templates, which lm-eval fills in again each time
            if hasattr(task, name):
                setattr(task, name, _remembered(getattr(task, name)))

    def build(self, *, samples: list[int], **more: Any) -> None:
        def made() -> list[Any]:
            with _own_code(self._name, "what it asks (doc_to_text, doc_to_choice, doc_to_target)"):
                self._build(samples=samples, **more)
            return list(self.task.instances)

        self.task._instances = _kept(self._made, tuple(samples), made)
        for instance in self.task._instances:
            instance.resps, instance.filtered_resps = [], {}

    def iterate(self, *, samples: list[int], **more: Any) -> list[tuple[int, Any]]:
        return _kept(self._docs, tuple(samples), lambda: list(self._iterate(samples=samples, **more)))

    def process(self, doc: Any, results: Any) -> Any:
        with _own_code(self._name, "its process_results"):
            marks = self._process(doc, results)
            for key in sorted(self._means & marks.keys()):
                if not hasattr(marks[key], "__float__"):
                    raise TypeError(f"{key} is {str(marks[key])[:60]!r}, and of that there is no mean")
            self.answers.append(marks)
        return self.answers[-1]

    def filtered(self) -> Any:
        with _own_code(self._name, "its filters"):
            return self._filter()

    def aggregation(self) -> dict[str, Any]:
        """lm-eval knows its own functions by their identity."""
        found = self._aggregation()
        own = {key: each for key, each in found.items() if not str(each.__module__).startswith("lm_eval.")}
        return {**found, **{key: self._guarded(key, each) for key, each in own.items()}}

    def _guarded(self, metric: str, aggregate: Callable[[Any], Any]) -> Callable[[Any], Any]:
        @functools.wraps(aggregate)
        def guarded(items: Any) -> Any:
            with _own_code(self._name, f"its aggregation of {metric}"):
                return aggregate(items)

        return guarded

    def single(self) -> dict[str, list[Any]]:
        """lm-eval goes through all questions once for each filter."""
        filters = list(self.task.instances[0].filtered_resps)
        count = len(self.answers) // len(filters)
        found: dict[str, list[Any]] = {}
        for n, name in enumerate(filters):
            for answer in self.answers[n * count : (n + 1) * count]:
                for metric, value in answer.items():
                    found.setdefault(f"{metric},{name}", []).append(value)
        return found


def _kept(known: dict[K, V], key: K, make: Callable[[], V]) -> V:
    """Each generation asks other questions; a race asks a few sets of them again and again."""
    if key not in known:
        while len(known) >= _KEPT:
            del known[next(iter(known))]
        known[key] = make()
    return known[key]


def _remembered(of_question: Callable[..., Any]) -> Callable[..., Any]:
    """What a template makes of a question; the questions are the same objects each time."""
    known: dict[int, tuple[Any, Any]] = {}

    def remembered(doc: Any, *more: Any, **others: Any) -> Any:
        if more or others:
            return of_question(doc, *more, **others)
        if id(doc) not in known or known[id(doc)][0] is not doc:
            known[id(doc)] = doc, of_question(doc)
        return known[id(doc)][1]

    return remembered


def _set_fewshot(task: Any, asked: TaskRequest) -> None:
    """As lm-eval's simple_evaluate does: a task's own 0 examples stay 0."""
    own = task.get_config("num_fewshot")
    if asked.num_fewshot is not None and own != 0:
        task.set_config(key="num_fewshot", value=asked.num_fewshot)
    elif own is None:
        task.set_config(key="num_fewshot", value=0)
    task.set_fewshot_seed(seed=SEED)


def _nearest(name: str, manager: Any) -> str:
    import difflib

    near = difflib.get_close_matches(name, manager.all_tasks, n=3, cutoff=0.0)
    return f"{near[0]} (or {', '.join(near[1:])})" if len(near) > 1 else ", ".join(near) or "none"


@contextlib.contextmanager
def _own_code(task: str, what: str) -> Iterator[None]:
    """A task's own code fails on every machine alike, unless it asks for a file or for memory."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"task {task}: {what} failed with {type(error).__name__}: {first_line(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """lm-eval reports each step, and draws bars; here it is one of hundreds."""
    import tqdm.std

    logger, before = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    logger.setLevel(logging.ERROR)
    drawn = tqdm.std.tqdm.__init__

    def undrawn(self: Any, *args: Any, **more: Any) -> None:
        drawn(self, *args, **{**more, "disable": True})

    tqdm.std.tqdm.__init__ = undrawn
    try:
        yield
    finally:
        logger.setLevel(before)
        tqdm.std.tqdm.__init__ = drawn

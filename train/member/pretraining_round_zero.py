"""Round 0: what a run needs once. The tokenizer, each source's token files, the first weights."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file

from fleet.hashed_files import HashedFile
from fleet.places import of_hub
from fleet.scratch import passing
from fleet.snapshots import Saver
from fleet.tasks import Args
from fleet.untrusted_model import check_config_in, check_words_in
from fleet.work import Failed, InputMember, NotOnThisMachine, Work
from train import text_sources
from train.member.pretraining_runtime import CONFIG, PretrainingRuntime
from train.member.vectors import save_weights
from train.model import built, empty, flat, layout_of, read_config, same_settings, same_shapes
from train.models_on_demand import byte_level_bpe, first_of
from train.optimizers import layouts_of
from train.recipe_arguments import FIRST, TOKENIZER, InitArgs, SourceArgs
from train.splits import HELD_OUT, SPLITS, SplitName
from train.token_budget import needed, tokenizer_name, tokenizer_sources, too_short, useful
from train.training_config import TrainConfig

_SAMPLE = 4_000_000  # characters that the tokenizer is made from
_BATCH = 256  # documents that are tokenised at a time
_BLOCK = 1 << 20  # random tokens, or bytes, at a time
_EVALUATED = 16  # documents at least that held-out tokens come from, where there are so many


# -- the tokenizer -----------------------------------------------------------------------------------------------------


def make_tokenizer(runtime: PretrainingRuntime, work: Work, args: Args) -> Mapping[str, Any]:
    config, named = runtime.config, tokenizer_name(runtime.config)
    if named:
        tokenizer = named_tokenizer(named, config.trust_remote_code)
    else:
        tokenizer = own_tokenizer(config)
    with passing("tokenizer") as folder:
        tokenizer.save_pretrained(folder)
        for file in sorted(folder.iterdir()):
            if file.is_file():
                work.write(file.name, file.read_bytes())
    return {"vocabulary": len(tokenizer), "end": tokenizer.eos_token_id if tokenizer.eos_token_id is not None else -1}


def own_tokenizer(config: TrainConfig) -> PreTrainedTokenizerBase:
    """Of as much of each source as it counts."""
    sources = tokenizer_sources(config)
    if any(text_sources.kind_of(each).of_python for each in sources):
        check_stdlib(config)
    part = _SAMPLE / sum(each.weight for each in sources)
    shares = (first_of(text_sources.documents(each), round(each.weight * part)) for each in sources)
    return byte_level_bpe(config.vocab_size, chain.from_iterable(shares))


def named_tokenizer(named: str, trust: bool = False) -> PreTrainedTokenizerBase:
    """A local folder's or the hub's, once its files were looked at."""
    id, revision = of_hub(named)
    for name, check in (("config.json", check_config_in), ("tokenizer.json", check_words_in)):
        if file := cached_file(id, name, revision=revision, _raise_exceptions_for_missing_entries=False):
            check(Path(file).parent)
    return AutoTokenizer.from_pretrained(id, revision=revision, trust_remote_code=trust)


def open_tokenizer(parent: InputMember, config: TrainConfig) -> PreTrainedTokenizerBase:
    """From a member's files, which are data; one that needs code of its own, from where that came from."""
    if config.trust_remote_code and (named := tokenizer_name(config)):
        id, revision = of_hub(named)
        return AutoTokenizer.from_pretrained(id, revision=revision, trust_remote_code=True)
    with passing("tokenizer") as folder:
        for name in parent.files:
            (folder / name).write_bytes(parent.read(name))
        return AutoTokenizer.from_pretrained(folder)


# -- tokens ------------------------------------------------------------------------------------------------------------


def make_tokens(runtime: PretrainingRuntime, work: Work, args: SourceArgs) -> Mapping[str, Any]:
    """As many tokens of one source as the run needs, and those for validation and for the test. Whoever goes on with it
    has the tokens to learn from, most of all; the held-out ones are soon made again."""
    config = runtime.config
    source, parent = config.datasets[args.source], work.inputs[TOKENIZER]
    vocabulary = parent.metrics["vocabulary"]
    dtype = np.dtype("<u2" if vocabulary <= 1 << 16 else "<u4")
    wanted, least = (count(config, args.source) for count in (useful, needed))
    held = {part: list[int]() for part in HELD_OUT}
    with contextlib.ExitStack() as stack:
        files = {part: stack.enter_context(work.create(part, again=part == "train")) for part in least}
        begin = _tokens_so_far(work, files["train"])
        got = {**dict.fromkeys(least, 0), "train": files["train"].size // dtype.itemsize}
        tokenizer = partial(open_tokenizer, parent, config)
        for document, part, tokens in tokens_of(config, args.source, tokenizer, vocabulary, wanted, got, begin):
            files[part].write(np.asarray(tokens, dtype=dtype).tobytes())
            got[part] += len(tokens)
            if part == "train":
                work.between_steps(document + 1, partial(_keep_tokens, work, document + 1))
            elif not text_sources.kind_of(source).random:
                held[part] += tokens
            work.at = ("tokens", got["train"], wanted["train"])
    for part, count in got.items():
        if count < least[part]:
            raise Failed(f"{too_short(config, args.source, part, count)}, in a run with another PROJECT_NAME")
    counted = {f"{part}_bytes": _bytes(tokenizer(), tokens) for part, tokens in held.items() if tokens}
    size = (
        {"size": there} if (there := text_sources.size(source)) else {}
    )  # whoever forks the run knows whether it has grown
    return {**{part: got[part] for part in SPLITS}, "dtype": dtype.str, **counted, **size}


def _keep_tokens(work: Work, begin: int, saver: Saver) -> int:
    with saver.create("train") as copy:
        for block in work.writer.written_so_far("train"):
            copy.write(block)
    return begin


def _tokens_so_far(work: Work, file: HashedFile) -> int:
    """Of an earlier attempt; says from which document on they are to be made."""
    if not (snapshot := work.resume()):
        return 0
    with snapshot.open("train") as kept:
        while block := kept.read(_BLOCK):
            file.write(block)
    return int(snapshot.state)


def _bytes(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> int:
    """Of the text that they stand for."""
    return len(str(tokenizer.decode(tokens, skip_special_tokens=True)).encode(errors="replace"))


def check_stdlib(config: TrainConfig) -> None:
    if config.stdlib_digest and text_sources.stdlib_digest() != config.stdlib_digest:
        raise NotOnThisMachine("its Python's standard library is not that of the machine that started the run")


def tokens_of(
    config: TrainConfig,
    number: int,
    open_one: Callable[[], PreTrainedTokenizerBase],
    vocabulary: int,
    wanted: Mapping[SplitName, int],
    got: Mapping[SplitName, int],
    begin: int = 0,
) -> Iterator[tuple[int, SplitName, Any]]:
    """Of one source, each for its part, until so many are wanted; the caller counts what it has got. What is to be
    learned of the documents before `begin` is known already."""
    source = config.datasets[number]
    if text_sources.kind_of(source).random:
        yield from _random(config, number, vocabulary, wanted, begin)
        return
    if text_sources.kind_of(source).of_python:
        check_stdlib(config)
    tokenizer, spare = open_one(), list[tuple[SplitName, list[int]]]()
    ends = tokenizer.eos_token_id is not None and not text_sources.is_one_document(source)
    end = [tokenizer.eos_token_id] if ends else []
    held = {"validation": config.eval_sequences, "test": config.test_sequences}
    most = {part: max(1, sequences // _EVALUATED) * config.seq_length for part, sequences in held.items()}
    documents, at = enumerate(text_sources.divided(source, config.held_out)), 0
    while batch := [*islice(documents, _BATCH)]:
        asked = [(at, part, each) for at, (part, each) in batch
                 if got[part] < wanted[part] and (at >= begin or part != "train")]  # fmt: skip
        for (at, part, _), tokens in zip(asked, _ids(tokenizer, [each for _, _, each in asked]), strict=True):
            found = tokens + end
            if part != "train":
                first = max(0, len(found) - most[part]) // 2  # how a document begins says little of the rest
                spare.append((part, found[:first] + found[first + most[part] :]))
                found = found[first : first + most[part]]
            if got[part] < wanted[part]:
                yield at, part, found
        if all(got[part] >= wanted[part] for part in wanted):
            return
    for part, found in spare:  # there were few documents
        if found and got[part] < wanted[part]:
            yield at + 1, part, found


def _random(
    config: TrainConfig, number: int, vocabulary: int, wanted: Mapping[SplitName, int], begin: int
) -> Iterator[tuple[int, SplitName, Any]]:
    """Each block is a document."""
    for stream, (part, count) in enumerate(wanted.items()):
        rng = np.random.default_rng([config.seed, number, stream])
        for at, done in enumerate(range(0, count, _BLOCK)):
            found = rng.integers(0, vocabulary, min(_BLOCK, count - done))
            if at >= begin or part != "train":
                yield at, part, found


def _ids(tokenizer: PreTrainedTokenizerBase, documents: list[str]) -> list[list[int]]:
    if not documents:
        return []
    found: list[list[int]] = tokenizer(documents, add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return found


# -- the first weights -------------------------------------------------------------------------------------------------


def make_init(runtime: PretrainingRuntime, work: Work, args: InitArgs) -> Mapping[str, Any]:
    """The weights of one entry of INITIAL_POPULATION, laid out as every member's are."""
    config = runtime.config
    entry, vocabulary = config.initial_population[args.entry], work.inputs[TOKENIZER].metrics["vocabulary"]
    model = built(entry, vocabulary, config.seed + args.entry, config.trust_remote_code)
    if model.config.vocab_size < vocabulary:
        raise Failed(f"model {entry!r}: {model.config.vocab_size} embeddings for a tokenizer of {vocabulary} words")
    layout = layout_of(model)
    if first := work.inputs.get(FIRST):
        other = read_config(first.read(CONFIG), config)
        names = repr(config.initial_population[0]), repr(entry)
        same_shapes(layout_of(empty(other, 0, config.trust_remote_code)), layout, *names)
        same_settings(other, model.config, *names)
    work.write(CONFIG, model.config.to_json_string(use_diff=False).encode())
    save_weights(work, flat(model, layout), layout)
    kinds = layouts_of(layout, config)
    moments = kinds["average"].size + kinds["square"].size
    return {"parameters": layout.size, "moments": moments if config.keeps_moments else 0}

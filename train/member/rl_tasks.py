"""What a worker makes of rewards: a policy's rollouts, the lessons of a child, held-out rewards."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fleet.run_config import UserError
from fleet.work import Work
from train import packing
from train.batches import shuffled
from train.chat_examples import ChatWriter
from train.kernels import looking
from train.learner import Learner
from train.member import posttraining_genome
from train.member.posttraining_round_zero import ROWS
from train.member.posttraining_runtime import ChildModel, PosttrainingRuntime, ends_in
from train.member.posttraining_weights import child_weights
from train.posttrain import posttrain_fitness
from train.posttrain.posttrain_config import PosttrainConfig
from train.posttrain.posttrain_sections import REWARD
from train.recipe_arguments import EvaluationArgs, PosttrainChildArgs, RolloutArgs
from train.rl import answering, environments, grpo, rollouts
from train.rl.answering import Asking
from train.rl.question_rows import QuestionRows
from train.rl.rollouts import FILE, Group, Judged, Rollouts
from train.rl.verifier import Verifier, digest_of
from train.text_sources import Row

Metrics = Mapping[str, Any]
_SHOWN = 2  # answers, of the best and of the worst
_SO_FAR = "answers"  # in a snapshot


# -- answers -----------------------------------------------------------------------------------------------------------


def make_rollouts(runtime: PosttrainingRuntime, work: Work, args: RolloutArgs) -> Metrics:
    """The parents' child, before it has learned anything, answers questions that its genome chooses."""
    c, genome = runtime.config, work.recipe.genome
    runtime.forget()
    child = child_weights(runtime, work, args).born()
    asked = [
        (name, row)
        for name, row in own_questions(c, work, genome, (args.generation, args.slot))
        for _ in range(c.of_grpo.answers)
    ]
    key = (c.seed, args.generation, args.slot)
    seeds = [answering.seed_of(*key, n // c.of_grpo.answers, n % c.of_grpo.answers) for n in range(len(asked))]
    said = answers_so_far(work)
    for some in judged(runtime, work, child, asked, seeds, genome["temperature"], len(said)):
        said.extend(some)
        if len(said) < len(asked):
            work.between_steps(len(said), lambda to: to.write(_SO_FAR, rollouts.packed_answers(said)), small=True)
    size, prompts = c.of_grpo.answers, ChatWriter(child.live.tokenizer)
    groups = []
    for n in range(0, len(said), size):
        name, row = asked[n]
        answers, terms = zip(*said[n : n + size], strict=True)
        groups.append(Group(name, shown(row), prompts.prompt(row["prompt"]), answers, terms))
    found = Rollouts(genome["temperature"], groups)
    work.write(FILE, rollouts.packed(found))
    samples = json.dumps(rollouts.samples(found, genome["rewards"], _SHOWN), ensure_ascii=False)
    return {**rollouts.metrics_of(found, genome["rewards"]), "samples": samples}


def answers_so_far(work: Work) -> list[Judged]:
    """Of an earlier attempt: whole batches."""
    snapshot = work.resume()
    return rollouts.unpacked_answers(snapshot.read(_SO_FAR)) if snapshot else []


def own_questions(
    c: PosttrainConfig, work: Work, genome: posttraining_genome.Genome, where: Sequence[int]
) -> list[tuple[str, Row]]:
    """Of each environment its share, in an order of the slot's own."""
    wanted_of = posttraining_genome.portions(posttraining_genome.mixture(c, genome), c.sft_examples)
    found = []
    for n, name in enumerate(posttraining_genome.names(c)):
        if wanted := wanted_of.get(name):
            rows = questions_in(work, n)
            there, key = len(rows.parts["train"]), (c.seed, *where, n)
            numbers = [shuffled(k % there, there, (*key, k // there)) for k in range(wanted)]  # the first ones
            found += [(name, rows.rows[number]) for number in numbers]
    return found


def judged(
    runtime: PosttrainingRuntime,
    work: Work,
    child: ChildModel,
    asked: Sequence[tuple[str, Row]],
    seeds: Sequence[int],
    temperature: float,
    begin: int = 0,
) -> Iterator[list[Judged]]:
    """Batch by batch, from the one that begins there on: answers, and what environments' checkers tell of them."""
    c, model, tokenizer = runtime.config, child.live.model, child.live.tokenizer
    writer = ChatWriter(tokenizer)
    once = {id(row): writer.prompt(row["prompt"]) for row in {id(row): row for _, row in asked}.values()}
    prompts = [once[id(row)] for _, row in asked]
    ends = answering.ends_of(tokenizer, model.generation_config, ends_in(child.plan.leader.folder))
    room = (c.grpo.answers if c.grpo else 1) * c.batch_size * c.seq_length  # far less than learning needs
    how = Asking(temperature, c.of_answers.max_tokens, ends, room)
    model.eval()
    with checking(c) as terms:
        for some in (each for each in answering.batches(prompts, how) if each.start >= begin):
            part = slice(some.start, some.stop)
            with looking(runtime.device, c.precision):
                said = answering.answers(model, tokenizer, prompts[part], seeds[part], how)
            yield [(each, terms(*about, each)) for about, each in zip(asked[part], said, strict=True)]
            work.at = ("answer", some.stop, len(asked))


@contextmanager
def checking(c: PosttrainConfig) -> Iterator[Any]:
    """What tells an answer's terms: a verifier of the user's own, or each environment's checker."""
    sources, longest = (
        dict(zip(posttraining_genome.names(c), c.mutation_datasets, strict=True)),
        c.of_answers.max_tokens,
    )
    if c.of_answers.verifier is None:
        yield lambda name, row, said: environments.reward_terms(sources[name], c.seed, row, said, longest)
        return
    if digest_of(c.of_answers.verifier) != c.verifier_digest:
        raise UserError(f"verifier {c.of_answers.verifier}: it is another one than when the run began")
    with Verifier(c.of_answers.verifier, c.of_answers.verifier_seconds) as verifier:
        yield lambda name, row, said: verifier.terms(row, said.text)


# -- what a child learns of them ---------------------------------------------------------------------------------------


def lessons(c: PosttrainConfig, work: Work, args: PosttrainChildArgs) -> list[grpo.Lesson]:
    """Its own answers, and the most instructive ones of others, as far as they tell anything."""
    own, weights = rollouts_in(work, args.own_rollouts_id).groups, work.recipe.genome["rewards"]
    others = [group for id in args.others_rollouts_ids for group in rollouts_in(work, id).groups]
    count = round(c.of_grpo.share * len(own))
    groups = [*own, *rollouts.most_instructive(others, weights, count)]
    return grpo.lessons(groups, weights, c.of_grpo.by_spread)


def steps(
    runtime: PosttrainingRuntime, work: Work, model: Any, lessons: Sequence[grpo.Lesson]
) -> list[list[grpo.LessonBatch]]:
    c, packed = runtime.config, packing.can_pack(model, min(64, runtime.config.seq_length))
    shape = (packed, c.seq_length, c.batch_size, c.gradient_accumulation)
    return grpo.steps_of(lessons, *shape, work.recipe.genome["temperature"], runtime.device)


def with_first_logprobs(learner: Learner, steps: Sequence[Sequence[grpo.LessonBatch]]) -> list[list[grpo.LessonBatch]]:
    """Each batch with its tokens' log-probabilities under the child before its first step."""
    learner.model.eval()
    told_apart = packing.telling_apart(learner.answer, [part.batch for step in steps for part in step])

    def there(part: grpo.LessonBatch) -> grpo.LessonBatch:
        return grpo.with_first_logprobs(learner.answer, replace(part, batch=told_apart(part.batch)), learner.device)

    return [[there(part) for part in step] for step in steps]


def rollouts_in(work: Work, id: str) -> Rollouts:
    return rollouts.unpacked(work.inputs[id].read(FILE))


def metrics_of_own_rollouts(work: Work, args: PosttrainChildArgs) -> Metrics:
    """A child's row in tables has them, too."""
    there = work.inputs[args.own_rollouts_id].metrics if args.own_rollouts_id else {}
    return {key: there[key] for key in there if key != "samples"}


# -- held-out rewards --------------------------------------------------------------------------------------------------


def held_out_terms(
    runtime: PosttrainingRuntime, work: Work, asked: EvaluationArgs, child: ChildModel
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Of the likeliest answers to held-out questions of all environments: marks, one by one, and their means."""
    c, names = runtime.config, posttraining_genome.names(runtime.config)
    there = {name: questions_in(work, n) for n, name in enumerate(names)}
    numbers = posttrain_fitness.drawn(c, {name: each.parts[asked.on] for name, each in there.items()}, asked)
    questions = [(name, there[name].rows[n]) for name, some in numbers.items() for n in some]
    batches = judged(runtime, work, child, questions, [0] * len(questions), 0.0)
    terms = [found for some in batches for _, found in some]
    single, values = dict[str, list[float]](), dict[str, float]()
    for each in (each for each in c.fitness if each.task == REWARD):
        if any(each.term not in found for found in terms):
            raise UserError(f"FITNESS: no term of the reward is called {each.term!r}; there are {', '.join(terms[0])}")
        single[each.key] = [found[each.term] for found in terms]
        values[each.key] = sum(single[each.key]) / len(single[each.key])
    return single, values


def questions_in(work: Work, number: int) -> QuestionRows:
    return QuestionRows.open(work.inputs[f"0/data-{number}"].path(ROWS))


def shown(row: Row) -> str:
    """What was asked last, for people."""
    asked = row["prompt"]
    return asked if isinstance(asked, str) else asked[-1]["content"]

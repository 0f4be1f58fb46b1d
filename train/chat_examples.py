"""From rows to examples: tokens, and which of them are learned. Of a conversation these are the assistant's answers,
each with the mark that ends it, exactly as the tokenizer's chat template writes them."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import jinja2
import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from fleet.run_config import UserError
from train.text_sources import Message, PlacedRow, conversation, located, preference

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_PROBE = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "qzjxv"})
# Some templates write today's date; what a run learns and asks must not depend on the day.
_NO_DATE = "{%- macro strftime_now(format) -%}01 January 2025{%- endmacro %}\n"
_HELP = "give the tokenizer a chat template that puts answers between {% generation %} and {% endgeneration %}"


@dataclass(frozen=True, eq=False)
class Example:
    """Token n + 1 is learned from tokens 0 to n, where learned[n + 1]."""

    tokens: NDArray[np.int32]
    learned: NDArray[np.bool_]

    def cut(self, longest: int) -> "Example":
        return Example(self.tokens[:longest], self.learned[:longest])


@dataclass(frozen=True)
class ChatExamples:
    """What became of some rows: each kept one is an example, or a better and a worse answer to the same prompt. A
    conversation may come to several."""

    kept: tuple[tuple[Example, ...], ...]
    rows: tuple[int, ...]  # which row each kept one is of
    cut: int  # lost their ends
    empty: int  # left out: there is nothing to learn, or it was cut off


@dataclass(frozen=True)
class Marked:
    """A text, and where in it the answers begin and end."""

    text: str
    answers: tuple[tuple[int, int], ...]


class ChatWriter:
    """Writes conversations as a tokenizer's chat template does, and knows where the answers stand."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.is_fast:
            raise UserError(
                f"{type(tokenizer).__name__} does not say where its tokens stand; a fast tokenizer is needed"
            )
        self.tokenizer = tokenizer

    def example(self, marked: Marked) -> Example:
        """By where tokens end in the whole text: some join what stands before an answer with its beginning, and of
        some that are only a space the offsets are empty."""
        said = self.tokenizer(marked.text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        ends = np.array([end for _, end in said["offset_mapping"]], dtype=np.int64)
        inside = [(begin < ends) & (ends <= end) for begin, end in marked.answers]
        return _example(said["input_ids"], np.any([np.zeros_like(ends, dtype=np.bool_), *inside], axis=0))

    def text(self, text: str, given: int = 0) -> Example:
        """A text, begun and ended as the tokenizer does, is learned to its end; not so many characters of it that are
        given."""
        said, end = self.tokenizer(text, return_offsets_mapping=True, verbose=False), self.tokenizer.eos_token_id
        tokens, learned = said["input_ids"], [not given or last > given for _, last in said["offset_mapping"]]
        if end is not None:
            kept = len(tokens) - (tokens[-1:] == [end])
            tokens, learned = [*tokens[:kept], end], [*learned[:kept], True]
        return _example(tokens, learned)

    def conversation(self, messages: Sequence[Message]) -> list[Marked]:
        """One text with all answers; or a text for each, where the template writes what was said in another way than
        what is being said: without the thoughts, for example."""
        if _GENERATION.search(self._template):
            return [self._marked_by_template(messages)]
        whole = self._written(messages)
        turns = [self._turn(messages[: n + 1]) for n, each in enumerate(messages) if each["role"] == "assistant"]
        if all(whole.startswith(turn.text) for turn in turns):
            return [Marked(whole, tuple(answer for turn in turns for answer in turn.answers))]
        return turns

    def answer(self, prompt: Any, answer: Any) -> Example:
        """One answer to a prompt, of which only the answer counts."""
        if not self.tokenizer.chat_template and isinstance(prompt, str) and isinstance(answer, str):
            return self.text(prompt + answer, given=len(prompt))
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        told = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else answer
        told = told[len(asked) :] if told[: len(asked)] == asked else told  # some write the prompt again
        if [each["role"] for each in told] != ["assistant"]:
            roles = ", ".join(each["role"] for each in told) or "none"
            raise UserError(f"one message of the assistant is expected after the prompt, not {roles}")
        return self.example(self._turn([*asked, *told]))

    def prompt(self, prompt: Any) -> list[int]:
        """A question, up to where its answer begins."""
        if not self.tokenizer.chat_template and isinstance(prompt, str):
            tokens: list[int] = self.tokenizer(prompt, verbose=False)["input_ids"]
            return tokens[: len(tokens) - (tokens[-1:] == [self.tokenizer.eos_token_id])]
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        found: list[int] = self.tokenizer(self._written(asked, ask=True), add_special_tokens=False)["input_ids"]
        return found

    @property
    def end(self) -> int | None:
        """The mark that ends an answer, where it is one token and more than space."""
        try:
            mark = self._ending[1].strip()
        except UserError:  # no template, or one that writes questions only
            return None
        tokens: list[int] = self.tokenizer(mark, add_special_tokens=False)["input_ids"] if mark else []
        return tokens[0] if len(tokens) == 1 else None

    # -- inside -------------------------------------------------------------------------------------------------------

    def _turn(self, messages: Sequence[Message]) -> Marked:
        """The last message is the answer: what the template writes after it has asked for one."""
        if len(messages) < 2:
            raise UserError("an answer is expected after a question, not at the beginning")
        asked, whole = self._written(messages[:-1], ask=True), self._written(messages)
        if not whole.startswith(asked):
            raise UserError(
                f"the chat template asks for an answer with {asked[-60:]!r}, but does not write one there; {_HELP}"
            )
        _, mark, rest = self._ending
        end = len(whole) - len(rest) if whole.endswith(mark + rest) else len(whole)
        return Marked(whole, ((len(asked), max(end, len(asked))),))

    def _marked_by_template(self, messages: Sequence[Message]) -> Marked:
        """Some templates leave the mark that ends an answer outside."""
        whole, spans = self._rendered(messages, marks=True)
        gap, mark, _ = self._ending

        def with_mark(begin: int, end: int) -> tuple[int, int]:
            answer = whole[begin:end]
            inside = answer.endswith(mark) or mark.strip() and answer.rstrip().endswith(mark)
            return begin, end if inside or not whole.startswith(gap + mark, end) else end + len(gap + mark)

        return Marked(whole, tuple(with_mark(*span) for span in spans))

    @cached_property
    def _ending(self) -> tuple[str, str, str]:
        """What the template writes after an answer: space, the mark that ends it, and what does not belong to it any
        more. Where it writes only space, this is the mark."""
        before, answer, after = self._written(_PROBE).rpartition(_PROBE[-1]["content"])
        if not answer:
            raise UserError(
                f"the chat template does not write what the assistant says, but {before + after!r}; {_HELP}"
            )
        return after.partition(after.strip() or after) if after else ("", "", "")

    def _written(self, messages: Sequence[Message], ask: bool = False) -> str:
        return self._rendered(messages, ask)[0]

    def _rendered(self, messages: Sequence[Message], ask: bool = False, marks: bool = False) -> tuple[str, Any]:
        """As apply_chat_template does, which itself loses answers that begin with a space: it marks tokens, by offsets
        that leave spaces out."""
        try:
            texts, spans = cast(Any, render_jinja_template)(
                [list(messages)],
                chat_template=self._template,
                add_generation_prompt=ask,
                return_assistant_tokens_mask=marks,
                **self.tokenizer.special_tokens_map,
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise UserError(f"the chat template cannot write this conversation: {error}") from None
        return texts[0], spans[0] if marks else ()

    @cached_property
    def _template(self) -> str:
        try:
            return undated(self.tokenizer.get_chat_template())
        except ValueError:
            raise UserError(
                "the tokenizer has no chat template for messages; give rows of text, or one that has"
            ) from None


def undated(template: str) -> str:
    return template if "strftime_now" not in template or template.startswith(_NO_DATE) else _NO_DATE + template


def _example(tokens: Sequence[int], learned: Sequence[bool] | NDArray[np.bool_]) -> Example:
    """Nothing stands before the first token, so it is not learned."""
    return Example(
        np.asarray(tokens, dtype=np.int32), np.asarray(learned, dtype=np.bool_) & (np.arange(len(tokens)) > 0)
    )


# -- examples ----------------------------------------------------------------------------------------------------------


def _conversation(writer: ChatWriter, row: Any) -> list[tuple[Example, ...]]:
    found = conversation(row)
    if "text" in found:
        return [(writer.text(found["text"]),)]
    if "completion" in found:
        return [(writer.answer(found["prompt"], found["completion"]),)]
    return [(writer.example(marked),) for marked in writer.conversation(found["messages"])]


def _preference(writer: ChatWriter, row: Any) -> list[tuple[Example, ...]]:
    found = preference(row)
    return [tuple(writer.answer(found["prompt"], found[which]) for which in ("chosen", "rejected"))]


def _examples(
    write: Callable[[ChatWriter, Any], list[tuple[Example, ...]]],
    rows: Iterable[PlacedRow],
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
) -> ChatExamples:
    writer, kept, of, cut, empty = ChatWriter(tokenizer), [], [], 0, 0
    for number, (where, row) in enumerate(rows):
        for each in located(partial(write, writer), row, where):
            cut += any(len(example.tokens) > longest for example in each)
            short = tuple(example.cut(longest) for example in each)
            if all(example.learned.any() for example in short):
                kept.append(short)
                of.append(number)
            else:
                empty += 1
    return ChatExamples(tuple(kept), tuple(of), cut, empty)


examples = partial(_examples, _conversation)  # of conversations and texts
pairs = partial(_examples, _preference)

"""DiLoCo between clusters that only meet over the internet: every so many steps the peers' changes are averaged by
Hivemind, and each peer takes the same outer step. Only changes travel, once."""

import hashlib
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fleet.errors import first_line
from fleet.plain import say
from fleet.run_config import UserError
from merge.outer_step import OuterOptimizer
from train.cluster.averager import Averager, HashTable, any_port, averager_at, table_at, unreachable
from train.cluster.options import HivemindOptions
from train.cluster.outer_steps import OuterStep
from train.cluster.ranks import Agreed
from train.cluster.rendezvous import Rendezvous, Word, number_of
from train.cluster.shared_learner import OuterState, SharedLearner

_ATTEMPTS = 5  # at one round, before it is said that it cannot be
_ALONE = 2  # peers that a round needs, unless told otherwise


class Peer:
    """This cluster among the others; all of its ranks take part."""

    def __init__(self, hv: HivemindOptions, spec: dict[str, Any], learner: SharedLearner, state: OuterState) -> None:
        self.hv, self.learner, self.ranks, self.round = hv, learner, learner.ranks, state.round
        self.outer = OuterOptimizer(lr=hv.outer_lr)
        self.start, self.momentum = state.start, state.momentum
        self.change = torch.zeros_like(self.start)
        self.meets = learner.leads_part  # this rank stands for its part of the tensors
        self._rounds = spec["total_steps"] // hv.local_steps
        self.spec = {**spec, "local_steps": hv.local_steps, "compression": hv.hivemind_compression}
        self._meeting: Rendezvous | None = None
        self._table: HashTable | None = None
        self._averager: Averager | None = None
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    # -- what training sees -------------------------------------------------------------------------------------------

    @property
    def state(self) -> OuterState:
        return OuterState(self.round, self.start, self.momentum)

    def exchange(self) -> dict[str, float]:
        """The outer step, with everybody who is there; or the state of those who have gone on without this one."""
        begin, self._waited = time.monotonic(), 0.0
        self.change.copy_(self.start - self.learner.vector.detach().cpu())
        averaged = self._met()
        if averaged is None:
            self.fetch()
            return {"outer_round": float(self.round), "exchange_seconds": time.monotonic() - begin}
        drift = self._drift(averaged)
        self.start, self.momentum = self.outer.step((self.start, self.momentum), averaged)
        self.round += 1
        self._go_on_from_here(train_on=True)
        every = self.hv.average_state_every
        if every and (self.round % every == 0 or self.round == self._rounds):
            self._level()
        step = OuterStep(self.round, self._others, drift, time.monotonic() - begin, self._waited)
        self._say(step.in_words())
        return step.metrics()

    def _drift(self, averaged: Tensor) -> float:
        """How far the weights that were learned here are from the average that came out, beside its size; of all ranks'
        parts, and where ranks have copies, it cancels out."""
        apart, size = averaged - self.change, self.start - averaged
        squares = torch.stack([torch.linalg.vector_norm(each, dtype=torch.double).square() for each in (apart, size)])
        of_apart, of_size = self.ranks.mean(squares).tolist()
        return math.sqrt(of_apart / of_size) if of_size else 0.0

    def fetch(self) -> None:
        """Weights, momentum and round of the peer that is furthest."""
        there = self._told(lambda m: {name: word for name, word in m.there().items() if name != m.name})
        furthest = max(there.items(), key=lambda item: (item[1].round, item[0]), default=None)
        if furthest is None or furthest[1].round <= self.round:
            return
        self._take(furthest[0], furthest[1])
        self._say(f"took the state of {furthest[0]} after {self.round} outer steps")

    def _begin_alike(self) -> None:
        """Before the first round, with the weights of the first peer."""
        there = self._told(lambda m: {name: word for name, word in m.there().items() if word.round == 0})
        if self.round or not there:
            return
        name, word = min(there.items())
        if name != self.name and self._told(lambda m: m.word.first) != word.first:
            self._say(f"other weights than those of {name}: takes them")
            self._take(name, word)

    def close(self) -> None:
        for each in (self._meeting and self._meeting.close, self._averager and self._averager.shutdown):
            with suppress(Exception):
                each and each()
        if self._table:
            self._table.shutdown()

    # -- meeting ------------------------------------------------------------------------------------------------------

    def _met(self) -> Tensor | None:
        """The mean change; nothing where the others are further already."""
        for attempt in range(_ATTEMPTS):
            number = self.round * _ATTEMPTS + attempt
            arrived = time.monotonic()
            names, ahead = self._told(partial(self._gathered, number=number))
            self._waited += time.monotonic() - arrived
            if ahead:
                return None
            self._names = names
            if len(names) == 1:
                return self.change
            good, averaged = self._average(number_of(self.round, attempt, names), names)
            if self._told(partial(self._agreed, number=number, good=good, names=names)):
                return averaged
            self._say(f"round {self.round}, attempt {attempt + 1}: not all of {', '.join(names)} got through")
            if self.hv.fail_rank_drop:
                raise Agreed(f"round {self.round}: a peer was lost (--hv.fail-rank-drop)")
        raise Agreed(f"round {self.round}: the peers did not get together in {_ATTEMPTS} attempts")

    def _gathered(self, meeting: Rendezvous, number: int) -> tuple[tuple[str, ...], bool]:
        """Whom this meeting has; or whether it is long over."""
        meeting.say(ready=number, round=self.round)
        patience = self.hv.timeout_waiting_for_peers if self._waits else self.hv.matchmaking_time

        def all_ready(there: dict[str, Word]) -> bool:
            ahead = any(word.round > self.round for word in there.values())
            ready = sum(word.ready >= number for word in there.values())
            return ahead or (ready == len(there) and (ready >= self._least or not self._waits))

        there = meeting.wait(all_ready, patience)
        names = tuple(name for name, word in there.items() if word.ready >= number)
        if any(word.round > self.round for word in there.values()):
            return names, True
        if len(names) < self._least and self._waits:
            raise UserError(
                f"round {self.round}: no other peer came within {patience:g} s (--hv.timeout-waiting-for-peers); "
                "--hv.all-reduce-strategy NO_WAIT goes on alone"
            )
        if len(names) == 1 < self.hv.galaxy_size:
            say(f"round {self.round}: nobody else is there; this peer goes on alone")
        return names, False

    def _average(self, bits: str, names: tuple[str, ...]) -> tuple[bool, Tensor]:
        """Of all ranks: whether each got the whole, and this one's part of it."""
        averaged, why = self.change, ""
        if self._averager:
            try:
                with self._averager.get_tensors() as (there,):
                    there.copy_(self.change)
                soon, timeout = self.hv.matchmaking_time, 3 * self.hv.matchmaking_time + self.hv.averaging_timeout
                found = self._averager.meet(bits, len(names), {"round": self.round}, min(soon, 2.0), timeout)
                why = f"{found['lost']} numbers were lost" if found["lost"] else ""
                with self._averager.get_tensors() as (there,):
                    averaged = there.clone()
            except Exception as error:  # whatever peers, networks and time-outs come up with
                why = first_line(error)
        return not self.ranks.any(bool(why)), self.learner.from_leader(averaged)

    def _agreed(self, meeting: Rendezvous, number: int, good: bool, names: tuple[str, ...]) -> bool:
        """A result counts if all who live have it."""
        meeting.say(met=number, good=good)

        def all_said(there: dict[str, Word]) -> bool:
            return all(word.met >= number or word.round > self.round for name, word in there.items() if name in names)

        there = {
            name: word for name, word in meeting.wait(all_said, self.hv.averaging_timeout).items() if name in names
        }
        if any(word.round > self.round for word in there.values()):
            return good
        return good and all(word.met > number or (word.met == number and word.good) for word in there.values())

    # -- state --------------------------------------------------------------------------------------------------------

    def _level(self) -> None:
        """Everybody takes the first one's numbers, so that what rounding has parted is together again."""
        patience, round = self.hv.averaging_timeout, self.round
        there = self._told(lambda m: m.wait(lambda found: self._all(found, lambda w: w.round >= round), patience))
        first = min((name for name in self._names if name in there and there[name].round == round), default="")
        if first and first != self.name:
            try:
                self._take(first, there[first])
            except Agreed as why:  # it was lost just now; what rounding has parted stays so until the next time
                self._say(f"round {round}: goes on with its own numbers: {why}")

        def leave(meeting: Rendezvous) -> None:
            """Whose numbers they are does not go on, or away, before all have them."""
            meeting.say(level=round)
            meeting.wait(lambda found: self._all(found, lambda w: w.level >= round or w.round > round), patience)

        self._told(leave)

    def _all(self, there: dict[str, Word], are: Callable[[Word], bool]) -> bool:
        """Of those whom the last round had, and who live."""
        return all(are(there[name]) for name in self._names if name in there)

    def _take(self, name: str, word: Word) -> None:
        """All ranks their parts, of the same round: that peer may go on between two of them."""
        for _ in range(_ATTEMPTS):
            error, round, got = "", "", (self.start, self.momentum)
            if self._averager:
                try:
                    known, (start, momentum) = self._averager.state_of(word.ids[self._part], self.hv.averaging_timeout)
                    if start.shape != self.start.shape or momentum.shape != self.start.shape:
                        raise UserError(f"its state has {len(start)} numbers, not {len(self.start)}")
                    got, round = (start, momentum), str(int(known["round"]))
                except Exception as wrong:
                    error = f"peer {name}: {first_line(wrong)}"
            self.ranks.all_or_none(error)
            if len(rounds := {each for each in self.ranks.each(round) if each}) == 1:
                break
        else:
            raise Agreed(f"peer {name} goes on faster than its state can be had")
        self.round = int(rounds.pop())
        self.start, self.momentum = (self.learner.from_leader(each) for each in got)
        self._go_on_from_here(train_on=True)

    def _go_on_from_here(self, train_on: bool) -> None:
        """Train from here on, and let others have it."""
        if train_on:
            self.learner.load_weights(self.start.to(self.learner.device))
            self.learner.loaded()
        if self._averager:
            self._averager.state = {"round": self.round}, [self.start.clone(), self.momentum.clone()]
        if self._meeting:
            self._meeting.say(round=self.round)

    # -- connecting ---------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        hv, error = self.hv, ""
        address = ""
        try:
            if self.ranks.first:
                self._table = table_at(hv.initial_peers, hv.host_maddrs, hv.announce_maddrs)
                address = str(self._table.get_visible_maddrs()[0])
        except Exception as wrong:  # whatever its daemon comes up with
            error = unreachable(hv, wrong)
        self.ranks.all_or_none(error)
        address = self.ranks.from_first(address)
        if self.meets and not self.ranks.first:
            self._table = table_at([*hv.initial_peers, address], [any_port(each) for each in hv.host_maddrs], [])
        if self._table:
            prefix = f"{hv.run}-{self._common}-{self.learner.part_number}"
            self._averager = averager_at(self._table, hv, prefix, torch.zeros_like(self.start))
        self.ranks.deaf()  # the averager has switched Ctrl-C off
        ids: list[Any] = [None] * self.ranks.count
        dist.all_gather_object(ids, self._table.peer_id.to_base58() if self._table and self.meets else "")
        leaders = [each for each in ids if each]
        self._part, self._names, self._waited = self.learner.part_number, tuple[str, ...](), 0.0
        self.name = f"peer-{hv.world_rank}"
        self._go_on_from_here(train_on=False)
        self._told_once(tuple(leaders))
        if not hv.skip_load_from_peers:
            self.fetch()
            self._begin_alike()

    def _told_once(self, ids: tuple[str, ...]) -> None:
        """Come to the meeting point; the first rounds wait for all."""
        error, first = "", hashlib.sha256("".join(self.ranks.each(_digest(self.start))).encode()).hexdigest()[:16]
        if self.ranks.first:
            assert self._table
            word = Word(ids, self.spec, self.round, first=first)
            self._meeting = Rendezvous(self._table, self.hv.run, self.name, word, lambda: bool(self.ranks.signals))
            try:
                self._meeting.open()
                patience = self.hv.timeout_waiting_for_peers
                there = self._meeting.wait(self._may_begin, patience)
                self._meeting.check(there)
                if not self._may_begin(there) and self._waits:
                    missing = {f"peer-{n}" for n in range(self.hv.galaxy_size)} - {*there}
                    error = (
                        f"{', '.join(sorted(missing))} did not come within {patience:g} s; clocks may be seconds apart"
                    )
            except UserError as wrong:
                error = str(wrong)
        self.ranks.all_or_none(error)

    # -- between the ranks --------------------------------------------------------------------------------------------

    @property
    def _common(self) -> str:
        """Equal for peers that train the same."""
        return hashlib.sha256(json.dumps(self.spec, sort_keys=True).encode()).hexdigest()[:16]

    def _may_begin(self, there: dict[str, Word]) -> bool:
        """All are there, or others have begun already."""
        others = (word for name, word in there.items() if name != self.name)
        return len(there) >= self.hv.galaxy_size or any(word.round > 0 for word in others)

    @property
    def _others(self) -> tuple[str, ...]:
        """Whom the last round had besides this one."""
        return tuple(each for each in self._names if each != self.name)

    @property
    def _waits(self) -> bool:
        return self.hv.all_reduce_strategy == "WAIT_FOR_ALL"

    @property
    def _least(self) -> int:
        return min(_ALONE, self.hv.galaxy_size)

    def _told(self, ask: Callable[[Rendezvous], Any]) -> Any:
        """What the first rank finds out at the meeting point."""
        found, error = None, ""
        if self._meeting:
            try:
                found = ask(self._meeting)
            except Exception as wrong:  # the table's, or nobody came
                error = first_line(wrong)
        self.ranks.all_or_none(error)
        return self.ranks.from_first(found)

    def _say(self, line: str) -> None:
        if self.ranks.first:
            say(line)


def _digest(vector: Tensor) -> str:
    return hashlib.sha256(vector.numpy().tobytes()).hexdigest()

"""Hivemind's averager, told who is to be met in which round; it says what it otherwise keeps to itself."""

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

os.environ.setdefault("HIVEMIND_LOGLEVEL", "CRITICAL")  # a round that fails is told by us, in a line
os.environ.setdefault("GOLOG_LOG_LEVEL", "FATAL")

import hivemind
import numpy as np
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import (
    BlockwiseQuantization,
    Float16Compression,
    NoCompression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    Uniform8BitQuantization,
    deserialize_torch_tensor,
)
from hivemind.compression.quantization import Quantization
from hivemind.compression.serialization import combine_from_streaming
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils import MPFuture, get_dht_time
from torch import Tensor

from fleet.errors import first_line
from fleet.run_config import UserError
from train.cluster.options import HivemindOptions

COMPRESSIONS: Mapping[str, type] = {
    "none": NoCompression,
    "fp16": Float16Compression,
    "scaled-fp16": ScaledFloat16Compression,
    "uniform8bit": Uniform8BitQuantization,
    "quantile8bit": Quantile8BitQuantization,
    "blockwise8bit": BlockwiseQuantization,
}
logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # of tasks that a lost peer leaves behind


class HashTable(hivemind.DHT):
    """The hash table's process ends with the one that started it, even where that is killed."""

    def run(self) -> None:
        _end_with(os.getppid(), lambda: self._node.p2p._child.kill())
        super().run()


class Averager(DecentralizedAverager):
    state: tuple[dict[str, Any], list[Tensor]] | None = None  # what others may have: never written in place

    def run(self) -> None:
        torch.set_num_threads(1)
        _end_with(os.getppid(), lambda: None)
        super().run()

    def meet(self, bits: str, size: int, known: Mapping[str, Any], soon: float, timeout: float) -> dict[str, Any]:
        """Average with so many others who mean the same bits: who was there, what was lost. May fail in many ways."""
        self._ask("_expect", bits=bits, size=size).result(timeout=10)
        found: dict[str, Any] = self.step(
            gather=dict(known), scheduled_time=get_dht_time() + soon, timeout=timeout, allow_retries=False, wait=True
        )
        return found

    def state_of(self, peer: str, timeout: float) -> tuple[dict[str, Any], list[Tensor]]:
        """What a peer shares, exactly."""
        found: tuple[dict[str, Any], list[Tensor]] = self._ask("_fetch", peer=peer, timeout=timeout).result(timeout + 5)
        return found

    def get_current_state(self) -> Any:
        return (*self.state, None) if self.state else None

    # -- in the averager's own process ---------------------------------------------------------------------------------

    def _ask(self, what: str, **how: Any) -> Any:
        future: Any = MPFuture()
        self._outer_pipe.send((what, [], {**how, "future": future}))
        return future

    async def _expect(self, bits: str, size: int, future: Any) -> None:
        matchmaking = self._matchmaking
        keys = matchmaking.group_key_manager
        keys.group_bits, keys.target_group_size = bits, None
        matchmaking.target_group_size = matchmaking.min_group_size = size
        future.set_result(None)

    async def _aggregate_with_group(self, group_info: Any, min_vector_size: int, **more: Any) -> dict[str, Any]:
        """A peer that is lost in the middle leaves its part as it was, and nobody is told otherwise."""
        gathered = await super()._aggregate_with_group(group_info, min_vector_size, **more)
        runner = self._running_groups[group_info.group_id].result()
        lost = runner.tensor_part_container.failed_size or len(runner.banned_senders)
        return {"gathered": list(gathered.values()), "lost": int(lost)}

    async def _fetch(self, peer: str, timeout: float, future: Any) -> None:
        try:
            future.set_result(await asyncio.wait_for(self._fetched(peer), timeout))
        except BaseException as error:  # it is for whoever waits
            future.set_exception(RuntimeError(f"the state of a peer cannot be had: {type(error).__name__}: {error}"))

    async def _fetched(self, peer: str) -> tuple[dict[str, Any], list[Tensor]]:
        stub = self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=self.prefix)
        known, parts, tensors = None, list[Any](), list[Tensor]()
        async for message in await stub.rpc_download_state(averaging_pb2.DownloadRequest()):
            if message.metadata:
                known = self.serializer.loads(message.metadata)
            if message.tensor_part.dtype and parts:
                tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
                parts = []
            parts.append(message.tensor_part)
        if not known or not parts:
            raise ValueError("it has none yet")
        tensors.append(deserialize_torch_tensor(combine_from_streaming(parts)))
        if len(tensors) != 2:
            raise ValueError("it went away in the middle")
        return known, tensors


# -- starting them ----------------------------------------------------------------------------------------------------


def table_at(peers: Sequence[str], hosts: Sequence[str], announced: Sequence[str]) -> HashTable:
    """In contact with the others, or an error."""
    how: dict[str, Any] = {"host_maddrs": hosts, **({"announce_maddrs": announced} if announced else {})}
    table = HashTable(
        initial_peers=peers or None, start=False, daemon=True, use_relay=False, use_auto_relay=False,
        nat_port_map=False, auto_nat=False, startup_timeout=15, wait_timeout=1, bootstrap_timeout=3,
        ensure_bootstrap_success=True, **how,
    )  # fmt: skip
    try:
        table.run_in_background(await_ready=True, timeout=30)
    except BaseException:
        table.shutdown()
        raise
    return table


def averager_at(table: HashTable, hv: HivemindOptions, prefix: str, room: Tensor) -> Averager:
    averager = Averager(
        [room], table, start=False, prefix=prefix, daemon=True, target_group_size=None, min_group_size=2,
        initial_group_bits="0" * 32, request_timeout=1.0, next_chunk_timeout=5.0, sender_timeout=5.0,
        min_matchmaking_time=max(2.0, hv.matchmaking_time), allreduce_timeout=hv.averaging_timeout,
        reducer_timeout=15.0, compression=compression(hv.hivemind_compression), allow_state_sharing=True,
        declare_state_period=30, shutdown_timeout=3,
    )  # fmt: skip
    averager.run_in_background(await_ready=True, timeout=30)
    return averager


def compression(name: str) -> Any:
    try:
        return COMPRESSIONS[name]()
    except ImportError as error:
        raise UserError(f"--hv.hivemind-compression {name}: {first_line(error)}") from None


def unreachable(hv: HivemindOptions, error: Exception) -> str:
    if "address already in use" in str(error) or "failed to listen" in str(error):
        return f"--hv.host-maddrs {', '.join(hv.host_maddrs)}: in use, or not of this machine"
    return f"the meeting point ({', '.join(hv.initial_peers) or 'none given'}) cannot be reached: {first_line(error)}"


def any_port(address: str) -> str:
    """The same interface, and whatever port is free."""
    return address.rpartition("/tcp/")[0] + "/tcp/0" if "/tcp/" in address else address


def _extracted(self: Any, said: Any) -> Tensor:
    """As the release has it, but for numpy 2.4, where an array of one number is no number any more: there it fails in
    the middle of an exchange, and everybody waits."""
    count = int(np.frombuffer(said.buffer, count=1, dtype=np.int64)[0])
    book = np.frombuffer(said.buffer, offset=8, count=count, dtype=self.codebook_dtype)
    places = np.frombuffer(said.buffer, offset=8 + book.nbytes, dtype=self.indices_dtype)
    values = torch.as_tensor(book.copy()).to(getattr(torch, said.dtype))
    found = values[torch.as_tensor(places.astype(np.int64))].reshape(tuple(said.size))
    return found.requires_grad_(said.requires_grad)


Quantization.extract = _extracted


def _end_with(parent: int, last: Any) -> None:
    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.3)
        try:
            last()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()

"""The cables of a lab: a switch in a network namespace of its own, and one cable from there to each machine.

A machine behind another has its cable from that one, so nobody else reaches it. Every interface lies in a namespace
that ends with its processes, or is the other end of such a one: nothing has to be cleaned up after a crash.
"""

import subprocess
from collections.abc import Collection, Iterable
from typing import Protocol


class Plugged(Protocol):
    """A machine, as its cable sees it."""

    name: str
    pid: int  # of its first process, seen from outside; 0 while it is off

    @property
    def address(self) -> str: ...
    @property
    def bastion(self) -> "Plugged | None": ...


class Network:
    """10.77.X.0/24, with the first X that nobody uses; the outside is number 1 in it."""

    def __init__(self, rack: int) -> None:
        """`rack` is a process whose network namespace becomes the switch."""
        self._rack = rack
        for x in range(1, 255):
            self.prefix, self._outer = f"10.77.{x}", f"lab{x}"
            if ip([f"link add {self._outer} type veth peer name outside netns {rack}"], check=False):
                break  # whoever makes the name has the number
        else:
            raise OSError("all networks 10.77.X.0/24 are in use")
        ip(["link add switch type bridge", "link set switch up", "link set outside master switch up"], rack)
        ip([f"addr add {self.prefix}.1/24 dev {self._outer}", f"link set {self._outer} up"])

    def remove(self) -> None:
        ip([f"link del {self._outer}"], check=False)

    def plug(self, machines: Collection[Plugged]) -> None:
        """New cables for machines that are on."""
        machines = [each for each in machines if each.pid and self._home(each)]
        for each in machines:  # what has just been switched off may take a moment to go by itself
            ip([f"link del {each.name}"], self._home(each), check=False)
        ip(_cable(each, self._home(each)) for each in machines)
        for each in machines:
            ip(_near_end(each), each.pid)
        for each in machines:
            self.heal(each)

    def cut(self, machine: Plugged) -> None:
        if home := self._home(machine):
            ip([f"link set {machine.name} down"], home)

    def heal(self, machine: Plugged) -> None:
        if home := self._home(machine):
            ip(_far_end(machine), home)
        # The outside may be about to give up its search for the machine, and would tell so to the next who asks.
        ip([f"neigh del {machine.address} dev {self._outer}"], check=False)

    def _home(self, machine: Plugged) -> int:
        """In whose network the far end of its cable is, which has the machine's name there; 0 if that one is off."""
        return machine.bastion.pid if machine.bastion else self._rack


def ip(lines: Iterable[str], pid: int = 0, check: bool = True) -> bool:
    """Commands of `ip` in the network of a process; whether all of them succeeded. Unchecked, none stops the others."""
    enter = ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid else []
    command, text = [*enter, "ip", *([] if check else ["-force"]), "-batch", "-"], "\n".join(lines) + "\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"ip: {done.stderr.strip()}\n{text}")
    return done.returncode == 0


def _cable(machine: Plugged, home: int) -> str:
    """Its card has the same number at each boot, lest the others send to the one that is gone."""
    card = "02:00:" + ":".join(f"{int(number):02x}" for number in machine.address.split("."))
    return f"link add {machine.name} netns {home} type veth peer name eth0 address {card} netns {machine.pid}"


def _near_end(machine: Plugged) -> list[str]:
    up = ["link set lo up", "link set eth0 up"]
    if machine.bastion:  # one address is all that it can reach
        return [*up, f"addr add {machine.address}/32 dev eth0", f"route add {machine.bastion.address} dev eth0"]
    return [*up, f"addr add {machine.address}/24 dev eth0"]


def _far_end(machine: Plugged) -> list[str]:
    if machine.bastion:
        return [f"link set {machine.name} up", f"route replace {machine.address} dev {machine.name}"]
    return [f"link set {machine.name} master switch up"]

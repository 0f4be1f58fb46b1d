"""How a host is reached: OpenSSH itself says what the user's configuration and known_hosts mean."""

import base64
import getpass
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import paramiko

from fleet.machines import Machine
from fleet.plain import plain
from fleet.run_config import UserError

_NONE = "none"


@dataclass(frozen=True)
class Route:
    """One host, with everything that OpenSSH would do to get there."""

    host: str
    port: int
    user: str
    keys: tuple[Path, ...] = ()  # files of private keys
    keys_only: bool = False  # of the agent's keys only these
    agent: bool = True  # whether it is asked at all
    jump: str = ""  # the hosts between, "user@host:port,..."
    proxy: str = ""  # or the command that connects
    alias: str = ""  # the name in known_hosts
    known_hosts: tuple[Path, ...] = ()

    def __str__(self) -> str:
        way = f" by way of {self.jump}" if self.jump else " through a ProxyCommand" if self.proxy else ""
        return f"{self.user}@{self.host}:{self.port}{way}"

    @property
    def known_as(self) -> str:
        name = self.alias or self.host
        return name if self.port == 22 or self.alias else f"[{name}]:{self.port}"


def route_to(machine: Machine, ssh_config: Path | None) -> Route:
    """The machine's own words win over the configuration."""
    options = ["-p", str(machine.port)] if machine.port else []
    options += ["-l", machine.user] if machine.user else []
    options += ["-i", str(Path(machine.key).expanduser())] if machine.key else []
    return _route(machine.host, options, ssh_config)


def first_hop(route: Route, ssh_config: Path | None) -> tuple[Route, Route] | None:
    """The last of the hosts between, with the way to it, and the host itself from there on."""
    if not route.jump:
        return None
    *before, last = route.jump.split(",")
    user, _, place = last.removeprefix("ssh://").rstrip("/").rpartition("@")
    host, _, port = place.rpartition(":") if place.count(":") == 1 or "]:" in place else (place, "", "")
    options = (["-l", user] if user else []) + (["-p", port] if port else [])
    options += ["-J", ",".join(before)] if before else []
    return _route(host.strip("[]"), options, ssh_config), route


def _route(host: str, options: list[str], ssh_config: Path | None) -> Route:
    said = _ask_openssh(host, options, ssh_config)

    def one(key: str) -> str:
        value = said.get(key, [""])[0]
        return "" if value == _NONE else value

    name, port, user = one("hostname") or host, int(one("port") or 22), one("user") or getpass.getuser()
    tokens = {"%%": "%", "%h": name, "%p": str(port), "%r": user, "%n": host, "%d": str(Path.home())}
    tokens["%u"] = getpass.getuser()

    def filled(text: str) -> str:
        return re.sub("%.", lambda token: tokens.get(token[0], token[0]), text)

    files = [file for key in ("userknownhostsfile", "globalknownhostsfile") for file in one(key).split()]
    return Route(
        name, port, user,
        keys=tuple(Path(filled(file)).expanduser() for file in said.get("identityfile", [])),
        keys_only=one("identitiesonly") == "yes",
        agent=said.get("identityagent") != [_NONE],
        jump=one("proxyjump"),
        proxy=filled(one("proxycommand")),
        alias=one("hostkeyalias"),
        known_hosts=tuple(Path(filled(file)).expanduser() for file in files),
    )  # fmt: skip


def _ask_openssh(host: str, options: list[str], ssh_config: Path | None) -> dict[str, list[str]]:
    """`ssh -G` connects nowhere: it prints what it would do, with Include, Match and patterns resolved."""
    command = ["ssh", "-G", *(["-F", str(ssh_config)] if ssh_config else []), *options, "--", host]
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=15)
    except FileNotFoundError:
        raise UserError("OpenSSH's client is missing: install it (openssh-client)") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"{host}: `ssh -G` takes too long; look at your SSH configuration") from None
    if done.returncode:
        line = (done.stderr.strip().splitlines() or ["?"])[-1]
        raise UserError(f"{host}: your SSH configuration cannot be used: {plain(line)}")
    said: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, value = line.partition(" ")
        said.setdefault(key, []).append(value)
    return said


# -- known hosts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostKeys:
    """What known_hosts says of one host."""

    keys: tuple[paramiko.PKey, ...]
    revoked: frozenset[bytes]
    notes: tuple[str, ...]  # lines about it that could not be used


def known(route: Route) -> HostKeys:
    """Also of hashed names and of patterns: ssh-keygen finds the lines."""
    keys, revoked, notes = list[paramiko.PKey](), set[bytes](), list[str]()
    for file in route.known_hosts:
        if not os.path.isfile(file):
            continue
        command = ["ssh-keygen", "-F", route.known_as, "-f", str(file)]
        found = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=15)
        for line in found.stdout.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            marker, line = line.split(None, 1) if line.startswith("@") else ("", line)
            fields = line.split()
            if marker == "@revoked" and len(fields) > 2:
                revoked.add(base64.b64decode(fields[2]))
            elif marker:
                notes.append(f"{file}: a line with {plain(marker, 40)} was passed over")
            elif key := _key(fields):
                keys.append(key)
            else:
                notes.append(f"{file}: a key of type {plain(fields[1:2], 40)} was passed over")
    return HostKeys(tuple(keys), frozenset(revoked), tuple(notes))


def _key(fields: list[str]) -> paramiko.PKey | None:
    try:
        return paramiko.PKey.from_type_string(fields[1], base64.b64decode(fields[2]))
    except (paramiko.SSHException, ValueError, IndexError, paramiko.pkey.UnknownKeyType):
        return None

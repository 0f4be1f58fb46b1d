"""One SSH connection, by paramiko, with the user's own habits. Host keys are always checked."""

import base64
import contextlib
import hashlib
import logging
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import paramiko

from fleet.remote.route import HostKeys, Route, first_hop, known

logging.getLogger("paramiko").setLevel(logging.CRITICAL)  # what matters is raised, and told in one line


_AT_ONCE = threading.Semaphore(8)  # through gates: sshd turns away whom it has not let in yet beyond ten or so


class Unreachable(Exception):
    """No connection, and why, in one line."""


class Locked(Unreachable):
    """Only an encrypted key is left to try."""

    def __init__(self, key: Path) -> None:
        super().__init__(f"its key {key} is encrypted: give it to the agent with `ssh-add {key}`")
        self.key = key


class Connection:
    """To one host, perhaps through others. A command's standard streams are all that it gives."""

    def __init__(
        self, route: Route, seconds: float, passphrases: Mapping[Path, bytes], ssh_config: Path | None = None,
        between: bool = False,
    ) -> None:  # fmt: skip
        self.route, self.seconds = route, seconds
        self._before: Connection | None = None
        self._transport: paramiko.Transport | None = None
        self._proxy: paramiko.ProxyCommand | None = None
        self.notes: list[str] = []
        try:
            with _AT_ONCE if route.jump and not between else contextlib.nullcontext():
                self._connect(passphrases, ssh_config)
        except BaseException:
            self.close()
            raise

    def execute(self, command: str) -> paramiko.Channel:
        """Start a command there; no terminal, so that what it leaves behind outlives the connection."""
        assert self._transport
        try:
            channel = self._transport.open_session(timeout=self.seconds)
            channel.settimeout(self.seconds)
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            raise Unreachable(f"logged in, but no command can be started: {_said(error)}") from None
        return channel

    def close(self) -> None:
        for each in (self._transport, self._before):
            if each:
                each.close()
        if self._proxy:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._proxy.process.wait(2.0)

    # -- getting there -------------------------------------------------------------------------------------------------

    def _connect(self, passphrases: Mapping[Path, bytes], ssh_config: Path | None) -> None:
        try:
            self._transport = paramiko.Transport(self._stream(passphrases, ssh_config))
            self._transport.banner_timeout = self._transport.auth_timeout = self.seconds
            found = known(self.route)
            self._prefer(found)
            self._transport.start_client(timeout=self.seconds)
            self._check(found, self._transport.get_remote_server_key())
            self._log_in(passphrases)
        except (paramiko.SSHException, EOFError, OSError) as error:
            speaks = bool(self._transport and self._transport.remote_version)
            silent = not isinstance(error, paramiko.AuthenticationException) and not speaks
            why = f"accepts connections, but is silent for {self.seconds:g} s" if silent else _said(error)
            raise Unreachable(f"{self.route}: {why}") from None

    def _stream(self, passphrases: Mapping[Path, bytes], ssh_config: Path | None) -> socket.socket:
        """A socket, or what stands for one."""
        if self.route.proxy:
            # a line of shell, as OpenSSH has it
            self._proxy = paramiko.ProxyCommand(shlex.join(["sh", "-c", f"exec {self.route.proxy}"]))
            self._proxy.settimeout(self.seconds)
            return self._proxy  # type: ignore[return-value]
        try:
            if hop := first_hop(self.route, ssh_config):
                self._before = Connection(hop[0], self.seconds, passphrases, ssh_config, between=True)
                return self._before.channel_to(self.route.host, self.route.port)
            return socket.create_connection((self.route.host, self.route.port), self.seconds)
        except socket.gaierror:
            raise Unreachable(f"the name {self.route.host} does not resolve") from None
        except TimeoutError:
            raise Unreachable(f"{self.route}: no answer within {self.seconds:g} s") from None
        except (OSError, paramiko.SSHException) as error:
            raise Unreachable(f"{self.route}: {_said(error)}") from None

    def channel_to(self, host: str, port: int) -> socket.socket:
        assert self._transport
        channel = self._transport.open_channel("direct-tcpip", (host, port), ("127.0.0.1", 0), timeout=self.seconds)
        channel.settimeout(self.seconds)
        return channel  # type: ignore[return-value]

    # -- who is there --------------------------------------------------------------------------------------------------

    def _prefer(self, found: HostKeys) -> None:
        """Ask for a key of a type that is known, or an unknown one of another type would look like a stranger's."""
        assert self._transport
        options = self._transport.get_security_options()
        kinds = {key.get_name() for key in found.keys}
        kinds |= {kind for kind in options.key_types if kind.startswith("rsa-") and "ssh-rsa" in kinds}
        options.key_types = tuple(sorted(options.key_types, key=lambda kind: kind not in kinds))

    def _check(self, found: HostKeys, key: paramiko.PKey) -> None:
        self.notes += found.notes
        if key.asbytes() in found.revoked:
            raise Unreachable(f"{self.route}: its host key {_fingerprint(key)} is marked as revoked in known_hosts")
        if key.asbytes() in {each.asbytes() for each in found.keys}:
            return
        file = next(iter(self.route.known_hosts), Path("~/.ssh/known_hosts"))
        add = f"echo '{self.route.known_as} {key.get_name()} {key.get_base64()}' >> {file}"
        if same := [each for each in found.keys if each.get_name() == key.get_name()]:
            raise Unreachable(
                f"{self.route}: its host key has CHANGED: known is {_fingerprint(same[0])}, it shows "
                f"{_fingerprint(key)}. Somebody may stand between. If you know why: "
                f"ssh-keygen -R '{self.route.known_as}' -f {file} && {add}"
            )
        kind = "ecdsa" if key.get_name().startswith("ecdsa") else key.get_name().removeprefix("ssh-")
        raise Unreachable(
            f"{self.route}: its host key is not known. Compare {_fingerprint(key)} with what "
            f"`ssh-keygen -lf /etc/ssh/ssh_host_{kind}_key.pub` says on the machine itself; then: {add}"
        )

    # -- logging in ----------------------------------------------------------------------------------------------------

    def _log_in(self, passphrases: Mapping[Path, bytes]) -> None:
        assert self._transport
        tried, locked = 0, list[Path]()
        for key in self._keys(passphrases, locked):
            tried += 1
            try:
                self._transport.auth_publickey(self.route.user, key)
            except paramiko.AuthenticationException as error:
                if "timeout" in str(error).lower():
                    raise Unreachable(f"{self.route}: no answer within {self.seconds:g} s, while logging in") from None
            if self._transport.is_authenticated():
                return
            if not self._transport.is_active():
                raise Unreachable(f"{self.route}: it hung up after {tried} keys; name the right one as `key`")
        if locked:
            raise Locked(locked[0])
        names = ", ".join(str(file) for file in self.route.keys if file.is_file()) or "no key file"
        raise Unreachable(f"{self.route}: it takes none of the keys ({names}, and the agent's); try `ssh-copy-id`")

    def _keys(self, passphrases: Mapping[Path, bytes], locked: list[Path]) -> Iterator[paramiko.PKey]:
        """First those of the agent that are named, then its others, then files. Encrypted ones are noted."""
        files = {_public(file): file for file in self.route.keys if file.is_file()}
        agents = {key.get_base64(): key for key in _of_agent()} if self.route.agent else {}
        named = [public for public in files if public in agents]
        for public in named + [each for each in agents if each not in files and not self.route.keys_only]:
            files.pop(public, None)
            yield agents[public]
        for file in files.values():
            try:
                yield paramiko.PKey.from_path(file, passphrases.get(file))  # type: ignore[arg-type]  # it wants bytes
            except (paramiko.PasswordRequiredException, TypeError):
                locked.append(file)
            except (paramiko.SSHException, paramiko.pkey.UnknownKeyType, ValueError, OSError) as error:
                if file in passphrases:
                    locked.append(file)
                self.notes.append(f"the key {file} cannot be used: {_said(error)}")


_agent_lock = threading.Lock()


def _of_agent() -> tuple[paramiko.PKey, ...]:
    with _agent_lock, contextlib.suppress(paramiko.SSHException, OSError):
        return tuple(paramiko.Agent().get_keys())
    return ()


def _public(file: Path) -> str:
    """The key's public half, by which an agent's key is recognised; or the file's name where it does not lie beside."""
    with contextlib.suppress(OSError, IndexError, UnicodeDecodeError):
        return Path(f"{file}.pub").read_text().split()[1]
    return str(file)


def _fingerprint(key: paramiko.PKey) -> str:
    digest = base64.b64encode(hashlib.sha256(key.asbytes()).digest()).decode().rstrip("=")
    return f"SHA256:{digest} ({key.get_name()})"


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 300 else text[:297] + "..."

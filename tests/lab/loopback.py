"""SSH servers on loopback for machines without root: each runs what it is told here, for whoever has the key."""

import contextlib
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import paramiko

_ROOM = 1 << 16


class _Guard(paramiko.ServerInterface):
    """Of one connection."""

    def __init__(self, key: paramiko.PKey) -> None:
        self._key = key

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        return paramiko.AUTH_SUCCESSFUL if key == self._key else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, number: int) -> int:
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        threading.Thread(target=_run, args=(channel, command.decode()), daemon=True).start()
        return True


def _run(channel: paramiko.Channel, command: str) -> None:
    """A shell's standard input and output, until it ends or nobody is there to ask."""
    with subprocess.Popen(
        ["bash", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    ) as process:
        assert process.stdin and process.stdout
        threading.Thread(target=_fed, args=(channel, process), daemon=True).start()
        while data := process.stdout.read(_ROOM):
            with contextlib.suppress(OSError):
                channel.sendall(data)
    with contextlib.suppress(OSError, EOFError):
        channel.send_exit_status(process.returncode)
        channel.close()


def _fed(channel: paramiko.Channel, process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin
    with contextlib.suppress(OSError), process.stdin:
        while data := channel.recv(_ROOM):
            process.stdin.write(data)


def _served(listening: socket.socket, host_key: paramiko.PKey, key: paramiko.PKey) -> None:
    with contextlib.suppress(OSError):  # it is closed
        while True:
            transport = paramiko.Transport(listening.accept()[0])
            transport.add_server_key(host_key)
            with contextlib.suppress(paramiko.SSHException, EOFError):
                transport.start_server(server=_Guard(key))


@contextlib.contextmanager
def loopback(folder: Path, count: int) -> Iterator[tuple[Path, list[int]]]:
    """So many of them: an SSH configuration that knows them, and their ports."""
    folder.mkdir()
    key, host_key = (paramiko.ECDSAKey.generate() for _ in range(2))
    key.write_private_key_file(str(folder / "key"))
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    said = f"{host_key.get_name()} {host_key.get_base64()}"
    (folder / "known_hosts").write_text("".join(f"[127.0.0.1]:{port} {said}\n" for port in ports))
    (folder / "config").write_text(
        f"Host *\n  IdentityFile {folder / 'key'}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder / 'known_hosts'}\n  GlobalKnownHostsFile /dev/null\n"
    )
    for each in sockets:
        threading.Thread(target=_served, args=(each, host_key, key), daemon=True).start()
    try:
        yield folder / "config", ports
    finally:
        for each in sockets:
            each.close()

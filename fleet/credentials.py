"""With which credentials a bucket is used. Only their source is ever named.

The environment comes first, then a profile of the files that `aws configure` writes, then what the machine itself has
(web identity, a container's or an instance's role), which obstore asks for by itself.
"""

import configparser
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

_AGAIN = timedelta(minutes=6)  # a client asks again some minutes before: who renews a profile need not start anew


def settings_for(address: str) -> dict[str, Any]:
    """What a client for that address needs to be told besides what it reads in the environment by itself."""
    if not address.startswith("s3://"):
        return {}
    known: dict[str, Any] = {}
    if not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        known["region"] = _of_profile(_file("AWS_CONFIG_FILE", "config")).get("region", "us-east-1")
    if not os.environ.get("AWS_ACCESS_KEY_ID") and _keys():
        known["credential_provider"] = Profile()
    return known


def source_of(address: str) -> str:
    """For people: where the credentials come from."""
    if not address.startswith("s3://"):
        return "what obstore finds in the environment or on the machine"
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        return "the environment (AWS_ACCESS_KEY_ID)"
    if _keys():
        return f"profile {_profile()} of {_file('AWS_SHARED_CREDENTIALS_FILE', 'credentials')}"
    return "the machine's own role, if it has one"


class Profile:
    """Read anew now and then, so that a run goes on when keys are renewed."""

    def __call__(self) -> dict[str, Any]:
        keys = _keys()
        if not keys:
            raise OSError(f"no credentials in profile {_profile()}")
        return {**keys, "expires_at": datetime.now(UTC) + _AGAIN}


def _keys() -> dict[str, str | None]:
    found = _of_profile(_file("AWS_SHARED_CREDENTIALS_FILE", "credentials"))
    if not {"aws_access_key_id", "aws_secret_access_key"} <= found.keys():
        return {}
    token = found.get("aws_session_token")
    return {
        "access_key_id": found["aws_access_key_id"],
        "secret_access_key": found["aws_secret_access_key"],
        "token": token,
    }


def _of_profile(file: Path) -> dict[str, str]:
    read = configparser.ConfigParser(interpolation=None)
    try:
        read.read_string(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, configparser.Error):
        return {}
    sections = (_profile(), f"profile {_profile()}")
    return next((dict(read[each]) for each in sections if each in read), {})


def _profile() -> str:
    return os.environ.get("AWS_PROFILE") or "default"


def _file(variable: str, name: str) -> Path:
    return Path(os.path.expanduser(os.environ.get(variable) or f"~/.aws/{name}"))  # there may be no home


def may_be_plain() -> bool:
    """Unencrypted requests are for a server on this very machine, unless AWS_ALLOW_HTTP says otherwise."""
    if os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("true", "1"):
        return True
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    host = endpoint.partition("://")[2].partition("/")[0].rpartition(":")[0]
    return endpoint.startswith("http://") and host in ("127.0.0.1", "localhost", "[::1]")

"""Hugging Face's hub: a model from it, by its id and revision; a finished model's folder to it."""

import contextlib
import fnmatch
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from fleet.errors import UserError, first_line
from fleet.places import of_hub

_BESIDE = ("*.json", "*.model", "*.txt", "*.jinja")
_WEIGHTS = (("model*.safetensors", "adapter_model*.safetensors"), ("pytorch_model*.bin", "adapter_model*.bin"))
_STALE = ("*.safetensors", "*.safetensors.index.json")  # of an earlier push, if this one has no such file
_LOG_IN = "`hf auth login` says it for all commands, HF_TOKEN in the environment for one"


def _be_quiet() -> None:
    """Its retries are nobody's concern, since the error says enough; and bars only where somebody looks."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if not sys.stderr.isatty():
        disable_progress_bars()


# -- from it -----------------------------------------------------------------------------------------------------------


def fetched(reference: str) -> Path:
    """A model's folder; without a network, as it was fetched before."""
    from huggingface_hub import list_repo_files, snapshot_download

    _be_quiet()
    name, revision = of_hub(reference)
    try:
        there = list_repo_files(name, revision=revision)
        safe = any(fnmatch.fnmatch(file, pattern) for file in there for pattern in _WEIGHTS[0])
        wanted = [*_BESIDE, *_WEIGHTS[0 if safe else 1]]
        return Path(snapshot_download(name, revision=revision, allow_patterns=wanted))
    except Exception as error:  # whatever a hub and a network can come up with
        with contextlib.suppress(Exception):
            if _absent(error):
                wanted = [*_BESIDE, *_WEIGHTS[0]]
                return Path(snapshot_download(name, revision=revision, allow_patterns=wanted, local_files_only=True))
        raise UserError(
            f"{reference}: no such folder here, and the hub does not give it: {first_line(error)}"
        ) from None


def _absent(error: Exception) -> bool:
    from httpx2 import TransportError  # huggingface_hub's own

    return isinstance(error, (ConnectionError, TransportError))  # the first: it was said to be


# -- to it -------------------------------------------------------------------------------------------------------------


def may_push(repo: str) -> None:
    """What can be refused is refused before anything is made: the name, no network, nobody's token."""
    from huggingface_hub import get_token, whoami
    from huggingface_hub.utils._validators import validate_repo_id

    with _in_a_line(repo):
        validate_repo_id(repo)
        if repo.count("/") != 1:
            raise UserError(f"--push {repo}: the owner's name and the model's are expected, as in org/name")
        if not get_token():
            raise UserError(f"--push {repo}: the hub wants to know who you are: {_LOG_IN}")
        whoami()


def push(folder: Path, repo: str, public: bool) -> str:
    """Its revision there. All files come in one commit, so that nobody sees half of a model; what an interrupted push
    has sent already is not sent again."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, files = HfApi(), sorted(file for file in folder.rglob("*") if file.is_file())
    names = {str(file.relative_to(folder)): file for file in files}
    names = {name: file for name, file in names.items() if not any(part[0] == "." for part in Path(name).parts)}
    with _in_a_line(repo):
        api.create_repo(repo, private=not public, exist_ok=True)
        if not public and not api.model_info(repo).private:
            raise UserError(f"{repo} is there already, and everybody can see it; --public says that this is meant")
        stale = [name for name in api.list_repo_files(repo) if any(fnmatch.fnmatch(name, each) for each in _STALE)]
        gone = [CommitOperationDelete(name) for name in stale if name not in names]
        added = [CommitOperationAdd(name, _sent(name, file, folder, repo)) for name, file in names.items()]
        return str(api.create_commit(repo, [*gone, *added], commit_message=f"{folder.name}, by edt").oid)


def _sent(name: str, file: Path, folder: Path, repo: str) -> Path | bytes:
    """A card speaks of the model where it is read, and of nobody's folders."""
    if name != "README.md":
        return file
    text = file.read_text(encoding="utf-8")
    for place in dict.fromkeys((str(folder.absolute()), str(folder.resolve()))):
        text = text.replace(place, repo)
    for begin, end in (("=", " "), ('"', '"')):  # of a command, of a line of Python
        text = text.replace(f"{begin}{folder}{end}", f"{begin}{repo}{end}")
    return text.replace(os.path.expanduser("~/"), "~/").encode()


@contextlib.contextmanager
def _in_a_line(repo: str) -> Iterator[None]:
    """Whatever the hub and the way to it can come up with."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    _be_quiet()
    try:
        yield
    except UserError:
        raise
    except HFValidationError as error:
        raise UserError(f"--push {repo}: {first_line(error)}") from None
    except Exception as error:
        why, code = first_line(error), error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        if _absent(error):
            why = f"the hub cannot be reached ({why}); the same command tries again"
        elif code == 401:
            why = f"the hub does not know your token: {_LOG_IN}"
        elif code == 403:
            why = f"your token may not write there ({why})"
        raise UserError(f"--push {repo}: {why}") from None

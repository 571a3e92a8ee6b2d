"""Files of a model on the Hugging Face hub, by its name; huggingface_hub downloads them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import responses
from pathlib import Path
from typing import Any, TypeGuard

from posenc._contract import checks

# `name` or `org/name`, and a revision after an @. A file that is missing is no model.
_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(?<!\.json)(?<!\.safetensors)(@\w[\w./-]*)?", re.ASCII)
# Seconds to wait for an answer of the hub, if HF_HUB_ETAG_TIMEOUT does not say.
_TIMEOUT = 5
_LOCK = threading.Lock()


def is_name(text: object) -> TypeGuard[str]:
    """Whether ``text`` can be a model's name on the hub, and is no path that exists.

    Examples:
        >>> [is_name(text) for text in ("gpt2", "org/name@main", "org/config.json", "/org/name")]
        [True, True, False, False]
    """
    return isinstance(text, str) and bool(_NAME.fullmatch(text)) and not os.path.exists(text)


def download(who: str, model: str, *names: str, instead: str) -> Path:
    """The first of the files ``names`` that ``model`` has, in the hub's cache on this machine.

    No other file is asked for. Without a connection, files that are in the cache are found.

    Args:
        who: The function that errors name.
        model: ``name`` or ``org/name``, with ``@revision`` for one that is not the newest.
        names: Paths in the model's repository.
        instead: What else the caller of ``who`` can pass the path of.
    """
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError as error:
        raise ImportError(
            f"{who}: {model} is not a path here, and as a model's name on the hub it needs "
            "huggingface_hub: pip install 'posenc[hub]', or '.[hub]' in a clone"
        ) from error
    repository, _, revision = model.partition("@")
    missing: Exception | None = None
    for name in names:
        how: dict[str, Any] = {"revision": revision or None, "etag_timeout": _TIMEOUT}
        # Without a connection, the next name need not wait for one again.
        how["local_files_only"] = isinstance(missing, errors.LocalEntryNotFoundError)
        try:
            with _checked_answers():
                return Path(hf_hub_download(repository, name, **how))
        except errors.EntryNotFoundError as error:
            missing = missing or error
        except errors.GatedRepoError as error:
            reason = f"{repository} is gated, and you have no access to it"
            hint = "Accept the terms on its page, and log in with hf auth login"
            raise _error(who, reason, hint) from error
        except errors.RevisionNotFoundError as error:
            reason = f"{repository} has no revision {revision or 'main'}"
            raise _error(who, reason, "Pass a branch, a tag or a commit") from error
        except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
            reason = f"{repository} is not a path here, and the hub has no model of this name"
            hint = "Check the spelling; if the model is private, log in with hf auth login"
            raise _error(who, reason, hint) from error
        except errors.HfHubHTTPError as error:
            why, hint = _why(error)
            reason = f"cannot get {name} of {model}: {why}"
            raise _error(who, reason, f"{hint}, or pass the path of {instead}") from error
        except Exception as error:
            # The network, the disk, the hub: huggingface_hub has no common class for these.
            words = " ".join(str(error).split())
            reason = f"cannot get {name} of {model}: {type(error).__name__}: {words}"
            raise _error(who, reason, f"Try again, or pass the path of {instead}") from error
    files = " or ".join(names)
    if not isinstance(missing, errors.LocalEntryNotFoundError):
        raise _error(who, f"{model} has no {files}", f"Pass the path of {instead}") from missing
    why, hint = _why(missing.__cause__)
    reason = f"{model} is not a path here, the hub's cache has no {files} of it, and {why}"
    raise _error(who, reason, f"{hint}, or pass the path of {instead}") from missing


def _why(error: BaseException | None) -> tuple[str, str]:
    """Why the hub was of no help, and what to do about it."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return "offline mode is on", "Unset HF_HUB_OFFLINE"
    settings = "Check HF_ENDPOINT, the proxy and your login (hf auth login)"
    if isinstance(error, errors.HfHubHTTPError):
        status, words = error.response.status_code, error.response.headers.get("X-Error-Message")
        answer = f"{status} {words or responses.get(status, '')}".strip()
        return f"{constants.ENDPOINT} answers {answer}", settings
    if isinstance(error, errors.FileMetadataError):
        return f"{constants.ENDPOINT} answers as no hub does: {error}", settings
    return "the hub does not answer", "Go online, set HF_HUB_OFFLINE=1 not to wait"


@contextmanager
def _checked_answers() -> Iterator[None]:
    """Make huggingface_hub refuse an answer that would lead out of its cache, and not ask twice.

    The paths that it writes to contain two headers of the answer, the commit and the ETag. Where
    nobody answers, it would ask again for half a minute.
    """
    from huggingface_hub import errors, file_download

    unanswered: Exception | None = None

    def asked(*args: Any, **kwargs: Any) -> Any:
        nonlocal unanswered
        if unanswered is not None:
            raise unanswered
        try:
            answer = ask(*args, **kwargs)
        except errors.HfHubHTTPError as error:
            _check("X-Repo-Commit", error.response.headers.get("X-Repo-Commit", "none"))
            raise
        except Exception as error:
            unanswered = error
            raise
        _check("X-Repo-Commit", answer.commit_hash)
        _check("ETag", answer.etag)
        return answer

    # One thread at a time, or one would restore what another has set.
    with _LOCK:
        # hf_hub_download looks this name up when it is called.
        ask: Any = file_download.get_hf_file_metadata
        file_download.get_hf_file_metadata = asked
        try:
            yield
        finally:
            file_download.get_hf_file_metadata = ask


def _check(header: str, value: str | None) -> None:
    """Refuse a value that is not a name in a folder."""
    from huggingface_hub import errors

    if not re.fullmatch(r"\w[\w.+=-]*", value or "", re.ASCII):
        raise errors.FileMetadataError(f"its {header} is {value!r}")


def _error(who: str, reason: str, hint: str) -> OSError:
    return OSError(f"{who}: {checks.shortened(checks.printable(reason.rstrip('.')))}.\n  {hint}.")

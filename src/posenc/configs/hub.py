"""Files of a model on the Hugging Face hub, by its name; huggingface_hub downloads them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TypeGuard

from posenc._contract import checks

# `name` or `org/name`, and a revision after an @. A file that is missing is no model.
_NAME = re.compile(r"(\w[\w.-]*/)?\w[\w.-]*(?<!\.json)(?<!\.safetensors)(@\w[\w./-]*)?", re.ASCII)


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
        # Without a connection, the next name need not wait half a minute for one again.
        cached = isinstance(missing, errors.LocalEntryNotFoundError)
        try:
            found = hf_hub_download(
                repository, name, revision=revision or None, local_files_only=cached
            )
            return Path(found)
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
        except Exception as error:
            # The network, the disk, the hub: huggingface_hub has no common class for these.
            words = " ".join(str(error).split())
            reason = f"cannot get {name} of {model}: {type(error).__name__}: {words}"
            raise _error(who, reason, f"Try again, or pass the path of {instead}") from error
    files = " or ".join(names)
    if not isinstance(missing, errors.LocalEntryNotFoundError):
        raise _error(who, f"{model} has no {files}", f"Pass the path of {instead}") from missing
    offline = isinstance(missing.__cause__, errors.OfflineModeIsEnabled)
    why = "offline mode is on" if offline else "the hub does not answer"
    online = "Unset HF_HUB_OFFLINE" if offline else "Go online, set HF_HUB_OFFLINE=1 not to wait"
    reason = f"{model} is not a path here, the hub's cache has no {files} of it, and {why}"
    raise _error(who, reason, f"{online}, or pass the path of {instead}") from missing


def _error(who: str, reason: str, hint: str) -> OSError:
    return OSError(f"{who}: {checks.shortened(checks.printable(reason.rstrip('.')))}.\n  {hint}.")

"""A stand-in for the Hugging Face hub, on loopback, which notes every file that is asked for."""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

# The commit of every model's only revision, `main`.
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves ``files``, by model and name, and refuses ``refused`` with a status and a code."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, dict[str, bytes]] = {}
        self.refused: dict[str, tuple[int, str]] = {}
        # Headers to send with another value, or not at all (None), after some honest answers.
        self.headers: dict[str, str | None] = {}
        self.honest = 0
        # Bytes of a download after which the connection is cut.
        self.cut: int | None = None
        # Each "model/file" once, or the path of a request of another kind.
        self.asked: list[str] = []
        # Each revision once.
        self.revisions: list[str] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may go away."""


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub, found = self.server, re.fullmatch(r"/(.+)/resolve/([^/]+)/(.+)", unquote(self.path))
        model, revision, name = found.groups() if found else ("", "", self.path)
        asked = f"{model}/{name}" if found else self.path
        if asked not in hub.asked:
            hub.asked.append(asked)
        if revision not in hub.revisions:
            hub.revisions.append(revision)
        if model in hub.refused:
            return self._answer(*hub.refused[model])
        if model not in hub.files:
            return self._answer(404, "RepoNotFound")
        if revision not in ("main", COMMIT):
            return self._answer(404, "RevisionNotFound")
        if name not in hub.files[model]:
            return self._answer(404, "EntryNotFound")
        self._answer(200, body=hub.files[model][name])

    do_HEAD = do_GET  # noqa: N815

    def _answer(self, status: int, code: str = "", body: bytes = b"") -> None:
        self.send_response(status)
        headers: dict[str, str | None] = {"X-Repo-Commit": COMMIT}
        if code:
            headers["X-Error-Code"] = code
        if status == 200:
            headers["ETag"] = f'"{hashlib.sha1(body).hexdigest()}"'
        headers["Content-Length"] = str(len(body))
        if self.server.honest == 0:
            headers |= self.server.headers
        self.server.honest = max(0, self.server.honest - 1)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[: self.server.cut])

    def log_message(self, *words: object) -> None:
        """Nothing: the tests read ``asked``."""


@contextmanager
def serve(home: Path) -> Iterator[Hub]:
    """A hub that huggingface_hub asks inside the block, with its cache under ``home``."""
    with Hub() as hub, pytest.MonkeyPatch.context() as patch:
        threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.01}).start()
        patch.setenv("HF_ENDPOINT", hub.url)
        patch.setenv("HF_HOME", str(home))
        patch.setenv("NO_PROXY", "127.0.0.1")
        # It asks for a list of its own otherwise.
        patch.setenv("HF_HUB_DISABLE_TELEMETRY", "1")
        for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"):
            patch.delenv(name, raising=False)
        try:
            with _imported_again():
                yield hub
        finally:
            hub.shutdown()


@contextmanager
def offline() -> Iterator[None]:
    """Offline mode inside the block."""
    with pytest.MonkeyPatch.context() as patch, _imported_again():
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


@contextmanager
def _imported_again() -> Iterator[None]:
    """Without huggingface_hub, which reads its environment when it is imported."""
    before, log = _take_out(), logging.getLogger("huggingface_hub")
    handlers = list(log.handlers)
    try:
        yield
    finally:
        used = _take_out()
        if "huggingface_hub" in used:
            used["huggingface_hub"].close_session()
        sys.modules.update(before)
        # Each import adds one.
        log.handlers[:] = handlers


def _take_out() -> dict[str, ModuleType]:
    names = [name for name in sys.modules if name.split(".")[0] == "huggingface_hub"]
    return {name: sys.modules.pop(name) for name in names}

"""Web server for tests, in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log nothing."""


class _Short(_Quiet):
    """Declares a hundred bytes more than it sends."""

    def send_header(self, keyword: str, value: str) -> None:
        more = 100 if keyword == "Content-Length" else 0
        super().send_header(keyword, str(int(value) + more) if more else value)


@contextmanager
def served(folder: Path, *, cuts_short: bool = False) -> Iterator[str]:
    """Serve the files of a folder, and yield its URL."""
    handler = partial(_Short if cuts_short else _Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

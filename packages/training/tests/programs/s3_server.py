"""Serves S3's protocol on a free port of the loopback interface until standard input ends; prints its URL.

``POST /-/faults`` takes a JSON document such as ``{"method": "PUT", "status": 503, "count": 2, "after": 1}``:
after one more request of that method, the next two are answered with that status; status 0 never answers.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

ERROR = b"<Error><Code>%s</Code><Message>as the test wants it</Message></Error>"
CODES = {503: b"SlowDown", 403: b"AccessDenied"}


class WithFaults:
    """The server, with the failures that a test asks for."""

    def __init__(self, application: Any) -> None:
        self._application = application
        self._lock = threading.Lock()
        self._faults: dict[str, Any] = {}

    def __call__(self, environ: dict[str, Any], start: Any) -> Any:
        if environ["PATH_INFO"] == "/-/faults":
            self._faults = json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"])))
            start("204 No Content", [])
            return []
        status = self._next(environ["REQUEST_METHOD"])
        if status is None:
            return self._application(environ, start)
        if not status:
            threading.Event().wait()
        # Read the request first: the client would find its connection closed while it sends.
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(f"{status} Refused", [("Content-Type", "application/xml")])
        return [ERROR % CODES[status]]

    def _next(self, method: str) -> int | None:
        with self._lock:
            faults = self._faults
            if method != faults.get("method"):
                return None
            if faults.get("after", 0) > 0:
                faults["after"] -= 1
                return None
            if faults["count"] <= 0:
                return None
            faults["count"] -= 1
            status: int = faults["status"]
            return status


def main() -> None:
    """Serve until standard input is closed."""
    application = WithFaults(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()

"""A client for Google Cloud's metadata server, which describes a TPU VM's slice.

Source: "About VM metadata", Compute Engine documentation, for paths and headers; torch_xla 2.9.0 for
    the attributes ``tpu-env`` and ``worker-network-endpoints`` and their formats. Newer TPU VMs list only the
    hosts in the latter.
"""

from __future__ import annotations

import importlib
import ipaddress
import re
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from polyxla.errors import UsageError
from polyxla.tpu import env

if TYPE_CHECKING:
    import requests

DEFAULT_HOST = "metadata.google.internal"
_PATH = "/computeMetadata/v1/instance/attributes/"
_FLAVOR = {"Metadata-Flavor": "Google"}
"""A header of requests and answers. An answer without it is another server's, such as a hotel's portal."""


class MetadataError(UsageError):
    """The metadata server did not give a usable answer."""


class MetadataUnreachableError(MetadataError):
    """Nothing answers as a metadata server: most likely this machine is not on Google Cloud."""


class MetadataKeyError(MetadataError):
    """The metadata server does not have the attribute: most likely this VM has no TPU."""


class MetadataClient:
    """A client that requests each attribute of this VM once.

    After a failed or timed-out request it sends no more. Proxies are ignored. Not thread-safe.

    Args:
        host: ``host`` or ``host:port`` of the server.
        timeout_s: longest duration of a call, from the lookup of the name to the last byte, in seconds.

    Raises:
        UsageError: `host` has another form.
    """

    def __init__(self, host: str = DEFAULT_HOST, timeout_s: float = 2.0) -> None:
        if not re.fullmatch(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(:\d{1,5})?", host, re.ASCII):
            raise UsageError(
                f"the metadata server's host cannot be {host!r}",
                where=env.GCE_METADATA_HOST,
                fix=f"Write host or host:port, or unset it: the default is {DEFAULT_HOST}.",
            )
        self.host = host
        self.timeout_s = timeout_s
        self._answers: dict[str, str | MetadataError] = {}
        self._failure: MetadataError | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> MetadataClient:
        """Make a client for the server that `environ` names, or for the default one.

        Raises:
            UsageError: the variable holds neither ``host`` nor ``host:port``.
        """
        return cls(environ.get(env.GCE_METADATA_HOST) or DEFAULT_HOST)

    def attribute(self, key: str) -> str:
        """Return an attribute's text. Blocks for at most `timeout_s`.

        Raises:
            MetadataUnreachableError: no metadata server answers.
            MetadataKeyError: the server does not have the attribute.
            MetadataError: the answer took too long, or has another HTTP status.
        """
        # After a failure no more is asked: each attempt would cost the timeout again.
        if self._failure is None and key not in self._answers:
            self._ask(key)
        answer = self._failure or self._answers[key]
        if isinstance(answer, MetadataError):
            # The stored exception is raised several times; its traceback would grow with each.
            raise answer.with_traceback(None)
        return answer

    def tpu_env(self) -> dict[str, str]:
        """Return the attribute ``tpu-env``, the description of this slice, with every value as text.

        Raises:
            MetadataError: as in `attribute`, or its text is not a YAML mapping.
        """
        import yaml

        text = self.attribute("tpu-env")
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise self._unusable("tpu-env", "is not YAML") from error
        if not isinstance(values, dict):
            raise self._unusable("tpu-env", "is not a YAML mapping")
        return {str(key): "" if value is None else str(value) for key, value in values.items()}

    def worker_addresses(self) -> tuple[str, ...]:
        """Return the addresses or names of the slice's hosts in the order of their worker ids.

        Raises:
            MetadataError: as in `attribute`, or the attribute ``worker-network-endpoints`` has neither the
                form ``name:uid:address,...`` nor ``host,...``.
        """
        entries = self.attribute("worker-network-endpoints").strip().split(",")
        addresses = tuple(_address(entry.strip()) for entry in entries)
        if not all(addresses):
            raise self._unusable("worker-network-endpoints", "is not a list of name:uid:address, or of hosts")
        return addresses

    def _ask(self, key: str) -> None:
        call = _Call(f"http://{self.host}{_PATH}{key}", self.timeout_s)
        finished = call.wait()
        # A call that is late may still write its answer, which is then ignored: the failure is final.
        if not finished or call.error is not None:
            self._failure = self._failed(call)
        elif call.status == 200:
            self._answers[key] = call.text
        else:
            self._answers[key] = self._refused(key, call.status)

    def _failed(self, call: _Call) -> MetadataError:
        reason = f" ({call.error})" if call.error else f" within {self.timeout_s:g} s"
        if call.answering:
            return MetadataError(
                f"the metadata server {self.host} did not finish its answer{reason}",
                where=self._source(),
                fix=f"Try again, or describe the slice by variables: {env.TPU_SKIP_MDS_QUERY}=1.",
            )
        return MetadataUnreachableError(
            f"no metadata server answers at {self.host}{reason}",
            where=self._source(),
            fix=f"On a TPU outside of Google Cloud, set {env.TPU_SKIP_MDS_QUERY}=1 and "
            f"{env.TPU_ACCELERATOR_TYPE}, such as v4-8.",
        )

    def _refused(self, key: str, status: int) -> MetadataError:
        if status == 404:
            return MetadataKeyError(
                f"the metadata server {self.host} has no attribute {key}",
                where=self._source(),
                fix=f"Start this on a TPU VM, or set {env.TPU_SKIP_MDS_QUERY}=1 and "
                f"{env.TPU_ACCELERATOR_TYPE}, such as v4-8.",
            )
        return self._unusable(key, f"was answered with HTTP status {status}")

    def _unusable(self, key: str, what: str) -> MetadataError:
        return MetadataError(
            f"the attribute {key} of the metadata server {self.host} {what}",
            where=self._source(),
            fix=f"Try again, or describe the slice by variables: {env.TPU_SKIP_MDS_QUERY}=1.",
        )

    def _source(self) -> str:
        if self.host == DEFAULT_HOST:
            return f"{env.GCE_METADATA_HOST} is unset"
        return f"{env.GCE_METADATA_HOST}={self.host}"


class _Call:
    """One GET in a thread of its own, so that the caller's wait is bounded.

    The timeouts of requests apply to a single read, so a server that sends byte by byte outlasts them, and
    the lookup of a name has no timeout at all.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.answering = False
        self.status = 0
        self.text = ""
        self.error: str | None = None
        self._url = url
        self._timeout_s = timeout_s
        self._deadline_s = 0.0
        self._done = threading.Event()

    def wait(self) -> bool:
        """Send the request; return whether it ended in time."""
        # The first import takes a while, which must not count as the server's delay.
        importlib.import_module("requests")
        self._deadline_s = time.monotonic() + self._timeout_s
        # A server that hangs must not keep the process from ending, so the thread is a daemon.
        threading.Thread(target=self._run, name="polyxla-metadata", daemon=True).start()
        return self._done.wait(self._timeout_s)

    def _run(self) -> None:
        import requests

        try:
            with requests.Session() as session:
                # Proxies from the environment cannot reach the metadata server, and would learn of its
                # answers.
                session.trust_env = False
                self._get(session)
        except requests.Timeout:
            self.error = f"nothing came within {self._timeout_s:g} s"
        except (requests.RequestException, OSError, ValueError) as error:
            self.error = type(error).__name__
        finally:
            self._done.set()

    def _get(self, session: requests.Session) -> None:
        with session.get(
            self._url, headers=_FLAVOR, timeout=self._timeout_s, stream=True, allow_redirects=False
        ) as response:
            if response.headers.get("Metadata-Flavor") != _FLAVOR["Metadata-Flavor"]:
                self.error = "what answers is not a metadata server"
                return
            self.answering = True
            self.status = response.status_code
            self.text = self._body(response).decode("utf-8", errors="replace")

    def _body(self, response: requests.Response) -> bytes:
        body = b""
        # Read in small pieces, so that the thread notices the deadline soon and ends.
        for piece in response.iter_content(64):
            body += piece
            if time.monotonic() > self._deadline_s:
                self.error = f"stopped after {self._timeout_s:g} s"
                break
        return body


def _address(entry: str) -> str:
    """Return the host in ``name:uid:address`` or ``host``, without its port; empty if there is none."""
    if _is_address(entry):
        return entry
    *_, host = entry.split(":", 2) if entry.count(":") >= 2 else [entry]
    if _is_address(host):
        return host
    # A port may follow a name or an IPv4 address.
    host = host.split(":")[0]
    return host if re.fullmatch(r"[\w.-]+", host, re.ASCII) else ""


def _is_address(text: str) -> bool:
    """Return whether a text is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

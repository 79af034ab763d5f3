"""The server: four questions and one answer each, on loopback, read-only.

It is the standard library's. Routing and parsing of forms, which a framework would bring, are a table of 7 paths here,
and its limits on time, size and connections would have to be set all the same.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import torch

from ..page.html import served_policy, shell
from ..view import View
from .answers import ANSWERS, one
from .guard import Guard, RefusedError, body_length
from .looks import BusyError, Look, Looks

__all__ = ["PageServer"]

#: Seconds for a request to arrive, for the answer to be computed and to be taken.
RECEIVE, COMPUTE, SEND = 15.0, 600.0, 60.0
#: Connections at a time.
CONNECTIONS = 96
#: Letters of a query.
QUERY = 2000

_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
_CLOSED = "default-src 'none'; frame-ancestors 'none'"
#: The page that the link opens: it goes on by itself, as a navigation of our own page, which a strict cookie follows.
_ENTRY = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/"><title>regard</title>'
    '<a href="/">Open</a>'
)


class PageServer(ThreadingHTTPServer):
    """A server of one recording, of one saved page, or of a model that looks at typed sentences.

    Args:
        port: The port on 127.0.0.1; 0 takes a free one.
        first: What is shown first: a page, or a function that makes a view.
        device: Where tiles are computed.
        look_at: Makes the view of a typed text, of which the second may be a decoder's; None where none can be typed.
        on_entry: Called with the next link once one was used.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    allow_reuse_address = True

    def __init__(
        self,
        first: str | Callable[[], View],
        *,
        port: int = 0,
        device: str = "cpu",
        look_at: Callable[[str, str | None], View] | None = None,
        on_entry: Callable[[str], None] = lambda link: None,
    ) -> None:
        self.looks = Looks(device)  # before the port is taken: where that fails, the server is closed
        super().__init__(("127.0.0.1", port), _PageHandler)
        self.guard = Guard(self.server_address[1])
        self.on_entry, self.look_at = on_entry, look_at
        self.page = first if isinstance(first, str) else None
        self.first = None if isinstance(first, str) else self.looks.add(first, look_at is not None)
        self.computing = threading.Lock()  # tiles one after the other: PyTorch uses all cores for each
        self._deadlines: dict[socket.socket, float] = {}
        self._open = threading.Semaphore(CONNECTIONS)

    def set_deadline(self, connection: socket.socket, seconds: float | None) -> None:
        """Close a connection that takes longer; None: it has ended."""
        if seconds is None:
            self._deadlines.pop(connection, None)
        else:
            self._deadlines[connection] = time.monotonic() + seconds

    def service_actions(self) -> None:
        """Close connections that are late, twice a second; a socket's own timeout begins again with every byte."""
        now = time.monotonic()
        for connection, end in list(self._deadlines.items()):
            if end < now:
                self._deadlines.pop(connection, None)
                _shut(connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; where too many are open, refuse at once."""
        if not self._open.acquire(blocking=False):
            refusal = (
                b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )
            try:
                request.settimeout(0.2)
                request.sendall(refusal)
            except OSError:
                pass
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.set_deadline(request, None)
            self._open.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log the class of an error alone: its message may hold a text. A client that is gone is no error."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print(f"regard: the server failed on a request ({type(error).__name__})", file=sys.stderr)

    def is_computing(self) -> bool:
        """Whether a thread is inside a model or a matrix product, from where none can be called back."""
        return self.computing.locked() or self.looks.is_working()

    def server_close(self) -> None:
        super().server_close()
        self.looks.close()


class _PageHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = RECEIVE
    server: PageServer

    def version_string(self) -> str:
        return "regard"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is logged: neither texts nor tokens."""

    def handle_one_request(self) -> None:
        self._was_read = False
        self.server.set_deadline(self.connection, RECEIVE)
        super().handle_one_request()

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.request_version == "HTTP/0.9":
            self.send_error(505)
            return False
        return True

    def handle_expect_100(self) -> bool:
        self.send_error(417)
        return False

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """A status and a sentence of our own, without anything of the request."""
        self.close_connection = True
        self.request_version = "HTTP/1.1"  # a request line that cannot be read gets an answer that can
        self._send(code, (explain or self.responses.get(cast(Any, code), ("refused", ""))[0]) + "\n", "text/plain")

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def __getattr__(self, name: str) -> Any:
        """Methods of HTTP that are not answered reach `_answer`, too, which refuses them."""
        if name.removeprefix("do_") in ("HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT"):
            return self._answer
        raise AttributeError(name)

    def _answer(self) -> None:
        try:
            self._route()
        except RefusedError as refusal:
            self._linger()
            self.send_error(refusal.status, explain=refusal.why)
        except BusyError:
            self.send_error(503, explain="too much is waiting; try again in a moment.")
        except ConnectionError:
            self.close_connection = True

    def _route(self) -> None:
        guard = self.server.guard
        guard.check_origin(self.headers)
        methods = {"GET": _GET, "POST": _POST}.get(self.command)
        if methods is None:
            raise RefusedError(405, "this server answers to GET, and to POST of /look.")
        length = body_length(self.headers, self.command)
        url = urlsplit(self.path) if self.path.startswith("/") and not self.path.startswith("//") else None
        if url is None or not self.path.isascii() or len(url.query) > QUERY:
            raise RefusedError(400, "the address must be a path of this server.")
        fields = _fields(url.query)
        if self.command == "GET" and url.path == "/" and "token" in fields:
            self._enter(fields)
            return
        guard.check_site(self.headers)
        if url.path not in {**_GET, **_POST}:
            raise RefusedError(404, "there is nothing here.")
        if not guard.has_session(self.headers):
            raise RefusedError(403, "open the link that the terminal shows; it works once.")
        if url.path not in methods:
            raise RefusedError(405, f"{url.path} is not asked by {self.command}.")
        self.server.set_deadline(self.connection, COMPUTE)
        answer, accepted = methods[url.path]
        if not fields.keys() <= accepted:
            raise RefusedError(400, "the question has a field that is not known.")
        if self.command == "POST":
            self._read_text(length, fields)
        with torch.no_grad():
            answer(self, fields)

    def _enter(self, fields: dict[str, list[str]]) -> None:
        """Turn the token of the link into a cookie."""
        guard = self.server.guard
        if fields.keys() != {"token"} or len(fields["token"]) != 1:
            raise RefusedError(400, "the link has one token.")
        if guard.has_session(self.headers):
            self._send(200, _ENTRY, "text/html")
        elif guard.use(fields["token"][0]):
            self._send(200, _ENTRY, "text/html", {"Set-Cookie": guard.cookie})
            self.server.on_entry(guard.link)
        else:
            raise RefusedError(403, "this link was used; the terminal shows a new one.")

    def _read_text(self, length: int, fields: dict[str, list[str]]) -> None:
        """Read the body of a POST into the fields: a JSON object of texts."""
        kinds = self.headers.get_all("Content-Type") or []
        if len(kinds) != 1 or kinds[0].split(";")[0].strip().lower() != "application/json":
            raise RefusedError(415, "a question must be application/json.")
        if not self.headers.get_all("Origin"):
            raise RefusedError(403, "a text must come from the page itself.")
        body = self.rfile.read(length)
        self._was_read = True
        if len(body) < length:
            raise ConnectionError("the client is gone")
        try:
            texts = json.loads(body)
        except (ValueError, RecursionError):
            raise RefusedError(400, "the body must be JSON.") from None
        if not isinstance(texts, dict) or not texts.keys() <= {"text", "decoder_text"}:
            raise RefusedError(400, "the body must be {text, decoder_text}.")
        if not isinstance(texts.get("text"), str) or not isinstance(texts.get("decoder_text"), str | None):
            raise RefusedError(400, "text and decoder_text must be texts.")
        fields |= {name: [text] for name, text in texts.items() if text is not None}

    def _linger(self) -> None:
        """Read what is left of a small body: closing over unread bytes would reset the connection before the answer."""
        try:
            if self.command != "GET" and not self._was_read:
                self.rfile.read(body_length(self.headers, "POST"))
        except (RefusedError, OSError):
            return

    def _send(
        self, status: int, body: str | bytes, kind: str, more: dict[str, str] | None = None, policy: str = _CLOSED
    ) -> None:
        data = body.encode() if isinstance(body, str) else body
        self.server.set_deadline(self.connection, SEND)
        self.send_response(status)
        charset = "; charset=utf-8" if kind.startswith("text/") or kind.endswith("json") else ""
        headers = _HEADERS | {"Content-Security-Policy": policy, "Content-Type": kind + charset} | (more or {})
        for name, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(name, value)
        if status == 405:
            self.send_header("Allow", "GET, POST")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    # The answers.

    def _page(self, fields: dict[str, list[str]]) -> None:
        server = self.server
        if server.page is not None:
            self._send(200, server.page, "text/html", policy=served_policy(server.page))
            return
        look = self._look(fields) if "look" in fields else server.first
        assert look is not None, "without a page there is a first look"
        page = shell(look.id)
        self._send(200, page, "text/html", policy=served_policy(page))

    def _data(self, fields: dict[str, list[str]]) -> None:
        look = self._look(fields)
        if look.error is not None:
            self._send(422, json.dumps({"error": look.error}), "application/json")
        elif look.packed is None:
            step = {"step": look.progress.step, "done": look.progress.done}
            self._send(202, json.dumps(step), "application/json")
        else:
            self._send(200, look.packed.data, "application/octet-stream")

    def _vectors(self, fields: dict[str, list[str]]) -> None:
        packed = self._look(fields).packed
        if packed is None:
            raise RefusedError(404, "there is nothing here yet.")
        self._send(200, packed.vectors, "application/octet-stream")

    def _arrays(self, fields: dict[str, list[str]]) -> None:
        look, path = self._look(fields), urlsplit(self.path).path
        with self.server.computing:
            block = ANSWERS[path](look, fields, lambda pyramid: self.server.looks.request_first(look, pyramid))
        self._send(200, block, "application/octet-stream")

    def _ask(self, fields: dict[str, list[str]]) -> None:
        server = self.server
        if server.look_at is None:
            raise RefusedError(404, "a recording is shown: no text can be typed.")
        text, decoder, look_at = fields["text"][0], fields.get("decoder_text", [None])[0], server.look_at
        look = server.looks.add(lambda: look_at(text, decoder), True)
        self._send(202, json.dumps({"look": look.id}), "application/json")

    def _look(self, fields: dict[str, list[str]]) -> Look:
        look = self.server.looks.find(one(fields, "look"))
        if look is None:
            raise RefusedError(404, "the server does not hold this any more.")
        return look


#: Of every path: who answers, and the fields it takes.
_GET: dict[str, tuple[Callable[..., None], set[str]]] = {
    "/": (_PageHandler._page, {"look"}),
    "/data": (_PageHandler._data, {"look"}),
    "/vectors": (_PageHandler._vectors, {"look"}),
    "/tiles": (_PageHandler._arrays, {"look", "head", "by", "tile"}),
    "/row": (_PageHandler._arrays, {"look", "head", "row"}),
    "/window": (_PageHandler._arrays, {"look", "head", "rows", "cols"}),
}
_POST: dict[str, tuple[Callable[..., None], set[str]]] = {"/look": (_PageHandler._ask, set())}


def _fields(query: str) -> dict[str, list[str]]:
    try:
        return parse_qs(query, keep_blank_values=True, strict_parsing=True, max_num_fields=32) if query else {}
    except ValueError:
        raise RefusedError(400, "the question cannot be read.") from None


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return

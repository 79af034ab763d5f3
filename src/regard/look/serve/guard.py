"""The checks of every request to a server on loopback: rules that a page of another origin cannot satisfy.

Loopback alone is no boundary: any page in the user's browser may send requests to it, and a name that is rebound to
127.0.0.1 may read the answers. So the Host must be one of ours, an Origin must be our own, and every request but the
first carries a cookie, which a link that works once has set.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from email.message import Message

__all__ = ["BODY", "Guard", "RefusedError", "body_length"]

#: Bytes of a body, at most.
BODY = 64_000


class RefusedError(Exception):
    """A request that is answered by a status and one sentence."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


class Guard:
    """The names of the server, the cookie of its pages and the link that opens it once.

    Args:
        port: The port that the server listens on. Cookies are shared by all ports of a host, so their name has it.
    """

    def __init__(self, port: int) -> None:
        self.hosts = (f"127.0.0.1:{port}", f"localhost:{port}")
        self.cookie_name = f"regard-{port}"
        self._session = secrets.token_urlsafe(32)
        self._token = secrets.token_urlsafe(32)

    @property
    def link(self) -> str:
        """The address that opens the page; it works once."""
        return f"http://{self.hosts[0]}/?token={self._token}"

    @property
    def cookie(self) -> str:
        return f"{self.cookie_name}={self._session}; Path=/; HttpOnly; SameSite=Strict"

    def check_origin(self, headers: Message) -> None:
        """Raise unless the request was meant for this server and comes from its own page or from the address bar."""
        hosts = headers.get_all("Host") or []
        if len(hosts) != 1:
            raise RefusedError(400, "a request must have one Host.")
        if hosts[0] not in self.hosts:
            raise RefusedError(403, f"this server answers to {self.hosts[0]} alone.")
        origins = headers.get_all("Origin") or []
        if any(origin != f"http://{hosts[0]}" for origin in origins) or len(origins) > 1:
            raise RefusedError(403, "pages of other origins may not ask.")

    def check_site(self, headers: Message) -> None:
        """Raise if the browser says that a page of another site has sent this."""
        if any(site not in ("same-origin", "none") for site in headers.get_all("Sec-Fetch-Site") or []):
            raise RefusedError(403, "pages of other sites may not ask.")

    def has_session(self, headers: Message) -> bool:
        """Whether the request carries the cookie of this server, and one alone."""
        sent = [part.strip().partition("=") for line in headers.get_all("Cookie") or [] for part in line.split(";")]
        values = [value for name, _, value in sent if name == self.cookie_name]
        return len(values) == 1 and _equal(values[0], self._session)

    def use(self, token: str) -> bool:
        """Whether this is the token of the link, which is another one from now on."""
        if not _equal(token, self._token):
            return False
        self._token = secrets.token_urlsafe(32)
        return True


def body_length(headers: Mapping[str, str] | Message, method: str) -> int:
    """The length of the body, refused where it is unclear or too large."""
    all_of = getattr(headers, "get_all", lambda name: [headers[name]] if name in headers else [])
    if all_of("Transfer-Encoding"):
        raise RefusedError(501, "a body must have a Content-Length.")
    lengths = all_of("Content-Length") or []
    if len(lengths) > 1 or any(not (n.isascii() and n.isdigit()) for n in lengths):
        raise RefusedError(400, "Content-Length must be one number.")
    if method == "GET":
        if lengths and int(lengths[0][:12]):
            raise RefusedError(400, "GET has no body.")
        return 0
    if not lengths:
        raise RefusedError(411, "a body must have a Content-Length.")
    if len(lengths[0]) > 12 or int(lengths[0]) > BODY:
        raise RefusedError(413, f"a body must have at most {BODY:,} bytes.")
    return int(lengths[0])


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "surrogateescape"), other.encode())

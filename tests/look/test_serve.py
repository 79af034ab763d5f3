"""The server: what it tells its own page, and how it answers everybody else."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli import main
from regard.look import View
from regard.look.page.html import served_policy, shell
from regard.look.serve import server as server_module
from regard.look.serve.pyramid import SIDE, Pyramid
from regard.look.serve.server import PageServer
from support.opened_page import running

LENGTH = 700


def capped(length: int = LENGTH) -> regard.Weights:
    """A long input whose weights a page cannot compute itself."""
    numbers = torch.Generator().manual_seed(3)
    q, k = (2 * torch.randn(2, length, 8, generator=numbers) for _ in "qk")
    score = regard.ScaledDot().softcap(20.0)
    return regard.weights(q, k, score=score, mask=regard.causal()).label([f"w{n % 50}" for n in range(length)])


def typed(text: str, decoder: str | None) -> View:
    words = text.split()
    if "wrong" in words:
        raise ValueError("the text must have another word.")
    return View(regard.weights(torch.eye(len(words))).label(words), title=text)


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    with running(PageServer(lambda: View(capped()), look_at=typed)) as one:
        look = wait(one)
        yield one
        assert look.error is None


def wait(server: PageServer, look: Any = None) -> Any:
    """Wait until a look is ready."""
    look = look or server.first
    for _ in range(12_000):  # where numba's tiles are not compiled yet, the first takes long
        if look.packed is not None or look.error is not None:
            return look
        time.sleep(0.01)
    raise AssertionError("the look is never ready")


def cookie(server: PageServer) -> str:
    return server.guard.cookie.partition(";")[0]


def send(server: PageServer, raw: bytes, seconds: float = 60.0) -> tuple[int, str, bytes]:
    """Status, headers and body of the answer to raw bytes."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=seconds) as connection:
        connection.sendall(raw)
        answer = http.client.HTTPResponse(connection, method=raw[:4].decode("latin-1").strip())
        answer.begin()
        return answer.status, str(answer.headers), answer.read()


def request(server: PageServer, line: str, *headers: str, body: bytes = b"") -> bytes:
    """A request; {host}, {port}, {cookie} and {look} are filled in. A header `-Name` leaves out the one of that name."""
    values = {"host": server.guard.hosts[0], "port": server.server_address[1], "cookie": cookie(server)}
    values["look"] = server.first.id if server.first else ""
    own = {"Host": "{host}", "Cookie": "{cookie}"}
    for header in headers:
        own.pop(header.removeprefix("-").partition(":")[0], None)
    lines = [line if " HTTP/" in line or line.startswith("raw ") else f"{line} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in own.items()]
    lines += [header for header in headers if not header.startswith("-")]
    text = "\r\n".join(lines).removeprefix("raw ")
    for name, value in values.items():
        text = text.replace("{" + name + "}", str(value))
    return text.encode("latin-1") + b"\r\n\r\n" + body


def get(server: PageServer, target: str) -> tuple[dict[str, Any], list[Any]]:
    """The header and the arrays of an answer."""
    status, _, body = send(server, request(server, f"GET {target}", "Connection: close"))
    assert status == 200, body
    (size,) = struct.unpack("<I", body[:4])
    header, raw = json.loads(body[4 : 4 + size]), body[4 + size :]
    arrays = []
    for place in header["arrays"]:
        if place is None:
            arrays.append(None)
            continue
        kind, at, count = place
        dtype = torch.float16 if kind == "f2" else torch.float32
        arrays.append(torch.frombuffer(bytearray(raw), dtype=dtype, count=count, offset=at))
    return header, arrays


# Sixty and more hostile requests: the line, headers, the body, and the status they must get.

POST = ("Origin: http://{host}", "Content-Type: application/json")
TILE = "GET /tiles?look={look}&head=0.0&by=max"
HOSTILE: dict[str, tuple[str, tuple[str, ...], bytes, int]] = {
    # Whom the request was meant for.
    "no host": ("GET /", ("-Host",), b"", 400),
    "two hosts": ("GET /", ("-Host", "Host: {host}", "Host: {host}"), b"", 400),
    "another host": ("GET /", ("Host: evil.test",), b"", 403),
    "a name rebound to loopback": ("GET /", ("Host: evil.test:{port}",), b"", 403),
    "no port": ("GET /", ("Host: 127.0.0.1",), b"", 403),
    "another port": ("GET /", ("Host: localhost:1",), b"", 403),
    "a user before the host": ("GET /", ("Host: x@{host}",), b"", 403),
    "our host as a prefix": ("GET /", ("Host: {host}.evil.test",), b"", 403),
    "every address": ("GET /", ("Host: 0.0.0.0:{port}",), b"", 403),
    "loopback of IPv6": ("GET /", ("Host: [::1]:{port}",), b"", 403),
    "loopback in short": ("GET /", ("Host: 127.1:{port}",), b"", 403),
    "an empty host": ("GET /", ("Host: ",), b"", 403),
    "another host by X-Forwarded-Host": ("GET /", ("Host: evil.test", "X-Forwarded-Host: {host}"), b"", 403),
    # Who has sent it.
    "another origin": ("GET /data?look={look}", ("Origin: http://evil.test",), b"", 403),
    "no origin of its own": ("GET /data?look={look}", ("Origin: null",), b"", 403),
    "our host over TLS": ("GET /data?look={look}", ("Origin: https://{host}",), b"", 403),
    "another port's origin": ("GET /data?look={look}", ("Origin: http://127.0.0.1:1",), b"", 403),
    "our origin as a prefix": ("GET /data?look={look}", ("Origin: http://{host}.evil.test",), b"", 403),
    "two origins": ("GET /data?look={look}", ("Origin: http://{host}", "Origin: http://evil.test"), b"", 403),
    "another site": ("GET /data?look={look}", ("Sec-Fetch-Site: cross-site",), b"", 403),
    "another port of the same site": ("GET /data?look={look}", ("Sec-Fetch-Site: same-site",), b"", 403),
    "a text of another origin": ("POST /look", ("Origin: http://evil.test", POST[1], "Content-Length: 2"), b"{}", 403),
    "a text without an origin": ("POST /look", (POST[1], "Content-Length: 2"), b"{}", 403),
    # Whether it may.
    "no cookie": ("GET /data?look={look}", ("-Cookie",), b"", 403),
    "no cookie, for the page": ("GET /", ("-Cookie",), b"", 403),
    "a wrong cookie": ("GET /", ("Cookie: regard-{port}=guess",), b"", 403),
    "an empty cookie": ("GET /", ("Cookie: regard-{port}=",), b"", 403),
    "the cookie of another server": ("GET /", ("Cookie: regard-1=guess",), b"", 403),
    "a cookie too long": ("GET /", ("Cookie: {cookie}x",), b"", 403),
    "two cookies": ("GET /", ("Cookie: {cookie}; regard-{port}=guess",), b"", 403),
    "a cookie of other letters": ("GET /", ("Cookie: regard-{port}=\xff\xfe",), b"", 403),
    "a wrong token": ("GET /?token=guess", ("-Cookie",), b"", 403),
    "an empty token": ("GET /?token=", ("-Cookie",), b"", 403),
    "two tokens": ("GET /?token=a&token=b", ("-Cookie",), b"", 400),
    "a token and more": ("GET /?token=a&look=b", ("-Cookie",), b"", 400),
    "a token elsewhere": ("GET /data?token=a", ("-Cookie",), b"", 403),
    # What it wants to be done.
    "HEAD": ("HEAD /", (), b"", 405),
    "PUT": ("PUT /", ("Content-Length: 1",), b"x", 405),
    "DELETE": ("DELETE /data", (), b"", 405),
    "a preflight": ("OPTIONS /look", ("Access-Control-Request-Method: POST",), b"", 405),
    "TRACE": ("TRACE /", (), b"", 405),
    "CONNECT": ("CONNECT evil.test:443", (), b"", 405),
    "a method that does not exist": ("BREW /", (), b"", 501),
    "a method in small letters": ("get /", (), b"", 501),
    "a text for the page": ("POST /", (*POST, "Content-Length: 2"), b"{}", 405),
    "a text by GET": ("GET /look", (), b"", 405),
    # Where.
    "a way up": ("GET /../../etc/passwd", (), b"", 404),
    "a hidden way up": ("GET /%2e%2e/%2e%2e/etc/passwd", (), b"", 404),
    "a file": ("GET /etc/passwd", (), b"", 404),
    "a slash more": ("GET /data/", (), b"", 404),
    "capitals": ("GET /DATA?look={look}", (), b"", 404),
    "another server's address": ("GET http://evil.test/", (), b"", 400),
    "another server's name": ("GET //evil.test/", (), b"", 404),
    "a star": ("GET *", (), b"", 400),
    "letters that are no ASCII": ("GET /\xe9", (), b"", 400),
    # What is asked.
    "no look": ("GET /data", (), b"", 400),
    "a look that is not there": ("GET /data?look=guess", (), b"", 404),
    "a path as a look": ("GET /data?look=../../etc/passwd", (), b"", 404),
    "two looks": ("GET /data?look={look}&look={look}", (), b"", 400),
    "a field that is not known": ("GET /data?look={look}&path=/etc/passwd", (), b"", 400),
    "a question that is none": ("GET /data?look", (), b"", 400),
    "a long question": ("GET /data?look=" + "a" * 3000, (), b"", 400),
    "many fields": ("GET /data?" + "&".join(["look=a"] * 40), (), b"", 400),
    "tiles by what is not there": ("GET /tiles?look={look}&head=0.0&by=sum&tile=0.0.0", (), b"", 400),
    "no tile": (TILE, (), b"", 400),
    "half a place": (TILE + "&tile=1.2", (), b"", 400),
    "a negative place": (TILE + "&tile=1.-1.0", (), b"", 400),
    "a place of many digits": (TILE + "&tile=0.0." + "9" * 50, (), b"", 400),
    "digits of another script": (TILE + "&tile=0.0.%D9%A1", (), b"", 400),
    "a tile below the last level": (TILE + "&tile=99.0.0", (), b"", 404),
    "a tile beyond the matrix": (TILE + "&tile=0.0.1", (), b"", 404),
    "too many tiles": (TILE + "&tile=0.0.0" * 17, (), b"", 400),
    "a head that is not there": ("GET /tiles?look={look}&head=0.2&by=max&tile=0.0.0", (), b"", 404),
    "a layer that is not there": ("GET /tiles?look={look}&head=1.0&by=max&tile=0.0.0", (), b"", 404),
    "a row that is not there": ("GET /row?look={look}&head=0.0&row=700", (), b"", 404),
    "a window too wide": ("GET /window?look={look}&head=0.0&rows=0.301&cols=0.10", (), b"", 404),
    "a window backwards": ("GET /window?look={look}&head=0.0&rows=9.3&cols=0.10", (), b"", 404),
    "a window beyond the end": ("GET /window?look={look}&head=0.0&rows=690.701&cols=0.10", (), b"", 404),
    # What it carries.
    "a large body": ("POST /look", (*POST, "Content-Length: 64001"), b"", 413),
    "an endless body": ("POST /look", (*POST, "Content-Length: " + "9" * 30), b"", 413),
    "a body of negative length": ("POST /look", (*POST, "Content-Length: -1"), b"", 400),
    "a body of two lengths": ("POST /look", (*POST, "Content-Length: 2", "Content-Length: 3"), b"{}", 400),
    "a body in chunks": ("POST /look", (*POST, "Transfer-Encoding: chunked"), b"2\r\n{}\r\n0\r\n\r\n", 501),
    "a body of both lengths": ("POST /look", (*POST, "Transfer-Encoding: chunked", "Content-Length: 2"), b"{}", 501),
    "a body of no length": ("POST /look", POST, b"", 411),
    "a body of GET": ("GET /", ("Content-Length: 3",), b"abc", 400),
    "a body that waits for leave": ("POST /look", (*POST, "Content-Length: 2", "Expect: 100-continue"), b"", 417),
    "a form": ("POST /look", (POST[0], "Content-Type: application/x-www-form-urlencoded", "Content-Length: 6"), b"text=a", 415),
    "plain text": ("POST /look", (POST[0], "Content-Type: text/plain", "Content-Length: 12"), b'{"text":"a"}', 415),
    "no JSON": ("POST /look", (*POST, "Content-Length: 3"), b"{a}", 400),
    "a list": ("POST /look", (*POST, "Content-Length: 2"), b"[]", 400),
    "no text": ("POST /look", (*POST, "Content-Length: 2"), b"{}", 400),
    "a number as a text": ("POST /look", (*POST, "Content-Length: 10"), b'{"text":1}', 400),
    "a field more": ("POST /look", (*POST, "Content-Length: 20"), b'{"text":"a","x":"y"}', 400),
    "bytes that are no text": ("POST /look", (*POST, "Content-Length: 12"), b'{"text":"\xff"}', 400),
    "JSON without an end": ("POST /look", (*POST, "Content-Length: 60000"), b"[" * 60000, 400),
    # How it is written.
    "a version of long ago": ("raw GET /", (), b"", 505),
    "a version to come": ("GET / HTTP/9.9", (), b"", 505),
    "no version": ("GET / HTTP/x", (), b"", 400),
    "no request at all": ("raw \x00\x01\x02", (), b"", 400),
    "a long line": ("GET /" + "a" * 70_000, (), b"", 414),
    "a long header": ("GET /", ("X: " + "a" * 70_000,), b"", 431),
    "many headers": ("GET /", tuple(f"X-{n}: 1" for n in range(150)), b"", 431),
}  # fmt: skip


def test_there_are_at_least_sixty_hostile_requests() -> None:
    assert len(HOSTILE) >= 60


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_gets_the_status_that_is_specified_and_nothing_more(server: PageServer, name: str) -> None:
    line, headers, body, expected = HOSTILE[name]
    status, sent, answer = send(server, request(server, line, *headers, body=body))
    assert status == expected, answer
    assert "Access-Control" not in sent
    assert "Set-Cookie" not in sent
    assert "nosniff" in sent
    assert "Content-Security-Policy: default-src 'none'; frame-ancestors 'none'" in sent
    assert "Python" not in sent
    secrets = [cookie(server).partition("=")[2], server.guard.link.partition("=")[2]]
    assert not any(secret.encode() in answer for secret in secrets)
    assert b"evil" not in answer, "nothing of the request comes back"
    assert len(answer) < 200


def test_the_server_answers_as_before_after_all_of_them(server: PageServer) -> None:
    assert send(server, request(server, "GET /"))[0] == 200


# The way in.


def test_a_link_opens_the_page_once_and_sets_a_strict_cookie() -> None:
    links: list[str] = []
    with running(PageServer(lambda: View(capped(320)), on_entry=links.append)) as server:
        target = server.guard.link.partition(server.guard.hosts[0])[2]
        status, headers, body = send(server, request(server, f"GET {target}", "-Cookie"))
        assert status == 200
        assert b'url=/"' in body
        (line,) = re.findall("Set-Cookie: (.*)", headers)
        assert line.strip() == f"{cookie(server)}; Path=/; HttpOnly; SameSite=Strict"
        assert send(server, request(server, f"GET {target}", "-Cookie"))[0] == 403, "it works once"
        assert send(server, request(server, f"GET {target}"))[0] == 200, "a reload with the cookie goes on"
        assert links == [server.guard.link]
        assert target not in links[0], "the next link is another one"


def test_a_cross_site_click_on_the_link_is_let_in(server: PageServer) -> None:
    """Links are clicked in terminals that are pages themselves; their browser says cross-site."""
    target = server.guard.link.partition(server.guard.hosts[0])[2]
    assert send(server, request(server, f"GET {target}", "-Cookie", "Sec-Fetch-Site: cross-site"))[0] == 200


def test_the_page_may_ask_its_own_server_alone(server: PageServer) -> None:
    status, headers, body = send(server, request(server, "GET /"))
    assert status == 200
    policy = re.search("Content-Security-Policy: (.*)", headers).group(1)
    assert "connect-src 'self';" in policy
    assert policy.strip().endswith("frame-ancestors 'none'")
    assert "unsafe" not in policy
    assert policy.strip() == served_policy(body.decode())
    for name in ("no-store", "no-referrer", "same-origin", "DENY"):
        assert name in headers


# The answers.


def test_tiles_rows_and_windows_are_the_weights(server: PageServer) -> None:
    dense = capped()[1].dense()
    visible = torch.ones(LENGTH, LENGTH).tril().bool()
    look = server.first.id
    _, (tile,) = get(server, f"/tiles?look={look}&head=0.1&by=max&tile=2.1.2")
    part = torch.where(visible, dense, -1.0)[512:700, 256:512]
    torch.testing.assert_close(tile.reshape(SIDE, SIDE)[:188], part, rtol=1e-4, atol=1e-7)
    assert not tile.reshape(SIDE, SIDE)[188:].any()
    _, (row,) = get(server, f"/row?look={look}&head=0.1&row=300")
    torch.testing.assert_close(row, torch.where(visible, dense, -1.0)[300], rtol=1e-4, atol=1e-7)
    header, (w, q, k) = get(server, f"/window?look={look}&head=0.1&rows=10.20&cols=5.25")
    torch.testing.assert_close(w.reshape(10, 20), torch.where(visible, dense, -1.0)[10:20, 5:25], rtol=1e-4, atol=1e-7)
    assert (header["scale"], q, k) == (None, None, None), "scores are capped: vectors would explain them wrongly"


def test_a_window_of_products_has_its_queries_and_keys() -> None:
    weights = regard.weights(torch.randn(2, 320, 8), torch.randn(1, 320, 8))
    with running(PageServer(lambda: View(weights))) as server:
        look = wait(server).id
        header, (w, q, k) = get(server, f"/window?look={look}&head=0.1&rows=10.20&cols=5.25")
    torch.testing.assert_close(w.reshape(10, 20), weights[1].dense()[10:20, 5:25], rtol=1e-4, atol=1e-7)
    assert header["scale"] == pytest.approx(8**-0.5)
    torch.testing.assert_close(q.reshape(10, 8), weights._factors.q[1, 10:20])
    torch.testing.assert_close(k.reshape(20, 8), weights._factors.k[0, 5:25])


def test_the_first_levels_are_computed_in_the_background_with_progress(server: PageServer) -> None:
    target = f"/tiles?look={server.first.id}&head=0.0&by=mean&tile=0.0.0"
    for _ in range(6_000):
        header, (tile,) = get(server, target)
        if tile is not None:
            break
        assert header["done"] is None or 0 <= header["done"] <= 1
        time.sleep(0.01)
    dense, words = capped()[0].dense(), 4
    padded = torch.nn.functional.pad(dense, (0, 4, 0, 4))[:700, :700]
    means = padded.unflatten(0, (-1, words)).mean(1).unflatten(-1, (-1, words)).sum(-1)
    torch.testing.assert_close(tile.reshape(SIDE, SIDE)[:175, :175].float(), means, rtol=2e-3, atol=1e-6)


SCORES = {
    "dot products": (regard.ScaledDot(), None),
    "a causal window": (regard.ScaledDot(), regard.causal() & regard.window(300, 0)),
    "a soft cap": (regard.ScaledDot().softcap(3.0), regard.causal()),
    "cosine": (regard.Cosine(), None),
    "a sink": (regard.ScaledDot().sink(torch.tensor([1.0, 2.0])), None),
    "two documents": (regard.Dot(), regard.documents(torch.arange(1100) // 600)),
    "a mask of dots": (regard.Dot(), torch.rand(1100, 1100, generator=torch.Generator().manual_seed(0)) > 0.4),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("by", ["max", "mean"])
def test_every_level_pools_the_weights(name: str, by: str) -> None:
    score, mask = SCORES[name]
    numbers = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, 1100, 4, generator=numbers) for _ in "qk")
    weights = regard.weights(q, k, score=score, mask=mask)
    pyramid, dense = Pyramid(weights, 1), weights[1].dense()
    pyramid.first_level = 1  # so that the level below it is computed by itself
    assert pyramid.tile(0, 0, 0, by) is None
    done: list[float] = []
    pyramid.compute_first(done.append)
    assert done[-1] == 1
    assert done == sorted(done)
    for z in range(pyramid.last):
        words = 2 ** (pyramid.last - z)
        size = -(-1100 // words)
        cells = torch.nn.functional.pad(dense, (0, size * words - 1100, 0, size * words - 1100))
        cells = cells.reshape(size, words, size, words)
        tall = torch.full((size, 1), float(words))
        tall[-1] = 1100 - (size - 1) * words
        want = cells.amax((1, 3)) if by == "max" else cells.sum((1, 3)) / tall
        across = -(-size // SIDE)
        for y in range(across):
            for x in range(across):
                tile = pyramid.tile(z, x, y, by)
                part = want[y * SIDE : (y + 1) * SIDE, x * SIDE : (x + 1) * SIDE]
                assert tile.dtype == torch.float16
                torch.testing.assert_close(tile[: len(part), : part.shape[1]].float(), part, rtol=2e-3, atol=1e-6)


def test_weights_of_a_row_without_keys_and_of_dense_ones() -> None:
    mask = torch.ones(400, 400, dtype=torch.bool)
    mask[7] = False
    pyramid = Pyramid(regard.weights(torch.randn(1, 400, 4), mask=mask), 0)
    assert (pyramid.row(7) == -1).all()
    w = torch.rand(1, 400, 400).softmax(-1)
    torch.testing.assert_close(Pyramid(regard.Weights.from_dense(w), 0).row(3), w[0, 3])


# Typed texts.


def ask(server: PageServer, text: str) -> tuple[int, bytes]:
    body = json.dumps({"text": text}).encode()
    raw = request(server, "POST /look", *POST, f"Content-Length: {len(body)}", body=body)
    status, _, answer = send(server, raw)
    return status, answer


def test_a_typed_text_is_looked_at_and_neither_written_nor_logged(
    server: PageServer, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, answer = ask(server, "my secret sentence")
    assert status == 202
    name = json.loads(answer)["look"]
    assert "secret" not in name
    wait(server, server.looks.find(name))
    status, _, data = send(server, request(server, f"GET /data?look={name}"))
    assert status == 200
    assert len(data) > 100
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_what_is_wrong_with_a_typed_text_is_told_to_the_page(server: PageServer) -> None:
    name = json.loads(ask(server, "wrong")[1])["look"]
    wait(server, server.looks.find(name))
    status, _, body = send(server, request(server, f"GET /data?look={name}"))
    assert (status, json.loads(body)) == (422, {"error": "the text must have another word."})


def test_a_recording_takes_no_text_and_the_oldest_look_is_dropped() -> None:
    with running(PageServer(lambda: View(capped(320)))) as server:
        assert ask(server, "hello")[0] == 404
    with running(PageServer(lambda: typed("a b", None), look_at=typed)) as server:
        first = server.first.id
        for n in range(4):
            wait(server, server.looks.find(json.loads(ask(server, f"text {n}")[1])["look"]))
        assert server.looks.find(first) is None


# Clients that are slow, gone, or many.


def count_ends(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Something to wait for: released once for every connection that the server has let go of."""
    ends, let_go = threading.Semaphore(0), server.process_request_thread

    def process(*connection: Any) -> None:
        let_go(*connection)
        ends.release()

    monkeypatch.setattr(server, "process_request_thread", process)
    return ends


def drip(slow: socket.socket) -> None:
    for _ in range(100):
        slow.sendall(b"G")
        time.sleep(0.03)


def drain(slow: socket.socket, received: list[int]) -> None:
    """Read until the other side ends."""
    while part := slow.recv(65536):
        received.append(len(part))
    raise ConnectionError("the other side has ended")


def test_a_client_that_sends_byte_by_byte_is_cut_off(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "RECEIVE", 0.2)
    slow = socket.create_connection(server.server_address, timeout=60)
    with slow, pytest.raises(OSError):  # noqa: PT011 - reset or broken, by the timing
        drip(slow)


def test_a_client_that_does_not_read_is_cut_off(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SEND", 0.2)
    received: list[int] = []
    ends = count_ends(server, monkeypatch)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(60)
        slow.connect(server.server_address)
        slow.sendall(request(server, TILE + "&tile=2.0.0" * 16))
        assert ends.acquire(timeout=60)
        with pytest.raises(OSError):  # noqa: PT011 - reset or ended, by the timing
            drain(slow, received)
    assert sum(received) < 16 * SIDE * SIDE * 4


def test_clients_that_leave_do_no_harm(server: PageServer, capfd: pytest.CaptureFixture[str]) -> None:
    tiles = request(server, TILE + "&tile=2.0.0" * 16)
    body = request(server, "POST /look", *POST, "Content-Length: 50", body=b'{"te')
    for raw in [tiles[:10], tiles, body, b"", b"\r\n"] * 4:
        with socket.create_connection(server.server_address) as connection:
            connection.sendall(raw)
    assert send(server, request(server, "GET /"))[0] == 200
    assert capfd.readouterr().err == ""


def test_fifty_at_once_are_all_answered(server: PageServer) -> None:
    answers: list[int] = []
    raw = request(server, TILE + "&tile=2.1.1")
    threads = [threading.Thread(target=lambda: answers.append(send(server, raw)[0])) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 50


def test_more_connections_than_allowed_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CONNECTIONS", 2)
    with running(PageServer(shell("x"))) as server:
        ends = count_ends(server, monkeypatch)
        idle = [socket.create_connection(server.server_address) for _ in range(2)]
        with socket.create_connection(server.server_address, timeout=60) as third:
            assert third.recv(100).startswith(b"HTTP/1.1 503 ")
        for connection in idle:
            connection.close()
        for _ in idle:
            assert ends.acquire(timeout=60)
        assert send(server, request(server, "GET /"))[0] == 200


# The command.


def test_ctrl_c_ends_the_command_also_with_clients_that_wait(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    View(regard.weights(torch.eye(3))).save(page)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    clients: list[socket.socket] = []

    def interrupt(server: PageServer) -> None:  # a server calls it while it waits for requests
        if threading.current_thread() is not threading.main_thread():
            return  # the server of other tests
        if not clients:
            clients.extend(socket.create_connection(server.server_address) for _ in range(3))
            clients[0].sendall(b"GET / HT")
        else:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(PageServer, "service_actions", interrupt)
    try:
        assert main(["serve", str(page)]) == 0
    finally:
        signal.signal(signal.SIGINT, before)
        for client in clients:
            client.close()
    shown = capsys.readouterr()
    assert re.match(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}\n", shown.out)
    assert shown.err.strip() == "stopped"


#: A server whose first view is never ready: its thread is in and out of matrix products.
BUSY = """
import signal, sys, torch
from regard.cli import main
from regard.look.serve import command

def never():
    x = torch.randn(200, 200)
    while True:
        x = (x @ x).clamp(-1, 1)

signal.signal(signal.SIGINT, signal.default_int_handler)
command._open_source = lambda args: (never, None)
sys.exit(main(["serve"]))
"""


def test_ctrl_c_ends_a_server_that_computes() -> None:
    server = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline().startswith("http://127.0.0.1:")
    server.send_signal(signal.SIGINT)
    _, errors = server.communicate(timeout=120)
    assert (server.returncode, errors.strip()) == (0, "stopped")


def test_a_saved_page_is_served_as_it_is(tmp_path: Path) -> None:
    page = View(regard.weights(torch.eye(3))).html()
    with running(PageServer(page)) as server:
        status, headers, body = send(server, request(server, "GET /"))
        assert (status, body.decode()) == (200, page)
        assert served_policy(page) in headers
        assert "connect-src" not in headers, "it has all it needs"
        assert send(server, request(server, "GET /data?look=x"))[0] == 404


MISTAKES = {
    ("nowhere.regard",): "there is no file nowhere.regard.",
    ("nowhere.html",): "there is no file nowhere.html.",
    ("other.html",): "the file must be a page that regard wrote",
    ("page.html", "--text", "a"): "--text is for a model",
    ("--text", " "): "--text takes a sentence",
    ("page.html", "--port", "70000"): "--port takes a number below 65536, got 70000.",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other.html").write_text("<!doctype html><script>alert(1)</script>")
    assert main(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert MISTAKES[arguments] in line


def test_a_port_that_is_taken_is_named_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.look.serve.command._open_source", lambda _: pytest.fail("the model was loaded"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port)]) == 2
    assert f"--port {port} cannot be taken" in capsys.readouterr().err

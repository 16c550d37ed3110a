"""Who may come in: the cases by which pages on the web got at other local servers."""

import asyncio
import base64

import pytest
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute, Route

from quantkit.serving import guard
from quantkit.serving.guard import GuardMiddleware, _headers

KEY = "sesame-1234"


def visit(client, method, path, **headers):
    return client.request(method, path, headers=headers)


def routes(application) -> list[BaseRoute]:
    found = application.api.routes
    assert {"/", "/health", "/ready", "/v1/models", "/v1/completions", "/openapi.json"} <= {
        route.path for route in found}
    return found


def basic(user, password):
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_without_the_key_every_route_but_liveness_is_closed(live):
    made = live(key=KEY)
    with made.http as client:
        for route in routes(made.application):
            for method in route.methods:
                answer = client.request(method, route.path.replace("{name:path}", "tiny"))
                expected = 200 if (method, route.path) == ("GET", "/health") else 401
                assert answer.status_code == expected, (method, route.path)
                if expected == 401 and method != "HEAD":
                    error = answer.json()["error"]
                    assert error.get("code", error["type"]) in ("invalid_api_key", "authentication_error")
                    assert answer.headers["www-authenticate"]
        assert client.get("/nowhere").status_code == 401, "deny by default"


@pytest.mark.parametrize(("given", "status"), [
    (f"Bearer {KEY}", 200), (f"bearer  {KEY}", 200), (basic("me", KEY), 200), (basic("", KEY), 200),
    ("", 401), (KEY, 401), ("Bearer", 401), (f"Bearer {KEY}x", 401), (f"Bearer {KEY[:-1]}", 401),
    ("Bearer " + KEY.upper(), 401), (f"Token {KEY}", 401), (basic(KEY, ""), 401), ("Basic ###", 401),
    ("Basic " + base64.b64encode(KEY.encode()).decode(), 401), ("Bearer \xff", 401),
])
def test_the_key(live, given, status):
    made = live(key=KEY)
    with made.http as client:
        answer = client.get("/v1/models", headers=[(b"authorization", given.encode("latin-1"))])
        assert answer.status_code == status
        both = [("authorization", "Bearer x"), ("authorization", f"Bearer {KEY}")]
        assert client.get("/v1/models", headers=both).status_code == 401


def test_the_key_is_compared_in_constant_time(live, monkeypatch):
    compared, compare = [], guard.hmac.compare_digest
    monkeypatch.setattr(guard.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or compare(a, b))
    made = live(key=KEY)
    made.get("/v1/models", headers={"authorization": "Bearer wrong"})
    assert compared == [(b"wrong", KEY.encode())]


def test_the_page_asks_a_browser_for_the_key_and_the_client_uses_it(live):
    made = live(key=KEY)
    with made.http as client:
        assert client.get("/").headers["www-authenticate"].startswith("Basic ")
        assert client.get("/", auth=("me", KEY)).status_code == 200
    assert made.openai(api_key=KEY).models.list().data[0].id == "tiny"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("host", "status"), [
    ("127.0.0.1", 200), ("127.0.0.1:1", 200), ("localhost:99", 200), ("LOCALHOST", 200), ("[::1]:80", 200),
    ("127.8.9.1", 200), ("evil.example", 403), ("evil.example:8000", 403), ("127.0.0.1.evil.example", 403),
    ("localhost.evil.example", 403), ("192.168.1.7:8000", 403), ("0.0.0.0", 403), ("", 403),
    ("user@localhost", 403), ("[::2]", 403), ("xn--localhost", 403), ("127.0.0.1,evil.example", 403),
    ("localhost:8471,evil.example", 403), ("localhost:8471, localhost", 403), ("localhost,", 403),
    ("localhost:", 200), ("localhost.:80", 200), ("localhost..", 403), (".localhost", 403),
    ("localhost:65535", 200), ("localhost:65536", 403), ("localhost:-1", 403), ("localhost:8o", 403),
    ("localhost:80:80", 403), ("localhost:80/", 403), ("localhost/evil.example", 403), ("localhost#", 403),
    ("localhost@evil.example", 403), ("evil.example@localhost:80", 403), ("localhost:pw@evil.example", 403),
    ("localhost evil.example", 403), ("localhost\tevil.example", 403), ("local%68ost", 403),
    ("[::1]", 200), ("[0:0:0:0:0:0:0:1]:1", 200), ("[::ffff:127.0.0.1]", 200), ("[::ffff:192.168.1.7]", 403),
    ("::1", 403), ("::1:80", 403), ("[::1", 403), ("[::1]x", 403), ("[::1%25eth0]", 403), ("[::1%eth0]", 403),
    ("[fe80::1%eth0]:1", 403), ("[localhost]", 403), ("[]", 403), ("127.1", 403), ("2130706433", 403),
    ("0x7f.0.0.1", 403), ("0177.0.0.1", 403), ("127.0.0.01", 403), ("127.0.0.1\xff", 403), (":80", 403),
    ("http://localhost", 403), ("l\xf6calhost", 403), ("\u0661".encode().decode("latin-1"), 403),
])
def test_a_foreign_host_is_refused(shared, host, status):
    """DNS rebinding: the browser believes that evil.example is this machine."""
    answer = shared.get("/v1/models", headers=[(b"host", host.encode("latin-1"))])
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["code"] == "forbidden_host"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("origin", "status"), [
    ("http://127.0.0.1:{port}", 200), ("https://127.0.0.1:{port}", 200), ("http://evil.example", 403),
    ("null", 403), ("http://127.0.0.1:1", 403), ("http://localhost:{port}", 403), ("", 403),
    ("http://127.0.0.1:{port}.evil.example", 403), ("file://", 403), ("127.0.0.1:{port}", 403),
    ("chrome-extension://127.0.0.1:{port}", 403), ("ftp://127.0.0.1:{port}", 403), ("http://127.0.0.1", 403),
    ("http://127.0.0.1:{port}/", 403), ("http://127.0.0.1:{port},http://evil.example", 403),
    ("http://127.0.0.1:{port} http://evil.example", 403), ("http://evil.example@127.0.0.1:{port}", 403),
    ("http://[127.0.0.1]:{port}", 403), ("//127.0.0.1:{port}", 403),
])
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("GET", "/health"), ("GET", "/"),
                                              ("POST", "/v1/completions"), ("OPTIONS", "/v1/completions")])
def test_a_foreign_origin_is_refused(shared, method, path, origin, status):
    origin = origin.replace("{port}", shared.url.rpartition(":")[2])
    with shared.http as client:
        answer = visit(client, method, path, Origin=origin)
    assert (answer.status_code == 403) == (status == 403)
    assert status == 200 or answer.json()["error"]["code"] == "forbidden_origin"
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_the_usual_port_may_be_left_out(shared):
    with shared.http as client:
        for host, origin, status in (
                ("localhost", "http://localhost", 200), ("localhost:80", "http://localhost", 200),
                ("localhost", "https://localhost:443", 200), ("localhost.", "http://localhost", 200),
                ("localhost:80", "https://localhost", 403), ("localhost:1", "http://localhost", 403),
                ("[::1]:1", "http://[0::1]:1", 200), ("[::1]:1", "http://[::2]:1", 403)):
            answer = visit(client, "GET", "/health", Host=host, Origin=origin)
            assert answer.status_code == status, (host, origin)


def test_a_header_that_comes_twice_is_not_believed(shared):
    """Whichever of them a proxy has looked at, the other may be meant."""
    host = shared.url.removeprefix("http://")
    for lines in ("Host: localhost\r\nHost: localhost", "Host: localhost\r\nHost: evil.example",
                  "Host: evil.example\r\nHost: localhost", "Host: localhost\r\nhost: localhost", "X: y",
                  "Host:",
                  f"Host: {host}\r\nOrigin: http://{host}\r\nOrigin: http://evil.example"):
        with shared.connect() as raw:
            raw.sendall(f"GET /v1/models HTTP/1.1\r\n{lines}\r\nConnection: close\r\n\r\n".encode())
            assert raw.makefile("rb").readline().split()[1] in (b"400", b"403"), lines
    with shared.connect() as raw:
        raw.sendall(b"GET /v1/models HTTP/1.0\r\n\r\n")
        assert raw.makefile("rb").readline().split()[1] == b"403", "HTTP/1.0 may leave it out"


def test_a_body_has_one_content_type(shared):
    kinds = [("content-type", "application/json"), ("content-type", "text/plain")]
    with shared.http as client:
        for headers in (kinds, kinds[::-1], kinds[:1] * 2):
            answer = client.post("/v1/completions", content=b"{}", headers=headers)
            assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_http"


def test_a_header_that_comes_often_takes_no_more_memory_than_its_values():
    headers = [(b"x", b"'\"\\")] * 40
    assert len(_headers({"headers": headers})[b"x"]) < 500


OURS = {"hosts": ("box.lan", "Other.", "lan.example:8000", "fd00::7", "192.168.1.7")}


@pytest.mark.parametrize(("options", "accepted", "refused"), [
    (OURS, ("BOX.lan:1", "other", "lan.example", "[fd00:0::7]:8000", "192.168.1.7:1", "other."),
     ("boxxlan", "box.lan,evil.example", "[fd00::8]", "192.168.1.8")),
    ({"loopback": False, "key": KEY, "hosts": ("box.lan",)},  # where any address is ours, and no other name
     ("192.168.1.7:8000", "[fe80::1]", "box.lan"), ("evil.example", "192.168.1.7.evil.example"))])
def test_names_that_are_ours_too(live, options, accepted, refused):
    made = live(**options)
    for status, hosts in ((200, accepted), (403, refused)):
        for host in hosts:
            assert made.get("/health", headers={"host": host}).status_code == status, host


def test_headers_that_keep_browsers_from_guessing(shared):
    with shared.http as client:
        for path in ("/", "/v1/models", "/nowhere"):
            headers = client.get(path).headers
            assert headers["x-content-type-options"] == "nosniff" and headers["cache-control"] == "no-store"
            assert "server" not in headers


def test_no_web_socket_is_opened():
    sent = []

    async def send(message):
        sent.append(message)

    async def never(*_):
        raise AssertionError("the application was asked")

    asyncio.run(GuardMiddleware(never)({"type": "websocket", "headers": [], "path": "/"}, never, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_a_route_that_fails_before_its_answer_is_an_error_of_the_servers():
    async def breaks(scope, receive, send):
        raise RuntimeError("secret")

    async def nothing():
        return {"type": "http.request", "body": b""}

    sent, told = [], []

    async def send(message):
        sent.append(message)

    one = GuardMiddleware(breaks, on_error=told.append)
    scope = {"type": "http", "headers": [(b"host", b"localhost")], "path": "/", "method": "GET"}
    asyncio.run(one(scope, nothing, send))
    assert sent[0]["status"] == 500 and b"secret" not in sent[1]["body"] and one.active == 0
    assert [str(error) for error in told] == ["secret"]


def test_everything_is_a_plain_route(shared):
    """So that walking over the routes walks over everything."""
    found = routes(shared.application)
    assert all(isinstance(route, Route) for route in found)
    assert any(isinstance(route, APIRoute) for route in found)

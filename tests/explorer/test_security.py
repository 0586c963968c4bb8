"""The server answers this machine alone, gives out nothing but the page, and survives whatever is sent to it."""

import json

import pytest

LEFT = ["page.className", "top.children", "notices.children", "stage-title.children"]
LEFT += ["source.children", "stage.children", "patch.children"]


def call(search="?model=zoo/sraven-2-hyla"):
    """A callback's request as a browser sends it."""
    outputs = [dict(zip(("id", "property"), name.split("."), strict=True)) for name in LEFT]
    return {
        "output": ".." + "...".join(LEFT) + "..",
        "outputs": outputs,
        "inputs": [{"id": "url", "property": "search", "value": search}],
        "changedPropIds": ["url.search"],
    }


@pytest.fixture
def client(app):
    return app.server.test_client()


def post(client, body, **more):
    text = body if isinstance(body, str | bytes) else json.dumps(body)
    more.setdefault("content_type", "application/json")
    return client.post("/_dash-update-component", data=text, base_url="http://127.0.0.1:8050", **more)


def get(client, path, **more):
    return client.get(path, base_url="http://127.0.0.1:8050", **more)


def alive(client):
    answer = post(client, call())
    assert answer.status_code == 200
    return answer.get_json()["response"]["page"]["className"] == "one kind-puzzle"


def test_a_request_of_the_page(client):
    assert alive(client)
    assert b"headcode explorer" in get(client, "/").data


def test_every_answer_has_the_headers_that_forbid_scripts_and_frames(client):
    for answer in (get(client, "/"), get(client, "/nothing"), post(client, call()), post(client, "{")):
        policy = dict(part.split(" ", 1) for part in answer.headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
        assert "unsafe" not in policy["script-src"] and "http" not in policy["script-src"]
        assert policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["X-Frame-Options"] == "DENY"
        assert answer.headers["Referrer-Policy"] == "no-referrer"


def test_the_page_names_no_other_machine(client):
    page = get(client, "/").text
    assert "//" not in page.replace("<!DOCTYPE", "").replace("//#", ""), page
    assert "cdn" not in page.lower()


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:8050", "[::1]:8050", "0.0.0.0"]
)
def test_other_hosts_are_refused(client, host):
    assert client.get("/", headers={"Host": host}).status_code == 403
    body = json.dumps(call())
    answer = client.post("/_dash-update-component", data=body, content_type="application/json", headers={"Host": host})
    assert answer.status_code == 403


def test_other_origins_are_refused(client):
    assert post(client, call(), headers={"Origin": "http://evil.example"}).status_code == 403
    assert post(client, call(), headers={"Origin": "null"}).status_code == 403
    assert post(client, call(), headers={"Origin": "http://127.0.0.1:8050"}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../app.py",
        "/assets/..%2fapp.py",
        "/assets/%2e%2e/%2e%2e/zoo/models/logic-hyla/card.json",
        "/assets//etc/passwd",
        "/assets/..\\app.py",
        "/etc/passwd",
        "/..%2f..%2fetc%2fpasswd",
        "/_dash-component-suites/dash/../../../../etc/passwd",
        "/_dash-component-suites/dash/..%2f..%2fversion.py",
        "/_dash-component-suites/os/path.py",
        "/_dash-component-suites/headcode/explorer/app.py",
        "/static/app.py",
        "/_reload-hash",
        "/_mcp",
        "/_alive_1",
    ],
)
def test_no_file_can_be_read(client, path):
    answer = get(client, path)
    assert answer.status_code == 404, (path, answer.status_code)
    assert b"root:" not in answer.data and b"import" not in answer.data and b'"task"' not in answer.data
    assert len(answer.data) < 300


@pytest.mark.parametrize(
    "search",
    [
        "?model=../../../etc",
        "?model=/etc/passwd",
        "?model=zoo/../../..",
        "?model=zoo/logic-linear",
        "?model=file:///etc",
    ],
)
def test_only_models_given_at_the_start_have_names(client, search):
    """logic-linear is in the zoo, but this explorer was not started with it."""
    answer = post(client, call(search)).get_json()["response"]
    assert "is not possible here" in answer["notices"]["children"][0]["props"]["children"]
    assert answer["page"]["className"] == "one kind-puzzle"


def test_hostile_text_stays_text(client):
    """What an address says comes back as the text of a paragraph: JSON strings, which React never parses as HTML."""
    hostile = "<img src=x onerror=alert(1)>"
    answer = post(client, call(f"?model={hostile}&n=javascript:alert(1)")).get_json()["response"]
    notices = answer["notices"]["children"]
    assert [notice["type"] for notice in notices] == ["P", "P"]
    assert f"model={hostile}"[:40] in notices[0]["props"]["children"]
    links = json.dumps(answer["top"]) + json.dumps(answer["stage"])
    assert "onerror" not in links and "javascript:" not in links


def with_parts(**changes):
    return {**call(), **changes}


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("", 400),
        ("{", 400),
        ("null", 400),
        ("[]", 400),
        ("17", 400),
        ("[" * 30000, 400),
        (b"\xff\xfe\x00", 400),
        ({}, 400),
        (with_parts(output="nothing.children"), 400),
        (with_parts(output=["page"]), 400),
        (with_parts(outputs=None), 400),
        (with_parts(outputs=[]), 400),
        (with_parts(outputs={"id": "page"}), 400),
        (with_parts(outputs=[1] * 7), 400),
        (with_parts(inputs=None), 400),
        (with_parts(inputs=[]), 400),
        (with_parts(inputs=["?"]), 400),
        (with_parts(inputs=[{"id": "page", "property": "search", "value": ""}]), 400),
        (with_parts(inputs=[{"id": {"a": 1}, "property": "search", "value": ""}]), 400),
        (with_parts(state="x"), 400),
        (with_parts(changedPropIds="url.search"), 400),
        (with_parts(changedPropIds=[{"a": 1}]), 400),
        (with_parts(changedPropIds=["other.search"]), 400),
        (with_parts(job="cancel", cancelJob="1"), 400),
        (call("x" * 70_000), 413),
        ("9" * 200_000, 413),
    ],
)
def test_malformed_and_oversized_requests_get_one_line_and_the_app_lives_on(client, body, status):
    answer = post(client, body)
    assert answer.status_code == status, answer.data[:200]
    assert answer.mimetype == "text/plain" and answer.text.count("\n") == 1 and len(answer.text) < 120
    assert "Traceback" not in answer.text
    assert alive(client)


@pytest.mark.parametrize(
    "value", [None, 17, 1.5, True, [], {}, ["?n=1"], {"a": {"b": []}}, "?n=" + "9" * 5000, "\x00", "?n=%00"]
)
def test_any_value_of_an_input_is_answered(client, value):
    answer = post(client, call(value))
    assert answer.status_code == 200
    assert "kind-puzzle" in answer.get_json()["response"]["page"]["className"]


def test_methods_and_types(client):
    assert post(client, call(), content_type="text/plain").status_code == 415
    assert get(client, "/_dash-update-component").status_code == 405
    assert client.post("/", base_url="http://127.0.0.1:8050").status_code == 405
    assert client.delete("/_dash-layout", base_url="http://127.0.0.1:8050").status_code == 405


def test_a_failure_inside_is_one_line_without_details(app, client, monkeypatch, explorer):
    monkeypatch.setattr(type(explorer.catalogue), "names", property(lambda self: 1 / 0))
    answer = post(client, call())
    assert answer.status_code == 500 and answer.text == "The explorer could not answer; the terminal says why.\n"
    monkeypatch.undo()
    assert alive(client)


TOKEN = "kT3-_" * 6
EVERYTHING = [
    "/",
    "/?model=zoo/logic-hyla",
    "/_dash-layout",
    "/_dash-dependencies",
    "/_dash-update-component",
    "/_favicon.ico",
    "/assets/explorer.css",
    "/_dash-component-suites/dash/dcc/dash_core_components.js",
    "/nothing",
]


@pytest.fixture(scope="module")
def guarded():
    """An explorer with a token."""
    from headcode.explorer.app import create_app

    return create_app(["zoo/logic-hyla"], token=TOKEN)[0].server


def status(answer):
    assert answer.mimetype != "text/plain" or answer.text.count("\n") == 1
    return answer.status_code


@pytest.mark.parametrize("path", EVERYTHING)
@pytest.mark.parametrize(
    "cookie", [None, "", "wrong", TOKEN[:-1], TOKEN + "x", TOKEN.lower(), "\xe9", f"headcode-explorer-8051={TOKEN}"]
)
def test_without_the_cookie_nothing_is_answered(guarded, path, cookie):
    client = guarded.test_client(use_cookies=False)
    given = cookie if cookie is None or "=" in cookie else f"headcode-explorer-8050={cookie}"
    headers = {} if given is None else {"Cookie": given}
    answer = get(client, path, headers=headers)
    assert status(answer) == 403 and answer.text.startswith("Open the address that headcode explore printed")
    assert status(post(client, call(), headers=headers)) == 403


@pytest.mark.parametrize("wrong", ["/?token=", "/?token=wrong", f"/_dash-layout?token={TOKEN}", "/?token=%ff%00é"])
def test_a_token_opens_nothing_but_the_page_and_only_if_it_is_right(guarded, wrong):
    answer = get(guarded.test_client(), wrong)
    assert status(answer) == 403 and "Set-Cookie" not in answer.headers


def test_the_token_sets_a_cookie_and_leads_to_the_address_without_it(guarded):
    client = guarded.test_client()
    answer = get(client, f"/?model=zoo/logic-hyla&token={TOKEN}&n=3%26")
    assert answer.status_code == 303 and TOKEN not in answer.headers["Location"] and TOKEN not in answer.text
    assert answer.headers["Location"] == "/?model=zoo%2Flogic-hyla&n=3%26"
    assert answer.headers["Cache-Control"] == "no-store"
    parts = answer.headers["Set-Cookie"].split("; ")
    assert parts[0] == f"headcode-explorer-8050={TOKEN}"
    assert sorted(parts[1:]) == ["HttpOnly", "Path=/", "SameSite=Lax"]
    # With the cookie that it has now, the client is answered as without a token.
    expected = {"/nothing": 404, "/_dash-update-component": 405}
    for path in EVERYTHING:
        answer = get(client, path)
        assert answer.status_code == expected.get(path, 200), path
        assert TOKEN.encode() not in answer.data
    assert post(client, call("?model=zoo/logic-hyla")).status_code == 200
    # Host and origin are asked for all the same.
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 403
    assert post(client, call(), headers={"Origin": "http://evil.example"}).status_code == 403
    # Another explorer on another port has a cookie of another name.
    assert client.get("/", base_url="http://127.0.0.1:8051").status_code == 403

"""Requests of random JSON to the explorer: each gets an answer that is meant for it, and the explorer lives on."""

import json
import string

import pytest

pytest.importorskip("dash", reason="the explorer needs headcode[explorer]")

pytestmark = pytest.mark.slow

RUNS = ["zoo/sraven-2-hyla", "zoo/logic-hyla", "zoo/logic-softmax"]
ADDRESS = "http://127.0.0.1:8050"
REQUESTS = 10
"""Requests of one try."""
NAMES = [
    "model",
    "other",
    "split",
    "n",
    "rules",
    "terms",
    "seed",
    "shuffle",
    "edits",
    "point",
    "axes",
    "layer",
    "query",
    "x",
]
NAMES += ["key", "click", "shown", "guess", "donor", "swap", "deep", "around", "text"]
VALUES = [
    *("", "0", "1", "-1", "7", "16", "999999999", "9" * 5000, "1e9", "nan", "inf", "None", "true", "1.2.3", "n-1"),
    *("rule-3", "n-99999999999999999999", *RUNS, "zoo/none", "../../etc/passwd", "file:///etc", "%00", "\x00", "é"),
    *("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "javascript:alert(1)", "{{7*7}}", "${7*7}", "'\"--"),
    *("\u202e", "\ud800", "🙂" * 50, "[0]", "{}", "a&b=c", "%", "%zz", "+", ";", ",", ".", "__class__", "exit()"),
]


@pytest.fixture(scope="module")
def client():
    from headcode.explorer.app import create_app

    made = create_app(RUNS)[0].server.test_client()
    for body in callbacks_of(made):
        for name in RUNS:  # the first look at a model is long: kernels are compiled, and maps of its codes made
            post(made, put(body, ("inputs", 0, "value"), f"?model={name}&shown=1"))
    return made


def post(client, body):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = "/_dash-update-component"
    return client.post(path, data=text, base_url=ADDRESS, content_type="application/json")


def callbacks_of(client):
    """The page's own requests, with an empty address."""
    known = client.get("/_dash-dependencies", base_url=ADDRESS).get_json()
    found = []
    for each in known:
        names = each["output"].strip(".").split("...")
        outputs = [dict(zip(("id", "property"), name.rsplit(".", 1), strict=True)) for name in names]
        several = each["output"].startswith("..")
        inputs, state = ([{**one, "value": None} for one in each[part]] for part in ("inputs", "state"))
        changed = [f"{one['id']}.{one['property']}" for one in inputs][:1]
        request = {"output": each["output"], "outputs": outputs if several else outputs[0], "inputs": inputs}
        found.append({**request, "state": state, "changedPropIds": changed})
    return found


def search_of(dice):
    """An address: mostly of known names, with values of every kind."""
    parts = [f"{dice.choice(NAMES)}={dice.choice(VALUES)}" for _ in range(dice.randint(0, 6))]
    first = [f"model={dice.choice(RUNS)}"] if dice.random() < 0.7 else []
    return "?" + "&".join(first + parts)


def anything(dice, depth=0):
    """A random JSON value."""
    kind = dice.randrange(8 if depth < 3 else 6)
    if kind == 6:
        return [anything(dice, depth + 1) for _ in range(dice.randint(0, 4))]
    if kind == 7:
        return {dice.choice(string.ascii_letters): anything(dice, depth + 1) for _ in range(dice.randint(0, 4))}
    plain = [None, dice.random() < 0.5, dice.randint(-(2**70), 2**70), dice.uniform(-1e300, 1e300)]
    return [*plain, dice.choice(VALUES), search_of(dice)][kind]


def places_in(value, path=()):
    """The path of every part of a JSON value."""
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_in(part, (*path, key))


def put(value, path, part):
    """A copy with another part at a path."""
    if not path:
        return part
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], part)
    return copy


def mutated(dice, callbacks):
    """A request of the page with a random address, often broken somewhere; or bytes that are no request."""
    body = dice.choice(callbacks)
    for number, one in enumerate(body["inputs"]):
        value = search_of(dice) if one["property"] == "search" else anything(dice)
        body = put(body, ("inputs", number, "value"), value)
    while dice.random() < 0.4:
        body = put(body, dice.choice(list(places_in(body))), anything(dice))
    if dice.random() < 0.1:
        text = bytearray(json.dumps(body).encode())
        for _ in range(dice.randint(1, 20)):
            text[dice.randrange(len(text))] = dice.randrange(256)
        return bytes(text[: dice.randint(0, len(text))])
    return body


def test_fuzzed_callbacks(tally, client):
    callbacks = callbacks_of(client)
    assert len(callbacks) >= 5
    for dice in tally.dice():
        for _ in range(REQUESTS):
            body = mutated(dice, callbacks)
            with tally.attempt(repr(body)):
                answer = post(client, body)
                assert answer.status_code in (200, 204, 400, 413), (answer.status_code, answer.text)
                assert "Traceback" not in answer.text, answer.text
                assert "root:" not in answer.text, "a file was read"
                assert answer.status_code == 200 or answer.status_code == 204 or answer.text.count("\n") == 1
                if answer.status_code == 200:
                    # What was sent may come back as text; never as the address of a link, nor as a component.
                    assert not list(links_of(answer.get_json(), "javascript:")), "a link runs a script"
        assert post(client, put(callbacks[0], ("inputs", 0, "value"), "?")).status_code in (200, 204)
    tally.check()


def links_of(value, scheme):
    """The addresses in an answer that begin with a scheme."""
    if isinstance(value, dict):
        for key, part in value.items():
            if key in ("href", "src") and isinstance(part, str) and part.strip().lower().startswith(scheme):
                yield part
            yield from links_of(part, scheme)
    elif isinstance(value, list):
        for part in value:
            yield from links_of(part, scheme)

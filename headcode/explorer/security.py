"""Who may ask the explorer what: on this machine, with the token, known addresses, small and well-formed requests."""

import logging
import re
import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from dash import Dash
from dash.exceptions import DependencyException
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

HOSTS = ("127.0.0.1", "localhost")
MAX_REQUEST = 64 * 1024
CALLBACKS = "/_dash-update-component"
PATHS = re.compile(
    r"/|/_dash-layout|/_dash-dependencies|/_favicon\.ico|/_dash-update-component|/_dash-component-suites/.+|/assets/.+"
)
PARTS = {"output", "outputs", "inputs", "state", "changedPropIds", "parsedChangedPropsIds"}
log = logging.getLogger("headcode.explorer")


def protect(app: Dash, token: str | None = None) -> None:
    """Checks before every request, and headers after it. A token, if there is one, is asked for first."""
    server: Flask = app.server
    server.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST
    policy = content_policy(app.csp_hashes())

    # Before Dash's own preparations, which run for every request.
    server.before_request_funcs.setdefault(None, []).insert(0, lambda: _check(app, token))

    @server.after_request
    def harden(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers["Cross-Origin-Opener-Policy"] = "same-origin"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        return response

    @server.errorhandler(HTTPException)
    def refused(error: HTTPException) -> Response:
        return _plain(f"{error.name}.", error.code or 400)

    @server.errorhandler(DependencyException)
    def unknown(error: DependencyException) -> Response:
        return _plain("There is nothing at this address.", 404)

    @server.errorhandler(Exception)
    def failed(error: Exception) -> Response:
        log.exception("a request failed: %s", request.path)
        return _plain("The explorer could not answer; the terminal says why.", 500)


def content_policy(hashes: Sequence[str]) -> str:
    """Nothing from elsewhere, no inline script but Dash's own two, no evaluation of text."""
    parts = {
        "default-src": "'none'",
        "script-src": " ".join(("'self'", *hashes)),
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "font-src": "'self'",
        # Plotly and React style elements in place; styles cannot run anything.
        "style-src": "'self' 'unsafe-inline'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


def _check(app: Dash, token: str | None) -> Response | None:
    # A page of another origin that resolves to this machine still names itself here (DNS rebinding).
    host = re.sub(r":\d{1,5}$", "", request.host or "")
    if host not in HOSTS:
        return _plain("The explorer answers on 127.0.0.1 and localhost alone.", 403)
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{request.host}":
        return _plain("Requests of other origins are refused.", 403)
    if token is not None and (answer := _admit(token)) is not None:
        return answer
    if PATHS.fullmatch(request.path) is None or any(part in request.path for part in ("..", "//", "\\")):
        return _plain("There is nothing at this address.", 404)
    if request.path != CALLBACKS:
        return None if request.method in ("GET", "HEAD") else _plain("Only reading is possible here.", 405)
    if request.method != "POST" or request.mimetype != "application/json":
        return _plain("A callback is a JSON request by POST.", 405 if request.method != "POST" else 415)
    if (request.content_length or 0) > MAX_REQUEST:
        return _plain("The request is too large.", 413)
    try:
        body = request.get_json(silent=True)
    except RecursionError:
        body = None
    return None if (complaint := _malformed(app, body)) is None else _plain(complaint, 400)


def _admit(token: str) -> Response | None:
    """None for a request with the cookie. The printed address sets it, and redirects to the address without token."""
    # Cookies know hosts but not ports: by its name each explorer on this machine finds its own.
    cookie = f"headcode-explorer-{request.host.rpartition(':')[2]}"
    if request.method == "GET" and request.path == "/" and _same(request.args.get("token"), token):
        rest = urlencode([each for each in request.args.items(multi=True) if each[0] != "token"])
        answer = Response(status=303, headers={"Location": f"/?{rest}" if rest else "/", "Cache-Control": "no-store"})
        answer.set_cookie(cookie, token, httponly=True, samesite="Lax")
        return answer
    if _same(request.cookies.get(cookie), token):
        return None
    return _plain("Open the address that headcode explore printed when it started: it ends with a token.", 403)


def _same(given: str | None, token: str) -> bool:
    return given is not None and secrets.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _malformed(app: Dash, body: Any) -> str | None:
    """What is wrong with a callback's request, compared with the callbacks that there are."""
    if not isinstance(body, dict):
        return "The request is not a JSON object."
    if not set(body) <= PARTS:
        return "The request has parts that no callback has."
    known = app.callback_map.get(body["output"]) if isinstance(body.get("output"), str) else None
    if known is None:
        return "There is no such callback."
    if _said(body.get("outputs"), body["output"].startswith("..")) != body["output"]:
        return "The outputs are not the callback's."
    for part, declared in (("inputs", known["inputs"]), ("state", known["state"])):
        given = body.get(part, [])
        if not isinstance(given, list) or len(given) != len(declared):
            return f"The {part} are not the callback's."
        for each, expected in zip(given, declared, strict=True):
            if not isinstance(each, dict) or any(each.get(name) != expected[name] for name in ("id", "property")):
                return f"The {part} are not the callback's."
    changed = body.get("changedPropIds", [])
    names = {f"{each['id']}.{each['property']}" for each in known["inputs"]}
    if not isinstance(changed, list) or not all(isinstance(name, str) and name in names for name in changed):
        return "The changed properties are not the callback's."
    return None


def _said(outputs: Any, several: bool) -> str | None:
    """The name of a callback with these outputs."""
    given = outputs if several else [outputs]
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        return None
    names = "...".join(f"{each.get('id')}.{each.get('property')}" for each in given)
    return f"..{names}.." if several else names


def _plain(sentence: str, status: int) -> Response:
    return Response(sentence + "\n", status=status, mimetype="text/plain")

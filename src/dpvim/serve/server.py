"""The server of the page: on this machine alone, for whoever has its secret address.

Other machines cannot reach it (it listens on the loopback). Other users of this machine do not
know the token of its address. Other sites that the same browser shows cannot use it: the session's
cookie is not sent along with their requests (``SameSite=Strict``), their forms do not know the
form's token, requests with another ``Origin`` are refused, and so are those with another ``Host``,
which a name that was rebound to this machine would have. The page loads nothing from elsewhere and
runs no script (``Content-Security-Policy``).
"""

from __future__ import annotations

import http.cookies
import secrets
import sys
import traceback
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from dpvim.serve.pages import Pages, Redirect
from dpvim.serve.session import Session

_LOOPBACK = "127.0.0.1"
_MOST_BYTES = 2**20
_MOST_FIELDS = 20_000
_SECONDS = 30.0

_PAGE_POLICY = (
    "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'"
)
# The report has its pictures and its style in itself.
_REPORT_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'; "
    "base-uri 'none'; frame-ancestors 'none'; sandbox allow-popups"
)
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Without any, forms of our own would have no origin.
    "Referrer-Policy": "same-origin",
}


class Secrets(NamedTuple):
    """Of one run of the server: in its address, in the cookie, in its forms."""

    address: str
    cookie: str
    form: str

    @classmethod
    def fresh(cls) -> Secrets:
        return cls(*(secrets.token_urlsafe(32) for _ in range(3)))


class PageServer(ThreadingHTTPServer):
    """Serves the pages of a session until somebody closes it."""

    daemon_threads = True

    def __init__(self, session: Session, *, port: int = 0) -> None:
        super().__init__((_LOOPBACK, port), _Handler)
        self.secrets = Secrets.fresh()
        self.pages = Pages(session, self.secrets.form)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        """The address to open, with the token: whoever has it may use the page."""
        return f"http://{_LOOPBACK}:{self.port}/?token={self.secrets.address}"

    @property
    def hosts(self) -> tuple[str, ...]:
        return (f"{_LOOPBACK}:{self.port}", f"localhost:{self.port}")

    @property
    def cookie_name(self) -> str:
        # Cookies do not know ports: two servers must not take each other's.
        return f"dpvim-{self.port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is no news; anything else is for the terminal."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            traceback.print_exc()


class _RefusedError(Exception):
    """A request that is not answered; the message is for whoever is at the browser."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "dpvim", ""
    timeout = _SECONDS

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Keep no log: addresses have the token in them."""

    def _answer(self, respond: Any) -> None:
        try:
            if self.headers.get_all("Host", []) not in [[host] for host in self.server.hosts]:
                raise _RefusedError(
                    HTTPStatus.MISDIRECTED_REQUEST, "This server has another address."
                )
            respond()
        except _RefusedError as refusal:
            self._send(refusal.status, str(refusal), kind="text/plain")
        except Redirect as redirect:
            self._redirect(redirect.place)
        except ConnectionError:
            raise
        except Exception:
            traceback.print_exc()
            self._send(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                "An error of dpvim's own; the terminal has more.",
                kind="text/plain",
            )

    def _get(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(address.query, max_num_fields=10)
        if address.path == "/" and "token" in query:
            self._enter(query["token"][0])
            return
        self._check_cookie()
        pages = self.server.pages
        if address.path == "/style.css":
            self._send(HTTPStatus.OK, pages.style(), kind="text/css")
        elif address.path == "/report":
            self._send(HTTPStatus.OK, pages.report(), policy=_REPORT_POLICY)
        else:
            page = pages.get(address.path)
            if page is None:
                raise _RefusedError(HTTPStatus.NOT_FOUND, "There is no such page.")
            self._send(HTTPStatus.OK, page)

    def _post(self) -> None:
        origin = self.headers.get("Origin")
        if origin is not None and origin not in [f"http://{h}" for h in self.server.hosts]:
            raise _RefusedError(HTTPStatus.FORBIDDEN, "The request came from another site.")
        if self.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin":
            raise _RefusedError(HTTPStatus.FORBIDDEN, "The request came from another site.")
        self._check_cookie()
        form = self._form()
        if not _same(form.pop("form_token", ""), self.server.secrets.form):
            raise _RefusedError(HTTPStatus.FORBIDDEN, "The form is not of this page: load it anew.")
        page = self.server.pages.post(urllib.parse.urlsplit(self.path).path, form)
        if page is None:
            raise _RefusedError(HTTPStatus.NOT_FOUND, "There is no such page.")
        self._send(HTTPStatus.OK, page.text)
        if page.is_last:
            self.server.shutdown()

    def _enter(self, token: str) -> None:
        if not _same(token, self.server.secrets.address):
            raise _RefusedError(HTTPStatus.FORBIDDEN, "The token is wrong: see the terminal.")
        cookie = f"{self.server.cookie_name}={self.server.secrets.cookie}"
        # No redirect: it would count as a request of whatever led here, without the cookie.
        self._send(
            HTTPStatus.OK,
            self.server.pages.way_in(),
            headers={"Set-Cookie": f"{cookie}; HttpOnly; SameSite=Strict; Path=/"},
        )

    def _check_cookie(self) -> None:
        jar: http.cookies.SimpleCookie = http.cookies.SimpleCookie()
        try:
            jar.load(self.headers.get("Cookie", ""))
        except http.cookies.CookieError:
            jar.clear()
        found = jar.get(self.server.cookie_name)
        if found is None or not _same(found.value, self.server.secrets.cookie):
            raise _RefusedError(
                HTTPStatus.FORBIDDEN, "Open the address that the terminal shows, with its token."
            )

    def _form(self) -> dict[str, str]:
        kind = self.headers.get_content_type()
        length = self.headers.get("Content-Length", "")
        if kind != "application/x-www-form-urlencoded" or not length.isdecimal():
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "Expected a form.")
        if int(length) > _MOST_BYTES:
            raise _RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "The form is too large.")
        try:
            text = self.rfile.read(int(length)).decode("utf-8")
            fields = urllib.parse.parse_qsl(
                text, keep_blank_values=True, errors="strict", max_num_fields=_MOST_FIELDS
            )
        except ValueError:
            raise _RefusedError(HTTPStatus.BAD_REQUEST, "Expected a form.") from None
        return dict(fields)

    def _redirect(self, place: str) -> None:
        self._send(HTTPStatus.SEE_OTHER, "", headers={"Location": place})

    def _send(
        self,
        status: HTTPStatus,
        text: str,
        *,
        kind: str = "text/html",
        policy: str = _PAGE_POLICY,
        headers: dict[str, str] | None = None,
    ) -> None:
        body = text.encode("utf-8")
        self.send_response(status)
        own = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": policy,
        }
        for name, value in {**_HEADERS, **own, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)


def _same(given: str, known: str) -> bool:
    """True if they are, in a time that does not tell how much of them is."""
    return secrets.compare_digest(given.encode(), known.encode())

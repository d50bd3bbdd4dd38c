"""A client of the voices routes, as the command line uses it.

`VoicesClient` returns the server's JSON and raises errors of its own. A text of the
server is not safe to show as it is: it goes through `printable` first.

The proxy of a server is taken from the variables that most programs read:
``http_proxy``, ``https_proxy``, ``all_proxy`` and ``no_proxy``, in small or capital
letters; where both are set the small ones count. A server on this machine is never
asked through a proxy: to the proxy ``127.0.0.1`` is the proxy's own machine.
"""

import ipaddress
import json
import os
import ssl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote
from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

import httpx

from vllm_tts_cache.errors import (
    ConfigError,
    ConnectionSettingError,
    NotThereError,
    RouteMissingError,
    ServerAnswerError,
    ServerUnreachableError,
    SpeakerNotFoundError,
)
from vllm_tts_cache.logs import printable, utf8

_SCHEMES = ("http", "https", "socks5", "socks5h")

CACHE_HEADER = "X-Speaker-Cache"
_KEY_HEADER = "Idempotency-Key"

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 300.0
# The longest answer that is no speech: a bundle of 64 MiB.
_ANSWER_MAX_BYTES = 65 * 1024 * 1024
# By default the server lets a queued request wait for 600 s, and then answers.
_ENCODE_TIMEOUT = httpx.Timeout(660.0, connect=_CONNECT_SECONDS)
_VOICES = "/v1/audio/voices"
_DEFAULT_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 3600.0
# FastAPI's message for a path without a route; the host wraps the same message.
_NO_ROUTE = "Not Found"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, and the variable that names it."""

    variable: str
    url: httpx.URL

    def __str__(self) -> str:
        """The address without user and password, and the variable."""
        where = f"{self.url.scheme}://{self.url.netloc.decode()}"
        return f"the proxy {where} ({self.variable})"


def proxy_for(url: httpx.URL, environ: Mapping[str, str] = os.environ) -> Proxy | None:
    """Return the proxy for requests to a URL; None if there is none.

    Raises: ConnectionSettingError: The variable holds no URL of a proxy.
    """
    _, no_proxy = _variable("no_proxy", environ)
    is_named = proxy_bypass_environment(url.netloc.decode(), {"no": no_proxy})
    is_within = any(_is_within(url.host, each) for each in no_proxy.split(","))
    if is_this_machine(url.host) or is_named or is_within:
        return None
    for name in (f"{url.scheme}_proxy", "all_proxy"):
        variable, text = _variable(name, environ)
        if text:
            return Proxy(variable, _parsed(variable, text))
    return None


def is_this_machine(host: str) -> bool:
    """Whether a URL's host is the machine that this process runs on."""
    host = host.lower().rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified


def _is_within(host: str, network: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
        return address in ipaddress.ip_network(network.strip(), strict=False)
    except ValueError:  # the host or the network is a name
        return False


def _variable(name: str, environ: Mapping[str, str]) -> tuple[str, str]:
    variable = name if name in environ else name.upper()
    return variable, environ.get(variable, "").strip()


def _parsed(variable: str, text: str) -> httpx.URL:
    text = text if "://" in text else f"http://{text}"
    try:
        url = httpx.URL(text)
        url.host.encode("idna")  # as it is looked up
    except (httpx.InvalidURL, UnicodeError):
        url = None
    if url is None or not url.host or url.scheme not in _SCHEMES:
        # The value is not shown: it may hold a password.
        raise ConnectionSettingError(
            f"{variable} is no URL of a proxy ({', '.join(_SCHEMES)}); correct it, or "
            "unset it"
        )
    return url


class VoicesClient:
    """A client of one server's voices; safe in any thread.

    Every method raises ServerUnreachableError or ServerAnswerError. For a name that
    cannot be in a path it raises SpeakerNotFoundError.

    Args:
        url: The server's, with or without ``/v1``.
        api_key: The server's ``--api-key``, or a tenant's key.

    Raises:
        ConfigError: The URL or the key is invalid.
        ConnectionSettingError: The environment names a proxy, or certificates, that
            cannot be used.
    """

    def __init__(self, url: str, api_key: str | None = None):
        self.url = _base_of(url)
        if not (api_key or "").isascii() or not (api_key or "").isprintable():
            raise ConfigError("--api-key: it has characters other than printable ASCII")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        self._proxy = proxy_for(httpx.URL(self.url))
        self._http = httpx.Client(
            base_url=self.url,
            timeout=timeout,
            headers=headers,
            transport=_transport(httpx.URL(self.url), self._proxy),
        )

    def __enter__(self) -> "VoicesClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    # -------- looking

    def voices(
        self,
        *,
        search: str | None = None,
        label: list[str] | None = None,
        sort: str = "name",
    ) -> Iterator[Json]:
        """Yield registered voices, page by page, as they are asked for.

        ``search`` is part of a name, a description or a label's value; a voice must
        have each ``label``, which is written ``key:value``.
        """
        given: Json = {"sort": sort, "search": search, "label": label}
        given = {name: value for name, value in given.items() if value}
        while True:
            page = self.request("GET", _VOICES, params=given)
            yield from page.get("uploaded_voices", [])
            if not page.get("next"):
                return
            if page["next"] == given.get("after"):  # else the loop would not end
                raise ServerAnswerError(200, "It answers the same page again.")
            given["after"] = page["next"]

    def get(self, name: str) -> Json:
        """Return a voice and the state of its encodings."""
        return self.request("GET", _path(name))

    def find(self, name: str) -> Json | None:
        """Return a voice; None if none has this name or id."""
        try:
            return self.get(name)["voice"]
        except (SpeakerNotFoundError, NotThereError):
            return None

    # -------- changing

    def add(
        self,
        form: Mapping[str, str],
        clips: Sequence[tuple[str, bytes]],
        key: str | None = None,
    ) -> Json:
        """Register a voice from clips; it replaces a voice of the same name.

        In the form ``ref_text`` has a line for each of several clips, which are pairs
        of a file's name and content. For ``key`` see `request`.
        """
        files = [("audio_sample", (utf8(name), clip)) for name, clip in clips]
        return self.request("POST", _VOICES, key, data=dict(form), files=files)

    def change(self, name: str, changes: Json) -> Json:
        """Change a voice's metadata, its name included."""
        return self.request("PATCH", _path(name), json=changes)

    def delete(self, name: str, key: str | None = None) -> Json:
        """Delete a voice. Raises: ServerAnswerError: 503 until all of it is deleted."""
        return self.request("DELETE", _path(name), key)

    def precompute(
        self, name: str, *, force: bool = False, urgent: bool = True
    ) -> Json:
        """Have the voice encoded, and wait until its encodings are stored.

        If it is not urgent the server encodes it in the background, and
        ``cache_status`` may be ``processing``: ask again.
        """
        query = {"force": "true"} if force else {}
        if not urgent:
            query["urgent"] = "false"
        where = _path(name, "cache")
        return self.request("POST", where, params=query, timeout=_ENCODE_TIMEOUT)

    def check(self, clip_name: str, clip: bytes, ref_text: str | None) -> Json:
        """Return the server's verdict on a clip, without registering it."""
        data = {"ref_text": ref_text} if ref_text else {}
        files = {"audio_sample": (utf8(clip_name), clip)}
        return self.request("POST", f"{_VOICES}/check", data=data, files=files)

    # -------- bundles

    def bundle(self, name: str) -> bytes:
        """Return a voice's bundle."""
        with self._streamed("GET", _path(name, "bundle")) as response:
            return _whole(response)

    def add_bundle(
        self, bundle: bytes, name: str | None, on_conflict: str, key: str | None = None
    ) -> Json:
        """Register the voice of a bundle, as ``name`` if one is given."""
        data = {"on_conflict": on_conflict} | ({"name": name} if name else {})
        files = {"bundle": ("bundle.voice", bundle, "application/octet-stream")}
        return self.request("POST", f"{_VOICES}/import", key, data=data, files=files)

    # -------- speaking

    def model(self) -> str:
        """Return the id of the model that the server has."""
        found = self.request("GET", "/v1/models").get("data") or []
        if not found:
            raise ServerAnswerError(200, "The server lists no model")
        return str(found[0]["id"])

    @contextmanager
    def speech(self, body: Json) -> Iterator[tuple[str | None, Iterator[bytes]]]:
        """Speak; yields the value of `CACHE_HEADER` and the chunks of the audio."""
        with self._streamed("POST", "/v1/audio/speech", json=body) as response:
            yield response.headers.get(CACHE_HEADER), response.iter_bytes()

    def request(
        self, method: str, path: str, key: str | None = None, **content: Any
    ) -> Json:
        """Send a request, and return the JSON object of the answer.

        The server carries out only the first of several requests with one ``key``: the
        client may send a request again if its answer was lost.
        """
        headers = None if key is None else {_KEY_HEADER: key}
        with self._streamed(method, path, headers=headers, **content) as response:
            answer = _json(_whole(response))
        if not isinstance(answer, dict):
            reason = "The answer is not JSON: this is another kind of server"
            raise ServerAnswerError(response.status_code, reason)
        return answer

    @contextmanager
    def _streamed(
        self, method: str, path: str, **content: Any
    ) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, path, **content) as response:
                _check(response, self._proxy)
                yield response
        except (httpx.RequestError, httpx.InvalidURL) as exc:
            raise _unreachable(self.url, self._proxy, exc) from exc


def _base_of(url: str) -> str:
    base = url.strip().rstrip("/").removesuffix("/v1").removesuffix("/voices")
    try:
        parsed = httpx.URL(base)
        parsed.host.encode("idna")  # as it is looked up
    except (httpx.InvalidURL, UnicodeError) as exc:
        raise ConfigError(f"--url {printable(url)}: {exc}") from exc
    if parsed.scheme in ("http", "https") and parsed.host:
        return base
    reason = "it is no URL such as http://127.0.0.1:8091 (http or https)"
    if "://" not in base and base.strip("/:"):
        where = printable(base.lstrip("/"))
        reason = f"it begins with neither http:// nor https://; write http://{where}"
    raise ConfigError(f"--url {printable(url)}: {reason}")


def _transport(url: httpx.URL, proxy: Proxy | None) -> httpx.HTTPTransport:
    # Without TLS no certificates are read: reading them takes longer than an answer.
    uses_tls = "https" in (url.scheme, proxy.url.scheme if proxy else "")
    try:
        return httpx.HTTPTransport(
            verify=uses_tls, proxy=None if proxy is None else httpx.Proxy(proxy.url)
        )
    except ImportError as exc:  # only SOCKS needs another package
        raise ConnectionSettingError(
            f"{proxy}: SOCKS needs pip install 'httpx[socks]'; or ask {url.host} "
            f"directly: NO_PROXY={url.host}"
        ) from exc
    except OSError as exc:
        raise ConnectionSettingError(
            f"the certificates to trust cannot be read ({printable(str(exc))}): look "
            "at SSL_CERT_FILE, SSL_CERT_DIR and SSLKEYLOGFILE"
        ) from exc


def _unreachable(
    url: str, proxy: Proxy | None, error: Exception
) -> ServerUnreachableError:
    """Name the cause: a certificate, TLS, a proxy, or the server itself."""
    reason, cause = printable(str(error) or type(error).__name__), error.__context__
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        hint = (
            "If you trust it, name it, or the authority that signed it, in "
            "SSL_CERT_FILE (a PEM file)."
        )
        reason = f"its certificate is not trusted ({cause.verify_message.rstrip('.')})"
        return ServerUnreachableError(url, reason, hint)
    if isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER":
        hint = "Name it with http://, or the port at which it speaks TLS."
        return ServerUnreachableError(url, "it speaks no TLS there", hint)
    if proxy is not None:
        hint = (
            "Is that proxy running, and may it reach the server? "
            f"NO_PROXY={httpx.URL(url).host} asks the server directly."
        )
        return ServerUnreachableError(url, f"through {proxy}: {reason}", hint)
    return ServerUnreachableError(url, reason)


def _path(name: str, *rest: str) -> str:
    if name in ("", ".", ".."):
        # No voice can have such a name, and httpx would make another path of it.
        raise SpeakerNotFoundError(name)
    try:
        return "/".join((_VOICES, quote(name, safe=""), *rest))
    except UnicodeError as exc:  # a lone surrogate, as a server may have listed
        raise SpeakerNotFoundError(name) from exc


def _whole(response: httpx.Response) -> bytes:
    """Read an answer. Raises: ServerAnswerError if it exceeds `_ANSWER_MAX_BYTES`."""
    data = bytearray()
    for chunk in response.iter_bytes():
        data += chunk
        if len(data) > _ANSWER_MAX_BYTES:
            reason = f"The answer has more than {_ANSWER_MAX_BYTES >> 20} MiB"
            raise ServerAnswerError(response.status_code, reason)
    return bytes(data)


def _json(data: bytes) -> Any:
    """Parse an answer; None if it is not JSON."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def _check(response: httpx.Response, proxy: Proxy | None) -> None:
    if response.is_redirect:  # not followed: the API key would be sent there
        where = printable(response.headers["location"])
        reason = f"It redirects to {where}: name that address with --url"
        raise ServerAnswerError(response.status_code, reason)
    if not response.is_error:
        return
    status, message = response.status_code, _message_of(_json(_whole(response)))
    if status == httpx.codes.METHOD_NOT_ALLOWED or (
        status == httpx.codes.NOT_FOUND and message in ("", _NO_ROUTE)
    ):
        request = response.request
        raise RouteMissingError(status, request.method, printable(request.url.path))
    reason = printable(message) or printable(response.reason_phrase) or "It failed"
    if proxy is not None and not message:
        reason = f"{reason}, says {proxy} or what is behind it"
    if status == httpx.codes.UNAUTHORIZED:
        reason += "; give the server's key by --api-key or VLLM_API_KEY"
    is_missing = status == httpx.codes.NOT_FOUND
    error = NotThereError if is_missing else ServerAnswerError
    raise error(status, reason, _retry_after(response))


def _message_of(body: Any) -> str:
    if not isinstance(body, dict):
        return ""
    error = body.get("error", body.get("detail", ""))
    message = error.get("message", "") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after")
    if response.status_code not in (429, 503) or text is None:
        return None
    # A speech server never sends the other form, a date.
    if not (text.isascii() and text.isdigit()):
        return _DEFAULT_RETRY_SECONDS
    return min(float(text), _MAX_RETRY_SECONDS)

"""A client of the voices routes, as the command line uses it.

It answers with what the server's JSON says, and raises errors of its own: what a server
answers is not believed to be text that can be shown as it is (`printable`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import IO, Any, Literal
from urllib.parse import quote

import httpx

from vllm_tts_cache.errors import (
    ConfigError,
    RouteMissingError,
    ServerAnswerError,
    ServerUnreachableError,
    SpeakerNotFoundError,
)
from vllm_tts_cache.printable import printable

DEFAULT_URL = "http://127.0.0.1:8091"
CACHE_HEADER = "X-Speaker-Cache"

_CONNECT_SECONDS = 5.0
_READ_SECONDS = 300.0
# In line the server has a request wait for 600 s by default, and answers then.
_ENCODE_TIMEOUT = httpx.Timeout(660.0, connect=_CONNECT_SECONDS)
_VOICES = "/v1/audio/voices"
_DEFAULT_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 3600.0
# What FastAPI, and the host in its shape, say of a path that nobody serves.
_NO_ROUTE = "Not Found"

Json = dict[str, Any]
Sort = Literal["name", "newest", "oldest"]
OnConflict = Literal["fail", "replace", "rename"]


class VoicesClient:
    """The voices of one server; for any thread.

    Every method raises ServerUnreachableError or ServerAnswerError. For a name that
    cannot be in a path it raises SpeakerNotFoundError.

    Args:
        url: Of the server, with or without ``/v1``.
        api_key: As of ``vllm serve --api-key``.

    Raises:
        ConfigError: The URL is none, or the key.
    """

    def __init__(self, url: str = DEFAULT_URL, api_key: str | None = None):
        self.url = _base_of(url)
        if not (api_key or "").isascii() or not (api_key or "").isprintable():
            raise ConfigError("--api-key: it holds what no header can carry")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(_READ_SECONDS, connect=_CONNECT_SECONDS)
        self._http = httpx.Client(base_url=self.url, timeout=timeout, headers=headers)

    def __enter__(self) -> "VoicesClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    # -------- looking

    def voices(
        self,
        limit: int | None = None,
        *,
        search: str | None = None,
        label: list[str] | None = None,
        sort: Sort = "name",
    ) -> Iterator[Json]:
        """Yield registered voices, page by page.

        Args:
            limit: Voices at most; None for all.
            search: Part of a name, a description or a label's value.
            label: As ``key:value``; all must fit.
            sort: The order.
        """
        given: Json = {"sort": sort}
        if search:
            given["search"] = search
        if label:
            given["label"] = label
        while True:
            page = self.request("GET", _VOICES, params=given)
            found = page.get("uploaded_voices", [])
            yield from found if limit is None else found[:limit]
            limit = None if limit is None else limit - len(found)
            if not page.get("next") or (limit is not None and limit <= 0):
                return
            if page["next"] == given.get("after"):  # it would never end
                raise ServerAnswerError(200, "It answers the same page again.")
            given["after"] = page["next"]

    def get(self, name: str) -> Json:
        """Return a voice and the state of its encodings."""
        return self.request("GET", _path(name))

    def find(self, name: str) -> Json | None:
        """Return a voice; None if there is none of this name or id."""
        try:
            return self.get(name)["voice"]
        except RouteMissingError:
            raise
        except SpeakerNotFoundError:
            return None
        except ServerAnswerError as exc:
            if exc.status == httpx.codes.NOT_FOUND:
                return None
            raise

    # -------- changing

    def add(self, form: Mapping[str, str], clips: Sequence[tuple[str, bytes]]) -> Json:
        """Register a voice by clips, over what has its name.

        Args:
            form: The fields; ``ref_text`` has a line for each of several clips.
            clips: Names of files, and what is in them.
        """
        files = [("audio_sample", clip) for clip in clips]
        return self.request("POST", _VOICES, data=dict(form), files=files)

    def change(self, name: str, changes: Json) -> Json:
        """Change what is written beside a voice."""
        return self.request("PATCH", _path(name), json=changes)

    def delete(self, name: str) -> Json:
        """Delete a voice; a 503 says how far it is."""
        return self.request("DELETE", _path(name))

    def precompute(
        self, name: str, *, force: bool = False, urgent: bool = True
    ) -> Json:
        """Make the voice's encodings exist, and wait.

        If it is not urgent they are made as those of one of many, and ``cache_status``
        may be ``processing``: ask again.
        """
        query = {"force": "true"} if force else {}
        if not urgent:
            query["urgent"] = "false"
        where = _path(name, "cache")
        return self.request("POST", where, params=query, timeout=_ENCODE_TIMEOUT)

    def check(self, clip_name: str, clip: bytes, ref_text: str | None) -> Json:
        """Ask what a clip is worth, without registering it."""
        data = {"ref_text": ref_text} if ref_text else {}
        files = {"audio_sample": (clip_name, clip)}
        return self.request("POST", f"{_VOICES}/check", data=data, files=files)

    # -------- bundles

    def save_bundle(self, name: str, file: IO[bytes]) -> int:
        """Write a voice's bundle; returns its bytes."""
        num_bytes = 0
        with self._streamed("GET", _path(name, "bundle")) as response:
            for chunk in response.iter_bytes():
                num_bytes += file.write(chunk)
        return num_bytes

    def add_bundle(
        self, bundle: bytes, name: str | None, on_conflict: OnConflict
    ) -> Json:
        """Register what a bundle holds."""
        data = {"on_conflict": on_conflict, **({"name": name} if name else {})}
        files = {"bundle": ("bundle.voice", bundle, "application/octet-stream")}
        return self.request("POST", f"{_VOICES}/import", data=data, files=files)

    # -------- speaking

    def model(self) -> str:
        """Return the name of the model that is served."""
        found = self.request("GET", "/v1/models").get("data") or []
        if not found:
            raise ServerAnswerError(200, "The server lists no model")
        return str(found[0]["id"])

    @contextmanager
    def speech(self, body: Json) -> Iterator[tuple[str | None, Iterator[bytes]]]:
        """Speak; gives what the cache said, and the audio as it comes."""
        with self._streamed("POST", "/v1/audio/speech", json=body) as response:
            yield response.headers.get(CACHE_HEADER), response.iter_bytes()

    def request(self, method: str, path: str, **content: Any) -> Json:
        """Send a request, and return the JSON object that it answers."""
        with self._errors():
            response = self._http.request(method, path, **content)
        _check(response)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            reason = "The answer is not JSON: this is another kind of server"
            raise ServerAnswerError(response.status_code, reason)
        return answer

    @contextmanager
    def _streamed(
        self, method: str, path: str, **content: Any
    ) -> Iterator[httpx.Response]:
        with (
            self._errors(),
            self._http.stream(method, path, **content) as response,
        ):
            if response.is_error:
                response.read()
            _check(response)
            yield response

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.InvalidURL) as exc:
            reason = printable(str(exc) or type(exc).__name__)
            raise ServerUnreachableError(self.url, reason) from exc


def _base_of(url: str) -> str:
    base = url.strip().rstrip("/").removesuffix("/v1")
    try:
        parsed = httpx.URL(base)
    except httpx.InvalidURL as exc:
        raise ConfigError(f"--url {printable(url)}: {exc}") from exc
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"--url {printable(url)}: is no URL as {DEFAULT_URL} (http or https)"
        )
    return base


def _path(name: str, *rest: str) -> str:
    if name in ("", ".", ".."):
        # No voice can be called so, and a client makes another path of it.
        raise SpeakerNotFoundError(name)
    return "/".join((_VOICES, quote(name, safe=""), *rest))


def _check(response: httpx.Response) -> None:
    if not response.is_error:
        return
    status = response.status_code
    try:
        body = response.json()
    except ValueError:
        body = {}
    body = body if isinstance(body, dict) else {}
    message = _message_of(body)
    if status == httpx.codes.METHOD_NOT_ALLOWED or (
        status == httpx.codes.NOT_FOUND and message in ("", _NO_ROUTE)
    ):
        request = response.request
        raise RouteMissingError(status, request.method, printable(request.url.path))
    raise ServerAnswerError(
        status,
        printable(message) or printable(response.reason_phrase) or "It failed",
        _retry_after(response),
        body,
    )


def _message_of(body: Json) -> str:
    error = body.get("error", body.get("detail", ""))
    message = error.get("message", "") if isinstance(error, dict) else error
    return message if isinstance(message, str) else ""


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after")
    if response.status_code not in (429, 503) or text is None:
        return None
    # The other form, a date, is nothing that a speech server says.
    if not (text.isascii() and text.isdigit()):
        return _DEFAULT_RETRY_SECONDS
    return min(float(text), _MAX_RETRY_SECONDS)

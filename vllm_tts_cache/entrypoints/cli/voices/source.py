"""Whose voices a command is about: a server's, or a directory's."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from vllm_tts_cache.errors import ConfigError
from vllm_tts_cache.tenants import DEFAULT_TENANT

if TYPE_CHECKING:
    from vllm_tts_cache.client import VoicesClient

Sort = Literal["name", "newest", "oldest"]
OnConflict = Literal["fail", "replace", "rename"]
DEFAULT_URL = "http://127.0.0.1:8091"

Url = Annotated[
    str, typer.Option("--url", metavar="URL", envvar="SPEAKER_URL", help="the server")
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        # Not OPENAI_API_KEY: it is OpenAI's on most machines, and would be sent to
        # whatever server is named.
        envvar="VLLM_API_KEY",
        help="as of `vllm serve --api-key`, or a tenant's",
        show_default=False,
    ),
]
Directory = Annotated[
    Path | None,
    typer.Option(
        "--directory",
        metavar="DIR",
        help="the SPEAKER_SAMPLES_DIR of a stopped server, in place of --url",
    ),
]
TenantName = Annotated[
    str | None,
    typer.Option(
        "--tenant",
        metavar="NAME",
        help="whose voices, with --directory; a server knows it by the key",
        show_default=False,
    ),
]
Jobs = Annotated[
    int, typer.Option("--jobs", min=1, max=32, help="requests at the same time")
]
Labels = Annotated[
    list[str] | None,
    typer.Option("--label", metavar="KEY:VALUE", help="may be repeated"),
]
Search = Annotated[
    str | None,
    typer.Option(help="part of a name, a description or a label's value"),
]


class Voices(Protocol):
    """What can be asked of both; both say of a voice what ``GET`` says of it."""

    def voices(
        self,
        limit: int | None = None,
        *,
        search: str | None = None,
        label: list[str] | None = None,
        sort: Sort = "name",
    ) -> Iterator[dict[str, Any]]:
        """Yield registered voices."""
        ...

    def get(self, name: str) -> dict[str, Any]:
        """Return a voice and what is known of its encodings."""
        ...

    def find(self, name: str) -> dict[str, Any] | None:
        """Return a voice; None if there is none of this name or id."""
        ...

    def delete(self, name: str) -> dict[str, Any]:
        """Delete a voice."""
        ...

    def save_bundle(self, name: str, file: IO[bytes]) -> int:
        """Write a voice's bundle; returns its bytes."""
        ...

    def consents(self) -> Iterator[dict[str, Any]]:
        """Yield consent recordings."""
        ...

    def add_bundle(
        self, bundle: bytes, name: str | None, on_conflict: OnConflict
    ) -> dict[str, Any]:
        """Register what a bundle holds."""
        ...


@contextmanager
def voices_of(
    url: str,
    api_key: str | None,
    directory: Path | None,
    tenant: str | None,
    *,
    writes: bool = False,
) -> Iterator[Voices]:
    """Open the directory if there is one, else be a client of the URL.

    Raises: ConfigError, StorageError.
    """
    if directory is None:
        if tenant is not None:
            raise ConfigError(
                "--tenant goes with --directory; a server takes the tenant from the "
                "key (--api-key)"
            )
        with client_of(url, api_key) as client:
            yield client
        return
    # SQLAlchemy and numpy take longer to import than a client takes for its answer.
    from vllm_tts_cache.entrypoints.cli.voices.directory import open_directory

    whose = tenant or DEFAULT_TENANT
    with open_directory(directory, whose, writes=writes) as found:
        yield found


def client_of(url: str, api_key: str | None) -> "VoicesClient":
    """Return a client; nothing is sent yet.

    Raises: ConfigError.
    """
    from vllm_tts_cache.client import VoicesClient

    return VoicesClient(url, api_key)

"""Who calls, from the first byte of a request to where its voice is looked up."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Annotated

from fastapi import Depends, Request
from starlette.requests import HTTPConnection

from vllm_tts_cache.entrypoints.other_sites import refuse_other_sites
from vllm_tts_cache.entrypoints.tenant_keys import TenantKeys
from vllm_tts_cache.errors import AdminKeyError, NoTenantError
from vllm_tts_cache.tenants import ALONE, Caller, Tenant


class KnowsTenants:
    """What serves speech, and knows whose keys are whose."""

    @property
    def tenants(self) -> TenantKeys:
        """The keys."""
        raise NotImplementedError


def caller_of(connection: HTTPConnection) -> Caller:
    """Return who sent a request, or opened a WebSocket; before anything of it is read.

    Raises: UnauthorizedError, OtherSiteError.
    """
    handler = getattr(connection.app.state, "openai_serving_speech", None)
    if isinstance(handler, KnowsTenants) and handler.tenants.is_on:
        return handler.tenants.caller(connection.headers.get("authorization"))
    refuse_other_sites(connection)
    return Caller(tenant=ALONE)


def caller_found(request: Request) -> Caller:
    """Return who it was found to be; a route that did not look has nobody."""
    return request.state.caller


async def _caller(request: Request) -> Caller:
    return caller_found(request)


async def _tenant(caller: Annotated[Caller, Depends(_caller)]) -> Tenant:
    """Raises: AdminKeyError."""
    return tenant_of(caller)


def tenant_of(caller: Caller) -> Tenant:
    """Return whose voices a caller may see.

    Raises: AdminKeyError.
    """
    if caller.tenant is None:
        raise AdminKeyError
    return caller.tenant


AnyCaller = Annotated[Caller, Depends(_caller)]
CallingTenant = Annotated[Tenant, Depends(_tenant)]


# A context variable, because the host's serving class calls through several layers
# between the route and where a voice is looked up, and takes no more arguments.
_speaking: ContextVar[Tenant | None] = ContextVar("speaking_tenant", default=None)


@contextmanager
def speaking_for(tenant: Tenant) -> Iterator[None]:
    """Look up the voices of this tenant for what the host does inside."""
    token = _speaking.set(tenant)
    try:
        yield
    finally:
        _speaking.reset(token)


def speaking_tenant(keys: TenantKeys) -> Tenant:
    """Return whose voices the host is to speak with here.

    Raises: NoTenantError: Nobody said so, and there are several; none is guessed.
    """
    if not keys.is_on:
        return ALONE
    if (tenant := _speaking.get()) is None:
        raise NoTenantError
    return tenant

import json

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRouter
from fastapi.testclient import TestClient

from vllm_tts_cache import errors
from vllm_tts_cache.entrypoints.http import routing
from vllm_tts_cache.entrypoints.http.clips import RangeNotSatisfiableError
from vllm_tts_cache.entrypoints.serving.fetching import NotFetchedError
from vllm_tts_cache.entrypoints.serving.host_http import InvalidRequestError
from vllm_tts_cache.entrypoints.speakers.served_model import CannotCloneError
from vllm_tts_cache.speaker.rpc_client import (
    ForeignStoreError,
    UnsupportedModelError,
    WorkerBusyError,
)

UNAVAILABLE = errors.StorageUnavailableError(
    "postgresql://me@db.internal/voices", "connection refused"
)
OBJECTS = errors.ObjectStoreError("s3://bucket/a", "timed out")
# The status of an answer -> the errors that it is for, each as it may be raised.
BY_STATUS = {
    400: [
        *(errors.InvalidAudioError("it is empty"), errors.SpeakerRequestError("no")),
        *(errors.InvalidSpeakerError("name", "it is empty"), NotFetchedError("no")),
        *(errors.ConsentRequiredError(), errors.LowQualityError(["It is noisy."])),
        *(errors.InvalidBundleError("no"), InvalidRequestError("no", None)),
        *(routing.FormCutOffError(), routing.TooManyPartsError()),
        CannotCloneError("It has no reference encoder."),
    ],
    401: [errors.UnauthorizedError()],
    403: [errors.DownloadsOffError(), errors.AdminKeyError(), routing.OtherSiteError()],
    404: [
        *(errors.SpeakerNotFoundError("ann"), errors.ConsentNotFoundError("cons_0")),
        routing.NoSpeechModelError(),
    ],
    408: [routing.TooSlowError()],
    409: [
        *(errors.SpeakerExistsError("ann"), errors.AlreadyDoneError("voice_0")),
        *(errors.SpeakerLimitError(3), errors.AudioBudgetError(1000)),
        errors.ConsentInUseError("cons_0", [("voice_0", "a")]),
        errors.ConsentLimitError(3),
    ],
    413: [errors.RequestTooLargeError(2**20)],
    416: [RangeNotSatisfiableError("bytes=9-", 9)],
    500: [
        *(errors.StorageError("broken"), errors.EncodingCorruptError("key", "flipped")),
        *(errors.SourceCorruptError("sha", "flipped"), errors.EncodeError("no")),
        *(errors.WorkerRPCError("no"), ForeignStoreError("elsewhere")),
        *(UnsupportedModelError("no"), errors.EncodersChangedError()),
        *(errors.GoneError("gone"), errors.AudioGoneError(), errors.NoTenantError()),
        *(errors.ConfigError("no"), errors.ConnectionSettingError("no")),
        *(errors.NoCatalogueError("no"), errors.CheckpointError("/x", "no")),
    ],
    503: [
        *(UNAVAILABLE, OBJECTS, errors.ServerBusyError("64 clips wait")),
        errors.DeletionPendingError("ann", files_removed=True, waiting_for=1),
        *(errors.StorageBusyError(2), WorkerBusyError("a batch runs")),
        *(errors.EncodeTimeoutError("late"), errors.NotStoredError()),
        errors.WorkerStorageError("The bucket is away."),
        errors.SpeakerReplacedError("ann"),
    ],
    507: [errors.StorageFullError()],
}
KINDS = {401: "AuthenticationError", 404: "NotFoundError", 409: "ConflictError"}
ERRORS = [(error, status) for status in BY_STATUS for error in BY_STATUS[status]]
EACH = pytest.mark.parametrize(
    ("error", "status"), ERRORS, ids=[type(error).__name__ for error, _ in ERRORS]
)


def kind_of(status):
    """What the host's answers of this status are called."""
    other = "BadRequestError" if status < 500 else "InternalServerError"
    return KINDS.get(status, other)


def all_errors(kind=errors.TTSCacheError):
    for each in kind.__subclasses__():
        yield each
        yield from all_errors(each)


def test_every_error_of_ours_is_in_the_table():
    ours = {
        kind
        for kind in all_errors()
        if kind.__module__.startswith("vllm_tts_")
        # What a worker raises stays there.
        and ".model_executor." not in kind.__module__
        # What a client raises is what a server has answered, or of its command line.
        and ".entrypoints.cli." not in kind.__module__
        and not issubclass(kind, errors.RemoteError)
    }
    branches = {errors.ServerFaultError}
    assert {type(error) for error, _ in ERRORS} >= ours - branches


@EACH
def test_a_voices_route_answers_an_error_in_the_hosts_shape(error, status):
    router = APIRouter(route_class=routing.GuardedRoute)

    @router.get("/fails")
    async def fails():
        raise error

    app = FastAPI()
    app.include_router(router)
    response = TestClient(app, raise_server_exceptions=False).get("/fails")
    assert response.status_code == status
    assert ("Retry-After" in response.headers) == (status == 503)
    told = response.json()["error"]
    said = {"message": str(error), "type": kind_of(status)}
    assert told == {**said, "param": None, "code": status}
    assert "Traceback" not in response.text


@EACH
def test_a_speech_request_gets_the_same_but_an_unknown_voice_is_a_400(error, status):
    response = routing.speech_response(error)
    answer = json.loads(bytes(response.body))["error"]
    expected = 400 if status == 404 else status
    assert answer["code"] == response.status_code == expected
    assert answer["type"] == kind_of(expected)
    assert answer["message"] == str(error)


@pytest.mark.parametrize(
    ("error", "words", "seconds"),
    [
        (errors.StorageFullError(), "no space left|SPEAKER_SAMPLES_DIR", None),
        (errors.AudioBudgetError(10), "10 bytes|SPEAKER_CACHE_AUDIO_MAX_BYTES", None),
        (errors.RequestTooLargeError(11 * 1024**2), "11 MiB|FLAC", None),
        (errors.ServerBusyError("16 fetches run"), "Try again in 2 s.", 2),
        (errors.StorageBusyError(3), "Try again in 3 s.", 3),
        (UNAVAILABLE, "Try again in 2 s.", 2),
    ],
)
def test_an_error_says_what_is_the_matter_and_what_to_do(error, words, seconds):
    assert all(each in str(error) for each in words.split("|"))
    assert "/secret" not in str(error)
    assert getattr(error, "retry_after_seconds", None) == seconds


def test_clients_are_told_that_the_catalogue_is_down_and_the_log_why():
    assert "db.internal" not in str(UNAVAILABLE)
    assert "PostgreSQL" in str(UNAVAILABLE)
    assert UNAVAILABLE.log_text == (
        "The voice catalogue postgresql://me@db.internal/voices is down: "
        "connection refused."
    )

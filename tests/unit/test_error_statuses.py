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
ERRORS = [
    (errors.InvalidAudioError("it is empty"), 400, "BadRequestError"),
    (errors.InvalidSpeakerError("name", "it is empty"), 400, "BadRequestError"),
    (errors.SpeakerRequestError("no"), 400, "BadRequestError"),
    (errors.SpeakerNotFoundError("ann"), 404, "NotFoundError"),
    (routing.FormCutOffError(), 400, "BadRequestError"),
    (routing.TooManyPartsError(), 400, "BadRequestError"),
    (routing.TooSlowError(), 408, "BadRequestError"),
    (InvalidRequestError("no", None), 400, "BadRequestError"),
    (NotFetchedError("no"), 400, "BadRequestError"),
    (routing.NoSpeechModelError(), 404, "NotFoundError"),
    (errors.SpeakerExistsError("ann"), 409, "ConflictError"),
    (errors.AlreadyDoneError("voice_0"), 409, "ConflictError"),
    (errors.SpeakerLimitError(3), 409, "ConflictError"),
    (errors.AudioBudgetError(1000), 409, "ConflictError"),
    (errors.ConsentRequiredError(), 400, "BadRequestError"),
    (errors.ConsentNotFoundError("cons_0"), 404, "NotFoundError"),
    (errors.ConsentInUseError("cons_0", [("voice_0", "a")]), 409, "ConflictError"),
    (errors.ConsentLimitError(3), 409, "ConflictError"),
    (errors.InvalidBundleError("no"), 400, "BadRequestError"),
    (errors.LowQualityError(["It is noisy."]), 400, "BadRequestError"),
    (errors.DownloadsOffError(), 403, "BadRequestError"),
    (errors.UnauthorizedError(), 401, "AuthenticationError"),
    (errors.AdminKeyError(), 403, "BadRequestError"),
    (routing.OtherSiteError(), 403, "BadRequestError"),
    (errors.NoTenantError(), 500, "InternalServerError"),
    (errors.RequestTooLargeError(2**20), 413, "BadRequestError"),
    (RangeNotSatisfiableError("bytes=9-", 9), 416, "BadRequestError"),
    (errors.ServerBusyError("64 clips wait"), 503, "InternalServerError"),
    (
        errors.DeletionPendingError("ann", files_removed=True, waiting_for=1),
        503,
        "InternalServerError",
    ),
    (errors.StorageBusyError(2), 503, "InternalServerError"),
    (UNAVAILABLE, 503, "InternalServerError"),
    (OBJECTS, 503, "InternalServerError"),
    (errors.StorageError("broken"), 500, "InternalServerError"),
    (errors.EncodingCorruptError("key", "flipped"), 500, "InternalServerError"),
    (errors.SourceCorruptError("sha", "flipped"), 500, "InternalServerError"),
    (errors.EncodeError("no"), 500, "InternalServerError"),
    (errors.WorkerRPCError("no"), 500, "InternalServerError"),
    (ForeignStoreError("elsewhere"), 500, "InternalServerError"),
    (UnsupportedModelError("no"), 500, "InternalServerError"),
    (WorkerBusyError("a batch runs"), 503, "InternalServerError"),
    (errors.EncodeTimeoutError("late"), 503, "InternalServerError"),
    (errors.EncodersChangedError(), 500, "InternalServerError"),
    (errors.GoneError("gone"), 500, "InternalServerError"),
    (errors.AudioGoneError(), 500, "InternalServerError"),
    (errors.NotStoredError(), 503, "InternalServerError"),
    (errors.WorkerStorageError("The bucket is away."), 503, "InternalServerError"),
    (errors.SpeakerReplacedError("ann"), 503, "InternalServerError"),
    (CannotCloneError("It has no reference encoder."), 400, "BadRequestError"),
    (errors.StorageFullError(), 507, "InternalServerError"),
    (errors.ConfigError("no"), 500, "InternalServerError"),
    (errors.ConnectionSettingError("no"), 500, "InternalServerError"),
    (errors.NoCatalogueError("no"), 500, "InternalServerError"),
    (errors.CheckpointError("/x", "no"), 500, "InternalServerError"),
]
IDS = [type(error).__name__ for error, _, _ in ERRORS]


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
    assert {type(error) for error, _, _ in ERRORS} >= ours - branches


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS, ids=IDS)
def test_a_voices_route_answers_an_error_in_the_hosts_shape(error, status, kind):
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
    assert told == {"message": str(error), "type": kind, "param": None, "code": status}
    assert "Traceback" not in response.text


@pytest.mark.parametrize(("error", "status", "kind"), ERRORS, ids=IDS)
def test_a_speech_request_gets_the_same_but_an_unknown_voice_is_a_wrong_field(
    error, status, kind
):
    response = routing.speech_response(error)
    answer = json.loads(bytes(response.body))["error"]
    expected = (400, "BadRequestError") if status == 404 else (status, kind)
    assert (answer["code"], answer["type"]) == expected
    assert response.status_code == expected[0]
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

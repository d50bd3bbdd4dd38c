"""What `/openapi.json` says of our routes: all of it, and what is true."""

from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import BaseModel

from tests.speaking import wav
from tests.two_tenants import ADMIN_KEY, two_tenants
from vllm_tts_cache.entrypoints.attach import routers
from vllm_tts_cache.entrypoints.http import models

VOICES, CONSENTS = "/v1/audio/voices", "/v1/audio/voice_consents"
CACHE = "/v1/audio/speaker_cache"
# The host's, whose bodies and answers are the host's.
SPEECH = ("/v1/audio/speech", "/v1/audio/speech/batch", "/v1/audio/generate")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    app = FastAPI()
    for router in routers():
        app.include_router(router)
    return app.openapi()


def operations(document):
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method} {path}", operation


def fields_of(document, operation):
    """Each field of each body, by its name."""
    for body in operation.get("requestBody", {}).get("content", {}).values():
        schema = body["schema"]
        for each in (schema, *schema.get("anyOf", [])):
            if "$ref" in each:
                name = each["$ref"].rsplit("/", 1)[-1]
                found = document["components"]["schemas"][name]
                whole = "examples" in found or "example" in body
                for field, shown in found["properties"].items():
                    yield field, shown, whole


def is_file(shown):
    return "contentMediaType" in str(shown) or "binary" in str(shown)


def test_every_operation_says_what_it_takes_and_answers(document):
    found = dict(operations(document))
    assert len(found) == 25
    for name, operation in found.items():
        assert operation["description"], name
        statuses = set(operation["responses"])
        assert statuses >= {"200", "400", "401", "403", "503"}, name
        assert "422" not in statuses, name
        assert ("413" in statuses) == ("requestBody" in operation), name
        for parameter in operation.get("parameters", []):
            assert parameter["schema"]["examples"], (name, parameter["name"])
        for field, shown, is_shown_whole in fields_of(document, operation):
            told = shown.get("examples") or is_shown_whole
            assert told or (is_file(shown) and shown["description"]), (name, field)


def test_every_answer_in_json_has_an_example(document):
    for name, operation in operations(document):
        content = operation["responses"]["200"].get("content", {})
        assert bool(content) != name.startswith("head"), name
        if not name.endswith(SPEECH) and "application/json" in content:
            shown = content["application/json"]
            assert "$ref" in shown["schema"] and shown["example"], name


def undocumented(told: Any) -> set[str]:
    """Names that are in an answer and in no field of its model."""
    if isinstance(told, dict):
        return undocumented(list(told.values()))
    if isinstance(told, list):
        return set().union(*map(undocumented, told))
    if not isinstance(told, BaseModel):
        return set()
    fields = [getattr(told, name) for name in type(told).model_fields]
    return set(told.model_extra or {}) | undocumented(fields)


ANSWERED = (
    *(models.Registered, models.VoiceStatus, models.VoiceList, models.CacheStatus),
    *(models.Quality, models.Imported, models.VoiceDeleted, models.SpeakerCache),
    *(models.Consent, models.ConsentList, models.ConsentDeleted),
)


@pytest.mark.parametrize("model", ANSWERED, ids=lambda model: model.__name__)
def test_an_example_is_what_the_model_says(model):
    assert undocumented(model.model_validate(models.example_of(model))) == set()


async def test_answers_are_what_the_models_say(server):
    client, clip = server.client, ("c.wav", wav(), "audio/wav")

    def told(model, answer):
        assert answer.status_code == 200, answer.text
        assert undocumented(model.model_validate(answer.json())) == set()
        return answer.json()

    form = {"name": "Ann's", "language": "de"}
    added = await client.post(CONSENTS, data=form, files={"recording": clip})
    consent = told(models.Consent, added)["id"]
    told(models.ConsentList, await client.get(CONSENTS))
    ends = {"labels": '{"a": "b"}', "expires_at": "2100-01-01T00:00:00Z"}
    added = await server.register("Ann", wav(), consent=consent, **ends)
    told(models.Registered, added)
    one = f"{VOICES}/Ann"
    told(models.CacheStatus, await client.post(f"{one}/cache"))
    told(models.VoiceStatus, await client.get(one))
    told(models.VoiceStatus, await client.patch(one, json={"language": "de"}))
    told(models.VoiceList, await client.get(VOICES))
    checked = await client.post(f"{VOICES}/check", files={"audio_sample": clip})
    told(models.Quality, checked)
    bundle = (await client.get(f"{one}/bundle")).content
    moved = await client.post(
        f"{VOICES}/import", files={"bundle": ("a", bundle)}, data={"name": "Bea"}
    )
    told(models.Imported, moved)
    shown = models.SpeakerCache.model_validate((await client.get(CACHE)).json())
    # A worker tells more than is written down: by the model, and for its developers.
    assert shown.workers and shown.model_extra == {}
    for name in ("Ann", "Bea"):
        told(models.VoiceDeleted, await client.delete(f"{VOICES}/{name}"))
    told(models.ConsentDeleted, await client.delete(f"{CONSENTS}/{consent}"))


async def test_so_are_the_counts_of_tenants(default_checkpoint, tmp_path, monkeypatch):
    async with two_tenants(default_checkpoint, tmp_path, monkeypatch) as host:
        async with host.client(ADMIN_KEY) as admin:
            shown = (await admin.get(CACHE)).json()
            all_of_them = models.SpeakerCache.model_validate(shown)
        shown = (await host.us.client.get(CACHE)).json()
        ours = models.SpeakerCache.model_validate(shown)
        assert all_of_them.tenants and all_of_them.model_extra == {}
        assert undocumented(ours) == set() and ours.limits is not None

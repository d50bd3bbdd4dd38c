"""Speech in every format that OpenAI's clients ask for, whole and while it is made."""

import base64
import gc
import io
import json

import av
import numpy as np
import pytest

from tests.audio_clips import voiced
from tests.speaking import data_url
from vllm_tts_cache.entrypoints.features.speech_formats import (
    FORMATS,
    OPUS_RATES_HZ,
    SpeechEncoder,
    SpeechRequest,
)

EACH = pytest.mark.parametrize("format_name", FORMATS)
# Two outputs of the tests' engine; a whole answer has the last alone.
SECONDS, RATE_HZ = 0.2, 24_000
DELAY = 0.25  # of an encoder, which fills whole frames, most of all AAC's at 8 kHz


def heard(data):
    with av.open(io.BytesIO(data), "r") as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
        samples = np.concatenate([frame.reshape(-1) for frame in frames])
        return samples, container.streams.audio[0].rate


def encoded(format_name, rate_hz, pcm, size):
    encoder = SpeechEncoder(format_name, rate_hz)
    pieces = [pcm[i : i + size] for i in range(0, len(pcm), size)]
    return [*map(encoder.encode, pieces), encoder.end()]


@pytest.mark.parametrize("rate_hz", [8_000, 22_050, 24_000, 44_100, 48_000])
@EACH
def test_a_speech_in_pieces_is_the_same_file_and_begins_at_once(format_name, rate_hz):
    if format_name == "opus" and rate_hz not in OPUS_RATES_HZ:
        pytest.skip("Opus has no such rate")
    samples = voiced(rate_hz, 2.0)[:, 0]
    pcm = (samples * 20_000).astype("<i2").tobytes()
    pieces = encoded(format_name, rate_hz, pcm, 2_001)  # odd: half a sample
    assert b"".join(pieces) == b"".join(encoded(format_name, rate_hz, pcm, len(pcm)))
    assert len(b"".join(pieces[: len(pieces) // 2])) > len(b"".join(pieces)) // 3
    found, found_rate = heard(b"".join(pieces))
    assert 0 <= len(found) / found_rate - 2.0 < DELAY


@EACH
def test_a_speech_without_a_sound_is_a_file(format_name):
    assert isinstance(b"".join(encoded(format_name, RATE_HZ, b"", 1)), bytes)


def sounding(answer, format_name):
    """The seconds of an answer."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Audio-Sample-Rate"] == str(RATE_HZ)
    assert answer.headers["X-Speaker-Cache"] == "miss"
    audio = answer.content
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = (line for line in answer.text.split("\n") if line[:1] == "d")
        *deltas, done = [json.loads(line[6:]) for line in lines]
        assert done["type"] == "speech.audio.done"
        assert {each["response_format"] for each in deltas} == {format_name}
        audio = b"".join(base64.b64decode(each["audio"]) for each in deltas)
    else:
        assert answer.headers["content-type"] == FORMATS[format_name].media_type
    samples, rate_hz = heard(audio)
    return len(samples) / rate_hz


STREAMS = [{"stream_format": "sse"}, {"stream": True}, {"stream_format": "audio"}]


@pytest.mark.parametrize("way", STREAMS, ids=str)
@EACH
async def test_each_format_is_streamed(server, format_name, way):
    """LiveKit asks for events with MP3 unless it is told otherwise."""
    fields = {"ref_audio": data_url(), "ref_text": "words", "speed": 1.0}
    answer = await server.speak(response_format=format_name, **way, **fields)
    assert SECONDS <= sounding(answer, format_name) < SECONDS + DELAY


async def test_aac_is_answered_whole_too(server):
    fields = {"ref_audio": data_url(), "ref_text": "words"}
    answer = await server.speak(response_format="aac", **fields)
    assert int(answer.headers["content-length"]) == len(answer.content)
    assert SECONDS / 2 <= sounding(answer, "aac") < SECONDS / 2 + DELAY


async def test_each_family_speaks_at_the_rate_that_a_client_reads(server):
    fields = {"ref_audio": data_url(), "ref_text": "words", "response_format": "pcm"}
    for rate_hz in (8_000, 16_000, 22_050, 48_000):
        answer = await server.speak(sample_rate=rate_hz, **fields)
        assert len(answer.content) == rate_hz * SECONDS  # of 2 bytes
        assert answer.headers["X-Audio-Sample-Rate"] == str(rate_hz)
    assert (await server.speak(sample_rate=7, **fields)).status_code == 400
    fields["response_format"] = "opus"  # which has no such rate
    answer = await server.speak(sample_rate=22_050, **fields)
    assert answer.headers["X-Audio-Sample-Rate"] == "48000"
    assert heard(answer.content)[1] == 48_000


async def test_odd_values_are_refused(server):
    for odd in ({"response_format": ["mp3"]}, {"response_format": {}}, {"stream": []}):
        assert (await server.speak(**odd)).status_code == 400
    for word in ("false", "0", False):  # as pydantic reads it
        fields = {"ref_audio": data_url(), "ref_text": "words", "stream": word}
        answer = await server.speak(response_format="mp3", **fields)
        assert answer.headers["content-type"] == "audio/mpeg"
        assert "content-length" in answer.headers


@EACH
def test_a_speech_that_is_not_ended_leaves_no_memory(format_name):
    """PyAV's container and stream hold one another: a cycle that only closing ends."""
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for _ in range(20):
            encoder = SpeechEncoder(format_name, RATE_HZ)
            encoder.encode(b"\0" * 9_600)
            encoder.close()
            del encoder
        assert len(gc.get_objects()) < before + 20
    finally:
        gc.enable()


def test_sampling_at_top_level_acts_or_is_refused():
    request = SpeechRequest.model_validate({"input": "Hi.", "temperature": 0.5})
    assert request.extra_params == {"temperature": 0.5}
    both = {"top_k": 5, "extra_params": {"top_k": 7, "a": 1}}
    request = SpeechRequest.model_validate({"input": "Hi.", **both})
    assert request.extra_params == {"top_k": 7, "a": 1}
    neutral = {"frequency_penalty": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    request = SpeechRequest.model_validate({"input": "Hi.", **neutral})
    assert request.extra_params is None
    for name in neutral:
        with pytest.raises(ValueError, match=f"{name} cannot be set for speech"):
            SpeechRequest.model_validate({"input": "Hi.", name: 0.5})


@pytest.mark.environment(SPEAKER_STREAM="1", SPEAKER_PCM_SAMPLE_RATE="48000")
async def test_an_operator_says_what_requests_leave_out(server):
    """Pipecat reads PCM as 24 kHz, and OpenAI streams whatever is not said."""
    fields = {"ref_audio": data_url(), "ref_text": "words"}
    answer = await server.speak(response_format="pcm", **fields)
    assert "content-length" not in answer.headers
    assert len(answer.content) == 2 * SECONDS * 48_000
    assert answer.headers["X-Audio-Sample-Rate"] == "48000"
    answer = await server.speak(response_format="mp3", **fields)
    assert "content-length" not in answer.headers
    assert answer.headers["content-type"] == "audio/mpeg"
    whole = await server.speak(response_format="mp3", speed=2.0, **fields)
    assert "content-length" in whole.headers

"""Requests that nobody sends by accident: Hypothesis strategies over all our routes."""

import base64
import io
import json
import os
import warnings
import zipfile
from dataclasses import dataclass, field
from functools import cache, partial
from urllib.parse import quote, urlencode

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.audio_clips import ffmpeg_bytes, sndfile_bytes, voiced
from vllm_tts_cache.audio.decode import decode
from vllm_tts_cache.store import bundle_format
from vllm_tts_cache.store.bundle_format import BundledVoice

NUM_CASES = int(os.environ.get("TTS_CACHE_TEST_HOSTILE_CASES", "150"))
VOICES = "/v1/audio/voices"
BOUNDARY = "hostile"
MULTIPART = f"multipart/form-data; boundary={BOUNDARY}"
EMBEDDING = str([0.5] * 16)

NASTY_TEXTS = ["", " ", "\0", "a\0b", "..", ".", "a/b", "a\\b", "default", "DEFAULT "]
NASTY_TEXTS += ["adm\u200bin", "\u202eevil", "\u2066\u2069", "\ud800", "\udfff\ud800"]
NASTY_TEXTS += ["\ufffe\uffff", "\r\nX-Header: 1", "%00%ff", "%", "_", "' OR 1=1 --"]
NASTY_TEXTS += ['"; DROP TABLE speaker; --', "\U0001f468\u200d\U0001f469"]
NASTY_TEXTS += ["I\u0307\u0130\u0131\u017fß", "e\u0301" * 40, "a" * 129]
NASTY_TEXTS += ["\U0001f600" * 600, "x" * 70_000, "<|speaker:0|>", "<|" * 400]
NASTY_TEXTS += ["{}", "[", "null", "nan", "1e999", "-1", "true"]
# Few, so that requests meet: one replaces, deletes or speaks what another registered.
NAMES = ["Ann", "ann", "Bob", "Čeněk", "E", "Zoë", "a.b", "50%", "a b"]


def so_many(num_cases):
    """Settings of a test that generates so many cases and shrinks none."""
    return settings(
        max_examples=num_cases,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


texts = st.sampled_from(NASTY_TEXTS) | st.text(
    st.characters(exclude_categories=()), max_size=30
)
names = st.sampled_from(NAMES) | st.sampled_from(NAMES) | texts

NUMBERS = [0, -1, 1, 2**31, 2**63, 10**40, 0.1, -0.0, 1e308]
NUMBERS += [float("nan"), float("inf"), -float("inf")]
scalars = st.none() | st.booleans() | st.sampled_from(NUMBERS) | texts
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
    ),
    max_leaves=6,
)


@dataclass(frozen=True, slots=True, repr=False)
class Case:
    """One request, as it goes over the wire."""

    method: str
    path: str
    body: bytes = b""
    headers: dict[bytes, bytes] = field(default_factory=dict)

    def __repr__(self):
        """As much as a reader wants to see of it."""
        told = f"{self.method} {self.path[:300]} {self.headers}"
        return f"{told[:600]} {self.body[:1500]!r} ({len(self.body)} bytes)"


# -------- clips


def _clip(number):
    return (voiced(8_000, 1.1, pitch_hz=200 + 7 * number) * 32767).astype(np.int16)


CLIPS = {
    "wav": lambda: sndfile_bytes(_clip(0), 8_000, "WAV"),
    "wav2": lambda: sndfile_bytes(_clip(1), 8_000, "WAV"),
    "wav3": lambda: sndfile_bytes(_clip(2), 8_000, "WAV"),
    "flac": lambda: sndfile_bytes(_clip(0), 8_000, "FLAC"),
    "m4a": lambda: ffmpeg_bytes(voiced(8_000, 1.2), 8_000, "ipod", "aac"),
    "silence": lambda: sndfile_bytes(np.zeros(9_000, np.int16), 8_000, "WAV"),
    "short": lambda: sndfile_bytes(_clip(0)[:100], 8_000, "WAV"),
}


@cache
def clip(name):
    return CLIPS[name]()


@st.composite
def damaged(draw, data):
    """Bytes that were good until somebody flipped, cut or repeated some."""
    data = bytearray(draw(data))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, 300)) % (len(data) + 1)
        if draw(st.booleans()):
            data[at : at + 1] = bytes([draw(st.integers(0, 255))])
        else:
            del data[at : at + draw(st.sampled_from([1, 7, 1000, 100_000]))]
    return bytes(data)


good_clips = st.sampled_from(["wav", "wav2", "wav3", "flac", "m4a"]).map(clip)
clips = (
    good_clips
    | st.sampled_from(list(CLIPS)).map(clip)
    | damaged(good_clips)
    | st.binary(max_size=64)
    | st.just(bytes(1_100_000))
)


# -------- bodies


def _bytes(text):
    return text.encode("utf-8", "surrogatepass")


def part(name, data, filename=None, media_type=None):
    head = b'Content-Disposition: form-data; name="' + _bytes(name) + b'"'
    if filename is not None:
        head += b'; filename="' + _bytes(filename) + b'"'
    if media_type is not None:
        head += b"\r\nContent-Type: " + _bytes(media_type)
    return b"--" + BOUNDARY.encode() + b"\r\n" + head + b"\r\n\r\n" + data + b"\r\n"


@st.composite
def parts(draw):
    """The parts of a registration: mostly what is asked for, some of it nasty."""
    good = {"name": draw(names), "consent": "yes", "precompute": draw(flags)}
    optional = ["ref_text", "speaker_description", "consent", "precompute", "language"]
    optional += ["labels", "expires_at", "type"]
    for name in draw(st.lists(st.sampled_from(optional), max_size=2)):
        good[name] = draw(texts)
    found = [part(name, _bytes(text)) for name, text in good.items()]
    if draw(st.integers(0, 4)):
        name = draw(st.sampled_from(["c.wav", "c.wav", *NASTY_TEXTS[:24]]))
        media_type = draw(st.sampled_from(["audio/wav", "", "a" * 200, "\ud800/x"]))
        found.append(part("audio_sample", draw(clips), name, media_type))
    else:
        given = st.sampled_from([EMBEDDING, "[]", "[1e39]", "[NaN]", "9" * 5000])
        nested = st.just("[" * 5000) | values.map(json.dumps)
        found.append(part("speaker_embedding", _bytes(draw(given | nested))))
    odd = [
        part("name", b"as a file", "f"),
        part("audio_sample", b"as a field"),
        part("unknown", b"x" * 100),
        b"",
    ]
    found += draw(st.lists(st.sampled_from(odd), max_size=1))
    return found if draw(st.booleans()) else draw(st.permutations(found))


flags = st.sampled_from(["true", "false", "0", "yes", "maybe"])
whole_forms = parts().map(lambda found: b"".join(found) + f"--{BOUNDARY}--".encode())
forms = whole_forms | whole_forms | damaged(whole_forms) | st.binary(max_size=50)
url_forms = st.dictionaries(names, texts.map(_bytes), max_size=4).map(
    lambda form: urlencode({_bytes(k): v for k, v in form.items()}).encode()
)

data_urls = clips.map(
    lambda data: "data:audio/wav;base64," + base64.b64encode(data).decode()
)
urls = (
    data_urls
    | data_urls
    | texts
    | st.sampled_from(
        [
            "http://127.0.0.1:9/closed",
            "http://[::1",
            "http://127.0.0.1:99999/",
            "file:///etc/passwd",
            "file://" + "a" * 5000,
            "ftp://127.0.0.1/x",
            "data:",
            "data:,",
            "data:audio/wav;base64,@@@",
            "data:audio/\ud800;base64,AAAA",
            "//x",
        ]
    )
)


@st.composite
def speech(draw):
    """A speech request, of which some fields are nothing that they should be."""
    fields = {"input": "Hello.", "model": "m"}
    speakers = st.fixed_dictionaries({"voice": names}) | st.fixed_dictionaries(
        {"ref_audio": urls, "ref_text": st.just("words")}
    )
    fields |= draw(speakers)
    nasty = st.sampled_from(SPEECH_FIELDS)
    for name in draw(st.lists(nasty, max_size=3)):
        fields[name] = draw(values)
    return fields


SPEECH_FIELDS = ["input", "voice", "speaker", "ref_audio", "ref_text", "ref_audio_2"]
SPEECH_FIELDS += ["x_vector_only_mode", "stream", "stream_format", "response_format"]
SPEECH_FIELDS += ["speed", "sample_rate", "task_type", "language", "instructions"]
SPEECH_FIELDS += ["speaker_embedding", "max_new_tokens", "seed", "extra_params"]
SPEECH_FIELDS += ["initial_codec_chunk_frames", "non_streaming_mode", "model"]
SPEECH_FIELDS += ["word_timestamps", "duration_seconds", "unknown"]


CHANGES = {
    "name": names,
    "speaker_description": texts,
    "language": texts | st.just("de"),
    "labels": st.dictionaries(texts, texts, max_size=3) | values,
    "ref_text": texts | st.just("words"),
    "expires_at": texts | values | st.just("2100-01-01T00:00:00Z"),
    "unknown": values,
}


@st.composite
def changes(draw):
    """What a PATCH says, of which some is nothing that it should be."""
    fields = draw(st.lists(st.sampled_from(sorted(CHANGES)), max_size=3))
    return {name: draw(CHANGES[name] | values) for name in fields}


@st.composite
def patches(draw):
    bodies = as_json(changes()) | as_json(changes()) | odd_json
    return Case("PATCH", draw(voice_paths), draw(bodies), draw(headers(_JSON_TYPE)))


# -------- bundles


@cache
def bundle(name, clip_name):
    """A voice's bundle, as any server may have signed it."""
    data = clip(clip_name)
    voice = BundledVoice(
        format=bundle_format.FORMAT_VERSION,
        name=name,
        consent="yes",
        audio_sha256=decode(data).audio.audio_sha256,
        files={},
        ref_text="words",
        labels={"team": "news"},
    )
    return bundle_format.write(voice, {"audio.wav": data}, b"somebody else's key")


good_bundles = st.builds(
    bundle, st.sampled_from(NAMES), st.sampled_from(["wav", "wav2", "wav3"])
)


@st.composite
def rewritten(draw):
    """A bundle whose entries are others, or twice, or packed, or not where they say."""
    written = io.BytesIO()
    packed = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    with zipfile.ZipFile(io.BytesIO(draw(good_bundles))) as source:
        entries = [(name, source.read(name)) for name in source.namelist()]
    odd = ["../evil", "/etc/x", "voice.json", "audio.flac", "encodings/x", "a" * 5000]
    for name in draw(st.lists(st.sampled_from(odd), max_size=2)):
        entries.append((name, draw(st.binary(max_size=64) | as_json(values))))
    for index in draw(st.lists(st.integers(0, len(entries) - 1), max_size=2)):
        entries[index] = entries[index][0], draw(damaged(st.just(entries[index][1])))
    with (
        warnings.catch_warnings(),
        zipfile.ZipFile(written, "w", packed, strict_timestamps=False) as archive,
    ):
        warnings.simplefilter("ignore")  # a name that is there twice
        for name, data in draw(st.permutations(entries)):
            archive.writestr(name, data)
    return written.getvalue()


@st.composite
def imports(draw):
    bundles = good_bundles | damaged(good_bundles) | rewritten() | clips
    found = [part("bundle", draw(bundles), "a.voice", "application/zip")]
    if draw(st.booleans()):
        found.append(part("name", _bytes(draw(names))))
    if draw(st.booleans()):
        given = st.sampled_from(["fail", "replace", "rename", "rename"]) | texts
        found.append(part("on_conflict", _bytes(draw(given))))
    return b"".join(found) + f"--{BOUNDARY}--".encode()


@st.composite
def checks(draw):
    found = [part("audio_sample", draw(clips), "c.wav", "audio/wav")]
    if draw(st.booleans()):
        found.append(part("ref_text", _bytes(draw(texts))))
    return b"".join(found) + f"--{BOUNDARY}--".encode()


CONSENTS = "/v1/audio/voice_consents"
# Few, so that some of them are of a voice's form, and none is of a recording's.
consent_paths = st.sampled_from(
    [f"{CONSENTS}/cons_{'0' * 32}", f"{CONSENTS}/%ff", f"{CONSENTS}/x", CONSENTS]
)


@st.composite
def recordings(draw):
    found = [
        part("name", _bytes(draw(texts | st.just("Ann's")))),
        part("language", _bytes(draw(texts | st.just("de")))),
        part("recording", draw(clips), "c.wav", "audio/wav"),
    ]
    return b"".join(found) + f"--{BOUNDARY}--".encode()


@st.composite
def consent_requests(draw):
    if draw(st.booleans()):
        head = draw(headers(_FORM_TYPE))
        return Case("POST", CONSENTS, draw(recordings() | forms), head)
    method = draw(st.sampled_from(["GET", "DELETE", "POST", "PUT"]))
    body = draw(as_json(st.fixed_dictionaries({"name": texts}) | values) | odd_json)
    path = draw(consent_paths) + draw(queries)
    return Case(method, path, body, draw(headers(_JSON_TYPE)))


@st.composite
def batch(draw):
    items = draw(st.lists(speech() | values, max_size=3) | values)
    return {"items": items} | draw(st.fixed_dictionaries({}, optional=_BATCH))


_BATCH = {"voice": names, "response_format": values, "ref_audio": urls}


@st.composite
def sounds(draw):
    """What a model of sounds is asked for, of one that speaks."""
    given = draw(st.lists(st.sampled_from(GENERATE_FIELDS), max_size=3))
    return {"input": draw(texts | st.just("rain"))} | {
        name: draw(values) for name in given
    }


GENERATE_FIELDS = ["input", "model", "response_format", "speed", "stream_format"]
GENERATE_FIELDS += ["audio_length", "audio_start", "negative_prompt", "seed"]
GENERATE_FIELDS += ["guidance_scale", "num_inference_steps", "unknown"]

odd_json = st.sampled_from(
    [
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"a":' * 20_000,
        b"\xff\xfe",
        b'{"input": "\\ud800"}',
        b'{"input": "x", "voice": "\\udc00"}',
        b'{"input": ' + b"9" * 5000 + b"}",
        b'{"input": "x", "speed": 1e999}',
        b'{"input": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"input": "x", "input": "y"}',
    ]
)


def as_json(fields):
    return fields.map(lambda value: json.dumps(value).encode())


_JSON_TYPE, _FORM_TYPE = b"application/json", MULTIPART.encode()
MEDIA_TYPES = [
    _JSON_TYPE,
    _FORM_TYPE,
    b"multipart/form-data",
    b"multipart/form-data; boundary=",
    b"multipart/form-data; boundary=" + b"b" * 5000,
    b"application/x-www-form-urlencoded",
    b"text/plain",
    b"",
    b"\xff\xfe",
    b"application/json; charset=utf-7",
]
LENGTHS = [b"-1", b"0", b"7", b"999999999999", b"9" * 5000, b"x", b"\xb2", b"1_0", b""]
# Who asks, and from where: nobody says so most of the time.
WHO = {
    b"authorization": [
        b"Bearer x",
        b"Bearer " + b"k" * 9000,
        b"Bearer ",
        b"Basic \xff",
    ],
    b"origin": [
        b"null",
        b"http://evil.example",
        b"http://[",
        b"\xff",
        b"http://server",
    ],
    b"host": [b"", b"[", b"\xff", b"server:99999"],
    b"x-request-id": [b"", b"\xff\x01", b"r" * 9000],
    b"idempotency-key": [b"", b"k" * 9000],
    b"range": [b"bytes=5-2", b"bytes=" + b"0-1," * 2000, b"x"],
    b"if-none-match": [b"*", b"\xff", b'"' + b"e" * 9000],
    b"accept": [b"", b"\xff", b"a/b," * 3000],
}
said = st.dictionaries(st.sampled_from(sorted(WHO)), st.integers(0, 9), max_size=2)
callers = (st.just({}) | st.just({})) | said.map(
    lambda given: {name: WHO[name][at % len(WHO[name])] for name, at in given.items()}
)


@st.composite
def headers(draw, media_type):
    """The right headers, and now and then a wrong one."""
    found = {b"content-type": media_type}
    if not draw(st.integers(0, 7)):
        found[b"content-type"] = draw(st.sampled_from(MEDIA_TYPES))
    if not draw(st.integers(0, 7)):
        found[b"content-length"] = draw(st.sampled_from(LENGTHS))
    return found | draw(callers)


# -------- requests


@st.composite
def with_body(draw, path, media_type, bodies):
    head = draw(headers(media_type))
    return Case("POST", path, draw(bodies), head)


voice_paths = (names | st.sampled_from(NAMES)).map(
    lambda name: f"{VOICES}/{quote(_bytes(name), safe='')}"
) | st.sampled_from([f"{VOICES}/%ff%fe", f"{VOICES}/a%2Fb", f"{VOICES}//", VOICES])
_ASKED = ["limit", "after", "search", "label", "sort", "names_only", "force", "urgent"]
_ASKED += ["name", "text", "check", "type", "unknown"]
queries = st.dictionaries(
    st.sampled_from(_ASKED),
    st.sampled_from(
        ["0", "1", "1000", "1001", "-5", "9" * 5000, "true", "newest", "a:b", "1.0:5"]
    )
    | texts,
    max_size=3,
).map(lambda query: "?" + urlencode({k: _bytes(v) for k, v in query.items()}))


OTHER_PATHS = ["/v1/audio/speaker_cache", "/voices", "/voices/assets/app.js"]
OTHER_PATHS += ["/voices/assets/..%2f..%2fservice.py", "/voices/assets/%00"]
OTHER_PATHS += ["/voices/assets/" + "a" * 5000]


@st.composite
def without_body(draw):
    methods = ["GET", "GET", "DELETE", "DELETE", "POST", "POST", "PUT"]
    below = draw(st.sampled_from(["", "", "/cache", "/audio", "/bundle"]))
    path = draw(voice_paths) + below
    if not draw(st.integers(0, 9)):
        path = draw(st.sampled_from(OTHER_PATHS))
    method = draw(st.sampled_from(methods))
    return Case(method, path + draw(queries), headers=draw(callers))


json_bodies = as_json(speech()) | as_json(speech()) | as_json(values) | odd_json
good_forms = st.builds(
    lambda name, data: (
        part("name", name.encode())
        + part("consent", b"yes")
        + part("ref_text", b"words")
        + part("audio_sample", data, "clip.wav", "audio/wav")
        + f"--{BOUNDARY}--".encode()
    ),
    st.sampled_from(NAMES),
    good_clips,
)
good_speech = as_json(
    st.fixed_dictionaries({"input": st.just("Hi."), "voice": st.sampled_from(NAMES)})
)
speeches = partial(with_body, "/v1/audio/speech", _JSON_TYPE)
registrations = partial(with_body, VOICES, _FORM_TYPE)
cases = st.one_of(
    speeches(good_speech),
    speeches(json_bodies),
    speeches(as_json(speech())),
    st.builds(
        Case,
        st.just("POST"),
        st.just(VOICES),
        good_forms,
        st.just({b"content-type": _FORM_TYPE}),
    ),
    registrations(forms | forms | forms | url_forms),
    registrations(whole_forms),
    with_body("/v1/audio/speech/batch", _JSON_TYPE, as_json(batch()) | odd_json),
    without_body(),
    without_body(),
    patches(),
    consent_requests(),
    with_body(f"{VOICES}/check", _FORM_TYPE, checks() | forms),
    with_body(f"{VOICES}/import", _FORM_TYPE, imports()),
    with_body(f"{VOICES}/import", _FORM_TYPE, damaged(imports()) | forms),
    with_body("/v1/audio/generate", _JSON_TYPE, as_json(sounds()) | odd_json),
)

"""Whatever a speech request says, the engine lives, and others are heard to the bit."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tests.beside_a_stream import undisturbed
from vllm_tts_cache.testing.server import SpeechClient

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.every_family]

HALF, OTHER_HALF = "\ud83d", "\ude00"
TEXTS = [
    f"All done {HALF}",
    f"{OTHER_HALF}{HALF}",
    "a\0b\x1b[2J\x07\x7f\x80",
    "\ufffe\uffff\U0010ffff\u202e\u2066\u200b\ufeff",
    "<|im_end|><|endoftext|><s></s>[INST]<|audio|><unk>",
    "e" + "\u0301" * 40,
    " \n\t ",
]
NESTED = {"a": [{"b": [None, [[1.5, HALF]]]}]}
OTHERS = [10**40, 2**63, float("nan"), NESTED]
MORE = ["", "nan", 0, -1, 2**31, 2**64, -(2**63) - 1, 1e308, 0.1, True, None, [], {}]
MORE += [float("inf"), float("-inf"), [HALF], {HALF: HALF}, ["x"] * 300]
MORE += ["e" + "\u0301" * 500]  # which is spoken for a minute
WRITTEN = ("input", "instructions", "language", "ref_text", "voice")
OPTIONS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"]
OPTIONS += ["tts_local_seed", "cfg_alpha", "cfg_scale", "cfg_value", "guidance_scale"]
OPTIONS += ["inference_timesteps", "num_inference_steps", "num_step", "clone_mode"]
OPTIONS += ["max_tokens", "min_tokens", "stop", "stop_token_ids", "bad_words"]
OPTIONS += ["logit_bias", "allowed_token_ids", "kv_transfer_params"]
OPTIONS += ["ec_transfer_params", "kv_cache_report_mode", "target_h", "duration"]
OPTIONS += ["lang", "note"]


def fields():
    from vllm_omni.entrypoints.openai.protocol.audio import OpenAICreateSpeechRequest

    return sorted(OpenAICreateSpeechRequest.model_fields)


def bodies(values, options):
    """Requests with one odd field each: of ``values``, and of texts where text is."""
    for field in [*fields(), "user", HALF]:
        for value in [*TEXTS, *values] if field in WRITTEN else values:
            yield {field: value}
    for value in (1e308, 1e30, "1e308", -1e308, float("inf")):
        for embedding in ([value] * 128, [[value] * 128], [0.1] * 127 + [value]):
            yield {"voice": None, "task_type": "Base", "speaker_embedding": embedding}
    for option in [*OPTIONS, HALF, "a\0b"]:
        for value in options:
            yield {"extra_params": {option: value}}


def send(client, path, body, method="POST"):
    kind = {"Content-Type": "application/json"}
    text = json.dumps(body).encode()
    answer = client.http.request(method, path, content=text, headers=kind)
    return answer.status_code, answer.text[:200] if answer.status_code != 200 else ""


# As the HTTP reference says of a talker that does not come to its end.
DOCUMENTED = "before its token budget"


def wrong(status, text):
    """What is wrong with an answer; None if nothing is."""
    if status == 200 or 400 <= status < 500 or DOCUMENTED in text:
        return None
    return f"{status} {text}"


def send_all(server, given):
    """Post them, some at once, beside a stream; return what is wrong with answers."""
    problems, client = {}, SpeechClient(server.url)
    client.http.headers["Connection"] = "close"

    def speak(fields):
        body = {"input": "All done.", "voice": "keeper", "model": "tts", **fields}
        status, text = send(client, "/v1/audio/speech", body)
        if found := wrong(status, text):
            problems.setdefault(found[:90], f"{fields!r}: {found}")

    with undisturbed(server.url, "keeper"), ThreadPoolExecutor(4) as several:
        list(several.map(speak, given))
    client.close()
    return "\n".join(problems.values())


FEW = [10**40, NESTED], [NESTED]
ALL = pytest.param(([*OTHERS, *MORE], [*TEXTS, *OTHERS, *MORE]), marks=pytest.mark.long)


@pytest.mark.parametrize("values", [FEW, ALL], ids=["few", "all"])
def test_no_value_of_any_field_ends_the_engine(keeper, shared_server, values):
    assert not send_all(shared_server, bodies(*values))


@pytest.mark.parametrize("field", ["input", "instructions", "ref_text", "language"])
def test_half_a_character_is_refused_by_the_name_of_its_field(keeper, field):
    body = {"input": "All done.", "voice": "keeper", field: f"All done {HALF}"}
    status, text = send(keeper, "/v1/audio/speech", body)
    assert status == 400 and f"Invalid {field}: " in text, text
    assert "half of a character, \\\\ud83d at 9" in text
    batch = {"voice": "keeper", "items": [{"input": "Fine."}, {"input": HALF}]}
    status, text = send(keeper, "/v1/audio/speech/batch", batch)
    assert status == 400 and "Invalid items[1].input: " in text
    status, text = send(keeper, "/v1/audio/voices/keeper", {"ref_text": HALF}, "PATCH")
    assert status == 400 and "Invalid ref_text: " in text


def spoken_by_socket(server, *texts, **config):
    """What is heard of texts, and the errors, of one utterance."""
    heard, errors = bytearray(), []
    config = {"voice": "keeper", "response_format": "pcm", "seed": 7, **config}
    url = server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    with connect(url, max_size=None) as socket:
        with suppress(ConnectionClosed):  # after an error, which is there to be read
            socket.send(json.dumps({"type": "session.config", **config}))
            for text in texts:
                socket.send(json.dumps({"type": "input.text", "text": text}))
            socket.send(json.dumps({"type": "input.done"}))
        while True:
            told = socket.recv(timeout=600)
            if isinstance(told, bytes):
                heard += told
                continue
            message = json.loads(told)
            if message["type"] == "error":
                errors.append(message["message"])
            if message["type"] == "session.done" or errors:
                return bytes(heard), errors


def test_halves_in_two_messages_make_the_character(family, keeper, shared_server):
    if family.pipelines:
        pytest.skip("the host has no WebSocket for a diffusion model")
    with undisturbed(shared_server.url, "keeper"):
        whole = spoken_by_socket(shared_server, "All done \U0001f600 now.")
        cut = spoken_by_socket(shared_server, f"All done {HALF}", f"{OTHER_HALF} now.")
        left_out = spoken_by_socket(shared_server, f"All {HALF}", f"done {HALF}now.")
        plain = spoken_by_socket(shared_server, "All done now.")
        at_the_end = spoken_by_socket(shared_server, "All done now.", HALF)
    assert whole[0] and whole == cut
    assert plain[0] and plain == left_out == at_the_end


def test_half_a_character_in_a_config_is_refused(family, keeper, shared_server):
    if family.pipelines:
        pytest.skip("the host has no WebSocket for a diffusion model")
    config = {"voice": "keeper", "instructions": f"calm {HALF}"}
    url = shared_server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    with connect(url) as socket:
        # No more is sent: with messages that nobody reads the answer may be lost.
        socket.send(json.dumps({"type": "session.config", **config}))
        told = json.loads(socket.recv(timeout=600))
    assert told["type"] == "error"
    assert "Invalid instructions: it holds half of a character" in told["message"]

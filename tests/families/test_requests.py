"""What clients may ask of every family, through the host's real routes and adapters."""

import asyncio
import importlib
import json
import threading
from collections import Counter

import msgspec
import pytest

from tests.families.cases import case_of, cloning_cases, of
from tests.families.serving import message
from tests.speaking import (
    as_events,
    as_raw_stream,
    by_websocket,
    data_url,
    in_a_batch,
    lose_files,
    plainly,
    registered,
    wav,
)
from tests.speech_server import Server, running
from vllm_tts_cache.speaker.family import CloneFacts, families, possible_modes
from vllm_tts_cache.speaker.reference import FIELD, REQUEST_FIELD

VOICES = "/v1/audio/voices"
SPOKEN = "What is said in it."
CLONING = cloning_cases()
# Models that speak with nobody but who is registered, or comes with the request.
NEED_ONE = ("qwen3_tts", "cosyvoice3")
NONE = ({}, {"voice": None}, {"voice": "default"}, {"voice": "Default"})
BLANK = ({"voice": ""}, {"voice": " \n"})


def told(server, number=-1):
    """What the engine is told of a request beside its tokens."""
    prompt = server.engine.prompts[number]
    return prompt.get("additional_information", prompt)


async def speak(server, **fields):
    answer = await server.speak(**fields)
    assert answer.status_code == 200, answer.text
    return answer.headers["X-Speaker-Cache"]


@of(CLONING)
async def test_named_or_inline_one_is_encoded_once_and_has_its_kv(server, own_case):
    """The host encodes an inline clip for every request, in its worker."""
    family = own_case.family
    await server.register("Ann", wav(), ref_text=SPOKEN)
    inline = {"ref_audio": data_url(pitch_hz=330.0), "ref_text": SPOKEN}
    for first, then in (({"voice": "Ann"}, {"voice": "ANN "}), (inline, inline)):
        assert await speak(server, input="Hello.", **first) == "miss"
        num_calls = len(server.engine.calls)
        assert await speak(server, input="Something else.", **then) == "hit"
        assert len(server.engine.calls) == num_calls
    named = CloneFacts(stored_transcript=True)
    inlined = CloneFacts(given_transcript=True, is_inline=True)
    modes = [family.mode(facts) for facts in (named, inlined)]
    encoders = Counter(name for mode in modes for name in mode.encoders)
    assert Counter(server.encodes) == encoders
    if family.shares_kv:
        one, again, *others = [p["cache_salt"] for p in server.engine.prompts]
        assert one == again and others[0] == others[1] != one


@of(CLONING)
async def test_a_name_then_its_transcript_then_inline_audio_are_each_themselves(server):
    """Two of these requests ended stock's VoxCPM2, and one never ended."""
    await server.register("Ann", wav(), ref_text=SPOKEN)
    inline = [{"ref_audio": data_url(seconds=n), "ref_text": SPOKEN} for n in (5.0, 1)]
    for fields in ({}, {"ref_text": "Other words."}, *inline, {}):
        await speak(server, voice="Ann", **fields)
    named, spoken, longer, shorter, again = server.engine.prompts
    for prompt in (named, again):
        prompt.pop(REQUEST_FIELD, None)
    assert named == again != spoken
    refs = [told(server, number)[FIELD] for number in range(5)]
    assert refs[0] == refs[1] == refs[4]
    assert refs[2][1] == refs[3][1] == "inline" and refs[2] != refs[3]
    if "prompt_token_ids" in named:
        lengths = [len(p["prompt_token_ids"]) for p in (shorter, longer)]
        assert lengths == sorted(lengths)


@of(CLONING)
async def test_a_message_has_no_audio_and_hardly_grows_with_the_clip(server, own_case):
    sizes = []
    for seconds in (1.0, 29.0):
        await speak(server, ref_audio=data_url(seconds=seconds), ref_text=SPOKEN)
        prompt = server.engine.prompts[-1]
        assert not {"multi_modal_data", "mm_processor_kwargs"} & set(prompt)
        sizes.append(len(msgspec.msgpack.encode(prompt)))
    assert sizes[1] <= own_case.message_max_bytes
    assert sizes[1] - sizes[0] <= 28 * own_case.message_bytes_per_second + 8


@of([case for case in CLONING if not case.family.pipelines])
@pytest.mark.parametrize("tell", [in_a_batch, by_websocket])
async def test_a_voice_speaks_in_a_batch_and_on_a_websocket(server, tell):
    await server.register("Ann", wav(), ref_text=SPOKEN)
    assert await tell(server, voice="Ann") is None
    assert FIELD in told(server)
    assert "not registered" in str(await tell(server, voice="Bob"))


@of(CLONING)
async def test_a_request_whose_encoding_is_lost_on_the_way_is_submitted_again(server):
    sha = await registered(server)
    server.engine.before_prefill = [lambda: lose_files(server, sha)]
    assert await speak(server, voice="Ann") == "miss"
    lost, again = server.engine.prompts
    assert lost == again


@of([case for case in CLONING if case.name in ("cosyvoice3", "fish_speech", "voxcpm2")])
async def test_a_long_text_is_read_off_the_event_loop(server, own_case, monkeypatch):
    await server.register("Ann", wav(), ref_text=SPOKEN)
    here, is_here = threading.get_ident(), []
    part = f"vllm_tts_cache.families.{own_case.name}.prompt"
    builder = importlib.import_module(part).PromptBuilder
    name = "speak" if hasattr(builder, "speak") else "clone"
    build = getattr(builder, name)

    def seen(self, *args, **kwargs):
        is_here.append(threading.get_ident() == here)
        return build(self, *args, **kwargs)

    monkeypatch.setattr(builder, name, seen)
    for text in ("short", "long " * 1000):
        await asyncio.wait_for(speak(server, voice="Ann", input=text), 60)
    assert not is_here[-1] and len(is_here) == 2


@of([case for case in CLONING if case.name != "higgs_audio_v2"])  # no processor
async def test_without_a_voice_it_is_spoken_or_told_what_to_send(server, own_case):
    has_own = own_case.name not in NEED_ONE
    for fields in (*NONE, *([] if has_own else BLANK)):
        for said in await told_each_way(server, own_case, fields):
            if has_own:
                assert said is None and FIELD not in told(server)
                assert server.engine.prompts[-1] == server.engine.prompts[0]
                continue
            assert said is not None
            assert "Invalid voice: the request names none ('default' and " in said
            assert "GET /v1/audio/voices" in said and "ref_audio" in said
            assert "task_type" not in said
    listed = (await server.client.get(VOICES)).json()["voices"]
    assert ("default" in listed) == has_own
    assert bool(server.engine.prompts) == has_own
    if has_own:
        assert await speak(server) == "none"


async def told_each_way(server, case, fields):
    """The error of each way to speak; None where it was spoken."""
    is_talker = not case.family.pipelines  # of which the host streams no events
    ways = [plainly, as_raw_stream, *([as_events] if is_talker else [])]
    answers = [await say(server, **fields) for say in ways]
    said = [
        None if answer.status_code == 200 else answer.json()["error"]["message"]
        for answer in answers
    ]
    if is_talker:
        said += [await say(server, **fields) for say in (in_a_batch, by_websocket)]
    return said


@pytest.mark.parametrize("kind", ["custom voice", "voice design"])
async def test_one_that_clones_nobody_is_the_hosts(kind, tiny, tmp_path, monkeypatch):
    (qwen3,) = (family for family in families() if family.name == "qwen3_tts")
    checkpoint = tmp_path / "checkpoint"
    case_of(qwen3).refusing[kind](checkpoint, tiny)
    server = Server(checkpoint, tmp_path / "speakers", monkeypatch, family=qwen3)
    async with running(server):
        names = {"ryan", "vivian"} if kind == "custom voice" else set()
        for voice in names:
            await speak(server, voice=voice)
        if kind == "voice design":
            await speak(server, task_type="VoiceDesign", instructions="warm")
        listed = (await server.client.get(VOICES)).json()["voices"]
        assert listed == sorted({*names, "default"})
        for fields in NONE:
            assert "names none" not in (await server.speak(**fields)).text


REFUSED = (
    ({"voice": "Bob"}, "not registered"),
    ({"ref_audio": "data:x", "ref_text": SPOKEN}, "reference audio"),
    ({"voice": "Ann", "ref_text": SPOKEN, "input": " "}, "empty"),
    ({"voice": "Ann", "extra_params": {"clone_mode": "by ear"}}, "it has "),
)
WITHOUT_EMBEDDINGS = (
    ({"speaker_embedding": [0.5] * 64}, "not from an embedding"),
    ({"voice": "Ann", "x_vector_only_mode": True}, "x_vector_only_mode"),
)


@of(CLONING)
async def test_what_the_family_cannot_do_is_a_400_that_says_so(server, own_case):
    family = own_case.family
    assert (await server.register("Ann", wav())).status_code == 200
    refused = [*REFUSED, *own_case.refused]
    needs_transcript = not possible_modes(family, has_transcript=False)
    if needs_transcript:
        refused.append(({"voice": "Ann"}, "ref_text"))
    if needs_transcript or family.asks_inline_transcript:
        refused.append(({"ref_audio": data_url()}, "ref_text"))
    if family.embedding_mode is None:
        refused += WITHOUT_EMBEDDINGS
        form = {"name": "raw", "consent": "c", "speaker_embedding": str([0.5] * 64)}
        answer = await server.client.post(VOICES, data=form)
        assert "audio_sample" in message(answer)
    for fields, says in refused:
        assert says in message(await server.speak(**fields)), fields
    assert server.engine.prompts == [] and not any(server.encodes.values())
    await speak(server, voice="Ann", ref_text=SPOKEN)


@of([case for case in CLONING if case.name in ("breeze_tts_2", "cosyvoice3")])
@pytest.mark.parametrize("limit", [None, 20])
async def test_instructions_are_as_long_as_the_host_says(server, monkeypatch, limit):
    await server.register("Ann", wav(), ref_text=SPOKEN)
    if limit is not None:  # as the host's option has it
        monkeypatch.setattr(server.handler, "_max_instructions_length", limit)
    longest = server.handler._max_instructions_length
    await speak(server, voice="Ann", instructions="x" * longest)
    too_long = {"instructions": "x" * (longest + 1)}
    kept = {"settings": json.dumps(too_long)}
    answers = [await server.speak(voice="Ann", **too_long)]
    answers.append(await server.register("Bob", wav(), ref_text=SPOKEN, **kept))
    for answer in answers:
        assert "nstructions" in message(answer) and str(longest) in message(answer)


@of([case for case in CLONING if case.control_tokens])
async def test_a_control_token_is_refused_in_every_text(server, own_case):
    """The model would read it as something else; `<s>` ended stock's engine."""
    for token in own_case.control_tokens:
        bad = token if len(token) > 1000 else f"{token} Hello."
        given = {"ref_audio": data_url(), "ref_text": SPOKEN}
        asked = [{**given, field: bad} for field in ("input", "ref_text")]
        asked.append({**given, "instructions": bad})
        if own_case.name not in NEED_ONE:
            asked.append({"input": bad})
        answers = [await server.speak(**fields) for fields in asked]
        answers.append(await server.register("Bob", wav(), ref_text=bad))
        kept = json.dumps({"instructions": bad})
        given = {"ref_text": SPOKEN, "settings": kept}
        answers.append(await server.register("Bob", wav(), **given))
        for answer in answers:
            said = message(answer)
            # Higgs Audio v2 takes no instructions at all.
            parts = token, "at most", "[SPEAKERn]", "'instructions'"
            assert any(part in said for part in parts), said
    assert server.engine.prompts == []
    assert server.service.store.num_speakers() == 0
    given = {"ref_text": SPOKEN, "settings": '{"instructions": null}'}
    assert (await server.register("Bob", wav(), **given)).is_success
    text = "a <b> c, < s > and [laughter],\n\nso on"
    await speak(server, input=text, ref_audio=data_url(), ref_text=SPOKEN)

"""What the page's scripts compute, run by node."""

import io
import json

import numpy as np
import pytest
import soundfile

from tests.node import run_module
from vllm_tts_cache.entrypoints import web_routes

WEB = web_routes.__file__.replace("web_routes.py", "web")


def samples(count=1_001, channels=1):
    made = np.random.default_rng(0).uniform(-1.2, 1.2, (count, channels))
    return made.astype(np.float32)


@pytest.mark.parametrize("rate", (8_000, 48_000))
def test_a_recording_is_a_wav_file_that_a_server_decodes(rate):
    given = samples()
    code = f"""
        import {{ readFileSync, writeSync }} from "node:fs";
        import {{ encodeWav }} from "{WEB}/wav.js";
        const samples = new Float32Array(new Uint8Array(readFileSync(0)).buffer);
        writeSync(1, encodeWav(samples, {rate}));
    """
    file = run_module(code, data=given.tobytes())
    heard, heard_rate = soundfile.read(io.BytesIO(file), dtype="float32")
    assert heard_rate == rate
    np.testing.assert_allclose(heard, given[:, 0].clip(-1, 1), atol=1.6 / 32768)


@pytest.mark.parametrize("channels", (1, 2))
@pytest.mark.parametrize("piece_bytes", (1, 3, 7, 64, 100_000))
def test_a_stream_is_read_in_whatever_pieces_it_comes(channels, piece_bytes):
    from vllm_omni.entrypoints.openai.serving_speech import _create_wav_header

    given = (samples(channels=channels).clip(-1, 1) * 32767).astype("<i2")
    header = _create_wav_header(24_000, channels)
    code = f"""
        import {{ readFileSync }} from "node:fs";
        import {{ WavStream }} from "{WEB}/wav.js";
        const bytes = new Uint8Array(readFileSync(0));
        const stream = new WavStream();
        const heard = [];
        for (let at = 0; at < bytes.length; at += {piece_bytes}) {{
          heard.push(...stream.push(bytes.slice(at, at + {piece_bytes})));
        }}
        console.log(JSON.stringify([stream.sampleRateHz, heard]));
    """
    rate, heard = json.loads(run_module(code, data=header + given.tobytes()))
    assert rate == 24_000
    np.testing.assert_allclose(heard, (given / 32768).mean(axis=1), atol=1e-6)


@pytest.mark.parametrize("answer", (b'{"error": {"message": "no"}}', b"<html>" * 9))
def test_what_is_no_sound_is_not_played(answer):
    code = f"""
        import {{ readFileSync }} from "node:fs";
        import {{ WavStream }} from "{WEB}/wav.js";
        try {{
          new WavStream().push(new Uint8Array(readFileSync(0)));
        }} catch (error) {{
          console.log(error.message);
        }}
    """
    assert b"no WAV stream" in run_module(code, data=answer)


def test_peaks_are_the_loudest_of_equal_parts():
    code = f"""
        import {{ peaksOf }} from "{WEB}/waveform.js";
        const samples = Float32Array.of(0, 0.5, -0.75, 0.25, 0, -1, 0.125, 0);
        console.log(JSON.stringify([...peaksOf(samples, 4)]));
    """
    assert json.loads(run_module(code)) == [0.5, 0.75, 1, 0.125]

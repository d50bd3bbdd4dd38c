"""What the host encodes anew for a request is encoded once, whoever asks how often.

Of the families that no shared test serves: they have no tiny checkpoint.
"""

import json

from tests.contract.test_speech import data_url, wav

SPOKEN = "What is said in it."


async def check_encoded_once(server):
    """Speak with a voice twice and with an inline clip twice, on a new server."""
    registered = await server.register("Ann", wav(), ref_text=SPOKEN)
    assert registered.status_code == 200, registered.text
    inline = {"ref_audio": data_url(pitch_hz=330.0), "ref_text": SPOKEN}
    outcomes = [
        (await server.speak(input=text, **who)).headers["X-Speaker-Cache"]
        for who in ({"voice": "Ann"}, inline)
        for text in ("Hello.", "Something else.")
    ]
    assert outcomes == ["miss", "hit", "miss", "hit"]
    assert server.encodes == {"codec": 2}
    # Nothing that the host could encode: no waveform, no tensor.
    told = [prompt["additional_information"] for prompt in server.engine.prompts]
    assert len(told) == 4 and len(json.dumps(told)) < 4 * 1000

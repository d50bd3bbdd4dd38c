"""What of a file is heard is said wherever a clip is sent: registered or checked."""

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from tests.heard_files import CUT


@pytest.mark.parametrize("name", ["MP3", "FLAC", "WebM", "stereo"])
async def test_what_is_lost_is_said(server, name):
    if name == "stereo":
        clip, code = np.hstack([voiced(), -voiced()]), "one_channel"
        data = sndfile_bytes(clip, 24_000)
    else:
        data, code = CUT[name](), "truncated"
        data = data[: int(len(data) * 0.7)]
    done = await server.register("Ann", data)
    assert done.status_code == 200, done.text
    assert [warning["code"] for warning in done.json()["warnings"]] == [code]
    files = {"audio_sample": ("clip", data)}
    checked = await server.client.post("/v1/audio/voices/check", files=files)
    assert checked.status_code == 200, checked.text
    assert code in [reason["code"] for reason in checked.json()["reasons"]]
    assert checked.json()["verdict"] != "good"

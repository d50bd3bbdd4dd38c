"""What of a file is heard is said wherever a clip is sent: registered or checked."""

import numpy as np
import pytest

from tests.audio_clips import sndfile_bytes, voiced
from tests.heard_files import CUT


def cut(name):
    whole = CUT[name]()
    return whole[: int(len(whole) * 0.7)]


def turned_over():
    return sndfile_bytes(np.hstack([voiced(), -voiced()]), 24_000)


@pytest.mark.parametrize(
    ("clip", "code"),
    [
        (lambda: cut("MP3"), "truncated"),
        (lambda: cut("FLAC"), "truncated"),
        (lambda: cut("WebM"), "truncated"),
        (turned_over, "one_channel"),
    ],
    ids=("MP3", "FLAC", "WebM", "stereo"),
)
async def test_what_is_lost_is_said(server, clip, code):
    done = await server.register("Ann", clip())
    assert done.status_code == 200, done.text
    assert [warning["code"] for warning in done.json()["warnings"]] == [code]
    files = {"audio_sample": ("clip", clip())}
    checked = await server.client.post("/v1/audio/voices/check", files=files)
    assert checked.status_code == 200, checked.text
    assert code in [reason["code"] for reason in checked.json()["reasons"]]
    assert checked.json()["verdict"] != "good"

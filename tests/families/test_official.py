"""Encodings are those of the official packages: on a CPU bit for bit.

What they make of clips is in ``official.py`` of a family's folder: ``CLIPS``;
``encodings`` of a checkpoint, a folder and paths, by a path's stem and the encoder's
name; and ``TOLERANCE`` where floating point is not summed in the same order.
"""

from importlib import import_module

import numpy as np
import pytest

from tests.families.cases import cases, of
from tests.torch_threads import on_threads
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.testing.clips import OTHER_SPEECH, SPEECH

# Of OmniVoice they are compared with all that is done to a clip before, in its folder.
CASES = [case for case in cases() if case.family.encoders and case.name != "omnivoice"]


# The longest that is allowed in the long proofs: it takes as long as all others.
@pytest.mark.parametrize("max_seconds", [5, pytest.param(60, marks=pytest.mark.long)])
@of(CASES)
def test_encodings_equal_the_official_ones(
    own_case, own_checkpoint, encoders, tmp_path, max_seconds
):
    part = import_module(f"tests.families.{own_case.name}.official")
    clips = [c for c in part.CLIPS if c.num_samples <= max_seconds * c.rate_hz]
    paths = [clip.write(tmp_path) for clip in clips]
    paths += [clip.path for clip in (SPEECH, OTHER_SPEECH)]
    # These networks are too small to share, and the encode thread has one.
    with on_threads(1):
        official = part.encodings(own_checkpoint, tmp_path, paths)
        wrong = [
            (path.stem, name)
            for path in paths
            for name, encoder in encoders.items()
            if not is_same(
                next(iter(encoder.encode(decode_path(path).audio).arrays.values())),
                official[path.stem, name],
                getattr(part, "TOLERANCE", {}).get(name),
            )
        ]
    assert wrong == []
    assert len(official) == len(paths) * len(encoders)


def is_same(ours, theirs, tolerance):
    if tolerance is None or ours.shape != theirs.shape:
        return np.array_equal(ours, theirs)
    return np.linalg.norm(ours - theirs) < tolerance * np.linalg.norm(theirs)

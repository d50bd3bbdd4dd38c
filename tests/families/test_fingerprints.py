"""An encoder's fingerprint: all that decides its encodings, and not who asks for them.

What a family's encoders are made of is in ``identities.py`` of its folder; the rest is
found out here.
"""

import json
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.families.cases import cases, identities_of, is_tried
from tests.families.test_encoders import audio
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.speaker import checkpoint

CPU = torch.device("cpu")
EVERY = [(case.family, name) for case in cases() for name in case.family.encoders]
IDS = [f"{family.name}-{name}" for family, name in EVERY]

every_encoder = pytest.mark.parametrize(("owner", "name"), EVERY, ids=IDS)
# It is loaded for each value that there is: of other families in the long proofs.
MARKS = {family: () if is_tried(family) else pytest.mark.long for family, _ in EVERY}
VALUES = [pytest.param(*each, marks=MARKS[each[0]]) for each in EVERY]
every_value = pytest.mark.parametrize(("owner", "name"), VALUES, ids=IDS)


def load(family, directory, name):
    return family.part("encoders_part")(directory, CPU)[name]


@contextmanager
def identities():
    """What fingerprints are made of inside the block: weights and the rest of each."""
    seen, weights = {}, []
    real_weights, real_sha256 = checkpoint.weights_sha256, checkpoint._sha256

    def of_weights(given):
        weights.append(given)
        return real_weights(given)

    def of_identity(identity):
        digest = real_sha256(identity)
        seen[digest] = (weights[-1], identity)
        return digest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "weights_sha256", of_weights)
        patch.setattr(checkpoint, "_sha256", of_identity)
        yield seen


@pytest.fixture(scope="module")
def known(tiny):
    """An encoder of a family, the weights in its fingerprint, and the rest of it."""
    loaded = {}

    def of(family, name):
        if (family.name, name) not in loaded:
            with identities() as seen:
                encoder = load(family, tiny(family), name)
            loaded[family.name, name] = (encoder, *seen[encoder.fingerprint])
        return loaded[family.name, name]

    return of


@pytest.fixture
def copied(tiny, tmp_path):
    """A checkpoint of a family to change."""
    return lambda family: shutil.copytree(tiny(family), tmp_path / "checkpoint")


def encoded(encoder):
    arrays = encoder.encode(audio(24_000, 30_011)).arrays
    return {name: array.tobytes() for name, array in arrays.items()}


@every_encoder
def test_it_names_the_network_and_not_the_family(owner, name, tiny, known):
    encoder, _, identity = known(owner, name)
    assert identity["network"] == identities_of(owner)[name].network
    assert set(identity) == {
        "network",
        "revision",
        "weights",
        "compute_dtype",
        "resampler",
        "settings",
    }
    before, directory = owner.name, tiny(owner)
    object.__setattr__(owner, "name", "another_family")
    try:
        assert load(owner, directory, name).fingerprint == encoder.fingerprint
    finally:
        object.__setattr__(owner, "name", before)


@every_encoder
def test_it_moves_with_every_weight(owner, name, known):
    _, weights, identity = known(owner, name)
    for changed in weights:
        nudged = {**weights, changed: other(weights[changed])}
        moved = {**identity, "weights": checkpoint.weights_sha256(nudged)}
        assert checkpoint._sha256(moved) != checkpoint._sha256(identity), changed


@every_value
def test_weights_that_are_not_in_it_change_no_encoding(owner, name, known, copied):
    encoder, weights, _ = known(owner, name)
    directory = copied(owner)
    num_changed = sum(
        change_tensors(path, weights) for path in sorted(directory.rglob("*"))
    )
    assert num_changed
    changed = load(owner, directory, name)
    assert changed.fingerprint == encoder.fingerprint
    assert encoded(changed) == encoded(encoder)


def change_tensors(path, kept):
    """Change all tensors of a file but those whose values are among ``kept``."""
    if path.suffix == ".safetensors":
        state = tensors = load_file(path)
    elif path.suffix in {".pth", ".pt"}:
        state: Any = torch.load(path, weights_only=True)
        tensors: Any = next((v for v in state.values() if isinstance(v, dict)), state)
    else:
        return 0
    others = [key for key, t in tensors.items() if not is_among(t, kept.values())]
    for key in others:
        tensors[key] = other(tensors[key])
    if path.suffix == ".safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    return len(others)


def is_among(tensor, kept):
    return any(
        tensor.dtype == one.dtype and torch.equal(tensor, one.to(tensor.device))
        for one in kept
        if one.shape == tensor.shape
    )


@every_value
def test_it_moves_with_every_value_read_of_the_config(owner, name, known, copied):
    encoder, _, _ = known(owner, name)
    identity, directory, right = identities_of(owner)[name], copied(owner), None
    moved = set()
    for section in identity.config:
        path = directory / section.file
        original = path.read_text()
        for key, default in section.values.items():
            config = json.loads(original)
            within = config
            for part in section.path:
                within = within[part]
            within[key] = other(within.get(key, default))
            path.write_text(json.dumps(config))
            try:
                changed = load(owner, directory, name)
                is_same = changed.fingerprint == encoder.fingerprint
                right = right or encoded(encoder)
                assert not is_same or encoded(changed) == right, key
            except AssertionError:
                raise
            except Exception:  # noqa: BLE001  refused, whoever does it
                continue
            moved |= set() if is_same else {key}
        path.write_text(original)
    assert identity.read <= moved


@every_value
def test_it_moves_with_the_preprocessing(owner, name, tiny, known, monkeypatch):
    encoder, _, _ = known(owner, name)
    for module, constants in identities_of(owner)[name].constants.items():
        for constant in constants:
            # No checkpoint fits another number of codebooks: that is refused.
            with monkeypatch.context() as patch, suppress(CheckpointError):
                patch.setattr(module, constant, other(getattr(module, constant)))
                changed = load(owner, tiny(owner), name).fingerprint
                assert changed != encoder.fingerprint, constant


def other(value):
    """Another value of the same kind, and a plausible one."""
    match value:
        case torch.Tensor():
            return (~value if value.dtype == torch.bool else value + 1).to(value.dtype)
        case bool():
            return not value
        case int() | float():
            return value * 2 or 1
        case "gelu":
            return "relu"
        case str():
            return f"{value} 2"
        case list() | tuple():
            return type(value)([other(value[0]), *value[1:]]) if value else [1]
        case dict():
            numbers = {k for k, v in value.items() if isinstance(v, int | float)}
            return {k: other(v) if k in numbers else v for k, v in value.items()}
    return 1


PINNED = Path(__file__).with_name("pinned_encodings.json")


@every_encoder
def test_every_host_gives_the_encodings_that_are_stored(known, owner, name):
    """Voices outlive an upgrade of the host, of transformers and of torch."""
    encoder, _, identity = known(owner, name)
    wanted = json.loads(PINNED.read_text())[f"{owner.name}-{name}"]
    # Without the weights: those of a tiny checkpoint differ between processors.
    fingerprint = checkpoint._sha256({**identity, "weights": ""})
    assert fingerprint == wanted.pop("fingerprint")
    arrays = encoder.encode(audio(24_000, 30_011)).arrays
    assert arrays.keys() == wanted.keys()
    for key, array in arrays.items():
        kept, is_codes = wanted[key], array.dtype.kind in "iu"
        assert [str(array.dtype), [*array.shape]] == [kept["dtype"], kept["shape"]]
        norm = np.linalg.norm(array.astype(float))
        assert norm == pytest.approx(kept["norm"], rel=0.01)
        sample = array.reshape(-1)[:: 1 if is_codes else -(-array.size // 64)]
        is_kept = np.isclose(sample, kept["values"], rtol=0, atol=0.001)
        # Of two codes that are equally near, another processor may choose the other.
        assert is_kept.mean() >= (0.98 if is_codes else 1.0)

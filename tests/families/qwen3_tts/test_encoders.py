import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.errors import CheckpointError
from vllm_tts_cache.families.qwen3_tts.encoders import load_reference_encoders
from vllm_tts_cache.families.qwen3_tts.family import FAMILY

CPU = torch.device("cpu")
ARRAY = {"speaker": "speaker_embedding", "codec": "codes"}


def clip(seconds, rate_hz=24_000, seed=0):
    rng = np.random.default_rng(seed)
    num_samples = round(seconds * rate_hz)
    tone = np.sin(2 * np.pi * (150 + 40 * seed) * np.arange(num_samples) / rate_hz)
    samples = 0.2 * tone + 0.05 * rng.standard_normal(num_samples)
    return ReferenceAudio.of(samples.astype(np.float32), rate_hz)


def same(a, b):
    return a.arrays.keys() == b.arrays.keys() and all(
        np.array_equal(a[name], b[name]) for name in a.arrays
    )


@pytest.fixture(scope="module")
def encoders(qwen3_checkpoint):
    return load_reference_encoders(qwen3_checkpoint, CPU)


@pytest.fixture
def checkpoint(qwen3_checkpoint, tmp_path):
    return shutil.copytree(qwen3_checkpoint, tmp_path / "checkpoint")


def edit_weights(path, edit):
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path)


def fingerprints(directory):
    return {
        k: e.fingerprint for k, e in load_reference_encoders(directory, CPU).items()
    }


def test_every_mode_needs_encoders_that_are_loaded_under_their_own_name(encoders):
    assert set(FAMILY.encoders) == set(encoders)
    assert all(encoder.name == name for name, encoder in encoders.items())


def test_an_embedding_is_float32_and_codes_are_one_row_of_16_per_80_ms(encoders):
    audio = clip(1.0)
    embedding = encoders["speaker"].encode(audio)["speaker_embedding"]
    assert (embedding.dtype, embedding.shape) == (np.float32, (128,))
    codes = encoders["codec"].encode(audio)["codes"]
    assert (codes.dtype, codes.shape) == (np.int16, (13, 16))
    assert codes.min() >= 0
    assert codes.max() < 2048


def test_the_encoders_are_float32_though_they_load_while_the_default_is_bfloat16(
    qwen3_checkpoint, encoders
):
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does while it loads a model
    try:
        loaded = load_reference_encoders(qwen3_checkpoint, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    for name, encoder in loaded.items():
        network = encoder.network  # pyright: ignore[reportAttributeAccessIssue]
        tensors = (*network.parameters(), *network.buffers())
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        assert dtypes == {torch.float32}
        assert same(encoder.encode(clip(1.0)), encoders[name].encode(clip(1.0)))


@pytest.mark.parametrize("name", ARRAY)
def test_an_encoding_does_not_depend_on_what_is_encoded_before_or_beside_it(
    encoders, name
):
    audios = [
        clip(seconds, seed=seed) for seed, seconds in enumerate((1.0, 1.3, 1.1, 1.2))
    ]
    alone = [encoders[name].encode(audio) for audio in audios]
    with ThreadPoolExecutor(4) as pool:
        beside = list(pool.map(encoders[name].encode, audios * 2))
    assert all(same(b, alone[i % 4]) for i, b in enumerate(beside))
    assert not same(alone[0], alone[1])


def test_a_new_thread_records_no_gradients_and_its_settings_stay(encoders):
    seen = []

    def work():
        encoders["speaker"].encode(clip(1.0))
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(True, False)]


def test_the_host_attention_window_is_off(qwen3_checkpoint, encoders):
    """The same 28 s would get other codes with it, so this checkpoint can tell."""
    windowed = load_reference_encoders(qwen3_checkpoint, CPU)["codec"]
    windowed.network.encoder_transformer.config.sliding_window = 250  # pyright: ignore
    short, long = clip(1.0), clip(28.0)
    assert same(windowed.encode(short), encoders["codec"].encode(short))
    assert not same(windowed.encode(long), encoders["codec"].encode(long))


def test_loading_draws_no_random_numbers(qwen3_checkpoint):
    before = torch.get_rng_state()
    load_reference_encoders(qwen3_checkpoint, CPU)
    assert torch.equal(before, torch.get_rng_state())


def test_fingerprints_are_hex_differ_by_encoder_and_are_the_same_on_every_load(
    qwen3_checkpoint,
):
    first, second = fingerprints(qwen3_checkpoint), fingerprints(qwen3_checkpoint)
    assert first == second
    assert first["speaker"] != first["codec"]
    assert all(
        len(f) == 64 and set(f) <= set("0123456789abcdef") for f in first.values()
    )


def test_an_unrelated_file_or_weight_changes_no_fingerprint(checkpoint):
    before = fingerprints(checkpoint)
    (checkpoint / "NOTES.md").write_text("a note")
    (checkpoint / "generation_config.json").write_text("{}")
    edit_weights(
        checkpoint / "model.safetensors",
        lambda tensors: tensors["talker.codec_head.weight"].add_(1),
    )
    assert fingerprints(checkpoint) == before


@pytest.mark.parametrize(
    ("file", "prefix", "changed"),
    [
        ("model.safetensors", "speaker_encoder.", "speaker"),
        ("speech_tokenizer/model.safetensors", "encoder.", "codec"),
    ],
)
def test_one_changed_weight_changes_the_fingerprint_of_its_encoder_alone(
    checkpoint, file, prefix, changed
):
    def nudge(tensors):
        name = min(name for name in tensors if name.startswith(prefix))
        tensors[name].view(-1)[0] += 1

    before = fingerprints(checkpoint)
    edit_weights(checkpoint / file, nudge)
    after = fingerprints(checkpoint)
    assert {name for name in before if before[name] != after[name]} == {changed}


def test_a_setting_of_an_encoder_changes_its_fingerprint(checkpoint):
    before = fingerprints(checkpoint)
    path = checkpoint / "speech_tokenizer" / "config.json"
    config = json.loads(path.read_text())
    config["encoder_config"]["rope_theta"] = 20_000.0
    path.write_text(json.dumps(config))
    after = fingerprints(checkpoint)
    assert before["codec"] != after["codec"]
    assert before["speaker"] == after["speaker"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (
            lambda t: t.pop("speaker_encoder.fc.bias"),
            "1 tensors missing: fc.bias",
        ),
        (
            lambda t: t.update(
                {"speaker_encoder.fc.bias": torch.zeros(128, dtype=torch.int8)}
            ),
            "1 tensors quantised: fc.bias int8",
        ),
        (
            lambda t: t.update({"speaker_encoder.fc.bias": torch.zeros(7)}),
            r"1 tensors of another shape: fc.bias \(7,\) instead of \(128,\)",
        ),
    ],
    ids=["missing", "quantised", "misshaped"],
)
def test_a_wrong_set_of_tensors_is_refused_by_name(checkpoint, edit, message):
    edit_weights(checkpoint / "model.safetensors", edit)
    with pytest.raises(CheckpointError, match=message):
        load_reference_encoders(checkpoint, CPU)


def test_a_missing_codec_tensor_is_refused_by_name(checkpoint):
    edit_weights(
        checkpoint / "speech_tokenizer" / "model.safetensors",
        lambda tensors: tensors.pop("encoder.downsample.conv.weight"),
    )
    with pytest.raises(CheckpointError, match=r"missing: downsample\.conv\.weight"):
        load_reference_encoders(checkpoint, CPU)


@pytest.mark.parametrize(
    ("file", "prefix", "name"),
    [
        ("model.safetensors", "speaker_encoder.", "fc.weight_scale"),
        (
            "speech_tokenizer/model.safetensors",
            "encoder.",
            "encoder.layers.0.conv.weight_scale",
        ),
    ],
)
def test_a_tensor_that_is_left_over_is_a_warning_and_changes_nothing(
    checkpoint, plugin_log, file, prefix, name
):
    before = fingerprints(checkpoint)
    edit_weights(
        checkpoint / file, lambda t: t.update({f"{prefix}{name}": torch.ones(1)})
    )
    assert fingerprints(checkpoint) == before
    [warning] = plugin_log.messages
    assert warning.endswith(f"1 tensors unexpected and left out: {name}")


def test_a_sharded_checkpoint_loads_as_the_same_encoders(checkpoint):
    before = fingerprints(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, kept in shards.items():
        save_file({name: tensors[name] for name in kept}, checkpoint / file)
    index = {name: file for file, kept in shards.items() for name in kept}
    (checkpoint / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index})
    )
    assert fingerprints(checkpoint) == before


@pytest.mark.parametrize(
    "file", ["config.json", "model.safetensors", "speech_tokenizer/model.safetensors"]
)
def test_an_absent_file_is_named(checkpoint, file):
    (checkpoint / file).unlink()
    with pytest.raises(CheckpointError, match=rf"{file}: No such file"):
        load_reference_encoders(checkpoint, CPU)


def test_a_truncated_checkpoint_is_named(checkpoint):
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_reference_encoders(checkpoint, CPU)


def test_a_model_that_cannot_clone_is_refused_with_the_reason(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["tts_model_type"] = "custom_voice"
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="tts_model_type is 'custom_voice'"):
        load_reference_encoders(checkpoint, CPU)

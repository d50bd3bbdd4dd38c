from ipaddress import ip_network
from pathlib import Path

import pytest

from vllm_tts_cache.config import Settings, load_settings
from vllm_tts_cache.errors import ConfigError

POLICY = "VLLM_OMNI_SPEAKER_REGISTRATION_POLICY"


@pytest.mark.parametrize("name", ["SPEAKER_CACHE_MAX_BYTES", "SPEAKER_ELSE", "PATH"])
def test_what_is_not_set_has_its_default(name):
    said = " " if name == "SPEAKER_CACHE_MAX_BYTES" else "/bin"
    assert load_settings({name: said}) == load_settings({}) == Settings()


# Stock's, and those that were asked for: they keep their names.
GIVEN = {
    POLICY: (" IMMUTABLE ", "registration_policy", "immutable"),
    "SPEAKER_SAMPLES_DIR": ("/voices", "samples_dir", Path("/voices")),
    "SPEAKER_MAX_UPLOADED": ("0", "max_uploaded", 0),
    "SPEAKER_CACHE_MAX_BYTES": ("1", "memory_max_bytes", 1),
    "SPEAKER_CACHE_MAX_ENTRIES": ("2", "memory_max_entries", 2),
    "SPEAKER_CACHE_FETCH_NETWORKS": ("::1", "fetch_networks", (ip_network("::1"),)),
}


def test_a_variable_sets_its_field():
    found = load_settings({variable: text for variable, (text, *_) in GIVEN.items()})
    assert found == Settings(**{field: value for _, field, value in GIVEN.values()})


def test_a_home_directory_is_expanded():
    directory = load_settings({"SPEAKER_SAMPLES_DIR": "~/voices"}).samples_dir
    assert directory == Path.home() / "voices"


@pytest.mark.parametrize("text", ["1", "true", "YES", " on ", "0", "False", " off "])
def test_what_is_true_and_what_is_not(text):
    is_true = text in ("1", "true", "YES", " on ")
    assert load_settings({"SPEAKER_CACHE_ENABLED": text}).enabled is is_true


WRONG = {
    POLICY: "refuse",
    "SPEAKER_MAX_UPLOADED": "-1 many",
    "SPEAKER_CACHE_ENABLED": "perhaps",
    "SPEAKER_CACHE_MAX_BYTES": "0 512M",
    "SPEAKER_CACHE_MAX_ENTRIES": "-3",
    "SPEAKER_CACHE_DISK_MAX_BYTES": "0",
    "SPEAKER_PCM_SAMPLE_RATE": "7",
    "SPEAKER_CACHE_INLINE_SHARE": "1 -0.1 nan",
    "SPEAKER_CACHE_AUDIO_MAX_BYTES": "0",
    "SPEAKER_CACHE_INLINE_AUDIO_MAX_BYTES": "0",
    "SPEAKER_CACHE_MAX_WAITING_INLINE": "0",
    "SPEAKER_CACHE_MAX_FETCHES": "-1",
    "SPEAKER_CACHE_FETCH_NETWORKS": "10.0.0.1/8",
    "SPEAKER_CACHE_ENCODE_TIMEOUT_SECONDS": "0 soon nan inf",
    "SPEAKER_CACHE_CPU_PLATFORM": "2",
    "SPEAKER_STORE_URL": "s3://bucket/\udced",
}


@pytest.mark.parametrize(
    ("variable", "value"), [(k, value) for k, v in WRONG.items() for value in v.split()]
)
def test_a_wrong_value_is_refused_with_variable_and_value(variable, value):
    with pytest.raises(ConfigError) as caught:
        load_settings({variable: value})
    assert str(caught.value).startswith(f"{variable}={value!r}: ")


def test_a_misspelt_variable_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        load_settings({"SPEAKER_CACHE_MAX_BYTE": "1"})
    message = str(caught.value)
    assert message.startswith("Unknown setting SPEAKER_CACHE_MAX_BYTE; known: ")
    assert "SPEAKER_CACHE_MAX_BYTES" in message

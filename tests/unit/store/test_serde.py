import ml_dtypes
import numpy as np
import pytest
import xxhash
from safetensors import safe_open
from safetensors.numpy import save

from tests.cli_runs import printed_by
from tests.encoding_samples import assert_same, make_encoding, make_key
from vllm_tts_cache.errors import EncodingCorruptError
from vllm_tts_cache.store.encoding import (
    ComputedOn,
    Encoding,
    encoding_from_bytes,
    encoding_to_bytes,
)

ORIGIN = ComputedOn(device="cuda", device_name='Ä "card"}', torch_version="2.13+cu130")
DTYPES = ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "complex64"]


def read_back(given):
    return encoding_from_bytes(encoding_to_bytes(make_key(), given), make_key())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (2, 3, 4)])
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype, shape):
    given = Encoding({"a": np.ones(shape, dtype), "ü\n": np.zeros(3, dtype)})
    assert_same(read_back(given), given)


def test_nan_payloads_and_negative_zero_survive():
    bits = np.array([0x7FC12345, 0xFFC00001, 0x80000000], np.uint32)
    given = Encoding({"x": bits.view(np.float32)})
    assert_same(read_back(given), given)


def test_big_endian_and_strided_arrays_are_stored_by_value():
    given = Encoding({"x": np.arange(12, dtype=">f4").reshape(3, 4).T})
    got = read_back(given)
    assert np.array_equal(got["x"], given["x"])
    assert got["x"].dtype == np.dtype("<f4")


def test_a_stage_that_reads_encodings_loads_no_audio_decoder():
    code = "import sys, vllm_tts_cache.speaker.wire, vllm_tts_cache.store.encoding;"
    assert (
        printed_by(f"{code} print({{'av', 'soundfile'}} & {{*sys.modules}})")
        == "set()\n"
    )


def test_equal_encodings_give_equal_bytes_in_every_process():
    script = (
        "from tests.encoding_samples import make_key, make_encoding\n"
        "from vllm_tts_cache.store.encoding import encoding_to_bytes\n"
        "print(encoding_to_bytes(make_key(), make_encoding()).hex())"
    )
    outputs = {printed_by(script).strip() for _ in range(3)}
    assert outputs == {encoding_to_bytes(make_key(), make_encoding()).hex()}


def test_a_dtype_that_cannot_be_read_back_is_refused():
    given = Encoding({"x": np.zeros(3, ml_dtypes.bfloat16)})
    with pytest.raises(TypeError, match="'x' is bfloat16"):
        encoding_to_bytes(make_key(), given)


@pytest.mark.parametrize("other", [make_key(1, 0), make_key(0, 1)])
def test_a_file_of_another_key_is_corrupt(other):
    with pytest.raises(EncodingCorruptError, match="another key"):
        encoding_from_bytes(encoding_to_bytes(make_key(), make_encoding()), other)


@pytest.mark.parametrize(
    "blob",
    [b"", b"RIFF....WAVE", b"\xff" * 64, save({"x": np.zeros(2)}), save({})],
    ids=["empty", "wav", "huge header", "no metadata", "no arrays"],
)
def test_what_is_not_an_encoding_is_corrupt(blob):
    with pytest.raises(EncodingCorruptError):
        encoding_from_bytes(blob, make_key())


@pytest.mark.parametrize("origin", [None, ORIGIN])
def test_every_flipped_bit_and_byte_is_caught(origin):
    # The header is padded, with spaces that JSON does not care for.
    made = Encoding({"x": np.arange(5, dtype=np.uint8)}, origin)
    good = encoding_to_bytes(make_key(), made)
    assert b"}} " in good
    for offset in range(len(good)):
        for mask in (1, 2, 4, 8, 16, 32, 64, 128, 0x29, 0xFF):
            bad = bytearray(good)
            bad[offset] ^= mask
            with pytest.raises(EncodingCorruptError):
                encoding_from_bytes(bytes(bad), make_key())


def test_every_truncation_and_any_extra_byte_is_caught():
    good = encoding_to_bytes(make_key(), make_encoding())
    for blob in [good[:n] for n in range(len(good))] + [good + b"\0"]:
        with pytest.raises(EncodingCorruptError):
            encoding_from_bytes(blob, make_key())


def test_decoded_arrays_cannot_be_written_to_nor_made_so():
    got = read_back(make_encoding())
    with pytest.raises(ValueError, match="read-only"):
        got["codes"][0] = 1
    with pytest.raises(ValueError, match="cannot set WRITEABLE"):
        got["codes"].flags.writeable = True


def test_every_array_starts_where_its_dtype_may():
    arrays = {"a": np.ones(3, np.uint8), "b": np.ones(1), "c": np.ones(1, "f2")}
    got = read_back(Encoding(arrays))
    assert all(array.flags.aligned for array in got.arrays.values())


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        (b'"shape":[5]', b'"shape":[9]'),
        (b'"shape":[5]', b'"shape":"5"'),
        (b'"dtype":"U8"', b'"dtype":"F4"'),
        (b'"data_offsets"', b'"data-offsets"'),
        (b'"x":{', b'"x":['),
    ],
)
def test_a_header_that_its_checksum_fits_is_still_not_trusted(good, bad):
    blob = encoding_to_bytes(make_key(), Encoding({"x": np.arange(5, dtype=np.uint8)}))
    assert good in blob
    with pytest.raises(EncodingCorruptError, match="not an encoding"):
        encoding_from_bytes(with_checksum(blob.replace(good, bad)), make_key())


def with_checksum(blob):
    """The checksum as docs/formats.md describes it."""
    begin = blob.index(b'"xxh3_128":"') + len(b'"xxh3_128":"')
    rest = blob[:begin] + blob[begin + 32 :]
    return blob[:begin] + xxhash.xxh3_128_hexdigest(rest).encode() + blob[begin + 32 :]


def test_the_checksum_is_what_the_documentation_says():
    blob = encoding_to_bytes(make_key(), make_encoding())
    assert with_checksum(blob) == blob


# -------- what computed it


def test_what_computed_an_encoding_comes_back_and_any_reader_sees_it(tmp_path):
    path = tmp_path / "encoding.safetensors"
    encoding = Encoding(make_encoding().arrays, ORIGIN)
    path.write_bytes(encoding_to_bytes(make_key(), encoding))
    got = encoding_from_bytes(path.read_bytes(), make_key())
    assert got.origin == ORIGIN
    assert_same(got, make_encoding())
    with safe_open(path, "numpy") as file:
        metadata = file.metadata()
    assert metadata.pop("device") == "cuda"
    assert metadata.pop("device_name") == ORIGIN.device_name
    assert metadata.pop("torch_version") == ORIGIN.torch_version
    assert metadata.keys() == {"xxh3_128", "audio_sha256", "encoder_fingerprint"}


# As it was written before files said what computed them.
OLD = (
    b' \x01\0\0\0\0\0\0{"__metadata__":{"xxh3_128":"a0c3bc2ec7abb0346fa707f452075b91",'
    b'"audio_sha256":'
    b'"bbc063e64ec1e7b939d31fa3f1cbec0c3272a85a11213c4566fb0c78e18ccff0",'
    b'"encoder_fingerprint":'
    b'"79d410550bd9474838621115ae717df3326261845a92e617ad3d8a1f84778dda"},'
    b'"x":{"dtype":"U8","shape":[3],"data_offsets":[0,3]}} \x00\x01\x02'
)


def test_a_file_that_does_not_say_it_is_read_as_before_and_written_so():
    got = encoding_from_bytes(OLD, make_key())
    assert got.origin is None
    assert got["x"].tolist() == [0, 1, 2]
    assert encoding_to_bytes(make_key(), got) == OLD


def test_more_metadata_of_a_later_version_is_no_damage():
    blob = encoding_to_bytes(make_key(), Encoding(make_encoding().arrays, ORIGIN))
    grown = blob.replace(b'"device":', b'"later":"","device":')
    size = len(grown) - len(blob)
    header = int.from_bytes(blob[:8], "little") + size
    later = with_checksum(header.to_bytes(8, "little") + grown[8:])
    assert encoding_from_bytes(later, make_key()).origin == ORIGIN

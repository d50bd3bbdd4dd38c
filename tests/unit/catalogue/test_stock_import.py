import os
import threading
import time

import numpy as np
import pytest
from safetensors.numpy import save_file

from vllm_tts_cache.catalogue.record import NewSpeaker
from vllm_tts_cache.catalogue.stock_import import import_stock_directory
from vllm_tts_cache.errors import InvalidAudioError, StorageError, StorageFullError

RATE = 24000


class AudioShelf:
    """Takes audio as the import hands it over."""

    def __init__(self):
        self.clips: dict[str, tuple[np.ndarray, int]] = {}

    def __call__(self, samples: np.ndarray, sample_rate_hz: int) -> str:
        audio_sha256 = f"clip-{len(self.clips)}"
        self.clips[audio_sha256] = (samples, sample_rate_hz)
        return audio_sha256


@pytest.fixture
def shelf():
    return AudioShelf()


@pytest.fixture
def stock_directory(tmp_path):
    directory = tmp_path / "stock"
    directory.mkdir()
    return directory


@pytest.fixture
def take_over(stock_directory, registry, shelf):
    return lambda store=None: import_stock_directory(
        stock_directory, registry, store or shelf
    )


@pytest.fixture
def write(stock_directory):
    """Writes a voice as stock does; fields that are None are left out."""

    def write_(name: str, created_at: int = 1000, tensors=None, file_name=None, **more):
        fields = {
            "name": name,
            "voice_name_lower": name.lower(),
            "consent": "consent-1",
            "created_at": created_at,
            "mime_type": "audio/wav",
            "original_filename": "me.wav",
            "file_size": 77,
            "sample_rate": RATE,
            "embedding_source": "audio",
        } | more
        header = {k: str(v) for k, v in fields.items() if v is not None}
        if tensors is None:
            tensors = {"audio": np.full(RATE, created_at / 1e6, np.float32)}
        path = stock_directory / (file_name or f"{name}_c_{created_at}.safetensors")
        save_file(tensors, path, metadata=header)
        return path

    return write_


def test_a_voice_is_taken_over_with_all_that_stock_knew(
    write, take_over, registry, shelf
):
    path = write("Zoë", ref_text="hallo", speaker_description="warm")
    report = take_over()
    record = registry.get("zoë")
    assert (report.imported, report.skipped) == (["Zoë"], [])
    assert (record.name, record.consent, record.created_at) == (
        "Zoë",
        "consent-1",
        1000,
    )
    assert (record.ref_text, record.description) == ("hallo", "warm")
    assert (record.mime_type, record.original_filename) == ("audio/wav", "me.wav")
    assert (record.file_size, record.seconds) == (77, 1.0)
    samples, rate = shelf.clips[record.audio_sha256]
    assert (samples.shape, samples.dtype, rate) == ((RATE,), np.float32, RATE)
    assert path.exists()


def test_an_embedding_is_taken_over_exactly(write, take_over, registry, shelf):
    values = np.array([0.1, -2.5, 3.0], np.float32)
    write("e", tensors={"speaker_embedding": values[None]}, embedding_source="direct")
    assert take_over().imported == ["e"]
    record = registry.get("e")
    assert registry.speaker_embedding(record) == tuple(values.tolist())
    assert (record.embedding_dim, record.audio_sha256) == (3, None)
    assert shelf.clips == {}


def test_channels_are_mixed_to_mono(write, take_over, shelf):
    stereo = np.stack([np.ones(RATE), np.zeros(RATE)], axis=1).astype(np.float32)
    write("s", tensors={"audio": stereo})
    take_over()
    samples, _ = shelf.clips["clip-0"]
    assert np.array_equal(samples, np.full(RATE, 0.5, np.float32))


def test_a_second_import_opens_nothing(write, take_over, stock_directory):
    path = write("a")
    (stock_directory / "foreign.safetensors").write_bytes(b"?")
    take_over()
    # Opened again, the voice would be found broken and reported.
    stamp = path.stat()
    path.write_bytes(b"\0" * stamp.st_size)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    report = take_over()
    assert (report.imported, report.skipped) == ([], [])


def test_new_files_are_found_by_the_next_import(write, take_over, registry):
    write("a")
    take_over()
    write("b")
    assert take_over().imported == ["b"]
    assert registry.names(limit=9) == ["a", "b"]


def test_the_newest_file_of_a_name_wins_whatever_the_order_of_file_names(
    write, take_over, registry
):
    write("Ana", 3000, file_name="a.safetensors", ref_text="new")
    write("ana", 1000, file_name="z.safetensors", ref_text="old")
    write("bob", 5, file_name="b1.safetensors", ref_text="first")
    write("bob", 5, file_name="b2.safetensors", ref_text="second")
    report = take_over()
    assert sorted(report.imported) == ["Ana", "bob"]
    assert dict(report.skipped).keys() == {"z.safetensors", "b1.safetensors"}
    assert registry.get("ana").ref_text == "new"
    assert registry.get("bob").ref_text == "second"
    assert take_over().skipped == []


def test_a_registered_voice_that_is_newer_stays(write, take_over, registry, shelf):
    write("ana", 1000)
    mine = registry.register(
        NewSpeaker(name="ANA", consent="", embedding=(1.0,))
    ).record
    report = take_over()
    assert (report.imported, len(report.skipped)) == ([], 1)
    assert registry.get("ana") == mine
    assert shelf.clips == {}


def test_a_newer_file_replaces_the_voice_unless_the_policy_is_immutable(
    write, take_over, registry, open_registry, stock_directory, shelf
):
    write("ana", 1000)
    take_over()
    strict = open_registry(policy="immutable")
    write("ana", 2000)
    assert import_stock_directory(stock_directory, strict, shelf).imported == []
    assert registry.get("ana").created_at == 1000
    write("ana", 3000)
    assert take_over().imported == ["ana"]
    assert registry.get("ana").created_at == 3000


def test_a_deleted_voice_never_returns(write, take_over, registry):
    # Stock dates a voice ahead of the clock when several come in one second.
    ahead = int(time.time()) + 30
    path = write("ana", ahead)
    write("ana", 900)
    take_over()
    registry.delete("ANA")
    assert take_over().imported == []
    os.utime(path)
    write("ana", 900, file_name="copy.safetensors")
    report = take_over()
    assert (report.imported, len(report.skipped)) == ([], 2)
    assert registry.get("ana") is None
    write("ana", ahead + 60)
    assert take_over().imported == ["ana"]


def test_a_name_that_another_tenant_deletes_is_still_taken_over(
    write, take_over, registry
):
    write("ana", 1000)
    take_over()
    new = NewSpeaker(name="ana", consent="", embedding=(1.0,), tenant="other")
    registry.register(new)
    registry.delete("ana", "other")
    write("ana", 2000)
    assert take_over().imported == ["ana"]


def test_the_limit_does_not_apply(write, open_registry, stock_directory, shelf):
    registry = open_registry(max_speakers=1)
    for name in "abc":
        write(name)
    report = import_stock_directory(stock_directory, registry, shelf)
    assert report.imported == ["a", "b", "c"]


def garbage(directory):
    (directory / "x.safetensors").write_bytes(b"no safetensors at all")


def endless_header(directory):
    (directory / "x.safetensors").write_bytes(b"\xff" * 64)


def deep_header(directory):
    text = b"[" * 100_000
    data = len(text).to_bytes(8, "little") + text
    (directory / "x.safetensors").write_bytes(data)


def listed_header(directory):
    (directory / "x.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0[]")


def without_metadata(directory):
    save_file({"audio": np.ones(9, np.float32)}, directory / "x.safetensors")


def foreign_metadata(directory):
    arrays = {"audio": np.ones(9, np.float32)}
    save_file(arrays, directory / "x.safetensors", metadata={"format": "pt"})


def empty(directory):
    (directory / "x.safetensors").touch()


@pytest.mark.parametrize(
    "make",
    [
        garbage,
        endless_header,
        deep_header,
        listed_header,
        without_metadata,
        foreign_metadata,
        empty,
    ],
)
def test_a_foreign_file_is_reported_once_and_hides_no_voice(
    make, write, take_over, stock_directory
):
    make(stock_directory)
    write("ana")
    report = take_over()
    assert report.imported == ["ana"]
    assert [name for name, _ in report.skipped] == ["x.safetensors"]
    assert take_over().skipped == []


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"tensors": {"other": np.ones(9, np.float32)}}, "neither"),
        ({"tensors": {"audio": np.ones((2, 2, 2), np.float32)}}, "of shape"),
        ({"tensors": {"audio": np.ones(9, np.int16)}}, "int16"),
        ({"tensors": {"audio": np.full(9, np.nan, np.float32)}}, "no numbers"),
        ({"tensors": {"speaker_embedding": np.full(9, np.inf, np.float32)}}, "finite"),
        ({"tensors": {"speaker_embedding": np.ones(9, np.int32)}}, "int32"),
        ({"sample_rate": None}, "sample rate"),
        ({"sample_rate": "often"}, "sample rate"),
        ({"name": "a/b", "file_name": "x.safetensors"}, "URL"),
    ],
)
def test_a_voice_that_cannot_be_used_is_reported_with_its_reason(
    write, take_over, registry, more, reason
):
    write(**({"name": "x"} | more))
    ((_, why),) = take_over().skipped
    assert reason in why
    assert registry.count() == 0


def test_a_truncated_voice_is_tried_again_when_it_is_complete(
    write, take_over, stock_directory
):
    path = write("ana")
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    assert len(take_over().skipped) == 1
    path.write_bytes(data)
    assert take_over().imported == ["ana"]


def test_a_date_that_is_no_number_is_taken_from_the_file(write, take_over, registry):
    path = write(
        "ana", created_at="yesterday", tensors={"audio": np.ones(9, np.float32)}
    )
    take_over()
    assert registry.get("ana").created_at == pytest.approx(path.stat().st_mtime)


def test_names_that_are_no_files_are_reported(take_over, stock_directory):
    (stock_directory / "directory.safetensors").mkdir()
    (stock_directory / "nowhere.safetensors").symlink_to("nowhere")
    (stock_directory / os.fsdecode(b"\xff.safetensors")).touch()
    assert len(take_over().skipped) == 3


def test_audio_that_the_store_refuses_is_reported(write, take_over, registry):
    def refuse(samples, rate) -> str:
        raise InvalidAudioError("silence")

    write("ana")
    assert "silence" in take_over(refuse).skipped[0][1]
    assert registry.count() == 0


def test_a_full_disk_ends_the_import_and_the_next_one_goes_on(
    write, take_over, registry, shelf
):
    def full_after_one(samples, rate) -> str:
        if shelf.clips:
            raise StorageFullError("/")
        return shelf(samples, rate)

    for name in "abc":
        write(name)
    with pytest.raises(StorageFullError):
        take_over(full_after_one)
    assert registry.names(limit=9) == ["a"]
    assert take_over().imported == ["b", "c"]


def test_a_directory_that_is_not_there_is_a_storage_error(take_over, stock_directory):
    stock_directory.rmdir()
    with pytest.raises(StorageError, match="stock"):
        take_over()


def test_imports_at_once_take_each_voice_once(
    write, open_registry, stock_directory, shelf
):
    for n in range(10):
        write(f"v{n}")
    reports = []

    def work() -> None:
        registry = open_registry()
        reports.append(import_stock_directory(stock_directory, registry, shelf))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    imported = [name for report in reports for name in report.imported]
    assert sorted(imported) == [f"v{n}" for n in range(10)]
    assert len(shelf.clips) == 10

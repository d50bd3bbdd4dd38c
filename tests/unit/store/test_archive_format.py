"""An archive is read one bundle at a time, and refused where it is none."""

import io
import tarfile

import pytest

from vllm_tts_cache.errors import InvalidArchiveError
from vllm_tts_cache.store.archive_format import (
    MAX_LISTED,
    SUMMARY,
    ArchiveReader,
    ArchiveWriter,
    is_archive,
)
from vllm_tts_cache.store.bundle_format import MAX_BYTES

VOICES = {"Ann": b"a bundle", "Wörter/..\\x\n": b"", ".." * 80: b"x" * 70_000}


def packed(voices=VOICES, left_out=()):
    writer, parts = ArchiveWriter(), []
    for name, data in voices.items():
        before, behind = writer.voice(name, len(data))
        parts += [before, data, behind]
    for name in left_out:
        writer.leave_out(name, "gone")
    return b"".join([*parts, writer.end()])


def read(data):
    reader = ArchiveReader(io.BytesIO(data))
    return list(reader), reader.summary


class Read(io.BytesIO):
    """Remembers how much was asked for at once."""

    largest = 0

    def read(self, size: int | None = -1, /):
        self.largest = max(self.largest, size or 0)
        return super().read(size)

    def seekable(self):
        return False


def test_what_was_packed_comes_out_in_order_one_at_a_time():
    pipe = Read(packed())
    reader = ArchiveReader(pipe)
    members = iter(reader)
    first = next(members)
    assert (first.name, first.data) == ("000001-Ann.voice", b"a bundle")
    assert pipe.tell() == 1024  # nothing behind it was read yet
    rest = list(members)
    assert [each.data for each in rest] == [b"", b"x" * 70_000]
    assert rest[0].name == "000002-Wörter_.._x_.voice"
    assert all("/" not in each.name for each in rest)
    assert reader.summary is not None and reader.summary.num_voices == 3
    assert pipe.largest == 70_000


def test_any_tar_program_opens_it():
    with tarfile.open(fileobj=io.BytesIO(packed())) as archive:
        names = archive.getnames()
        assert names[-1] == SUMMARY and len(set(names)) == 4
        assert all(each.isreg() and each.mode == 0o600 for each in archive)


def test_what_was_left_out_is_counted_and_listed_up_to_a_bound():
    names = [f"v{number}" for number in range(MAX_LISTED + 5)]
    members, summary = read(packed({}, names))
    assert members == [] and summary is not None
    assert summary.num_left_out == MAX_LISTED + 5
    assert [each.name for each in summary.left_out] == names[:MAX_LISTED]


def with_tar(*infos, data=b"", format=tarfile.PAX_FORMAT):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for info in infos:
            info.size = len(data) if info.isreg() else 0
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def info(name, **fields):
    made = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def test_what_another_program_packed_is_taken_without_a_promise():
    members, summary = read(with_tar(info("ann.voice"), data=b"bundle"))
    assert [(each.name, each.data) for each in members] == [("ann.voice", b"bundle")]
    assert summary is None


HOSTILE = {
    "symlink": with_tar(info("a", type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    "hardlink": with_tar(info("a", type=tarfile.LNKTYPE, linkname="b")),
    "folder": with_tar(info("a", type=tarfile.DIRTYPE)),
    "device": with_tar(info("a", type=tarfile.CHRTYPE)),
    "pipe": with_tar(info("a", type=tarfile.FIFOTYPE)),
    "sparse": with_tar(info("a", type=tarfile.GNUTYPE_SPARSE)),
    "absolute": with_tar(info("/etc/cron.d/x")),
    "parent": with_tar(info("../x.voice")),
    "extended": with_tar(info("ü" * 90)),
    "long name": with_tar(info("n" * 300), format=tarfile.GNU_FORMAT),
    "behind the end": packed({})[:-1024] + packed({"Ann": b"x"}),
    "two ends": packed({})[:-1024] + packed({}),
    "more voices than it says": packed({"Ann": b"x"})[:1024] + packed({}),
    "no tar": b"PK\x03\x04" + bytes(600),
    "empty": b"",
}


@pytest.mark.parametrize("kind", tuple(HOSTILE))
def test_what_is_no_archive_of_voices_is_refused(kind):
    with pytest.raises(InvalidArchiveError, match="Invalid archive"):
        read(HOSTILE[kind])


@pytest.mark.parametrize("size", (MAX_BYTES + 1, 8 * 1024**3, 2**62))
@pytest.mark.parametrize("name", ("a.voice", SUMMARY))
def test_a_huge_file_is_refused_before_it_is_read(name, size):
    header = info(name, size=size).tobuf(tarfile.GNU_FORMAT)
    pipe = Read(header + bytes(10_000))
    with pytest.raises(InvalidArchiveError):
        list(ArchiveReader(pipe))
    assert pipe.largest == 512


def test_a_negative_size_is_refused():
    header = bytearray(info("a").tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" * 12  # base 256: -1
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    with pytest.raises(InvalidArchiveError, match="of no size"):
        read(bytes(header) + bytes(1024))


def test_an_archive_that_was_cut_anywhere_gives_what_was_whole():
    data = packed({"Ann": b"x" * 600, "Bea": b"y"})
    whole = len(data) - 1024  # the two blocks at its end
    for at in (*range(0, whole, 97), whole):
        reader, seen = ArchiveReader(io.BytesIO(data[:at])), []
        with pytest.raises(InvalidArchiveError, match="ends in the middle") as raised:
            seen.extend(reader)
        assert seen == [] or at >= 512 + 1024
        assert raised.value.num_read == reader.num_voices


@pytest.mark.parametrize(
    "told", (b"{}x", b"[" * 5000, b'{"format": 2}', b'{"num_voices": 9}', b'{"a": 1}')
)
def test_an_end_that_says_something_else_is_refused(told):
    with pytest.raises(InvalidArchiveError):
        read(with_tar(info(SUMMARY), data=told))


def test_a_bundle_and_an_archive_are_told_apart():
    assert is_archive(packed({}))
    assert not is_archive(b"PK\x03\x04" + bytes(600))
    assert not is_archive(b"")

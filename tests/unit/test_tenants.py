"""The file that says whose keys are whose: read strictly, and again when it changes."""

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from vllm_tts_cache import tenants
from vllm_tts_cache.config import load_settings
from vllm_tts_cache.errors import ConfigError, UnauthorizedError
from vllm_tts_cache.tenants import Limits, Tenant, TenantKeys

DOCS = Path(__file__).parents[2] / "docs" / "tenants.md"
KEY, OTHER, ADMIN = "acme-key-0123456789", "other-key-012345678", "admin-key-012345678"


def hashed(key):
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def tenant(name="acme", keys=(KEY,), **limits: Any) -> dict[str, Any]:
    return {"name": name, "keys": list(keys), **limits}


def test_a_key_is_a_tenants_whether_it_is_given_plainly_or_hashed():
    limits = {"max_voices": 3, "max_audio_bytes": 4, "max_inline": 2}
    listed = [tenant("acme", [KEY, hashed(OTHER)], **limits), tenant("zenith", [])]
    content = {"tenants": listed, "admin_keys": [hashed(ADMIN)]}
    found = tenants.parse(json.dumps(content).encode(), "tenants.json")
    acme = Tenant(name="acme", limits=Limits(**limits))
    for key in (KEY, OTHER):
        caller = found.caller(key)
        assert caller is not None and caller.tenant == acme
    admin = found.caller(ADMIN)
    assert admin is not None and admin.tenant is None
    for key in ("", KEY[:-1], f"{KEY} ", hashed(OTHER), "\ud800", "x" * 10_000):
        assert found.caller(key) is None
    assert found.tenants == {"acme": acme}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"tenants": [],\n\n oops}', "line 3"),
        (b'{"tenants": [', "line 1"),
        (b"\xff", "malformed"),
        (b"[" * 100_000, "tenants.json"),
        (b"[]", "Expected `object`"),
        (b"{}", "`tenants`"),
        (b'{"tenants": [], "tenant": 1}', "`tenant`"),
        ({"tenants": [tenant(), {"name": "b"}]}, "$.tenants[1]"),
        ({"tenants": [tenant(max_voices=0)]}, "$.tenants[0].max_voices"),
        ({"tenants": [tenant(max_voices="7")]}, "$.tenants[0].max_voices"),
        ({"tenants": [tenant(max_voice=1)]}, "`max_voice`"),
        ({"tenants": [tenant("Acme")]}, "$.tenants[0].name"),
        ({"tenants": [tenant("../x")]}, "$.tenants[0].name"),
        ({"tenants": [tenant(), tenant(keys=[OTHER])]}, "$.tenants[1].name"),
        ({"tenants": [tenant(keys=["short"])]}, "$.tenants[0].keys[0]"),
        ({"tenants": [tenant(keys=[f"{KEY} {KEY}"])]}, "$.tenants[0].keys[0]"),
        ({"tenants": [tenant(keys=[KEY, KEY])]}, "$.tenants[0].keys[1]"),
        ({"tenants": [tenant(keys=[KEY, hashed(KEY)])]}, "$.tenants[0].keys[1]"),
        ({"tenants": [tenant()], "admin_keys": [hashed(KEY)]}, "$.admin_keys[0]"),
        # A hash that was mistyped would be a key that anybody can read here.
        ({"tenants": [tenant(keys=[hashed(KEY)[:-1]])]}, "$.tenants[0].keys[0]"),
        ({"tenants": [tenant(keys=[hashed(KEY).upper()])]}, "$.tenants[0].keys[0]"),
    ],
)
def test_what_is_wrong_is_named_and_no_key_with_it(content, said):
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    with pytest.raises(ConfigError) as caught:
        tenants.parse(data, "tenants.json")
    message = str(caught.value)
    assert message.startswith("SPEAKER_TENANTS_FILE=tenants.json: ")
    assert said in message
    assert KEY not in message and hashed(KEY)[7:20] not in message


def test_the_file_in_the_documentation_is_one():
    (block,) = re.findall(r"```json\n(\{\n  .tenants.*?)```", DOCS.read_text(), re.S)
    found = tenants.parse(block.encode(), "docs")
    assert set(found.tenants) == {"acme", "zenith"}
    assert found.tenants["acme"].limits == Limits(
        max_voices=2000, max_audio_bytes=2_000_000_000, max_inline=8
    )


def test_a_file_has_an_end():
    with pytest.raises(ConfigError, match="more than 4 MiB"):
        tenants.parse(b" " * (tenants.MAX_BYTES + 1), "tenants.json")


# -------- the file


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tenants.json"
    write(path, tenant())
    return path


def write(path, *entries, mode=0o600):
    """As it is to be done: whole, beside it, and renamed over it."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"tenants": list(entries)}))
    new.chmod(mode)
    new.replace(path)


def named(keys, key):
    caller = keys.caller(f"Bearer {key}")
    return caller.tenant.name


def test_a_key_comes_as_the_hosts_does(path):
    keys = TenantKeys(path)
    assert named(keys, KEY) == "acme"
    lower = keys.caller(f"bearer {KEY}").tenant
    assert lower is not None and lower.name == "acme"
    for header in (None, "", KEY, f"Basic {KEY}", "Bearer", f"Bearer  {KEY}"):
        with pytest.raises(UnauthorizedError):
            keys.caller(header)


def test_a_file_that_is_wrong_at_the_start_is_an_error(tmp_path, path):
    with pytest.raises(ConfigError, match="No such file"):
        TenantKeys(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="directory"):
        TenantKeys(tmp_path)
    path.write_text("{")
    settings = load_settings({"SPEAKER_TENANTS_FILE": str(path)})
    with pytest.raises(ConfigError, match="line 1"):
        TenantKeys(settings.tenants_file)


def test_a_changed_file_is_read_anew_and_a_wrong_one_not(path, caplog, monkeypatch):
    caplog.set_level(logging.ERROR)
    keys = TenantKeys(path)
    write(path, tenant(keys=[OTHER], max_voices=5), tenant("zenith"))
    assert named(keys, KEY) == "acme"  # it has not looked yet
    keys.reload()
    assert (named(keys, KEY), named(keys, OTHER)) == ("zenith", "acme")
    assert keys.tenants["acme"].limits.max_voices == 5
    write(path, tenant("Wrong"))
    for _ in range(3):
        keys.reload()
    (line,) = caplog.messages
    assert "$.tenants[0].name" in line and "stay as they were" in line
    path.unlink()
    keys.reload()
    keys.reload()
    assert len(caplog.messages) == 2
    assert (named(keys, KEY), named(keys, OTHER)) == ("zenith", "acme")
    write(path, tenant(keys=[]))
    with monkeypatch.context() as busy:
        busy.setattr(Path, "open", Mock(side_effect=OSError("Too many open files")))
        keys.reload()
    keys.reload()
    for key in (KEY, OTHER):
        with pytest.raises(UnauthorizedError):
            named(keys, key)


@pytest.mark.parametrize(("mode", "warns"), [(0o600, 0), (0o640, 0), (0o644, 1)])
def test_a_file_that_everybody_may_read_is_warned_of(path, mode, warns, caplog):
    write(path, tenant(), mode=mode)
    TenantKeys(path)
    assert any("chmod 600" in record.getMessage() for record in caplog.records) == warns


def test_a_file_of_the_same_time_and_size_is_another_one(path):
    """A file system whose clock ticks once a second."""
    keys = TenantKeys(path)
    before = path.stat()
    write(path, tenant(keys=[OTHER]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    keys.reload()
    assert named(keys, OTHER) == "acme"

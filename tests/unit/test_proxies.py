"""Which proxy a server is asked through, by what people have in their shells."""

import httpx
import pytest

from vllm_tts_cache.client import proxy_for
from vllm_tts_cache.errors import ConnectionSettingError

DOWN = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("url", "environ", "variable"),
    (
        ("http://gpu-7:8091", {}, None),
        ("http://gpu-7:8091", {"HTTP_PROXY": DOWN}, "HTTP_PROXY"),
        ("http://gpu-7:8091", {"http_proxy": DOWN, "HTTP_PROXY": "x"}, "http_proxy"),
        ("http://gpu-7:8091", {"http_proxy": "", "HTTP_PROXY": DOWN}, None),
        ("http://gpu-7:8091", {"HTTP_PROXY": "127.0.0.1:9"}, "HTTP_PROXY"),
        ("https://gpu-7", {"HTTP_PROXY": DOWN}, None),
        ("https://gpu-7", {"HTTPS_PROXY": DOWN, "ALL_PROXY": "x"}, "HTTPS_PROXY"),
        ("https://gpu-7", {"ALL_PROXY": "socks5h://127.0.0.1:9"}, "ALL_PROXY"),
        # This machine is never asked through one.
        ("http://127.0.0.1:8091", {"ALL_PROXY": DOWN}, None),
        ("http://127.9.9.9", {"ALL_PROXY": DOWN}, None),
        ("http://localhost.:8091", {"HTTP_PROXY": DOWN}, None),
        ("http://voices.localhost", {"HTTP_PROXY": DOWN}, None),
        ("http://[::1]:8091", {"ALL_PROXY": "socks5://x"}, None),
        ("http://[::ffff:127.0.0.1]:8091", {"ALL_PROXY": DOWN}, None),
        ("http://0.0.0.0:8091", {"ALL_PROXY": "not a proxy's"}, None),
    ),
)
def test_the_variables_name_it_as_for_other_programs(url, environ, variable):
    proxy = proxy_for(httpx.URL(url), environ)
    assert (proxy and proxy.variable) == variable


@pytest.mark.parametrize(
    ("no_proxy", "url", "is_named"),
    (
        ("*", "http://gpu-7", True),
        ("a, gpu-7", "http://GPU-7:8091", True),
        ("example.com", "http://gpu.example.com", True),
        ("a,gpu-7:8091", "http://gpu-7:8091", True),
        (".example.com", "http://gpu.example.com", True),
        ("10.1.2.3", "http://10.1.2.3:8091", True),
        ("10.0.0.0/8", "http://10.1.2.3:8091", True),
        ("[::1],[2001:db8::7]", "http://[2001:db8::7]:8091", True),
        ("[2001:db8::7]:8091", "http://[2001:db8::7]:8091", True),
        ("2001:db8::/32", "http://[2001:db8::7]:8091", True),
        # What it does not name, and nonsense, which is left out.
        ("", "http://gpu-7", False),
        (" , ", "http://gpu-7", False),
        ("gpu-7:8092", "http://gpu-7:8091", False),
        ("example.com", "http://notexample.com", False),
        ("10.0.0.0/33, 10.0.0", "http://10.0.0.1", False),
        ("[::1], [, ]:, :::, [::1", "http://[2001:db8::7]", False),
        ("::/0", "http://10.0.0.1", False),
    ),
)
def test_what_no_proxy_names_is_asked_directly(no_proxy, url, is_named):
    for name in ("NO_PROXY", "no_proxy"):
        proxy = proxy_for(httpx.URL(url), {"ALL_PROXY": DOWN, name: no_proxy})
        assert (proxy is None) is is_named


@pytest.mark.parametrize(
    "text",
    (
        *("ftp://ann:secret@proxy", "http://", "http://p:port", "socks4://p:1"),
        *("http://a\x00", "http://a..b"),
    ),
)
def test_what_is_no_proxy_is_refused_by_the_name_of_its_variable(text):
    with pytest.raises(ConnectionSettingError, match="HTTP_PROXY is no URL") as refused:
        proxy_for(httpx.URL("http://gpu-7"), {"HTTP_PROXY": text})
    assert "secret" not in str(refused.value)

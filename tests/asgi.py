"""Requests as a web server hands them on, for what no client library sends."""


def http_scope(method, path, headers=(), *, query=b"", raw_path=None):
    """The scope of a request; ``path`` is unquoted, ``raw_path`` as it was sent."""
    return {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode() if raw_path is None else raw_path,
        "query_string": query,
        "headers": list(headers),
        "http_version": "1.1",
        "scheme": "http",
        "server": ("server", 80),
        "client": ("client", 1),
        "root_path": "",
    }

"""``voices usage``: how much voices spoke."""

from typing import Annotated, Any

import typer

from vllm_tts_cache.entrypoints.cli import common

_PAGE = 1000
_HEADINGS = ("DAY", "VOICE", "REQUESTS", "CHARACTERS", "SECONDS")

Day = Annotated[str | None, typer.Option(metavar="YYYY-MM-DD", help="in UTC")]


def usage(
    since: Day = None,
    until: Day = None,
    url: common.Url = common.DEFAULT_URL,
    api_key: common.ApiKey = None,
    as_json: common.Json = False,
) -> None:
    """Show how much each voice spoke on each day, by default of the last 30 days.

    JSON: {"data": [{"day", "voice_id", "name", "requests", "characters", "seconds"}],
    "totals": {...}}.
    """
    asked: dict[str, Any] = {"since": since, "until": until, "limit": _PAGE}
    asked = {name: value for name, value in asked.items() if value is not None}
    rows: list[dict[str, Any]] = []
    with common.client_of(url, api_key) as client:
        while True:
            page = client.request("GET", "/v1/audio/usage", params=asked)
            rows += page.get("data") or ()
            if not (after := page.get("next")):
                break
            asked["after"] = after
    if as_json:
        common.print_json({"data": rows, "totals": page.get("totals")})
        return
    shown = [_row({**row, "voice": row["name"] or row["voice_id"]}) for row in rows]
    if shown:
        total = {"day": "total", "voice": "", **page["totals"]}
        common.print_columns(_HEADINGS, [*shown, _row(total)])
    else:
        common.note("no voice spoke")


def _row(found: dict[str, Any]) -> tuple[str, ...]:
    counted = str(found["requests"]), str(found["characters"])
    voice = "/".join(filter(None, (found.get("tenant"), found["voice"])))
    return (str(found["day"]), voice, *counted, f"{found['seconds']:.1f}")

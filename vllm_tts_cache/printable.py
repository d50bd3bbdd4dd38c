"""Texts of others on a terminal: one line, and nothing that moves the cursor."""

_MAX_CHARS = 1000


def printable(text: str, max_chars: int = _MAX_CHARS) -> str:
    """Spell out control and invisible characters, and cut what is long."""
    shown = text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"
    if shown.isprintable():
        return shown
    return "".join(
        character if character.isprintable() else _spelt(character)
        for character in shown
    )


def _spelt(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

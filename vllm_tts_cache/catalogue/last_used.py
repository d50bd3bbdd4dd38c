"""Which speakers spoke last, as their files tell."""

from sqlalchemy import Connection, func, select

from vllm_tts_cache.catalogue.record import Segment
from vllm_tts_cache.catalogue.schema import speaker, stored_file
from vllm_tts_cache.catalogue.stored_files import IS_NO_PREVIEW

# At least as many as a family makes encodings of one audio.
_ENCODINGS_EACH = 4


def speakers(db: Connection, limit: int) -> list[tuple[str, str]]:
    """Tenants and names of speakers whose encodings were used or made last.

    The last one comes first. Of several speakers of one audio it is the newest: which
    of them spoke is not known.
    """
    audios = _audios(db, limit)
    newest = (
        select(func.max(speaker.c.generation))
        .where(speaker.c.audio_sha256.in_(audios))
        .group_by(speaker.c.audio_sha256)
    )
    columns = speaker.c.audio_sha256, speaker.c.tenant, speaker.c.name
    rows = db.execute(select(*columns).where(speaker.c.generation.in_(newest)))
    named = {sha: (tenant, name) for sha, tenant, name in rows}
    return [named[sha] for sha in audios if sha in named]


def _audios(db: Connection, limit: int) -> list[str]:
    query = (
        select(stored_file.c.audio_sha256)
        .where(
            stored_file.c.segment == Segment.REGISTERED.value,
            stored_file.c.is_audio == 0,
            IS_NO_PREVIEW,
        )
        .order_by(stored_file.c.used_at.desc(), stored_file.c.id.desc())
        .limit(_ENCODINGS_EACH * limit)
    )
    found = dict.fromkeys(db.execute(query).scalars())
    return list(found)[:limit]

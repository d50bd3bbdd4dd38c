"""An example of each answer, for the OpenAPI document."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from vllm_tts_cache.entrypoints import voice_models
from vllm_tts_cache.entrypoints.cache_models import SpeakerCache

VOICE_ID = "voice_5f0c2b9a64d1473e8a1b2c3d4e5f6071"
CONSENT_ID = "cons_0b7d3c52a1e94f6f9d8e7c6b5a493827"
_CREATED = 1793491200

_SHORT_VOICE = {
    "id": VOICE_ID,
    "object": "audio.voice",
    "created_at": _CREATED,
    "name": "keeper",
    "type": "audio_sample",
}
_VOICE = {
    **_SHORT_VOICE,
    "consent": "signed 2026-11-01",
    "file_size": 81234,
    "mime_type": "audio/flac",
    "embedding_source": "audio",
    "embedding_dim": None,
    "ref_text": "The keeper counts the ships at dusk.",
    "generation": 7,
    "audio_sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "sample_rate": 24000,
    "duration_seconds": 4.5,
    "labels": {"team": "news"},
    "pinned": False,
    "language": "en-GB",
}
_QUALITY = {
    "verdict": "fair",
    "reasons": [
        {"code": "noisy", "message": "Noise is heard behind the voice. Record again."}
    ],
    "duration_seconds": 4.5,
    "speech_seconds": 3.9,
    "speech_share": 0.867,
    "longest_pause_seconds": 0.4,
    "loudness_lufs": -21.3,
    "peak_dbfs": -3.2,
    "clipped_share": 0.0,
    "noise_dbfs": -48.0,
    "snr_db": 24.5,
    "bandwidth_hz": 11000,
}
_CONSENT = {
    "id": CONSENT_ID,
    "object": "audio.voice_consent",
    "created_at": _CREATED,
    "name": "Ann's consent",
    "language": "en-US",
}
_NO_FILES = {"files": 0, "bytes": 0}
_CACHE = {
    "registry": {"speakers": 2},
    "storage": {
        "registered": {
            "audio": {"files": 2, "bytes": 81920},
            "encodings": {"files": 3, "bytes": 9216},
        },
        "inline": {"audio": _NO_FILES, "encodings": _NO_FILES},
        "max_bytes": {
            "registered_audio": 21474836480,
            "inline_audio": 1073741824,
            "encodings": 21474836480,
        },
    },
    "deletions": {"unfinished": 0},
    "records": {"speakers": 0, "remembered": 0, "read": 14},
    "flights": 0,
    "workers": [
        {
            "rank": 0,
            "encodes": {"speaker": 2, "codec": 1},
            "failed_encodes": {"speaker": 0, "codec": 0},
            "prompts": 14,
            "failed_prompts": 0,
        }
    ],
}

EXAMPLES: Mapping[type[BaseModel], dict[str, Any]] = {
    voice_models.Registered: {
        "success": True,
        "voice": _VOICE,
        **_SHORT_VOICE,
        "quality": _QUALITY,
    },
    voice_models.VoiceStatus: {
        "voice": _VOICE,
        "cache_status": "ready",
        "modes": ["x_vector", "in_context"],
    },
    voice_models.VoiceList: {
        "voices": ["default", "keeper"],
        "uploaded_voices": [_VOICE],
        "max_clips": 1,
    },
    voice_models.CacheStatus: {"voice": "keeper", "cache_status": "ready"},
    voice_models.Quality: _QUALITY,
    voice_models.Imported: {
        "imported": [{"voice": _VOICE, "encodings_kept": 2, "encodings_left": 0}]
    },
    voice_models.VoiceDeleted: {
        "success": True,
        "message": "Voice 'keeper' deleted successfully",
        "id": VOICE_ID,
        "object": "audio.voice.deleted",
        "deleted": True,
    },
    voice_models.Consent: _CONSENT,
    voice_models.ConsentList: {
        "object": "list",
        "data": [_CONSENT],
        "first_id": CONSENT_ID,
        "last_id": CONSENT_ID,
        "has_more": False,
    },
    voice_models.ConsentDeleted: {
        "id": CONSENT_ID,
        "object": "audio.voice_consent",
        "deleted": True,
    },
    SpeakerCache: _CACHE,
}

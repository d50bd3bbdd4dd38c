"""OmniVoice in ``tests/families/heard.py``."""

from tests.families.heard import SPOKEN, TEXT
from vllm_tts_cache.audio.decode import decode_path
from vllm_tts_cache.families.networks.higgs_tokenizer.frames import SAMPLES_PER_FRAME
from vllm_tts_cache.families.omnivoice.preparation import LOUDNESS, RATE_HZ, prepare

TRANSCRIPTS = (SPOKEN,)


def seed(params):
    params.extra_args = {**(params.extra_args or {}), "seed": 7}


def samples(output):
    return output.multimodal_output["audio"]


def hosts_prompt(_model, clip, ref_text):
    """The host's, of a clip that was prepared as the official package prepares it."""
    if clip is None:
        return {"input": TEXT}
    prepared = prepare(decode_path(clip).audio, SAMPLES_PER_FRAME)
    assert prepared.rms >= LOUDNESS, "what is spoken by it would be made quieter"
    reference = (prepared.samples, RATE_HZ)
    return {"input": TEXT, "ref_audio": reference, "ref_text": ref_text}

"""What the official CosyVoice3 makes of a clip and of texts, part by part.

Its code (FunAudioLLM/CosyVoice at ace7c47, Apache 2.0) is in no package. What its front
end calls is: openai-whisper, torchaudio, librosa and ONNX Runtime are called here as it
calls them, with its numbers. ``cosyvoice/cli/frontend.py`` and ``cosyvoice/llm/llm.py``
are the sources.
"""

import librosa
import numpy as np
import onnxruntime
import soundfile
import torch
import torchaudio
import whisper
from torchaudio.compliance import kaldi

from tests.families.clip import Clip

# Lengths: the shortest allowed, primes, whole tokens, one sample more and one less, and
# the longest allowed.
CLIPS = (
    Clip(16_000, 16_001, 1, "FLOAT"),
    Clip(16_000, 17_920),
    Clip(16_000, 20_479, 2, "PCM_24"),
    Clip(16_000, 480_000),
    Clip(22_050, 23_173, 2),
    Clip(22_050, 231_529, 1, "FLOAT"),
    Clip(24_000, 24_000),
    Clip(24_000, 48_001, 2, "PCM_24"),
    Clip(24_000, 26_880, 2, "FLOAT"),
    Clip(32_000, 64_007),
    Clip(44_100, 44_101),
    Clip(44_100, 49_392, 2, "PCM_24"),
    Clip(44_100, 463_050, 1, "FLOAT"),
    Clip(48_000, 48_017, 1, "PCM_24"),
    Clip(48_000, 96_001, 2),
    Clip(96_000, 191_999, 1, "PCM_24"),
)


def load_wav(path, target_sr, min_sr=16_000):
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    speech = torch.from_numpy(np.ascontiguousarray(samples.T)).mean(dim=0, keepdim=True)
    if rate_hz != target_sr:
        assert rate_hz >= min_sr
        speech = torchaudio.transforms.Resample(rate_hz, target_sr)(speech)
    return speech


def session(path):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        str(path), sess_options=options, providers=["CPUExecutionProvider"]
    )


def speech_tokens(checkpoint, path):
    speech = load_wav(path, 16_000)
    assert speech.shape[1] / 16_000 <= 30
    feat = whisper.log_mel_spectrogram(speech, n_mels=128)
    network = session(checkpoint / "speech_tokenizer_v3.onnx")
    first, second = network.get_inputs()
    given = {
        first.name: feat.numpy(),
        second.name: np.array([feat.shape[2]], dtype=np.int32),
    }
    return np.asarray(network.run(None, given)[0]).flatten()


def speaker(checkpoint, path):
    speech = load_wav(path, 16_000)
    feat = kaldi.fbank(speech, num_mel_bins=80, dither=0, sample_frequency=16_000)
    feat = feat - feat.mean(dim=0, keepdim=True)
    network = session(checkpoint / "campplus.onnx")
    (name,) = (given.name for given in network.get_inputs())
    vector = network.run(None, {name: feat.unsqueeze(dim=0).numpy()})[0]
    return np.asarray(vector).flatten()


def mel(_checkpoint, path):
    """matcha's, with ``cosyvoice3.yaml``'s numbers."""
    speech = load_wav(path, 24_000)
    bank = librosa.filters.mel(sr=24_000, n_fft=1_920, n_mels=80, fmin=0, fmax=None)
    margin = (1_920 - 480) // 2
    padded = torch.nn.functional.pad(
        speech.unsqueeze(1), (margin, margin), mode="reflect"
    ).squeeze(1)
    spec = torch.stft(
        padded,
        1_920,
        hop_length=480,
        win_length=1_920,
        window=torch.hann_window(1_920),
        center=False,
        pad_mode="reflect",
        normalized=False,
        onesided=True,
        return_complex=True,
    )
    spec = torch.sqrt(torch.view_as_real(spec).pow(2).sum(-1) + 1e-9)
    spec = torch.matmul(torch.from_numpy(bank).float(), spec)
    spec = torch.log(torch.clamp(spec, min=1e-5))
    return spec.squeeze(dim=0).transpose(0, 1).numpy()


def encodings(checkpoint, _folder, paths):
    encode = {"speech_tokens": speech_tokens, "mel": mel, "speaker": speaker}
    return {
        (path.stem, name): encode[name](checkpoint, path)
        for path in paths
        for name in encode
    }


def used(tokens, frames):
    """Tokens and frames of which there are two each, as ``frontend_zero_shot``."""
    length = min(int(len(frames) / 2), len(tokens))
    return tokens[:length], frames[: 2 * length]


def model_input(tokenizer, mode, text, prompt_text, tokens):
    """Text ids, prompt's text ids and prompt's tokens of the talker, by mode."""
    ids = tokenizer.encode(text)
    prompt_ids = tokenizer.encode(prompt_text) if prompt_text else []
    return {
        "zero_shot": (ids, prompt_ids, list(tokens)),
        "cross_lingual": (ids, [], []),
        "instruct": (ids, prompt_ids, []),
    }[mode]


def talker_input(talker, ids, prompt_ids, tokens):
    """``lm_input`` of ``CosyVoice3LM.inference``."""
    text = torch.tensor([*prompt_ids, *ids])
    embedded = talker.llm.model.embed_tokens(text)
    table = talker.speech_embedding.weight
    start, turn = table[talker.sos].reshape(1, -1), table[talker.task_id].reshape(1, -1)
    spoken = talker.speech_embedding(torch.tensor(tokens, dtype=torch.long))
    return torch.cat([start, embedded, turn, spoken], dim=0)

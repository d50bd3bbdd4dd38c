"""The networks' inputs from a clip, and its mel: arithmetic in float32 on the CPU.

Sources: openai-whisper (``log_mel_spectrogram``), Kaldi's filter banks as torchaudio
has them, and matcha's ``mel_spectrogram``, which the official front end calls.
"""

import torch
import torchaudio.compliance.kaldi as kaldi
from torch import Tensor
from torch.nn.functional import pad

from vllm_tts_cache.audio.reference import ReferenceAudio
from vllm_tts_cache.families.cosyvoice3 import positions
from vllm_tts_cache.families.networks.mel import mel_filters
from vllm_tts_cache.families.networks.sinc_resample import resample

CPU = torch.device("cpu")

# Fixed in the official code, so no checkpoint can change them.
TOKENIZER_FFT = 400
TOKENIZER_HOP = 160
TOKENIZER_MELS = 128
TOKENIZER_RANGE = 8.0  # powers of ten below the loudest; lower values are raised to it
SPEAKER_MELS = 80
MEL_FFT = 1_920
MEL_HOP = 480
MEL_BINS = 80
MEL_FLOOR = 1e-5
# Added under the root, as in training, where it keeps the slope in silence finite.
MEL_EPSILON = 1e-9


def waveform(audio: ReferenceAudio, rate_hz: int) -> Tensor:
    """Return the clip at a rate: ``(num_samples,)`` float32, as `positions` counts."""
    samples = resample(audio, rate_hz, CPU)
    given = audio.num_samples, audio.sample_rate_hz
    num_samples = positions.num_resampled(*given, rate_hz)
    # Zeros only at rates that soxr resamples instead: it rounds lengths differently.
    return pad(samples, (0, num_samples - len(samples)))


def tokenizer_frames(audio: ReferenceAudio) -> Tensor:
    """Return the speech tokenizer's input: ``(1, 128, num_frames)``, 100 a second."""
    spectrum = torch.stft(
        waveform(audio, positions.TOKENIZER_RATE_HZ).unsqueeze(0),
        TOKENIZER_FFT,
        TOKENIZER_HOP,
        window=torch.hann_window(TOKENIZER_FFT, dtype=torch.float32, device=CPU),
        return_complex=True,
    )
    power = spectrum[..., :-1].abs() ** 2
    logs = _filters(positions.TOKENIZER_RATE_HZ, TOKENIZER_FFT, TOKENIZER_MELS) @ power
    logs = logs.clamp(min=1e-10).log10()
    return (torch.maximum(logs, logs.max() - TOKENIZER_RANGE) + 4.0) / 4.0


def speaker_frames(audio: ReferenceAudio) -> Tensor:
    """Return the speaker network's input: ``(1, num_frames, 80)``, of zero mean."""
    frames = kaldi.fbank(
        waveform(audio, positions.TOKENIZER_RATE_HZ).unsqueeze(0),
        num_mel_bins=SPEAKER_MELS,
        dither=0,
        sample_frequency=positions.TOKENIZER_RATE_HZ,
    )
    return (frames - frames.mean(dim=0, keepdim=True)).unsqueeze(0)


def mel_frames(audio: ReferenceAudio) -> Tensor:
    """Return the mel that the decoder continues: ``(num_frames, 80)``, 50 a second."""
    margin = (MEL_FFT - MEL_HOP) // 2
    samples = waveform(audio, positions.MEL_RATE_HZ).unsqueeze(0)
    padded = pad(samples.unsqueeze(1), (margin, margin), mode="reflect").squeeze(1)
    spectrum = torch.stft(
        padded,
        MEL_FFT,
        hop_length=MEL_HOP,
        window=torch.hann_window(MEL_FFT, dtype=torch.float32, device=CPU),
        center=False,
        return_complex=True,
    )
    squares = torch.view_as_real(spectrum).pow(2).sum(-1)
    loudness = torch.sqrt(squares + MEL_EPSILON)
    mel = torch.matmul(_filters(positions.MEL_RATE_HZ, MEL_FFT, MEL_BINS), loudness)
    return torch.log(mel.clamp(min=MEL_FLOOR))[0].transpose(0, 1)


def _filters(rate_hz: int, num_fft: int, num_mels: int) -> Tensor:
    filters = mel_filters(rate_hz, num_fft, num_mels, rate_hz / 2)
    return torch.tensor(filters, device=CPU)

"""Clips in every accepted format, made on the fly."""

import io

import av
import numpy as np
import soundfile

LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1", 8: "7.1"}


def voiced(
    sample_rate_hz=24_000, seconds=2.0, num_channels=1, peak=0.5, pitch_hz=220.0
):
    """``(num_frames, num_channels)`` float32: a tone that swells, channels unequal."""
    t = np.arange(round(sample_rate_hz * seconds)) / sample_rate_hz
    swell = np.abs(np.sin(2 * np.pi * 1.5 * t))
    tone = peak * np.sin(2 * np.pi * pitch_hz * t) * swell
    return (tone[:, None] * np.linspace(1.0, 0.5, num_channels)).astype(np.float32)


def sndfile_bytes(samples, sample_rate_hz, container="WAV", subtype=None):
    file = io.BytesIO()
    num_channels = 1 if samples.ndim == 1 else samples.shape[1]
    with soundfile.SoundFile(
        file, "w", sample_rate_hz, num_channels, subtype, format=container
    ) as out:
        # libsndfile's Vorbis encoder puts what it is given on the stack.
        for start in range(0, len(samples), 1 << 16):
            out.write(samples[start : start + (1 << 16)])
    return file.getvalue()


def ffmpeg_bytes(samples, sample_rate_hz, container, codec, with_video=False):
    file = io.BytesIO()
    layout = LAYOUTS[samples.shape[1]]
    with av.open(file, "w", format=container) as out:
        stream = out.add_stream(codec, rate=sample_rate_hz, layout=layout)
        if codec in ("vorbis", "opus"):
            stream.codec_context.options = {"strict": "experimental"}
        video = out.add_stream("mpeg4", rate=25) if with_video else None
        if video is not None:
            video.width, video.height, video.pix_fmt = 64, 64, "yuv420p"
            for number in range(25):
                image = av.VideoFrame(64, 64, "yuv420p")
                image.pts = number
                out.mux(video.encode(image))
            out.mux(video.encode())
        # Interleaved, because PyAV miscounts the planes of eight channels.
        interleaved = np.ascontiguousarray(samples).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(interleaved, format="flt", layout=layout)
        frame.sample_rate = sample_rate_hz
        sample_format = stream.codec_context.codec.audio_formats[0].name
        resampler = av.AudioResampler(sample_format, layout, sample_rate_hz)
        for converted in resampler.resample(frame):
            out.mux(stream.encode(converted))
        out.mux(stream.encode(None))
    return file.getvalue()

// WAV: what a recording is sent as, and what speech streams arrive in.

const HEADER_BYTES = 44;

/** Mono samples in [-1, 1] as a 16-bit WAV file, which every server can decode. */
export function encodeWav(samples, sampleRateHz) {
  const view = new DataView(new ArrayBuffer(HEADER_BYTES + samples.length * 2));
  const text = (at, chars) => [...chars].forEach((c, i) => view.setUint8(at + i, c.charCodeAt(0)));
  text(0, "RIFF");
  view.setUint32(4, 36 + samples.length * 2, true);
  text(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // mono
  view.setUint32(24, sampleRateHz, true);
  view.setUint32(28, sampleRateHz * 2, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, "data");
  view.setUint32(40, samples.length * 2, true);
  samples.forEach((sample, i) => {
    const clamped = Math.max(-1, Math.min(1, sample));
    view.setInt16(HEADER_BYTES + i * 2, Math.round(clamped * 32767), true);
  });
  return new Uint8Array(view.buffer);
}

/**
 * Reads a 16-bit WAV stream in whatever pieces it comes. The header names the rate, as
 * bare PCM does not; its sizes are placeholders while the length is not known.
 */
export class WavStream {
  #bytes = new Uint8Array(0);
  #channels = 0;
  sampleRateHz = 0;

  /** Take a piece; return the samples that it completes, channels mixed to one. */
  push(piece) {
    const joined = new Uint8Array(this.#bytes.length + piece.length);
    joined.set(this.#bytes);
    joined.set(piece, this.#bytes.length);
    this.#bytes = joined;
    if (!this.sampleRateHz && !this.#readHeader()) return new Float32Array(0);
    return this.#samples();
  }

  #readHeader() {
    const bytes = this.#bytes;
    const view = new DataView(bytes.buffer);
    const tag = (at) => String.fromCharCode(...bytes.subarray(at, at + 4));
    if (bytes.length < 12) return false;
    if (tag(0) !== "RIFF" || tag(8) !== "WAVE") throw new Error("The answer is no WAV stream.");
    let format = null;
    for (let at = 12; at + 8 <= bytes.length; ) {
      const size = view.getUint32(at + 4, true);
      if (tag(at) === "data" && format) {
        this.#accept(view, format);
        this.#bytes = bytes.slice(at + 8);
        return true;
      }
      if (at + 8 + size > bytes.length) return false;
      if (tag(at) === "fmt ") format = at + 8;
      at += 8 + size + (size % 2);
    }
    return false;
  }

  #accept(view, format) {
    if (view.getUint16(format, true) !== 1 || view.getUint16(format + 14, true) !== 16) {
      throw new Error("The answer is no 16-bit PCM.");
    }
    this.#channels = view.getUint16(format + 2, true);
    this.sampleRateHz = view.getUint32(format + 4, true);
  }

  #samples() {
    const frameBytes = 2 * this.#channels;
    const numFrames = Math.floor(this.#bytes.length / frameBytes);
    const view = new DataView(this.#bytes.buffer, this.#bytes.byteOffset);
    const mixed = new Float32Array(numFrames);
    for (let frame = 0; frame < numFrames; frame++) {
      for (let channel = 0; channel < this.#channels; channel++) {
        mixed[frame] += view.getInt16(frame * frameBytes + channel * 2, true) / 32768 / this.#channels;
      }
    }
    this.#bytes = this.#bytes.slice(numFrames * frameBytes);
    return mixed;
  }
}

export function joined(pieces) {
  const all = new Float32Array(pieces.reduce((sum, piece) => sum + piece.length, 0));
  let at = 0;
  for (const piece of pieces) {
    all.set(piece, at);
    at += piece.length;
  }
  return all;
}

// Hands the microphone's samples on, mono, in pieces of about 40 ms.

const PIECE = 2048;

class Recorder extends AudioWorkletProcessor {
  #piece = new Float32Array(PIECE);
  #length = 0;

  process([channels]) {
    const [first] = channels;
    if (!first) return true;
    for (let i = 0; i < first.length; i++) {
      let sum = 0;
      for (const channel of channels) sum += channel[i];
      this.#piece[this.#length++] = sum / channels.length;
      if (this.#length === PIECE) {
        this.port.postMessage(this.#piece.slice());
        this.#length = 0;
      }
    }
    return true;
  }
}

registerProcessor("recorder", Recorder);

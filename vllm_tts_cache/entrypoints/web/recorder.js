// Records the microphone as it is: samples, not a compressed file.

import { joined } from "./wav.js";

// What makes calls clearer changes the voice that is to be cloned.
const AS_IT_IS = { echoCancellation: false, noiseSuppression: false, autoGainControl: false, channelCount: 1 };

export class Recorder {
  #pieces = [];
  #stream;
  #context;

  /**
   * Begin; `onPiece` gets samples as they come. Throws why it cannot, and an AbortError
   * if `signal` was aborted before people had allowed it: the microphone is off then.
   */
  static async start(onPiece, signal) {
    if (!navigator.mediaDevices?.getUserMedia) {
      throw new Error("This browser gives a page the microphone only over https, or on localhost. Choose a file instead.");
    }
    const recorder = new Recorder();
    try {
      await recorder.#open(onPiece);
      signal.throwIfAborted();
    } catch (error) {
      recorder.#close();
      signal.throwIfAborted();
      throw new Error(REASONS[error.name] ?? `The microphone cannot be used: ${error.message}`);
    }
    return recorder;
  }

  /** End; what was recorded. */
  stop() {
    const sampleRateHz = this.#context.sampleRate;
    this.#close();
    return { samples: joined(this.#pieces), sampleRateHz };
  }

  async #open(onPiece) {
    this.#stream = await navigator.mediaDevices.getUserMedia({ audio: AS_IT_IS });
    this.#context = new AudioContext();
    await this.#context.audioWorklet.addModule(new URL("recorder-worklet.js", import.meta.url));
    const node = new AudioWorkletNode(this.#context, "recorder", { numberOfOutputs: 0 });
    node.port.onmessage = ({ data }) => {
      this.#pieces.push(data);
      onPiece(data, this.#context.sampleRate);
    };
    this.#context.createMediaStreamSource(this.#stream).connect(node);
    await this.#context.resume();
  }

  #close() {
    this.#stream?.getTracks().forEach((track) => track.stop());
    this.#context?.close();
  }
}

const REASONS = {
  NotAllowedError: "The microphone was not allowed. Allow it for this page, or choose a file.",
  NotFoundError: "There is no microphone. Choose a file instead.",
  NotReadableError: "The microphone is in use by something else.",
};

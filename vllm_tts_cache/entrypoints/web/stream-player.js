// Plays samples while they arrive, each piece right behind the last.

// What is held back before the first sound, and after the stream has run dry.
const LEAD_SECONDS = 0.06;
const USUAL_RATE_HZ = 24_000;

export class StreamPlayer {
  #context;
  #nextAt = 0;
  #beganAt = 0;
  #sources = new Set();
  #closed = false;
  numScheduled = 0;
  numPlayed = 0;
  onProgress = () => {};

  /** Only while a click is handled: browsers give nobody else a voice. */
  constructor() {
    this.#open(USUAL_RATE_HZ);
  }

  /** Play these samples, mono, after what was given before. */
  push(samples, sampleRateHz) {
    if (this.#closed || !samples.length) return;
    // At the stream's own rate no piece is resampled, so none clicks at its ends.
    if (sampleRateHz !== this.#context.sampleRate) {
      this.#context.close();
      this.#open(sampleRateHz);
    }
    const context = this.#context;
    const buffer = context.createBuffer(1, samples.length, sampleRateHz);
    buffer.copyToChannel(samples, 0);
    const source = new AudioBufferSourceNode(context, { buffer });
    source.connect(context.destination);
    const startAt = Math.max(this.#nextAt, context.currentTime + LEAD_SECONDS);
    // A gap in which the stream had run dry was not heard: it does not count.
    this.#beganAt = this.numScheduled ? this.#beganAt + startAt - this.#nextAt : startAt;
    source.start(startAt);
    this.#nextAt = startAt + buffer.duration;
    this.numScheduled += samples.length;
    this.#sources.add(source);
    source.addEventListener("ended", () => this.#ended(source, samples.length));
  }

  /** Seconds that were heard so far. */
  get position() {
    const { currentTime, sampleRate } = this.#context;
    if (this.#closed) return this.numPlayed / sampleRate;
    return Math.min(Math.max(0, currentTime - this.#beganAt), this.numScheduled / sampleRate);
  }

  get isSilent() {
    return this.#sources.size === 0;
  }

  stop() {
    if (this.#closed) return;
    this.#closed = true;
    this.#sources.clear();
    this.#context.close();
    this.onProgress();
  }

  #open(sampleRateHz) {
    this.#context = new AudioContext({ sampleRate: sampleRateHz, latencyHint: "interactive" });
    this.#context.resume();
  }

  #ended(source, count) {
    if (!this.#sources.delete(source)) return;
    this.numPlayed += count;
    this.onProgress();
  }
}

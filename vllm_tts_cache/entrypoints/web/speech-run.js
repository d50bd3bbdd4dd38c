// One request to speak: played while it arrives, drawn, and told of.

import { send } from "./api.js";
import { el } from "./dom.js";
import { duration, number } from "./format.js";
import { StreamPlayer } from "./stream-player.js";
import { WavStream, joined } from "./wav.js";
import { draw, numBars, peaksOf, redrawn } from "./waveform.js";

export class Run {
  #player = new StreamPlayer();
  #abort = new AbortController();
  #stream = new WavStream();
  #pieces = [];
  #numSamples = 0;
  #begun = 0;
  #facts = {};
  #frame = 0;
  #isOver = false;
  #onEnd;
  #stopRedrawing;

  /** `onEnd` is called once nothing more of it will be heard. */
  constructor({ results, canvas, onEnd }) {
    this.results = results;
    this.canvas = canvas;
    this.#onEnd = onEnd;
    this.#player.onProgress = () => this.#count();
    this.#stopRedrawing = redrawn(canvas, () => this.#paint());
  }

  /** Send, and play what comes; the samples, or null if it was stopped. */
  async speak(json) {
    if (this.#isOver) return null;
    this.#begun = performance.now();
    this.#show("Waiting for the first audio …");
    try {
      const { signal } = this.#abort;
      const response = await send("audio/speech", { method: "POST", json, signal });
      this.#facts.cache = response.headers.get("X-Speaker-Cache");
      this.#follow();
      for await (const piece of pieces(response.body)) this.#take(piece);
      this.#facts.took = this.#passed();
      this.#show();
      this.#count(); // what is short may have been heard already
      return { samples: joined(this.#pieces), sampleRateHz: this.#stream.sampleRateHz };
    } catch (error) {
      if (error.name === "AbortError") return null;
      throw error;
    }
  }

  /** Let nothing more of it be heard, nor arrive. */
  pause() {
    if (this.#isOver) return;
    this.#abort.abort();
    if (!this.#facts.took) this.#show("Stopped.");
    this.#end();
  }

  dispose() {
    this.pause();
    this.#stopRedrawing();
  }

  #end() {
    this.#isOver = true;
    cancelAnimationFrame(this.#frame);
    this.#player.stop();
    this.#paint();
    this.#onEnd();
  }

  #take(piece) {
    const samples = this.#stream.push(piece);
    if (!samples.length) return;
    this.#facts.first ??= this.#passed();
    this.#pieces.push(samples);
    this.#numSamples += samples.length;
    this.#player.push(samples, this.#stream.sampleRateHz);
    this.#count();
    this.#show();
  }

  #passed() {
    return (performance.now() - this.#begun) / 1000;
  }

  #count() {
    const { numScheduled, numPlayed } = this.#player;
    Object.assign(this.results.dataset, { samples: numScheduled, played: numPlayed });
    if (this.#facts.took && this.#player.isSilent && !this.#isOver) this.#end();
  }

  #show(note = null) {
    const { first, took, cache } = this.#facts;
    const seconds = this.#numSamples / (this.#stream.sampleRateHz || 1);
    const told = (label, value) => el("span", {}, `${label} `, el("b", {}, value));
    this.results.replaceChildren(
      ...[
        note ? el("span", { class: "muted" }, note) : null,
        first ? told("First audio after", duration(first)) : null,
        cache ? el("span", { class: `pill ${cache}`, title: "X-Speaker-Cache" }, cacheText(cache)) : null,
        seconds ? told(took ? "Speech of" : "So far", `${number(seconds, 1)} s`) : null,
        took ? told("in", `${number(took, 1)} s`) : null,
      ].filter(Boolean));
  }

  #follow() {
    this.#paint();
    this.#frame = requestAnimationFrame(() => this.#follow());
  }

  #paint() {
    const count = numBars(this.canvas);
    const heard = this.#player.position * (this.#stream.sampleRateHz || 1);
    // Fewer bars than fit while little is there, so that sound comes in from the left.
    const perBar = Math.max(480, this.#numSamples / count);
    const bars = Math.min(count, Math.ceil(this.#numSamples / perBar));
    if (this.#known !== this.#numSamples) {
      this.#known = this.#numSamples;
      this.#peaks = bars ? peaksOf(joined(this.#pieces), bars) : [];
    }
    draw(this.canvas, this.#peaks, this.#numSamples ? heard / this.#numSamples : 0);
  }

  #known = -1;
  #peaks = [];
}

const cacheText = (cache) =>
  ({ hit: "cache hit", miss: "cache miss: encoded first", none: "no reference audio" })[cache] ?? cache;

async function* pieces(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield value;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The stream broke off. Is the server still running?");
  } finally {
    reader.releaseLock();
  }
}

// A player of one clip: its waveform, and a slider over it.

import { button, el, icon } from "./dom.js";
import { clock } from "./format.js";
import { draw, numBars, peaksOf, redrawn } from "./waveform.js";

let playing = null;

/** Let this be heard, and nothing else; whatever plays is paused. */
export function hear(sound) {
  if (playing !== sound) playing?.pause();
  playing = sound;
}

/** Decode a file to mono samples; null for what this browser cannot decode. */
export async function decode(blob) {
  try {
    const context = new OfflineAudioContext(1, 1, 48_000);
    const decoded = await context.decodeAudioData(await blob.arrayBuffer());
    return { samples: decoded.getChannelData(0), seconds: decoded.duration };
  } catch {
    return null;
  }
}

export class ClipPlayer {
  #audio = new Audio();
  #canvas = el("canvas", { "aria-hidden": "true" });
  #slider;
  #time = el("time");
  #toggle;
  #peaks = new Float32Array(48);
  #samples = null;
  #stopRedrawing;
  #frame = 0;

  constructor(blob, label) {
    this.#audio.src = URL.createObjectURL(blob);
    this.#slider = el("input", { type: "range", min: 0, max: 1000, value: 0, "aria-label": `Position in ${label}` });
    this.#toggle = button("", () => this.toggle(), { class: "round primary", "aria-label": `Play ${label}` });
    this.element = el("div", { class: "player" }, this.#toggle,
      el("div", { class: "track" }, this.#canvas, this.#slider), this.#time);
    this.#slider.addEventListener("input", () => this.#seek());
    for (const type of ["play", "pause", "ended", "durationchange", "seeked"]) {
      this.#audio.addEventListener(type, () => this.#show(label));
    }
    this.#stopRedrawing = redrawn(this.#canvas, () => this.#measure());
    this.ready = decode(blob).then((decoded) => {
      this.#samples = decoded?.samples ?? null;
      this.seconds = decoded?.seconds ?? null;
      this.#measure();
    });
    this.#show(label);
  }

  toggle() {
    if (!this.#audio.paused) return this.#audio.pause();
    hear(this.#audio);
    return this.#audio.play().catch(() => {}); // paused again before it began
  }

  dispose() {
    this.#audio.pause();
    this.#stopRedrawing();
    cancelAnimationFrame(this.#frame);
    URL.revokeObjectURL(this.#audio.src);
  }

  get #length() {
    return Number.isFinite(this.#audio.duration) ? this.#audio.duration : this.seconds ?? 0;
  }

  #seek() {
    this.#audio.currentTime = (this.#slider.value / 1000) * this.#length;
    this.#paint();
  }

  #measure() {
    if (this.#samples && this.#canvas.clientWidth) this.#peaks = peaksOf(this.#samples, numBars(this.#canvas));
    this.#paint();
  }

  #show(label) {
    const isOff = this.#audio.paused;
    this.#toggle.replaceChildren(icon(isOff ? "play" : "pause"));
    this.#toggle.setAttribute("aria-label", `${isOff ? "Play" : "Pause"} ${label}`);
    cancelAnimationFrame(this.#frame);
    const follow = () => {
      this.#paint();
      if (!this.#audio.paused) this.#frame = requestAnimationFrame(follow);
    };
    follow();
  }

  #paint() {
    const { currentTime } = this.#audio;
    const share = this.#length ? currentTime / this.#length : 0;
    draw(this.#canvas, this.#peaks, share);
    this.#slider.value = Math.round(share * 1000);
    this.#time.textContent = `${clock(currentTime)} / ${clock(this.#length)}`;
    this.#slider.setAttribute("aria-valuetext", this.#time.textContent);
  }
}

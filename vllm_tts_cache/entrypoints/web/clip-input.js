// One clip: dropped, chosen or recorded.

import { isOfVoices } from "./bundles.js";
import { ClipPlayer } from "./clip-player.js";
import { bar, button, el, icon, newId, showError, toast } from "./dom.js";
import { bytes, clock, seconds } from "./format.js";
import { Recorder } from "./recorder.js";
import { encodeWav } from "./wav.js";
import { draw, numBars } from "./waveform.js";

const MAX_SECONDS = 30;
const MAX_BYTES = 10 * 1024 * 1024;
const ACCEPTED = "audio/*,.wav,.flac,.ogg,.oga,.mp3,.m4a,.mp4,.aac,.webm";
const READ_ALOUD = {
  clip: "The lighthouse keeper counts the ships at dusk, and writes their names into a blue notebook.",
  consent: "I am the owner of this voice, and I consent to this voice being used to make a synthetic voice model.",
};

export class ClipInput {
  #what;
  #error = el("div");
  #stage = el("div");
  #player = null;
  #recorder = null;
  #asking = null; // for the microphone; aborted when nobody wants it any more
  #onChange;
  #onFiles;
  #takesSeveral;
  blob = null;
  readText = null;

  /**
   * `what` names it for people; `onChange` is called with the clip, or with null, and
   * `onFiles` with files that are dropped or chosen: by itself it takes the first.
   */
  constructor({ what, kind, onChange = () => {}, onFiles = null, takesSeveral = () => false }) {
    this.#onFiles = onFiles ?? ((files) => this.#takeFirst(files));
    this.#takesSeveral = takesSeveral;
    this.#what = what;
    this.kind = kind;
    this.#onChange = onChange;
    this.element = el("div", { data: { clip: kind } }, this.#stage, this.#error);
    this.#ask();
  }

  get fileName() {
    return this.blob?.name ?? "recording.wav";
  }

  /** Take a file, from wherever it came. */
  take(file, readText = null) {
    if (file.size > MAX_BYTES) {
      const size = `The file has ${bytes(file.size)}, and at most ${bytes(MAX_BYTES)} are taken.`;
      showError(this.#error, new Error(size));
      return;
    }
    this.#stopRecording();
    this.blob = file;
    this.readText = readText;
    this.#show();
    this.#onChange(file);
  }

  #takeFirst([file, ...others]) {
    this.take(file);
    if (others.length) toast(`Only ${file.name} is taken: ${this.#what} is one file.`);
  }

  clear({ focus = false } = {}) {
    this.#stopRecording();
    this.blob = null;
    this.#ask();
    this.#onChange(null);
    if (focus) this.focus();
  }

  /** End a recording that is under way, or asked for; nothing of it is kept. */
  stop() {
    if (this.#recorder) this.#ask();
    this.#stopRecording();
  }

  /** It is shown no more. */
  dispose() {
    this.#stopRecording();
    this.#player?.dispose();
  }

  focus() {
    this.#stage.querySelector("button, input")?.focus();
  }

  explain(error) {
    showError(this.#error, error);
  }

  #ask() {
    this.#player?.dispose();
    this.#player = null;
    showError(this.#error, null);
    const file = el("input", { type: "file", accept: ACCEPTED, class: "hidden", tabindex: -1, "aria-label": `File of ${this.#what}` });
    file.multiple = this.#takesSeveral();
    file.addEventListener("change", () => file.files.length && this.#onFiles([...file.files]));
    const drop = el("div", { class: "drop" }, icon("wave", "big"),
      el("p", {}, `Drop ${this.#what} here, or`),
      el("div", { class: "row" },
        button("Choose a file", () => {
          file.multiple = this.#takesSeveral(); // known some time after the page
          file.click();
        }, { iconName: "file", data: { act: "choose" } }),
        button("Record", () => this.#record(), { iconName: "mic", data: { act: "record" } })),
      el("p", { class: "hint" }, `WAV, FLAC, OGG, MP3, M4A or WebM; up to ${MAX_SECONDS} s and ${bytes(MAX_BYTES)}`), file);
    drop.addEventListener("dragover", (event) => {
      event.preventDefault();
      drop.classList.add("over");
    });
    drop.addEventListener("dragleave", () => drop.classList.remove("over"));
    drop.addEventListener("drop", (event) => {
      event.preventDefault();
      drop.classList.remove("over");
      const files = [...event.dataTransfer.files];
      if (!files.length || files.some(isOfVoices)) return; // no clip: the page's to take
      event.stopPropagation();
      this.#onFiles(files);
    });
    this.#stage.replaceChildren(drop);
  }

  #show() {
    this.#player?.dispose();
    this.#player = new ClipPlayer(this.blob, this.#what);
    const facts = el("p", { class: "hint" });
    const { name = "recording", size } = this.blob;
    const told = (length) => {
      facts.textContent = [name, length && seconds(length), bytes(size)].filter(Boolean).join(" · ");
    };
    told(null);
    const player = this.#player;
    player.ready.then(() => told(player.seconds));
    showError(this.#error, null);
    const again = button("Take another", () => this.clear({ focus: true }), { class: "quiet", data: { act: "replace" } });
    this.#stage.replaceChildren(player.element, el("div", { class: "row" }, facts, again));
  }

  async #record() {
    if (this.#asking) return;
    const asking = new AbortController();
    this.#asking = asking;
    showError(this.#error, null);
    const readId = newId("read");
    const canvas = el("canvas", { "aria-hidden": "true" });
    const time = el("b", { class: "number" }, clock(0));
    const level = el("div", { role: "meter", "aria-label": "Level", "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": 0 });
    const read = el("input", { type: "checkbox", id: readId, checked: true });
    const stop = button("Stop", () => this.#finish(read.checked), { iconName: "stop", class: "primary", data: { act: "stop" } });
    const peaks = [];
    let numSamples = 0;
    const onPiece = (samples, sampleRateHz) => {
      const loudest = samples.reduce((peak, sample) => Math.max(peak, Math.abs(sample)), 0);
      peaks.push(loudest);
      numSamples += samples.length;
      draw(canvas, peaks.slice(-numBars(canvas)), 1);
      time.textContent = clock(numSamples / sampleRateHz);
      // On a scale of decibels, as ears have it: -60 dBFS is nothing.
      const share = loudest ? Math.max(0, 1 + Math.log10(loudest) / 3) : 0;
      level.replaceChildren(bar(share, loudest > 0.98 ? "meter hot" : "meter"));
      level.setAttribute("aria-valuenow", Math.round(share * 100));
      if (numSamples / sampleRateHz >= MAX_SECONDS - 0.1) this.#finish(read.checked);
    };
    try {
      this.#recorder = await Recorder.start(onPiece, asking.signal);
    } catch (error) {
      showError(this.#error, error);
      return;
    } finally {
      if (this.#asking === asking) this.#asking = null;
    }
    this.#stage.replaceChildren(el("div", { class: "recording" },
      el("div", { class: "read-aloud" }, el("p", { class: "hint" }, "Read this, or say something of your own:"),
        el("p", {}, READ_ALOUD[this.kind]),
        this.kind === "clip"
          ? el("label", { class: "check small" }, read, el("span", {}, "I read this: take it as the transcript"))
          : null),
      canvas, level,
      el("div", { class: "row" }, stop, el("span", { role: "timer" }, time, ` of ${MAX_SECONDS} s`),
        button("Discard", () => this.clear({ focus: true }), { class: "quiet" }))));
    stop.focus();
  }

  #finish(hasRead) {
    const recorder = this.#recorder;
    if (!recorder) return;
    this.#recorder = null;
    const { samples, sampleRateHz } = recorder.stop();
    const file = new File([encodeWav(samples, sampleRateHz)], "recording.wav", { type: "audio/wav" });
    this.take(file, hasRead ? READ_ALOUD[this.kind] : null);
    this.focus();
  }

  #stopRecording() {
    this.#asking?.abort();
    this.#asking = null;
    this.#recorder?.stop();
    this.#recorder = null;
  }
}

// "Try it": a text, spoken while it arrives.

import { modelName, send, voicePath } from "./api.js";
import { ClipPlayer, silence } from "./clip-player.js";
import { button, el, icon, showError } from "./dom.js";
import { duration, modeTitle, number } from "./format.js";
import { StreamPlayer } from "./stream-player.js";
import { WavStream, encodeWav, joined } from "./wav.js";
import { draw, numBars, peaksOf, redrawn } from "./waveform.js";

const EXAMPLE = "The tide is out, and the boats are resting on the sand.";

/** The block of one voice; `dispose` ends what it does. */
export function tryIt(voice, modes) {
  const text = el("textarea", { rows: 3, maxlength: 4096, id: "try-text", "aria-label": "Text to speak" });
  text.value = EXAMPLE;
  const mode = modeField(modes);
  const say = el("button", { type: "submit", class: "primary", id: "speak" }, icon("play"), "Speak");
  const stop = button("Stop", () => run?.stop(), { iconName: "stop", id: "stop-speaking" });
  stop.disabled = true;
  const canvas = el("canvas", { class: "live", "aria-hidden": "true", hidden: true });
  const results = el("div", { class: "results", id: "try-results", role: "status" });
  const error = el("div");
  const replay = el("div");
  const form = el("form", {}, text,
    el("div", { class: "row" }, say, stop, mode?.element ?? null), error, canvas, results, replay);
  let run = null;
  let kept = null;

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    run?.stop();
    kept?.dispose();
    silence();
    replay.replaceChildren();
    showError(error, null);
    stop.disabled = false;
    canvas.hidden = false;
    const mine = new Run({ results, canvas });
    run = mine;
    try {
      const done = await mine.speak(await requestOf(voice, text.value, mode?.value()));
      if (run === mine && done) kept = offer(replay, done, voice);
    } catch (failure) {
      if (run !== mine) return;
      showError(error, failure);
      results.replaceChildren();
      canvas.hidden = true;
    } finally {
      if (run === mine) stop.disabled = true;
    }
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  return {
    element: form,
    dispose() {
      run?.stop();
      kept?.dispose();
      run = null;
    },
  };
}

function modeField(modes) {
  if (modes.length < 2) return null;
  const choice = el("select", { "aria-label": "Way of cloning", id: "clone-mode" },
    el("option", { value: "" }, "as the transcript decides"),
    modes.map((mode) => el("option", { value: mode }, modeTitle(mode))));
  return { element: choice, value: () => choice.value };
}

async function requestOf(voice, input, mode) {
  return {
    model: await modelName(),
    voice: voice.id,
    input,
    stream: true,
    stream_format: "audio", // not events: bytes of sound
    response_format: "wav", // its header says the rate, which bare PCM leaves open
    ...(mode ? { extra_params: { clone_mode: mode } } : {}),
  };
}

class Run {
  #player = new StreamPlayer();
  #abort = new AbortController();
  #stream = new WavStream();
  #pieces = [];
  #numSamples = 0;
  #begun = 0;
  #facts = {};
  #frame = 0;
  #forget;

  constructor({ results, canvas }) {
    this.results = results;
    this.canvas = canvas;
    this.#player.onProgress = () => this.#count();
    this.#forget = redrawn(canvas, () => this.#paint());
  }

  /** Send, and play what comes; the samples, or null if it was stopped. */
  async speak(json) {
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
      return { samples: joined(this.#pieces), sampleRateHz: this.#stream.sampleRateHz };
    } catch (error) {
      if (error.name === "AbortError") return null;
      this.#player.stop();
      throw error;
    }
  }

  stop() {
    this.#abort.abort();
    this.#player.stop();
    cancelAnimationFrame(this.#frame);
    this.#forget();
    if (!this.#facts.took && this.results.isConnected) this.#show("Stopped.");
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
    if (this.#facts.took && this.#player.isSilent) cancelAnimationFrame(this.#frame);
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
  } finally {
    reader.releaseLock();
  }
}

function offer(place, { samples, sampleRateHz }, voice) {
  if (!samples.length) return null;
  const blob = new Blob([encodeWav(samples, sampleRateHz)], { type: "audio/wav" });
  const player = new ClipPlayer(blob, "what was spoken");
  const save = el("a", { class: "button", download: `${voice.name}.wav` }, icon("import"), "Save as WAV");
  save.href = URL.createObjectURL(blob);
  place.replaceChildren(el("details", {}, el("summary", {}, "Hear it again, or keep it"), player.element,
    el("div", { class: "row" }, save)));
  return {
    dispose() {
      URL.revokeObjectURL(save.href);
      player.dispose();
    },
  };
}

/** The server's own short sample of a voice: kept, so that it is made only once. */
export function previewBlock(voice) {
  const place = el("div");
  const error = el("div");
  const note = el("span", { class: "hint", role: "status" });
  const make = button("Preview", async () => {
    make.disabled = true;
    showError(error, null);
    try {
      const answer = await send(voicePath(voice.id, "preview"), { method: "POST", json: {} });
      shown(await answer.blob(), answer.headers.get("X-Speaker-Preview"));
    } catch (failure) {
      showError(error, failure.isNoRoute ? new Error("This server makes no previews.") : failure);
    } finally {
      make.disabled = false;
    }
  }, { iconName: "play", id: "make-preview" });
  let player = null;

  function shown(blob, origin) {
    player?.dispose();
    player = new ClipPlayer(blob, "the preview");
    place.replaceChildren(player.element);
    make.hidden = true;
    note.textContent = origin === "made" ? "Made just now, and kept." : "As it was kept.";
    player.toggle();
  }

  return {
    element: el("div", {}, el("div", { class: "row" }, make, note), place, error),
    dispose: () => player?.dispose(),
  };
}

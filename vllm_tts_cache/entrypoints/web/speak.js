// "Try it": a text, spoken while it arrives.

import { modelName, send, voicePath } from "./api.js";
import { ClipPlayer, hear } from "./clip-player.js";
import { button, el, icon, showError } from "./dom.js";
import { modeTitle } from "./format.js";
import { Run } from "./speech-run.js";
import { encodeWav } from "./wav.js";

const EXAMPLE = "The tide is out, and the boats are resting on the sand.";

/** The block of one voice; `dispose` ends what it does. */
export function tryIt(voice, modes) {
  const text = el("textarea", { rows: 3, maxlength: 4096, id: "try-text", "aria-label": "Text to speak" });
  text.value = EXAMPLE;
  const mode = modeField(modes);
  const say = el("button", { type: "submit", class: "primary", id: "speak" }, icon("play"), "Speak");
  const stop = button("Stop", () => run?.pause(), { iconName: "stop", id: "stop-speaking" });
  stop.disabled = true;
  const canvas = el("canvas", { class: "live", "aria-hidden": "true", hidden: true });
  const results = el("div", { class: "results", id: "try-results", role: "status" });
  const error = el("div");
  const replay = el("div");
  const form = el("form", {}, text,
    el("div", { class: "row" }, say, stop, mode?.element ?? null), error, canvas, results, replay);
  let run = null;
  let kept = null;

  function ended(one) {
    if (run !== one) return;
    const hadFocus = document.activeElement === stop;
    stop.disabled = true;
    if (hadFocus) say.focus();
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    run?.dispose();
    kept?.dispose();
    replay.replaceChildren();
    showError(error, null);
    stop.disabled = false;
    canvas.hidden = false;
    const mine = new Run({ results, canvas, onEnd: () => ended(mine) });
    run = mine;
    hear(mine);
    try {
      const done = await mine.speak(await requestOf(voice, text.value, mode?.value()));
      if (run === mine && done) kept = offer(replay, done, voice);
    } catch (failure) {
      mine.pause();
      if (run !== mine) return;
      showError(error, failure);
      results.replaceChildren();
      canvas.hidden = true;
    }
  });
  text.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  return {
    element: form,
    dispose() {
      run?.dispose();
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

// "Try it": a text, spoken while it arrives.

import { modelName } from "./api.js";
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
  const replay = el("div", { id: "try-again" });
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

/** Let it be heard again, from memory, or kept. */
function offer(place, { samples, sampleRateHz }, voice) {
  if (!samples.length) return null;
  const blob = new Blob([encodeWav(samples, sampleRateHz)], { type: "audio/wav" });
  const player = new ClipPlayer(blob, "what was spoken");
  const save = el("a", { class: "button", download: `${voice.name}.wav` }, icon("import"), "Save as WAV");
  save.href = URL.createObjectURL(blob);
  place.replaceChildren(player.element, el("div", { class: "row" }, save));
  return {
    dispose() {
      URL.revokeObjectURL(save.href);
      player.dispose();
    },
  };
}

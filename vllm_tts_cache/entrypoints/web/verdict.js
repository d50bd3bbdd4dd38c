// What a clip is worth, as the server measured it.

import { send } from "./api.js";
import { el, showError } from "./dom.js";
import { clipNames, number, seconds } from "./format.js";

const SAYS = {
  good: "A good clip",
  fair: "A fair clip: it will do",
  poor: "A poor clip: listeners would hear it",
};

// Null where it could not be measured.
const FIGURES = [
  ["duration_seconds", "Length", seconds],
  ["loudness_lufs", "Loudness", (v) => `${number(v, 1)} LUFS`],
  ["peak_dbfs", "Peak", (v) => `${number(v, 1)} dBFS`],
  ["clipped_share", "Clipped", (v) => `${number(v * 100, 2)} %`],
  ["snr_db", "Over noise", (v) => `${number(v)} dB`],
  ["speech_share", "Speech", (v) => `${number(v * 100)} %`],
  ["longest_pause_seconds", "Longest pause", seconds],
  ["bandwidth_hz", "Bandwidth", (v) => `${number(v / 1000, 1)} kHz`],
];

/** Have a clip judged and show it; nothing is stored. */
export async function showVerdict(place, clip, { fileName, transcript, signal }) {
  if (!place.childElementCount) place.append(el("p", { class: "hint" }, "Listening to the clip …"));
  const form = new FormData();
  form.append("audio_sample", clip, fileName);
  if (transcript) form.append("ref_text", transcript);
  try {
    const answer = await send("audio/voices/check", { method: "POST", body: form, signal });
    place.replaceChildren(verdictOf(await answer.json()));
  } catch (error) {
    if (error.name === "AbortError") return;
    if (error.isNoRoute) place.replaceChildren(el("p", { class: "hint" }, "This server does not judge clips."));
    else showError(place, error);
  }
}

/** The verdict, a sentence for each reason, and the figures. */
export function verdictOf(quality) {
  const { verdict, reasons = [] } = quality;
  const figures = FIGURES.filter(([field]) => Number.isFinite(quality[field]));
  return el("div", { class: "verdict", data: { verdict } },
    el("p", {}, el("span", { class: `pill ${verdict}` }, verdict), ` ${SAYS[verdict] ?? ""}`),
    reasons.length ? el("ul", {}, reasons.map((reason) => el("li", {}, clipNames(reason.message)))) : null,
    el("dl", { class: "figures" }, figures.map(([field, title, show]) =>
      el("div", {}, el("dt", {}, title), el("dd", {}, show(quality[field]))))));
}

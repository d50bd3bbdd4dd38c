// Changing what is written beside a voice, and deleting one.

import { ServerError, getJson, send, voicePath } from "./api.js";
import { openDialog } from "./dialog.js";
import { el } from "./dom.js";
import { bytes, fromLocalField, seconds, toLocalField } from "./format.js";
import { LabelEditor } from "./labels.js";

const RETRY_SECONDS = 2;
// Name, title, and what an input of it takes.
const SETTINGS = [
  ["speed", "Speed", { type: "number", min: 0.25, max: 4, step: 0.05 }],
  ["gain_db", "Gain in dB", { type: "number", min: -24, max: 24, step: 0.5 }],
  ["temperature", "Temperature", { type: "number", min: 0, max: 2, step: 0.05 }],
  ["seed", "Seed", { type: "number", min: 0, step: 1 }],
  ["language", "Language of speech", { maxlength: 64 }],
  ["clone_mode", "Way of cloning", { maxlength: 64 }],
  ["instructions", "Instructions", { maxlength: 2000 }],
];

/** The answer to the change, or null. Only what was changed is sent. */
export function askEdit(voice) {
  const field = (label, node, hint = null) =>
    el("label", { class: "field" }, label, node, hint ? el("span", { class: "hint" }, hint) : null);
  const input = (value, props = {}) => {
    const node = el("input", { autocomplete: "off", ...props });
    node.value = value ?? "";
    return node;
  };
  const name = input(voice.name, { required: true, maxlength: 128 });
  const description = input(voice.speaker_description, { maxlength: 2000 });
  const aliases = el("textarea", { name: "aliases", rows: 2, maxlength: 3000 });
  aliases.value = (voice.aliases ?? []).join("\n");
  const language = input(voice.language, { list: "languages", maxlength: 35 });
  const expires = input(toLocalField(voice.expires_at), { type: "datetime-local" });
  const said = transcriptFields(voice);
  const labels = new LabelEditor(voice.labels);
  const settings = SETTINGS.map(([name, title, props]) => [name, title, input(voice.settings?.[name], { name, ...props })]);
  const settingsNow = () => Object.fromEntries(settings
    .filter(([, , node]) => node.value.trim())
    .map(([name, , node]) => [name, node.type === "number" ? Number(node.value) : node.value.trim()]));
  const fields = [
    ["name", () => name.value.trim(), voice.name],
    ["speaker_description", () => description.value.trim() || null, voice.speaker_description ?? null],
    ["language", () => language.value.trim() || null, voice.language ?? null],
    ["ref_text", () => joined(said, voice), voice.ref_text ?? null],
    ["labels", () => labels.value, voice.labels],
    ["aliases", () => aliases.value.split("\n").map((each) => each.trim()).filter(Boolean), voice.aliases ?? []],
    ["settings", settingsNow, ordered(voice.settings)],
  ];
  return openDialog({
    title: `Edit ${voice.name}`,
    body: [
      field("Name", name), field("Description", description),
      field("Also called", aliases, "A line for each. A client that asks for one of these names gets this voice."),
      ...said.map((text, index) => field(said.length > 1 ? `What is said in clip ${index + 1}` : "What is said in the clip", text,
        index ? null : "It decides the ways of cloning; what is newly needed is encoded at once.")),
      el("div", { class: "pair" }, field("Language", language), field("Expires", expires)),
      labels.element,
      el("details", { id: "settings" }, el("summary", {}, "How it speaks where a request does not say"),
        settings.map(([, title, node]) => field(title, node))),
    ],
    submit: "Save",
    focus: name,
    onSubmit: () => {
      const changes = {};
      for (const [key, read, before] of fields) {
        const now = read();
        if (JSON.stringify(now) !== JSON.stringify(before)) changes[key] = now;
      }
      if (expires.value !== toLocalField(voice.expires_at)) changes.expires_at = fromLocalField(expires.value);
      if (!Object.keys(changes).length) return null;
      return getJson(voicePath(voice.id), { method: "PATCH", json: changes });
    },
  });
}

/** Settings in the order of their inputs, to be compared. */
function ordered(settings = {}) {
  return Object.fromEntries(SETTINGS.map(([name]) => [name, settings[name]]).filter(([, value]) => value !== undefined));
}

/** A field for each clip: of several the transcript has a line for each. */
function transcriptFields({ clips = [null], ref_text: text = "" }) {
  const lines = clips.length > 1 ? text.split("\n") : [text];
  return clips.map((_, index) => {
    const node = el("textarea", { rows: clips.length > 1 ? 2 : 3, maxlength: 2000 });
    node.value = lines[index] ?? "";
    return node;
  });
}

function joined(said, { clips = [null] }) {
  const texts = said.map(({ value }) => value.trim());
  if (clips.length === 1) return texts[0] || null;
  return texts.filter(Boolean).map((text) => text.replace(/\s*[\r\n]+\s*/g, " ")).join("\n") || null;
}

/** True once nothing of the voice is left. */
export function askDelete(voice) {
  const progress = el("p", { class: "hint", role: "status" });
  const removed = [
    "the voice: its name, id, labels and texts. No request finds it any more",
    voice.audio_sha256
      ? `its reference clip (${seconds(voice.duration_seconds)}, ${bytes(voice.file_size)}) and every encoding of it: on disk and in the memory of every worker and API server`
      : "its speaker embedding, on disk and in memory",
  ];
  const kept = ["audio and encodings that another voice shares",
    voice.consent_id ? "the consent recording it stands on" : null,
    "bundles that were downloaded"].filter(Boolean);
  return openDialog({
    title: `Delete ${voice.name}?`,
    body: [
      el("p", {}, "This removes, for good:"), el("ul", { id: "removes" }, removed.map((text) => el("li", {}, text))),
      el("p", {}, "It leaves:"), el("ul", {}, kept.map((text) => el("li", {}, text))), progress,
    ],
    submit: "Delete",
    danger: true,
    onSubmit: () => deleteWhole(voicePath(voice.id), progress),
  });
}

/** Delete what is at a path, and wait until nothing of it is left. */
export async function deleteWhole(path, progress) {
  progress.textContent = "Deleting …";
  for (let hasBegun = false; ; ) {
    try {
      await send(path, { method: "DELETE" });
      return true;
    } catch (error) {
      const isGone = hasBegun && error instanceof ServerError && error.status === 404;
      if (isGone) return true;
      const { deletion } = error.body ?? {};
      if (!deletion) {
        progress.textContent = "";
        throw error;
      }
      hasBegun = true;
      progress.textContent = deletion.files_removed
        ? `Its files are removed; waiting for ${deletion.waiting_for} server processes to delete it from memory …`
        : "No request finds it any more; its files are being removed …";
      await new Promise((go) => setTimeout(go, 1000 * (error.retryAfterSeconds ?? RETRY_SECONDS)));
    }
  }
}

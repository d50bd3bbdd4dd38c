// One voice: what is known of it, its clip, trying it, changing it.

import { addOver } from "./add.js";
import { getJson, send, voicePath } from "./api.js";
import { saveBundle } from "./bundles.js";
import { askDelete, askEdit } from "./changes.js";
import { ClipPlayer } from "./clip-player.js";
import { busy, button, byId, el, icon, showError, toast } from "./dom.js";
import { bytes, modeTitle, moment, seconds } from "./format.js";
import { face, load, maxClips, select } from "./library.js";
import { tryIt } from "./speak.js";
import { showStatus, statusPill, statuses } from "./statuses.js";

let shown = { id: null, parts: [], pill: null };

export function startVoice() {
  statuses.addEventListener("change", ({ detail }) => {
    if (detail.id !== shown.id || !shown.pill) return;
    showStatus(shown.pill, detail);
    showFailure(detail);
  });
}

/** Show a voice, named or by its id, beside the list; null shows what to do instead. */
export async function showVoice(nameOrId, { focus = true } = {}) {
  leave();
  select(nameOrId);
  byId("view-library").classList.toggle("open", Boolean(nameOrId));
  const place = byId("detail");
  const mine = { id: null, parts: [], pill: null };
  shown = mine;
  if (!nameOrId) {
    place.replaceChildren(invitation());
    return;
  }
  place.replaceChildren(el("p", { class: "muted" }, "Loading …"));
  try {
    const answer = await getJson(voicePath(nameOrId));
    if (shown !== mine) return;
    // The list and the statuses know a voice by its id.
    mine.id = answer.voice.id;
    select(mine.id);
    statuses.watch(mine.id);
    statuses.learn(mine.id, answer.cache_status, answer.error);
    show(place, answer, focus);
  } catch (error) {
    if (shown !== mine) return;
    place.replaceChildren(back());
    const told = el("div");
    place.append(told);
    showError(told, error, error.status === 404 ? null : () => showVoice(nameOrId));
  }
}

function leave() {
  shown.parts.forEach((part) => part.dispose());
  if (shown.id) statuses.unwatch(shown.id);
  shown = { id: null, parts: [], pill: null };
}

function show(place, { voice, modes }, focus) {
  const title = el("h2", { tabindex: -1, id: "voice-title" }, el("bdi", {}, voice.name));
  shown.pill = statusPill(voice.id);
  const speaking = tryIt(voice, modes);
  shown.parts.push(speaking);
  place.replaceChildren(
    back(),
    el("div", { class: "voice-head" }, face(voice, "large"),
      el("div", {}, title, el("div", { class: "row" }, shown.pill,
        voice.speaker_description ? el("span", { class: "muted" }, voice.speaker_description) : null))),
    tools(voice),
    el("div", { id: "voice-error" }),
    block("Try it", speaking.element),
    voice.audio_sha256 ? block("Reference", reference(voice)) : "",
    block("About", facts(voice, modes)));
  showFailure(statuses.get(voice.id));
  document.title = `${voice.name} · Voices`;
  if (focus) title.focus();
}

const block = (title, ...content) =>
  el("section", { class: "block", "aria-label": title }, el("h3", {}, title), content);

const back = () => el("a", { class: "button quiet back", href: "#/" }, icon("back"), "All voices");

function tools(voice) {
  const error = el("div");
  const encode = button("Encode now", () => busy(encode, error, async () => {
    statuses.learn(voice.id, "processing");
    try {
      await send(voicePath(voice.id, "cache"), { method: "POST" });
      toast("Its encodings are there.");
    } finally {
      statuses.delete(voice.id);
    }
  }), { id: "encode" });
  const bundle = button("Bundle", () => busy(bundle, error, () => saveBundle(voice)), { iconName: "export", id: "save-bundle" });
  const edit = button("Edit", async () => {
    const changed = await askEdit(voice);
    if (!changed) return;
    statuses.delete(voice.id);
    toast(whatChanged(changed.modes));
    load();
    showVoice(voice.id);
  }, { iconName: "edit", id: "edit-voice" });
  const other = button(maxClips() > 1 ? "Other clips" : "Another clip", () => {
    location.hash = "#/add";
    addOver(voice);
  }, { iconName: "mic", id: "other-clips" });
  const remove = button("Delete", async () => {
    if (!await askDelete(voice)) return;
    toast(`${voice.name} is deleted: nothing of it is left.`);
    statuses.delete(voice.id);
    load();
    location.hash = "#/";
  }, { iconName: "trash", id: "delete-voice" });
  return el("div", {}, el("div", { class: "tools" }, edit, other, bundle, voice.audio_sha256 ? encode : null, remove), error);
}

const whatChanged = (modes) =>
  modes.length ? `Changed. It can be cloned by: ${modes.map(modeTitle).join(", ")}.` : "Changed.";

function showFailure({ status, error } = {}) {
  const place = byId("voice-error");
  if (place) showError(place, status === "failed" ? new Error(error ?? "Its encoding failed.") : null);
}

function reference(voice) {
  const place = el("div", { id: "reference" }, el("p", { class: "hint" }, "Fetching the clip …"));
  const mine = shown;
  // Fetched, and not named to the player, which could not send the API key.
  send(voicePath(voice.id, "audio")).then((answer) => answer.blob()).then((blob) => {
    if (shown !== mine) return;
    const player = new ClipPlayer(blob, "the reference clip");
    mine.parts.push(player);
    place.replaceChildren(player.element);
  }).catch((error) => {
    // That the operator keeps clips back is no failure.
    if (error.status === 403) place.replaceChildren(el("p", { class: "hint" }, error.message));
    else showError(place, error);
  });
  return place;
}

function facts(voice, modes) {
  const copy = button("", async () => {
    await navigator.clipboard.writeText(voice.id);
    toast("The id is copied.");
  }, { iconName: "copy", class: "quiet", "aria-label": "Copy the id" });
  const labels = Object.entries(voice.labels ?? {});
  const rows = [
    ["Said in the clip", voice.ref_text && el("span", {}, saidIn(voice))],
    ["Labels", labels.length && el("span", { class: "chips" }, labels.map(([key, value]) => el("span", { class: "chip" }, `${key}: ${value}`)))],
    ["Also called", voice.aliases && voice.aliases.join(", ")],
    ["Speaks with", voice.settings && Object.entries(voice.settings).map(([name, value]) => `${name} ${value}`).join(", ")],
    ["Language", voice.language],
    ["Ways of cloning", modes.map(modeTitle).join(", ")],
    ["Consent", voice.consent_id ? `recording ${voice.consent_id}` : voice.consent],
    ["Clip", voice.duration_seconds && `${seconds(voice.duration_seconds)}, ${voice.sample_rate} Hz, ${bytes(voice.file_size)}`],
    ["Clips", voice.clips && voice.clips.map((clip) => seconds(clip.duration_seconds)).join(", ")],
    ["Embedding", voice.embedding_dim && `${voice.embedding_dim} values`],
    ["Registered", moment(voice.created_at)],
    ["Changed", voice.updated_at && moment(voice.updated_at)],
    ["Expires", voice.expires_at && moment(voice.expires_at)],
    ["Id", el("span", {}, el("span", { class: "mono" }, voice.id), navigator.clipboard ? copy : null)],
  ];
  return el("dl", { class: "facts" }, rows.filter(([, value]) => value)
    .map(([title, value]) => [el("dt", {}, title), el("dd", {}, value)]).flat());
}

function saidIn({ clips, ref_text: text }) {
  const lines = clips ? text.split("\n") : [text];
  return lines.map((line, index) => [index ? el("br") : null, el("q", {}, line)]).flat();
}

function invitation() {
  return el("div", { class: "empty" }, icon("wave", "big"),
    el("h2", {}, "Choose a voice, or add one"),
    el("p", {}, "A clip of a few seconds is enough: drop a file anywhere on this page, or record one."),
    el("a", { class: "button primary", href: "#/add" }, icon("mic"), "Add a voice"));
}

// Adding a voice: a clip, what it is worth, what is written beside it, and then
// watching it become ready.

import { getJson, send, voicePath } from "./api.js";
import { ClipsInput } from "./clips-input.js";
import { ConsentField } from "./consent.js";
import { openDialog } from "./dialog.js";
import { busy, button, byId, debounced, el, icon, showError } from "./dom.js";
import { clipNames, fromLocalField, seconds, toLocalField } from "./format.js";
import { LabelEditor } from "./labels.js";
import { load } from "./library.js";
import { statuses } from "./statuses.js";
import { verdictOf } from "./verdict.js";

const PLAIN = ["name", "language", "speaker_description"];

let clips;
let labels;
let consent;
let watched = null;

export function startAdd() {
  const form = byId("add-form");
  clips = new ClipsInput();
  addEventListener("clips-known", () => clips.show());
  labels = new LabelEditor();
  consent = new ConsentField();
  byId("clip-input").append(clips.element);
  byId("add-labels").append(labels.element);
  byId("add-consent").append(consent.element);
  form.elements.name.addEventListener("input", debounced(noteName, 400));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    busy(byId("register"), byId("add-error"), register);
  });
  statuses.addEventListener("change", ({ detail }) => {
    if (detail.id === watched?.voice.id) showProgress(detail);
  });
}

/** Clips from elsewhere on the page. */
export function takeClips(files) {
  again();
  clips.take(files);
}

/** Another view is shown: the microphone does not stay on behind it. */
export function leaveAdd() {
  again();
  clips.stop();
  consent.stop();
}

/** Leave what was registered, for the next one. */
export function again() {
  if (watched) statuses.unwatch(watched.voice.id);
  watched = null;
  byId("add-progress").hidden = true;
  byId("add-form").hidden = false;
}

/** Begin with what is written beside a voice: other clips are to take its place. */
export function addOver(voice) {
  again();
  clear();
  const { elements } = byId("add-form");
  for (const name of PLAIN) elements[name].value = voice[name] ?? "";
  elements.expires_at.value = toLocalField(voice.expires_at);
  labels.set(voice.labels);
  consent.set(voice);
  noteName();
}

async function noteName() {
  const same = await sameName();
  byId("name-note").textContent = same ? `There is a voice ${same}. Registering replaces it, if this server allows that.` : "";
}

/** The name of the voice that registering would replace. */
async function sameName() {
  const name = byId("add-form").elements.name.value.trim();
  if (!name || name === "." || name === ".." || name.includes("/")) return undefined;
  // Searched for, and not asked for by its path: that there is none is no error.
  const asked = new URLSearchParams({ search: name, limit: 50 });
  const found = await getJson(`audio/voices?${asked}`, { isBackground: true }).catch(() => ({}));
  const fold = (text) => text.trim().normalize("NFC").toLowerCase();
  return (found.uploaded_voices ?? []).find((voice) => fold(voice.name) === fold(name))?.name;
}

/** Whether to go on, although a voice and all that is written of it would be gone. */
async function mayReplace() {
  const same = await sameName();
  return !same || await openDialog({
    title: `Replace ${same}?`,
    body: el("p", {}, "Its clip, transcript, consent, labels, language and description are replaced by these, for good."),
    submit: "Replace", danger: true, onSubmit: () => true,
  });
}

async function register() {
  const form = byId("add-form");
  const fields = new FormData();
  if (!clips.appendTo(fields)) return;
  const given = consent.value;
  if (!given || !await mayReplace()) return;
  for (const name of PLAIN) {
    const value = form.elements[name].value.trim();
    if (value) fields.append(name, value);
  }
  fields.append("consent", given);
  const expires = fromLocalField(form.elements.expires_at.value);
  if (expires) fields.append("expires_at", expires);
  if (Object.keys(labels.value).length) fields.append("labels", JSON.stringify(labels.value));
  byId("register").textContent = "Registering …";
  try {
    const answer = await (await send("audio/voices", { method: "POST", body: fields })).json();
    registered(answer);
  } catch (error) {
    error.message = clipNames(error.message);
    throw error;
  } finally {
    byId("register").textContent = "Register";
  }
}

function registered(answer) {
  clear();
  byId("add-form").hidden = true;
  watched = { ...answer, since: performance.now() };
  statuses.delete(answer.voice.id);
  statuses.watch(answer.voice.id);
  byId("add-progress").hidden = false;
  showProgress({ status: "pending" });
  byId("add-progress").querySelector("h2").focus();
  load();
}

function clear() {
  byId("add-form").reset();
  labels.set({});
  clips.clear();
  byId("name-note").textContent = "";
  showError(byId("add-error"), null);
  consent.stop();
  byId("add-consent").replaceChildren((consent = new ConsentField()).element);
}

function showProgress({ status, error }) {
  const { voice, warnings = [], quality, note, since } = watched;
  const took = seconds((performance.now() - since) / 1000);
  const encoded = {
    ready: ["done", `Encoded, ${took} after it was stored`],
    failed: ["failed", "The encoding failed"],
    unsupported: ["done", "This model's references are not cached here"],
  }[status] ?? ["now", "Encoding in the background …"];
  const place = byId("add-progress");
  const hadFocus = place.contains(document.activeElement);
  place.dataset.status = status ?? "";
  place.replaceChildren(
    el("h2", { tabindex: -1 }, el("bdi", {}, voice.name),
      ` ${status === "ready" ? "is ready" : "is registered"}`),
    el("ol", { class: "steps", role: "list" },
      el("li", { class: "done" }, "Received and checked"),
      el("li", { class: "done" }, "Stored, with its consent"),
      el("li", { class: encoded[0], role: "listitem", "aria-current": encoded[0] === "now" ? "step" : null }, encoded[1])),
    el("div", { id: "progress-error" }),
    note ? el("p", { class: "notice" }, note) : "",
    ...warnings.map(({ message }) => el("p", { class: "notice fair" }, clipNames(message))),
    quality ? verdictOf(quality) : "",
    el("div", { class: "actions" },
      button("Add another", () => {
        again();
        clips.focus();
      }, { id: "add-another" }),
      el("a", { class: "button primary", href: `#/voices/${encodeURIComponent(voice.id)}`, id: "try-new" },
        icon("play"), "Try it")));
  if (status === "failed") showError(byId("progress-error"), new Error(error ?? "No reason was given."), retry);
  if (hadFocus) place.querySelector("h2").focus();
}

async function retry() {
  const { id } = watched.voice;
  showProgress({ status: "processing" });
  await send(voicePath(id, "cache"), { method: "POST" }).catch(() => {}); // the status will say
  statuses.delete(id);
}

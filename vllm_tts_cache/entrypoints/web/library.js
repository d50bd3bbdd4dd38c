// The list of voices: search, labels, order, pages, and how far each is.

import { getJson } from "./api.js";
import { button, byId, debounced, el, icon, showError } from "./dom.js";
import { hueOf, seconds } from "./format.js";
import { showStatus, statusPill, statuses } from "./statuses.js";

const PAGE = 50;
const MAX_SUGGESTED = 8;

const state = { labels: new Set(), next: null, selected: null };
const voices = new Map(); // id -> {voice, item, pill}
let loading = null;
let numClips = 1;

/** How many clips the served model takes for one voice, as far as is known. */
export const maxClips = () => numClips;

// Rows that can be seen, and a little more: only those are asked about.
const seen = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) {
    const { id, watched } = target.dataset;
    if (isIntersecting === Boolean(watched)) continue;
    if (isIntersecting) statuses.watch(id);
    else statuses.unwatch(id);
    target.dataset.watched = isIntersecting ? "yes" : "";
  }
}, { rootMargin: "100px" });

const nearEnd = new IntersectionObserver(([entry]) => {
  if (entry.isIntersecting) load({ more: true });
}, { rootMargin: "300px" });

export function startLibrary() {
  byId("search").addEventListener("input", debounced(() => load()));
  byId("sort").addEventListener("change", () => load());
  byId("more").addEventListener("click", () => load({ more: true, focus: true }));
  byId("voice-list").addEventListener("keydown", moveInList);
  nearEnd.observe(byId("more"));
  statuses.addEventListener("change", ({ detail }) => {
    const row = voices.get(detail.id);
    if (row) showStatus(row.pill, detail);
  });
}

/** Load the first page, or the next one. */
export async function load({ more = false, focus = false } = {}) {
  if (more && (!state.next || loading?.more)) return;
  loading?.abort.abort();
  const mine = { abort: new AbortController(), more };
  loading = mine;
  byId("voice-list").setAttribute("aria-busy", "true");
  try {
    const page = await getJson(`audio/voices?${query(more)}`, { signal: mine.abort.signal });
    if (loading !== mine) return;
    loading = null;
    state.next = page.next ?? null;
    numClips = page.max_clips ?? 1;
    dispatchEvent(new Event("clips-known"));
    show(page, more, focus);
    showError(byId("list-error"), null);
  } catch (error) {
    if (loading !== mine) return;
    loading = null;
    state.next = null; // else what cannot be loaded is asked for without end
    byId("more").hidden = true;
    showError(byId("list-error"), error, () => load());
  } finally {
    byId("voice-list").removeAttribute("aria-busy");
  }
}

/** Mark the voice that is shown beside the list. */
export function select(id) {
  state.selected = id;
  for (const [each, { item }] of voices) mark(item, each === id);
}

function mark(item, isSelected) {
  if (isSelected) item.firstElementChild.setAttribute("aria-current", "true");
  else item.firstElementChild.removeAttribute("aria-current");
}

function query(more) {
  const asked = new URLSearchParams({ limit: PAGE, sort: byId("sort").value });
  const search = byId("search").value.trim();
  if (search) asked.set("search", search);
  for (const label of state.labels) asked.append("label", label);
  if (more) asked.set("after", state.next);
  return asked;
}

function show(page, more, focus) {
  const list = byId("voice-list");
  if (!more) clear(list);
  const items = (page.uploaded_voices ?? []).filter(({ id }) => !voices.has(id)).map(row);
  list.append(...items);
  byId("more").hidden = !state.next;
  byId("num-voices").textContent = voices.size ? `${voices.size}${state.next ? "+" : ""}` : "";
  if (focus) items[0]?.firstElementChild.focus();
  if (!more) showBuiltIn(page);
  showLabels();
  showEmpty();
}

function clear(list) {
  for (const { item } of voices.values()) {
    seen.unobserve(item);
    if (item.dataset.watched) statuses.unwatch(item.dataset.id);
  }
  voices.clear();
  list.replaceChildren();
}

function row(voice) {
  const pill = statusPill(voice.id);
  const name = el("span", { class: "voice-name" }, el("bdi", {}, voice.name));
  const link = el("a", { href: `#/voices/${encodeURIComponent(voice.id)}` },
    face(voice), name, pill, el("span", { class: "voice-facts" }, el("bdi", {}, factsOf(voice))));
  const item = el("li", { data: { id: voice.id, name: voice.name } }, link);
  mark(item, voice.id === state.selected);
  voices.set(voice.id, { voice, item, pill });
  seen.observe(item);
  return item;
}

export function face(voice, size = "") {
  const [first = "?"] = voice.name.trim();
  const shown = el("span", { class: `face ${size}`, "aria-hidden": "true" }, first.toUpperCase());
  shown.style.setProperty("--hue", hueOf(voice.id));
  return shown;
}

function factsOf(voice) {
  const labels = Object.values(voice.labels ?? {});
  const length = voice.duration_seconds ? seconds(voice.duration_seconds) : "embedding";
  return [length, voice.language, ...labels, voice.speaker_description].filter(Boolean).join(" · ");
}

function showBuiltIn(page) {
  const registered = new Set((page.uploaded_voices ?? []).map(({ name }) => name));
  const others = page.voices.filter((name) => !registered.has(name) && name !== "default");
  byId("built-in").hidden = others.length === 0;
  byId("built-in").textContent = `The model also has voices of its own: ${others.join(", ")}.`;
}

function showLabels() {
  const counts = new Map();
  for (const { voice } of voices.values()) {
    for (const [key, value] of Object.entries(voice.labels ?? {})) {
      const label = `${key}:${value}`;
      counts.set(label, (counts.get(label) ?? 0) + 1);
    }
  }
  const common = [...counts].sort((a, b) => b[1] - a[1]).map(([label]) => label);
  const others = common.filter((label) => !state.labels.has(label)).slice(0, MAX_SUGGESTED);
  const place = byId("label-filters");
  const focused = place.contains(document.activeElement) ? document.activeElement.dataset.label : null;
  place.replaceChildren(...[...state.labels, ...others].map(chip));
  place.hidden = place.childElementCount === 0;
  [...place.children].find(({ dataset }) => dataset.label === focused)?.focus();
}

function chip(label) {
  const isOn = state.labels.has(label);
  const toggle = () => {
    if (isOn) state.labels.delete(label);
    else state.labels.add(label);
    showLabels();
    load();
  };
  return button(label.replace(":", ": "), toggle, { class: "chip", "aria-pressed": String(isOn), data: { label } });
}

function showEmpty() {
  const place = byId("list-empty");
  place.hidden = voices.size > 0;
  if (!place.hidden) {
    const isFiltered = byId("search").value.trim() || state.labels.size;
    place.replaceChildren(isFiltered
      ? el("p", {}, "No voice fits.")
      : el("p", {}, "No voice is registered yet."));
  }
}

function moveInList(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const item = event.target.closest("li");
  if (!step || !item) return;
  event.preventDefault();
  const other = step > 0 ? item.nextElementSibling : item.previousElementSibling;
  other?.firstElementChild.focus();
}

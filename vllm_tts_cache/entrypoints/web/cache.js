// The cache: what is stored, what is in memory, what was encoded.

import { getJson } from "./api.js";
import { bar, byId, el, showError } from "./dom.js";
import { bytes, number, seconds } from "./format.js";

const REFRESH_MS = 2000;
const USAGE_MS = 60_000;
let timer = null;
let spoken = null;
let askAgainAt = 0;
let isShown = false;

export function showCache(shouldShow) {
  isShown = shouldShow;
  clearTimeout(timer);
  if (shouldShow) refresh({ isBackground: false });
}

document.addEventListener("visibilitychange", () => {
  if (isShown && !document.hidden) refresh();
});

async function refresh({ isBackground = true } = {}) {
  clearTimeout(timer);
  try {
    askUsage(isBackground);
    render(await getJson("audio/speaker_cache", { isBackground }));
    showError(byId("cache-error"), null);
  } catch (error) {
    const wantsKey = error.status === 401;
    showError(byId("cache-error"), error, wantsKey ? () => showCache(true) : null);
    if (wantsKey) return; // it stays wrong until somebody gives the key
  }
  clearTimeout(timer);
  if (isShown && !document.hidden) timer = setTimeout(() => refresh(), REFRESH_MS);
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Once a minute, beside the rest: it reads all that was spoken in 30 days. */
function askUsage(isBackground) {
  if (Date.now() < askAgainAt) return;
  askAgainAt = Date.now() + USAGE_MS;
  getJson("audio/usage?limit=1", { isBackground }).then(({ totals }) => { spoken = totals; }, () => {});
}

function render(stats) {
  const workers = stats.workers ?? [];
  const hits = sum(workers.map(({ hits }) => sum(Object.values(hits ?? {}))));
  const misses = sum(workers.map(({ misses = 0 }) => misses));
  const encodes = sum(workers.map(({ encodes = {} }) => sum(Object.values(encodes))));
  const waiting = sum(workers.map(({ waiting = {} }) => sum(Object.values(waiting))));
  const inFlight = sum(workers.map(({ in_flight: count = 0 }) => count));
  const failed = sum(workers.map(({ failed_prompts: count = 0 }) => count));
  const asked = hits + misses;
  byId("cache-body").replaceChildren(
    el("div", { class: "cards" },
      card("Voices", number(stats.registry?.speakers ?? 0), "registered"),
      card("Look-ups that hit", asked ? `${number((hits / asked) * 100, 1)} %` : "–",
        `${number(hits)} hits, ${number(misses)} misses`, asked ? hits / asked : null),
      card("Encodes", number(encodes), "since the workers started"),
      card("In flight", number(inFlight), `${number(waiting)} waiting, ${number(stats.flights ?? 0)} waited for here`),
      ...storage(stats.storage),
      spoken ? card("Spoken in 30 days", seconds(spoken.seconds),
        `${number(spoken.requests)} requests, ${number(spoken.characters)} characters`) : null,
      card("Prompts without a speaker", number(failed), failed ? "requests were ended for want of one" : "as it should be"),
      stats.deletions?.unfinished
        ? card("Deletions under way", number(stats.deletions.unfinished), "they go on by themselves") : null),
    ...workers.map(worker));
}

function card(title, value, note, share = null) {
  return el("div", { class: "pane card" }, el("h2", {}, title), el("p", { class: "value" }, value),
    share === null ? null : bar(share), el("p", { class: "hint" }, note));
}

function storage({ registered, inline, max_bytes: limits } = {}) {
  if (!registered) return [];
  const encodings = registered.encodings.bytes + inline.encodings.bytes;
  const files = registered.encodings.files + inline.encodings.files;
  return [
    budget("Reference clips", registered.audio, limits.registered_audio),
    budget("Inline references", inline.audio, limits.inline_audio),
    budget("Encodings on disk", { bytes: encodings, files }, limits.encodings),
  ];
}

const budget = (title, { bytes: used, files }, limit) =>
  card(title, bytes(used), `${number(files)} of at most ${bytes(limit)} together`, used / limit);

const each = (counts = {}) =>
  Object.entries(counts).map(([name, count]) => `${name} ${number(count)}`).join(", ");

function worker(stats) {
  const memory = stats.tiers?.memory;
  const rows = [
    ["Encodes", each(stats.encodes)],
    ["Prompts given", number(stats.prompts ?? 0)],
    ["Encoding now", number(stats.in_flight ?? 0)],
    ["Waiting", each(stats.waiting)],
    ...Object.entries(stats.hits ?? {}).map(([tier, count]) => [`Hits, ${tier}`, number(count)]),
    ["Misses", number(stats.misses ?? 0)],
    ["Evictions", number(stats.evictions ?? 0)],
    ["Dropped, as nobody waited", number(stats.dropped ?? 0)],
    ["Refused, over the bound", number(stats.refused ?? 0)],
    ["Corrupt files removed", number(stats.corrupt ?? 0)],
    ["Tier errors", number(stats.tier_errors ?? 0)],
  ];
  const title = `Worker ${stats.rank ?? ""}`;
  return el("section", { class: "pane", "aria-label": title }, el("h2", {}, title),
    memory ? el("p", {}, `${number(memory.entries)} encodings in memory, ${bytes(memory.bytes)} of ${bytes(memory.max_bytes)}`) : null,
    memory ? bar(memory.bytes / memory.max_bytes) : null,
    el("dl", { class: "figures worker" }, rows.map(([name, value]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, value)))));
}

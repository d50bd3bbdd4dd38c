// How far the encodings of voices are: asked only of those that are looked at and are
// not ready, a few at a time, and less often the longer nothing changes.

import { getJson, voicePath } from "./api.js";
import { el } from "./dom.js";

const MAX_AT_ONCE = 6;
const TICK_MS = 500;
const FIRST_MS = 1000;
const LONGEST_MS = 15_000;
const LAST = new Set(["ready", "unsupported"]);

const NAMES = {
  ready: "ready",
  processing: "encoding",
  pending: "not encoded",
  failed: "failed",
  unsupported: "not cached",
};

class Statuses extends EventTarget {
  #watched = new Map(); // id -> how many look at it
  #known = new Map(); // id -> {status, error, dueAt, waitMs}
  #asking = new Set();

  constructor() {
    super();
    setInterval(() => this.#tick(), TICK_MS);
  }

  watch(id) {
    this.#watched.set(id, (this.#watched.get(id) ?? 0) + 1);
  }

  unwatch(id) {
    const left = (this.#watched.get(id) ?? 0) - 1;
    if (left > 0) this.#watched.set(id, left);
    else this.#watched.delete(id);
  }

  get(id) {
    return this.#known.get(id) ?? null;
  }

  /** Ask anew: something about the voice has changed. */
  delete(id) {
    this.#known.delete(id);
  }

  /** Take what another answer told. */
  learn(id, status, error = null) {
    const before = this.#known.get(id);
    const isNew = before?.status !== status;
    const waitMs = isNew ? FIRST_MS : Math.min(before.waitMs * 1.5, LONGEST_MS);
    this.#known.set(id, { status, error, waitMs, dueAt: LAST.has(status) ? Infinity : performance.now() + waitMs });
    if (isNew) this.dispatchEvent(new CustomEvent("change", { detail: { id, status, error } }));
  }

  #tick() {
    if (document.hidden) return;
    const now = performance.now();
    for (const id of this.#watched.keys()) {
      if (this.#asking.size >= MAX_AT_ONCE) return;
      if (!this.#asking.has(id) && (this.#known.get(id)?.dueAt ?? 0) <= now) this.#ask(id);
    }
  }

  async #ask(id) {
    this.#asking.add(id);
    try {
      const { cache_status: status, error } = await getJson(voicePath(id, "cache"), { isBackground: true });
      this.learn(id, status, error);
    } catch {
      // Gone meanwhile, or the server is: the next action will say so.
      this.#known.set(id, { status: null, error: null, waitMs: LONGEST_MS, dueAt: performance.now() + LONGEST_MS });
    } finally {
      this.#asking.delete(id);
    }
  }
}

export const statuses = new Statuses();

/** A pill that shows a status; empty while it is not known. */
export function statusPill(id) {
  const pill = el("span", { data: { status: "" } });
  showStatus(pill, statuses.get(id));
  return pill;
}

export function showStatus(pill, known) {
  const status = known?.status ?? "";
  pill.dataset.status = status;
  pill.className = status ? `pill ${status}` : "";
  pill.textContent = NAMES[status] ?? status;
  pill.title = known?.error ?? "";
}

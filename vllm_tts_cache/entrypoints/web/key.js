// The API key of a server that was started with --api-key: asked for, and kept for
// this tab only.

import { byId, el } from "./dom.js";
import { openDialog } from "./dialog.js";

const PLACE = "vllm-tts-cache.api-key";
let asking = null;
let isDeclined = false;

// Whoever was asked and gave none is not asked again before doing something else.
for (const type of ["click", "submit", "hashchange"]) {
  addEventListener(type, () => { isDeclined = false; }, { capture: true });
}

askForKey.current = () => sessionStorage.getItem(PLACE);

/**
 * Ask for another key than the one that was refused; null if nobody gives one.
 * Nobody is asked for the sake of what the page does by itself.
 */
export function askForKey(refused, { isBackground = false } = {}) {
  const current = askForKey.current();
  if (current && current !== refused) return Promise.resolve(current); // by another request
  if (!asking && (isBackground || isDeclined)) return Promise.resolve(null);
  asking ??= ask(Boolean(refused)).finally(() => { asking = null; });
  return asking;
}

export function forgetKey() {
  sessionStorage.removeItem(PLACE);
  location.reload();
}

async function ask(wasRefused) {
  const field = el("input", { type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const given = await openDialog({
    title: "This server wants its API key",
    body: [
      wasRefused ? el("p", { class: "notice bad", role: "alert" }, "The server refused that key.") : null,
      el("label", { class: "field" }, "API key", field,
        el("span", { class: "hint" }, "Kept in this tab until it is closed, and sent to this server only.")),
    ],
    submit: "Go on",
    onSubmit: () => field.value.trim(),
    focus: field,
  });
  isDeclined = !given;
  if (isDeclined) return null;
  sessionStorage.setItem(PLACE, given);
  byId("forget-key").hidden = false;
  return given;
}

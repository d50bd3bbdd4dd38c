// The consent recordings that are kept, and deleting one that no voice stands on.

import { getJson } from "./api.js";
import { deleteWhole } from "./changes.js";
import { openDialog } from "./dialog.js";
import { button, byId, el, showError, toast } from "./dom.js";
import { moment } from "./format.js";

const SHOWN = 50;
let last = ""; // where the next page begins
let asked = 0;

export function showConsents(shouldShow) {
  if (shouldShow) load();
}

/** Load the next page, behind `after`; from the first one without it. */
async function load(after = "") {
  const turn = ++asked;
  const place = byId("consents-error");
  try {
    const query = new URLSearchParams({ limit: SHOWN, after });
    const page = await getJson(`audio/voice_consents?${query}`);
    if (turn !== asked) return; // somebody asked again meanwhile
    showError(place, null);
    last = page.last_id ?? last;
    const rows = page.data.map(row);
    if (after) byId("consent-list").append(...rows);
    else byId("consent-list").replaceChildren(...rows);
    byId("more-consents").hidden = !page.has_more;
    byId("no-consents").hidden = byId("consent-list").childElementCount > 0;
  } catch (error) {
    if (turn === asked) showError(place, error, () => load(after));
  }
}

function row(consent) {
  const said = `${consent.language}, kept ${moment(consent.created_at)}`;
  const remove = button("Delete", () => askDelete(consent), {
    iconName: "trash", class: "quiet", "aria-label": `Delete ${consent.name}`,
  });
  return el("li", { class: "pane row", data: { consent: consent.id } },
    el("div", { class: "grow" }, el("b", {}, consent.name), el("p", { class: "hint" }, said)),
    remove);
}

async function askDelete(consent) {
  const progress = el("p", { class: "hint", role: "status" });
  const standing = el("div");
  const isGone = await openDialog({
    title: `Delete ${consent.name}?`,
    body: [el("p", {}, "This removes the recording, for good. One that a voice stands on stays."), progress, standing],
    submit: "Delete",
    danger: true,
    onSubmit: async () => {
      standing.replaceChildren();
      try {
        return await deleteWhole(`audio/voice_consents/${encodeURIComponent(consent.id)}`, progress);
      } catch (error) {
        standing.append(...voicesOf(error));
        throw error;
      }
    },
  });
  if (!isGone) return;
  toast("The consent recording is deleted.");
  await load();
  byId("consents-title").focus(); // where it was pressed is nothing any more
}

/** The voices that stand on it, as the server names them: a way to each. */
function voicesOf(error) {
  const voices = error.body?.voices ?? [];
  if (!voices.length) return [];
  const links = voices.map(({ id, name }) =>
    el("li", {}, el("a", { href: `#/voices/${encodeURIComponent(id)}` }, name)));
  return [el("p", {}, "They stand on it:"), el("ul", {}, links)];
}

byId("more-consents").addEventListener("click", () => load(last));

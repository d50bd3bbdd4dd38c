// The page: which view is shown, and what is dropped on it.

import { leaveAdd, startAdd, takeClips } from "./add.js";
import { askForKey, forgetKey } from "./key.js";
import { askImport, isOfVoices } from "./bundles.js";
import { modelName } from "./api.js";
import { byId, toast } from "./dom.js";
import { openDialogs } from "./dialog.js";
import { load, startLibrary } from "./library.js";
import { showCache } from "./cache.js";
import { showConsents } from "./consents.js";
import { showVoice, startVoice } from "./voice.js";

const TITLES = { library: "Voices", add: "Add a voice · Voices", consents: "Consents · Voices", cache: "Cache · Voices" };

function route(isFirst) {
  const [, view = "", ...rest] = location.hash.split("/");
  const id = rest.join("/");
  const name = ["add", "consents", "cache"].includes(view) ? view : "library";
  const wasShown = !byId(`view-${name}`).hidden;
  for (const each of Object.keys(TITLES)) byId(`view-${each}`).hidden = each !== name;
  for (const link of document.querySelectorAll(".top nav a")) {
    if (link.dataset.view === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = TITLES[name];
  if (name !== "add") leaveAdd();
  showCache(name === "cache");
  showConsents(name === "consents");
  showVoice(name === "library" && view === "voices" ? decoded(id) : null, { focus: !isFirst });
  // Whoever does not see the page hears that another view is there.
  if (!isFirst && !id) byId(`${name}-title`).focus({ preventScroll: wasShown });
  if (!wasShown) scrollTo(0, 0);
}

/** Undo the escapes of an address; a per cent sign that begins none stays. */
function decoded(text) {
  return text.replace(/(?:%[0-9a-f]{2})+/gi, (escaped) => {
    try {
      return decodeURIComponent(escaped);
    } catch {
      return escaped;
    }
  });
}

async function importBundles(files) {
  const told = await askImport(files);
  if (!told) return;
  toast(told);
  load();
}

function startDrops() {
  const place = byId("drop-here");
  let depth = 0; // every element on the way reports, too
  const isFile = ({ dataTransfer }) => dataTransfer?.types.includes("Files");
  const end = () => {
    depth = 0;
    place.hidden = true;
  };
  addEventListener("dragenter", (event) => {
    if (!isFile(event) || openDialogs().length) return;
    depth += 1;
    // The fields for a clip take it themselves.
    place.hidden = !byId("view-add").hidden;
  });
  addEventListener("dragleave", () => (depth -= 1) <= 0 && end());
  addEventListener("dragover", (event) => isFile(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    if (!isFile(event)) return;
    event.preventDefault(); // the browser would open the file in place of the page
    end();
    if (openDialogs().length) return;
    const files = [...event.dataTransfer.files];
    const ofVoices = files.filter(isOfVoices);
    if (ofVoices.length) {
      importBundles(ofVoices);
      if (ofVoices.length < files.length) toast("Only files of voices are taken. Drop clips by themselves.");
    } else if (files.length) {
      location.hash = "#/add";
      takeClips(files);
    }
  }, { capture: false });
}

byId("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address says which view is shown
  byId("main").focus();
});
byId("open-import").addEventListener("click", () => importBundles([]));
byId("forget-key").addEventListener("click", forgetKey);
byId("forget-key").hidden = !askForKey.current();
addEventListener("hashchange", () => {
  openDialogs().forEach((dialog) => dialog.close()); // it was about what was shown
  route(false);
});

startLibrary();
startVoice();
startAdd();
startDrops();
route(true);
load();
modelName().then((name) => { byId("model").textContent = name ?? ""; }).catch(() => {}); // said where it matters

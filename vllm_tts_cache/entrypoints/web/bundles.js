// Bundles: one file that holds a voice, to keep or to move to another server.

import { send, voicePath } from "./api.js";
import { openDialog } from "./dialog.js";
import { el } from "./dom.js";

/** Whether a file holds voices, and is no clip, as its name says. */
export const isOfVoices = ({ name }) => /\.(voice|zip)$/i.test(name);

/** Save a voice as a file. */
export async function saveBundle(voice) {
  let answer;
  try {
    answer = await send(voicePath(voice.id, "bundle"));
  } catch (error) {
    throw error.isNoRoute ? new Error("This server makes no bundles.") : error;
  }
  const link = el("a", { download: `${voice.name}.voice` });
  link.href = URL.createObjectURL(await answer.blob());
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Ask for bundles and import them; the sentence that says what came, or null. */
export function askImport(files = []) {
  const chooser = el("input", { type: "file", multiple: true, accept: ".voice,.zip", id: "bundle-files" });
  const conflict = el("select", {},
    el("option", { value: "fail" }, "leave the one that is here"),
    el("option", { value: "replace" }, "replace it"),
    el("option", { value: "rename" }, "keep both, under another name"));
  const given = files.length ? el("p", {}, files.map(({ name }) => name).join(", ")) : null;
  return openDialog({
    title: "Import voices",
    body: [
      el("p", { class: "muted" }, "A bundle holds a voice with its clip, texts, consent and encodings. Encodings that this server signed, and that fit its model, are taken as they are."),
      given ?? el("label", { class: "field" }, "Bundles", chooser),
      el("label", { class: "field" }, "If there is a voice of that name", conflict),
    ],
    submit: "Import",
    focus: given ? conflict : chooser,
    onSubmit: () => importAll(files.length ? files : [...chooser.files], conflict.value),
  });
}

async function importAll(files, onConflict) {
  if (!files.length) throw new Error("Choose a file.");
  const imported = [];
  for (const file of files) {
    const form = new FormData();
    form.append("bundle", file, file.name);
    form.append("on_conflict", onConflict);
    try {
      const answer = await send("audio/voices/import", { method: "POST", body: form });
      imported.push(...(await answer.json()).imported);
    } catch (error) {
      const why = error.isNoRoute ? "This server takes no bundles." : error.message;
      const before = imported.length ? ` Imported before it: ${names(imported)}.` : "";
      throw new Error(`${file.name}: ${why}${before}`);
    }
  }
  const kept = imported.reduce((sum, each) => sum + each.encodings_kept, 0);
  return `Imported ${names(imported)}. ${kept ? "What was encoded came along." : "It is encoded now."}`;
}

const names = (imported) => imported.map(({ voice }) => voice.name).join(", ") || "nothing";

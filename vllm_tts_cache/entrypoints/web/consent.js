// The consent of a voice's owner: a reference in words, or a recording.

import { getJson, send } from "./api.js";
import { ClipInput } from "./clip-input.js";
import { button, busy, el, newId, showError, toast } from "./dom.js";
import { moment } from "./format.js";

const SHOWN = 100;

export class ConsentField {
  #text = el("input", { maxlength: 512, placeholder: "signed 2026-11-22, folder 12", autocomplete: "off", id: "consent-text" });
  #list = el("select", { "aria-label": "Consent recording", id: "consent-recording" });
  #recordings = el("div", { hidden: true });
  #inWords = el("label", { class: "field" }, "Reference to the consent", this.#text);
  #new = el("div");
  #clip = null; // of a recording that is not kept yet
  #error = el("div");
  #kind = "text";

  constructor() {
    const name = newId("consent");
    const choice = (kind, label) => {
      const radio = el("input", { type: "radio", name, value: kind, checked: kind === "text" });
      radio.addEventListener("change", () => this.#choose(kind));
      return el("label", { class: "check" }, radio, label);
    };
    this.#recordings.append(el("div", { class: "row" }, this.#list), this.#new, this.#error);
    this.#list.addEventListener("change", () => this.#offerNew());
    this.element = el("fieldset", {},
      el("legend", { class: "hidden" }, "Consent"),
      choice("text", "In words: where the consent can be found"),
      choice("recording", "As a recording of the owner's voice"),
      this.#inWords, this.#recordings);
  }

  /** What is sent as `consent`; null, and said why, while it is missing. */
  get value() {
    const given = this.#kind === "text" ? this.#text.value.trim() : this.#list.value;
    if (given) return given;
    if (this.#kind === "text") {
      showError(this.#error, null);
      this.#text.setCustomValidity("Say where the consent can be found.");
      this.#text.reportValidity();
      this.#text.addEventListener("input", () => this.#text.setCustomValidity(""), { once: true });
    } else {
      showError(this.#error, new Error("Choose a consent recording, or keep a new one."));
      this.#list.focus();
    }
    return null;
  }

  /** Take over what a voice stands on. */
  set({ consent, consent_id: id }) {
    if (!id) {
      this.#text.value = consent;
      return;
    }
    this.element.querySelector("input[value=recording]").checked = true;
    this.#choose("recording", id);
  }

  /** End a recording of it that is under way. */
  stop() {
    this.#clip?.stop();
  }

  #choose(kind, chosen = "") {
    this.stop();
    this.#kind = kind;
    this.#inWords.hidden = kind !== "text";
    this.#recordings.hidden = kind !== "recording";
    if (kind === "recording") this.#load(chosen).catch((error) => showError(this.#error, error));
  }

  async #load(chosen = "") {
    const { data } = await getJson(`audio/voice_consents?limit=${SHOWN}`);
    this.#list.replaceChildren(
      el("option", { value: "" }, data.length ? "Choose a recording, or make a new one" : "None is kept yet: make one"),
      ...data.map((consent) => el("option", { value: consent.id },
        `${consent.name} (${consent.language}, ${moment(consent.created_at)})`)));
    this.#list.value = chosen;
    this.#offerNew();
  }

  #offerNew() {
    if (this.#list.value) {
      this.stop();
      this.#new.replaceChildren();
      return;
    }
    if (this.#new.childElementCount) return;
    const clip = new ClipInput({ what: "the consent recording", kind: "consent" });
    this.#clip = clip;
    const name = el("input", { placeholder: "Ann's consent", autocomplete: "off", maxlength: 128, id: "consent-name" });
    const language = el("input", { list: "languages", value: "en-US", maxlength: 35, autocomplete: "off", id: "consent-language" });
    const keep = button("Keep this recording", () => busy(keep, this.#error, () => this.#keep(clip, name, language)), { id: "keep-consent" });
    this.#new.replaceChildren(
      el("div", { class: "pair" }, el("label", { class: "field" }, "Its name", name),
        el("label", { class: "field" }, "Its language", language)),
      clip.element, el("div", { class: "row" }, keep));
  }

  async #keep(clip, name, language) {
    if (!clip.blob) throw new Error("Record the consent, or choose a file of it.");
    const form = new FormData();
    form.append("name", name.value.trim());
    form.append("language", language.value.trim());
    form.append("recording", clip.blob, clip.fileName);
    const kept = await (await send("audio/voice_consents", { method: "POST", body: form })).json();
    clip.clear();
    this.#new.replaceChildren();
    await this.#load(kept.id);
    this.#list.focus();
    toast("The consent recording is kept.");
  }
}

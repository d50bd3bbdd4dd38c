// The clips of one voice: each with what it is worth, and what is said in it.

import { ClipInput } from "./clip-input.js";
import { button, el, toast } from "./dom.js";
import { maxClips } from "./library.js";
import { showVerdict } from "./verdict.js";

/** One of them. */
class Part {
  #checking = new AbortController();
  #title = el("h3");
  #verdict = el("div", { "aria-live": "polite" });
  #remove;
  text = el("textarea", { name: "ref_text", rows: 3, maxlength: 2000 });

  constructor({ onChange, onFiles, onRemove }) {
    this.clip = new ClipInput({
      what: "the clip", kind: "clip", onFiles, takesSeveral: () => maxClips() > 1,
      onChange: async (blob) => {
        this.#verdict.replaceChildren();
        if (blob && this.clip.readText && !this.said) this.text.value = this.clip.readText;
        onChange();
        await this.#judge();
      },
    });
    this.text.addEventListener("input", onChange);
    this.text.addEventListener("change", () => this.#judge());
    this.#remove = button("Remove", onRemove, { iconName: "trash", class: "quiet", data: { act: "remove" } });
    this.element = el("div", { class: "clip", role: "group" },
      el("div", { class: "row" }, this.#title, this.#remove), this.clip.element, this.#verdict,
      el("label", { class: "field" }, "What is said in the clip", this.text,
        el("span", { class: "hint" }, "Word for word. Many models clone better with it, some need it.")));
  }

  get said() {
    return this.text.value.trim();
  }

  /** Say which it is; alone it is just the clip. `isAsked`: others have a transcript. */
  number(index, isAlone, isAsked) {
    const name = isAlone ? "The clip" : `Clip ${index + 1}`;
    this.#title.textContent = name;
    this.#title.hidden = this.#remove.hidden = isAlone;
    this.#remove.setAttribute("aria-label", `Remove clip ${index + 1}`);
    this.element.setAttribute("aria-label", name);
    this.text.required = isAsked;
  }

  /** Have it judged; again when the transcript is another, which may not fit it. */
  async #judge() {
    this.#checking.abort();
    this.#checking = new AbortController();
    const { blob, fileName } = this.clip;
    if (!blob) return;
    await showVerdict(this.#verdict, blob, { fileName, transcript: this.said, signal: this.#checking.signal });
  }

  dispose() {
    this.#checking.abort();
    this.clip.dispose();
    this.element.remove();
  }
}

export class ClipsInput {
  #parts = [];
  #list = el("div", { class: "clips" });
  #more = button("Add another clip of this voice", () => this.#add().clip.focus(), { iconName: "plus", id: "more-clips", class: "wide" });

  constructor() {
    this.element = el("div", {}, this.#list, this.#more);
    this.#add();
  }

  get #filled() {
    return this.#parts.filter(({ clip }) => clip.blob);
  }

  /** Take files, from wherever they came: behind those that are there, or in their place. */
  take(files) {
    const max = maxClips();
    const room = max === 1 ? 1 : Math.max(0, max - this.#filled.length);
    if (files.length > room) {
      toast(max === 1
        ? `Only ${files[0].name} is taken: this model takes one clip to a voice. Join them into one, or choose the best.`
        : `${room} of ${files.length} files are taken: this model takes ${max} clips to a voice at most.`);
    }
    for (const file of files.slice(0, room)) {
      const free = max === 1 ? this.#parts[0] : this.#parts.find(({ clip }) => !clip.blob);
      (free ?? this.#add()).clip.take(file);
    }
  }

  /** Add them to a form; false, and said why, if there is none. */
  appendTo(form) {
    const parts = this.#filled;
    if (!parts.length) {
      this.#parts[0].clip.explain(new Error("Record a clip first, or choose a file."));
      this.focus();
      return false;
    }
    for (const { clip } of parts) form.append("audio_sample", clip.blob, clip.fileName);
    // One for each, or none: which of them one text would be of, nobody knows.
    if (parts.some(({ said }) => said)) parts.forEach(({ said }) => form.append("ref_text", said));
    return true;
  }

  /** End a recording that is under way, or asked for. */
  stop() {
    this.#parts.forEach(({ clip }) => clip.stop());
  }

  focus() {
    this.#parts[0].clip.focus();
  }

  clear() {
    this.#parts.splice(0).forEach((part) => part.dispose());
    this.#add();
  }

  /** What there is to see has changed. */
  show() {
    const isAlone = this.#parts.length === 1;
    const isAsked = !isAlone && this.#filled.some(({ said }) => said);
    this.#parts.forEach((part, index) => part.number(index, isAlone, isAsked && Boolean(part.clip.blob)));
    const isFull = this.#parts.length >= maxClips();
    this.#more.hidden = isFull || this.#filled.length < this.#parts.length;
  }

  #add() {
    const part = new Part({
      onChange: () => this.show(),
      onFiles: (files) => this.take(files),
      onRemove: () => this.#leave(part),
    });
    this.#parts.push(part);
    this.#list.append(part.element);
    this.show();
    return part;
  }

  #leave(part) {
    this.#parts = this.#parts.filter((each) => each !== part);
    part.dispose();
    this.show();
    this.#parts.at(-1).clip.focus();
  }
}

// Labels: a field in which `key: value` becomes a chip.

import { button, el, icon, newId } from "./dom.js";

export class LabelEditor {
  #labels = new Map();
  #chips = el("div", { class: "chips" });
  #field;
  #note = el("span", { class: "hint", role: "status" });

  constructor(labels = {}) {
    const id = newId("label");
    this.#field = el("input", { id, placeholder: "gender: female", autocomplete: "off", maxlength: 200, "aria-describedby": `${id}-hint` });
    this.#field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !this.#field.value.trim()) return;
      event.preventDefault(); // else the whole form is sent
      this.#add();
    });
    this.element = el("div", { class: "field" },
      el("label", { for: id }, "Labels"), this.#chips,
      el("div", { class: "row" }, this.#field, button("Add label", () => this.#add(), { class: "quiet", data: { act: "add-label" } })),
      el("span", { class: "hint", id: `${id}-hint` }, "As key: value; to find the voice by."), this.#note);
    this.set(labels);
  }

  /** All of them, with one that was typed and not added yet. */
  get value() {
    if (this.#field.value.trim()) this.#add();
    return Object.fromEntries(this.#labels);
  }

  set(labels) {
    this.#labels = new Map(Object.entries(labels));
    this.#field.value = "";
    this.#show();
  }

  #add() {
    const [key, ...rest] = this.#field.value.split(/[:=]/);
    const value = rest.join(":").trim();
    this.#note.textContent = key.trim() && value ? "" : "Write it as key: value.";
    if (this.#note.textContent) return;
    this.#labels.set(key.trim(), value);
    this.#field.value = "";
    this.#show();
  }

  #show() {
    this.#chips.replaceChildren(...[...this.#labels].map(([key, value]) => {
      const take = el("button", { type: "button", class: "chip", "aria-label": `Remove the label ${key}: ${value}` },
        `${key}: ${value}`, icon("close"));
      take.addEventListener("click", () => {
        this.#labels.delete(key);
        this.#show();
        this.#field.focus();
      });
      return take;
    }));
  }
}

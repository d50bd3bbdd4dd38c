// Dialogs: modal, closed by Escape, and they give the focus back where it was.

import { busy, button, el, newId } from "./dom.js";

export const openDialogs = () => [...document.querySelectorAll("dialog[open]")];

/**
 * Ask something; resolves to what `onSubmit` returns, or to null if it is left.
 * While `onSubmit` fails the dialog stays open and shows why.
 */
export function openDialog({ title, body, submit, danger = false, onSubmit, focus }) {
  const opener = document.activeElement;
  const titleId = newId("dialog-title");
  // One of its own for each question: one that closes tells so only later, when the
  // next may be open.
  const dialog = el("dialog", { "aria-labelledby": titleId });
  return new Promise((resolve) => {
    let answer = null;
    const error = el("div");
    const ok = el("button", { type: "submit", class: danger ? "danger" : "primary" }, submit);
    const form = el("form", {},
      el("h2", { id: titleId }, title), body, error,
      el("div", { class: "actions" },
        button("Cancel", () => dialog.close()), onSubmit ? ok : null));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      busy(ok, error, async () => {
        answer = await onSubmit(ok);
        if (answer !== undefined) dialog.close();
      });
    });
    dialog.append(form);
    document.body.append(dialog);
    dialog.addEventListener("close", () => {
      dialog.remove();
      if (opener?.isConnected && !openDialogs().length) opener.focus();
      resolve(answer);
    }, { once: true });
    dialog.showModal();
    focus?.focus();
  });
}

// Building elements. Whatever a server says becomes text here, and never markup.

export const byId = (id) => document.getElementById(id);

/** Make an element; `on` holds listeners, `data` its data attributes, the rest is set. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null) continue;
    if (name === "on") {
      for (const [type, listener] of Object.entries(value)) node.addEventListener(type, listener);
    } else if (name === "data") Object.assign(node.dataset, value);
    else if (name === "class") node.className = value;
    else if (typeof value === "boolean") node.toggleAttribute(name, value);
    else node.setAttribute(name, value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function icon(name, size = "") {
  const svg = byId("icon").content.firstElementChild.cloneNode(true);
  svg.firstElementChild.setAttribute("href", `#i-${name}`);
  if (size) svg.classList.add(size);
  return svg;
}

export const button = (label, onClick, { iconName, ...props } = {}) =>
  el("button", { type: "button", on: { click: onClick }, ...props },
    iconName ? icon(iconName) : null, label);

/** A bar that is filled to `share`; what it means stands beside it as text. */
export function bar(share, kind = "bar") {
  const fill = el("i");
  // Not a style attribute, which the page's own policy forbids.
  fill.style.setProperty("--share", Math.min(1, Math.max(0, share || 0)));
  return el("div", { class: kind, "aria-hidden": "true" }, fill);
}

/** Show a failure, in the server's words, where it happened. */
export function showError(place, error, retry = null) {
  place.replaceChildren();
  if (!error || error.name === "AbortError") return;
  place.append(el("div", { class: "notice bad", role: "alert" },
    el("span", {}, error.message || String(error)),
    retry ? button("Try again", retry, { class: "quiet" }) : null));
}

export function toast(text) {
  const note = el("p", { class: "toast" }, text);
  byId("status").append(note);
  setTimeout(() => note.remove(), 6000);
}

/** Run something for a button: it is disabled meanwhile, and errors are shown. */
export async function busy(node, place, work) {
  if (node.getAttribute("aria-disabled") === "true") return;
  showError(place, null);
  // Not `disabled`, which would take the focus away from whoever pressed it.
  node.setAttribute("aria-disabled", "true");
  try {
    await work();
  } catch (error) {
    showError(place, error);
  } finally {
    node.removeAttribute("aria-disabled");
  }
}

export function debounced(work, milliseconds = 250) {
  let timer;
  return (...given) => {
    clearTimeout(timer);
    timer = setTimeout(() => work(...given), milliseconds);
  };
}

let lastId = 0;
export const newId = (prefix) => `${prefix}-${++lastId}`;

// The server's HTTP: one function that sends, and its errors in the server's own words.

import { askForKey } from "./key.js";

// Beside the page, so that it also works behind a proxy that puts a path before it.
const ROOT = new URL("v1/", location.href);

export class ServerError extends Error {
  constructor(message, { status = 0, body = null, retryAfterSeconds = null } = {}) {
    super(message);
    Object.assign(this, { status, body, retryAfterSeconds });
  }

  /** Whether the server is too old, or built without it, to know the route. */
  get isNoRoute() {
    return this.status === 405 || (this.status === 404 && /^not found\.?$/i.test(this.message));
  }
}

/** The path of a voice, or of something of it. Ids and names are data, not path. */
export function voicePath(id, rest = "") {
  // Escaped or not, the path would be one of something else.
  if (id.includes("/") || id === "." || id === "..") {
    throw new ServerError(`Voice '${id}' is not registered: no name is '.' or '..', or holds '/'.`, { status: 404 });
  }
  return `audio/voices/${encodeURIComponent(id)}${rest ? `/${rest}` : ""}`;
}

/**
 * Send, and return the answer; asks for the key where the server wants one, but not for
 * `isBackground`, what the page asks by itself.
 */
export async function send(path, { json, headers = {}, isBackground = false, ...options } = {}) {
  const body = json === undefined ? options.body : JSON.stringify(json);
  const given = json === undefined ? headers : { "Content-Type": "application/json", ...headers };
  let key = askForKey.current();
  for (;;) {
    const authorized = key ? { Authorization: `Bearer ${key}`, ...given } : given;
    const response = await reach(new URL(path, ROOT), { ...options, body, headers: authorized });
    if (response.ok) return response;
    if (response.status !== 401) throw await errorOf(response);
    key = await askForKey(key, { isBackground });
    if (!key) throw await errorOf(response);
  }
}

export const getJson = async (path, options) => (await send(path, options)).json();

async function reach(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
}

async function errorOf(response) {
  const body = await response.json().catch(() => null);
  const { status } = response;
  const retryAfterSeconds = Number(response.headers.get("Retry-After")) || null;
  return new ServerError(messageOf(body) || `The server answered ${status}.`, {
    status, body, retryAfterSeconds,
  });
}

function messageOf(body) {
  const told = body?.error?.message ?? body?.error ?? body?.detail ?? body?.message;
  if (typeof told === "string") return told;
  return told ? JSON.stringify(told) : "";
}

let models;

/** The name that requests of the served model carry. */
export async function modelName() {
  models ??= getJson("models");
  try {
    return (await models).data[0]?.id ?? null;
  } catch (error) {
    models = undefined;
    throw error;
  }
}

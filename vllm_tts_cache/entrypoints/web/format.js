// Numbers and times for people.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let value = count;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${value.toLocaleString(undefined, { maximumFractionDigits: value < 10 && unit ? 1 : 0 })} ${UNITS[unit]}`;
}

export const number = (value, digits = 0) =>
  value.toLocaleString(undefined, { maximumFractionDigits: digits, minimumFractionDigits: digits });

export const seconds = (value) => `${number(value, 1)} s`;

export const duration = (value) => (value < 1 ? `${Math.round(value * 1000)} ms` : `${number(value, 2)} s`);

export function clock(value) {
  const whole = Math.max(0, value);
  return `${Math.floor(whole / 60)}:${(whole % 60).toFixed(1).padStart(4, "0")}`;
}

export const moment = (unixSeconds) =>
  new Date(unixSeconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });

/** What a `datetime-local` field takes, and back: it speaks of the browser's own zone. */
export function toLocalField(unixSeconds) {
  if (!unixSeconds) return "";
  const date = new Date(unixSeconds * 1000);
  return new Date(date - date.getTimezoneOffset() * 60_000).toISOString().slice(0, 16);
}

export const fromLocalField = (text) => (text ? new Date(text).toISOString() : null);

/** A colour that stays a voice's own. */
export function hueOf(text) {
  let hash = 0;
  for (const char of text) hash = (hash * 31 + char.codePointAt(0)) % 360_007;
  return hash % 360;
}

/** What the server calls a form's field, of several clips, as people count them. */
export const clipNames = (text) => text.replace(/audio_sample\[(\d+)\]/g, (_, index) => `clip ${Number(index) + 1}`);

/** `in_context` as people read it. */
export const modeTitle = (mode) => mode.replaceAll("_", " ").replaceAll("x vector", "x-vector");

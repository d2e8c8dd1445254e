// Figures in words: the same spelling wherever a number is shown.

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const SIZES = ["bytes", "KiB", "MiB", "GiB", "TiB"];

/** What stands where a figure cannot be known. */
export const NONE = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

/** 12,411 */
export function count(value) {
  return known(value) ? whole.format(value) : NONE;
}

/** 4.1M */
export function compact(value) {
  return known(value) ? short.format(value) : NONE;
}

/** "1 slot", "3 slots" */
export function plural(value, noun, nouns = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : nouns}`;
}

/** 14.2 GiB */
export function bytes(value) {
  if (!known(value)) return NONE;
  let size = value;
  let unit = 0;
  while (size >= 1024 && unit < SIZES.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size.toFixed(unit === 0 || size >= 100 ? 0 : 1)} ${SIZES[unit]}`;
}

/** A span of time: 17 ms, 0.18 s, 23 s, 4 min 10 s, 1 h 52 min, 3 d 4 h */
export function seconds(value) {
  if (!known(value)) return NONE;
  if (value > 0 && value < 0.0005) return "< 1 ms";
  if (value > 0 && value < 0.0995) return `${Math.round(value * 1000)} ms`;
  if (value < 60 && Number.isInteger(value)) return `${value} s`;
  if (value < 9.95) return `${value.toFixed(value < 0.995 ? 2 : 1)} s`;
  const total = Math.round(value);
  if (total < 60) return `${total} s`;
  const parts = [
    [Math.floor(total / 86400), "d"],
    [Math.floor((total % 86400) / 3600), "h"],
    [Math.floor((total % 3600) / 60), "min"],
    [total % 60, "s"],
  ];
  const first = parts.findIndex(([amount]) => amount > 0);
  return parts
    .slice(first, first + 2)
    .filter(([amount]) => amount > 0)
    .map(([amount, unit]) => `${amount} ${unit}`)
    .join(" ");
}

/** How long ago, in one unit: "just now", "40 s ago", "4 min ago", "2 d ago" */
export function ago(at, now) {
  if (!known(at)) return NONE;
  const age = Math.max(0, now - at);
  if (age < 5) return "just now";
  if (age < 60) return `${Math.floor(age)} s ago`;
  if (age < 3600) return `${Math.floor(age / 60)} min ago`;
  if (age < 86400) return `${Math.floor(age / 3600)} h ago`;
  return `${Math.floor(age / 86400)} d ago`;
}

/** 14:02:11 */
export function time(at) {
  return known(at) ? clock.format(at * 1000) : NONE;
}

/** 30 Nov, 14:02:11 */
export function date(at) {
  return known(at) ? `${day.format(at * 1000)}, ${time(at)}` : NONE;
}

/** A share of 1 as "92 %"; never rounded up to all or down to nothing. */
export function percent(part, total) {
  if (!known(part) || !known(total) || total <= 0) return NONE;
  const value = (100 * part) / total;
  if (value > 0 && value < 1) return "< 1 %";
  if (value > 99 && value < 100) return "> 99 %";
  return `${Math.round(value)} %`;
}

const UNITS = {
  ...Object.fromEntries(["total", "queued", "first_token", "seconds"].map((name) => [name, seconds])),
  ...Object.fromEntries(
    ["reused", "computed", "tokens", "prompt_tokens"].map((name) => [name, (n) => plural(n, "token")]),
  ),
  bytes,
};
const ID = /^[0-9a-f]{24,64}$/;

/** A value of a log line, as `slotkeeper logs` spells it: with its unit, ids cut, "" for nothing. */
export function field(name, value) {
  if (Array.isArray(value)) return value.map((one) => field("", one)).join(", ");
  if (known(value)) return UNITS[name]?.(value) ?? String(Number(value.toPrecision(4)));
  if (value === null || value === undefined) return "";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "object") return Object.keys(value).length ? JSON.stringify(value) : "";
  return ID.test(value) ? value.slice(0, 8) : value;
}

/** A conversation in words: its title, else the beginning of its id; without one, the path. */
export function name(row) {
  if (row.title) return row.title;
  if (row.conversation) return `Conversation ${row.conversation.slice(0, 8)}`;
  return row.client || row.path || NONE;
}

/** llama-server without an alias names the whole path of a model; its file says enough. */
export function model(name) {
  return name?.endsWith(".gguf") ? name.split(/[/\\]/).at(-1) : name;
}

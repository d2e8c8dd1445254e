// The proxy's structured log, the newest line last.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { field, time } from "./format.js";
import { Empty, Section } from "./parts.js";

const LEVELS = ["debug", "info", "warning", "error"];

const severity = (level) => LEVELS.indexOf(level === "critical" ? "error" : level);

/** A line's fields as `name=value`; what is empty is left out. */
function told(fields) {
  return Object.entries(fields ?? {})
    .map(([name, value]) => [name, field(name, value)])
    .filter(([, value]) => value)
    .map(([name, value]) => `${name}=${value}`)
    .join(" ");
}

function fits(row, level, words) {
  if (severity(row.level) < severity(level)) return false;
  return !words || `${row.event} ${told(row.fields)}`.toLowerCase().includes(words.toLowerCase());
}

function Controls({ level, setLevel, words, setWords, still, setStill, logs }) {
  return html`<label>
      <span class="unseen">Lowest level</span>
      <select id="log-level" value=${level} onChange=${(event) => setLevel(event.target.value)}>
        ${LEVELS.map((name) => html`<option value=${name}>${name}</option>`)}
      </select>
    </label>
    <label>
      <span class="unseen">Search the log</span>
      <input
        id="log-search"
        type="search"
        placeholder="Search"
        value=${words}
        onInput=${(event) => setWords(event.target.value)}
      />
    </label>
    <button
      type="button"
      id="log-pause"
      aria-pressed=${still !== null}
      onClick=${() => setStill(still === null ? logs : null)}
    >
      ${still === null ? "Stop following" : "Follow"}
    </button>`;
}

function Lines({ rows, follow }) {
  const frame = useRef(null);
  const last = rows.at(-1)?.seq;
  useEffect(() => {
    if (follow) frame.current.scrollTop = frame.current.scrollHeight;
  }, [last, follow]);
  return html`<div class="log" ref=${frame} role="region" aria-label="Log lines" tabindex="0">
    <ol>
      ${rows.map(
        (row) => html`<li key=${row.seq} class=${row.level}>
          <time>${time(row.at)}</time> <b>${row.level}</b> <span>${row.event}</span>${" "}
          <span class="faint">${told(row.fields)}</span>
        </li>`,
      )}
    </ol>
  </div>`;
}

/** The log with its filters. `still`: the lines as they were when it was held. */
export function Log({ logs }) {
  const [level, setLevel] = useState("info");
  const [words, setWords] = useState("");
  const [still, setStill] = useState(null);
  const rows = (still ?? logs ?? []).filter((row) => fits(row, level, words));
  const controls = html`<${Controls}
    ...${{ level, setLevel, words, setWords, still, setStill, logs }}
  />`;
  return html`<${Section} id="log" title="Log" aside=${controls}>
    ${logs?.length === 0 && html`<${Empty} title="Nothing logged yet" />`}
    ${logs?.length > 0 && rows.length === 0 && html`<${Empty} title="No line fits" />`}
    ${rows.length > 0 && html`<${Lines} rows=${rows} follow=${still === null} />`}
  <//>`;
}

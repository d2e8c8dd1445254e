// The decision log: what each request got, and why.

import { html, useState } from "./vendor/htm-preact.js";
import { count, name, percent, seconds, time } from "./format.js";
import { Bar, Empty, Section, Table } from "./parts.js";
import { Why } from "./why.js";

const PAGE = 20;
/** Share of a prompt: who reuses less computed most of it, whatever that is called. */
const MUCH = 0.5;
const CLIENT_LEFT = 499; // as the log counts it
const HEAD = [
  ["Time"],
  ["Conversation", "wide"],
  ["What it got"],
  ["Reused", "number"],
  ["First token", "number middle"],
  ["Status", "number wide"],
];

function got(row) {
  return row.slot === null ? "" : `slot ${row.slot}`;
}

/** The reason, but where there was no answer: what the slots held says nothing about that. */
function word({ reason, status, prompt, conversation }) {
  if (status === 404 && prompt === null && !conversation) return "unknown path";
  if (status === CLIENT_LEFT) return "client left";
  return status >= 400 && reason !== "refused" ? "failed" : reason;
}

/** The reason's colour goes by the share that was reused. */
function reasonClass({ reason, status, reused, prompt }) {
  if (status === CLIENT_LEFT) return "";
  if (status >= 400) return "refused";
  const hot = reason === "slot-hit" || reason === "restored";
  return hot && prompt && (reused ?? 0) < MUCH * prompt ? "cold" : reason;
}

function Reused({ row }) {
  if (row.reused === null || !row.prompt) return html`<span class="faint">–</span>`;
  const kind = row.reason === "restored" ? "snapshot" : "slot";
  return html`<span class="reused">
    <span class="faint middle">${count(row.reused)} / ${count(row.prompt)}</span>
    <b>${percent(row.reused, row.prompt)}</b>
    <${Bar} parts=${[[kind, row.reused / row.prompt], ["computed", 1 - row.reused / row.prompt]]} />
  </span>`;
}

function Row({ row, open, onToggle }) {
  const id = `why-${row.seq}`;
  return html`<tr class=${row.status >= 400 ? "failed" : ""} data-request=${row.request_id}>
      <td>
        <button
          type="button"
          class="disclose"
          aria-expanded=${open}
          aria-controls=${open ? id : undefined}
          onClick=${onToggle}
        >
          <span class="caret" aria-hidden="true"></span>${time(row.at)}
          <span class="unseen"> why?</span>
        </button>
      </td>
      <td class="wide title">${name(row)}</td>
      <td>
        <span class="reason ${reasonClass(row)}">${word(row)}</span>
        <span class="faint">${got(row)}${row.side && ` · ${row.side}`}</span>
        <span class="narrow-only title">${name(row)}</span>
        ${row.status >= 400 && row.note && html`<span class="because">${row.note}</span>`}
        ${row.cold?.sentence && html`<span class="because">cold because ${row.cold.sentence}</span>`}
      </td>
      <td class="number"><${Reused} row=${row} /></td>
      <td class="number middle">${seconds(row.first_token)}</td>
      <td class="number wide">${row.status}</td>
    </tr>
    ${open &&
    html`<tr class="detail">
      <td colspan=${HEAD.length} id=${id}><${Why} row=${row} /></td>
    </tr>`}`;
}

function FirstSteps() {
  const { origin } = location;
  return html`<${Empty} title="No requests yet">
    Point a client here: <code>${origin}/v1</code> for OpenAI-compatible ones, ${" "}
    <code>${origin}</code> for Anthropic's and Ollama's. Its first request shows up by itself.
  <//>`;
}

/** The newest requests; a click tells why. */
export function Requests({ requests }) {
  const [open, setOpen] = useState(null);
  const [shown, setShown] = useState(PAGE);
  const [onlyCold, setOnlyCold] = useState(false);
  if (requests === null) return html`<${Section} id="requests" title="Requests" />`;
  const rows = onlyCold ? requests.filter((row) => row.cold) : requests;
  const filter = html`<label class="check">
    <input type="checkbox" checked=${onlyCold} onChange=${() => setOnlyCold(!onlyCold)} />
    Only unexpectedly cold
  </label>`;
  return html`<${Section} id="requests" title="Requests" aside=${requests.length > 0 && filter}>
    ${requests.length === 0 && html`<${FirstSteps} />`}
    ${requests.length > 0 &&
    rows.length === 0 &&
    html`<${Empty} title="None of these was colder than expected" />`}
    ${rows.length > 0 &&
    html`<${Table} label="Requests, the newest first" head=${HEAD}>
      ${rows.slice(0, shown).map(
        (row) => html`<${Row}
          key=${row.seq}
          row=${row}
          open=${open === row.seq}
          onToggle=${() => setOpen(open === row.seq ? null : row.seq)}
        />`,
      )}
    <//>`}
    ${rows.length > shown &&
    html`<button type="button" class="more" onClick=${() => setShown(shown + PAGE)}>
      Show more (${rows.length - shown} older)
    </button>`}
  <//>`;
}

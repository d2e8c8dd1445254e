// What the backend's memory holds, and what is running right now.

import { html } from "./vendor/htm-preact.js";
import { ago, count, name, plural, seconds } from "./format.js";
import { Empty, Section } from "./parts.js";

const SLOT = { leased: "answering", saving: "saving", restoring: "restoring" };

function state(slot) {
  if (SLOT[slot.state]) return SLOT[slot.state];
  return slot.tokens ? "warm" : "free";
}

/** Whether a lost slot could be restored, in words. */
function kept(slot) {
  if (!slot.tokens) return "";
  if (!slot.storable) return "cannot be saved";
  if (!slot.saved_tokens) return "not saved";
  if (slot.saved_tokens >= slot.tokens) return "saved";
  return `${count(slot.saved_tokens)} saved`;
}

function Card({ slot, now }) {
  const what = state(slot);
  const titled = slot.title || slot.conversation;
  return html`<li class="card slot-card ${what}">
    <p class="card-head">
      <span>Slot ${slot.index}</span>
      <span class="state ${what}">${what}</span>
    </p>
    <p class="card-title">${titled ? name(slot) : what === "free" ? "Holds nothing known" : "No known conversation"}</p>
    <p class="card-more">
      ${slot.tokens > 0 && html`<span>${plural(slot.tokens, "token")}</span>`}
      ${kept(slot) && html`<span>${kept(slot)}</span>`}
      ${slot.state === "free"
        ? slot.used && html`<span>used ${ago(slot.used, now)}</span>`
        : slot.since && html`<span>for ${seconds(Math.max(0, Math.floor(now - slot.since)))}</span>`}
      ${slot.client && html`<span>${slot.client}</span>`}
    </p>
  </li>`;
}

function Progress({ row }) {
  const { prompt, processed, cached } = row;
  const done = Math.min(1, processed / prompt);
  const from = Math.min(done, (cached ?? 0) / prompt);
  return html`<span
    class="progress"
    role="progressbar"
    aria-label="Prompt read"
    aria-valuemin="0"
    aria-valuemax=${prompt}
    aria-valuenow=${processed}
    aria-valuetext="${count(processed)} of ${plural(prompt, "token")}"
  >
    <span class="progress-part cached" style=${{ width: `${100 * from}%` }}></span>
    <span class="progress-part" style=${{ width: `${100 * (done - from)}%` }}></span>
  </span>`;
}

function doing(row, now) {
  const since = seconds(Math.max(0, Math.floor(now - row.at)));
  switch (row.state) {
    case "waiting":
      return `Waiting for a slot, ${since}`;
    case "preparing":
      return `Making its slot ready, ${since}`;
    case "prefill": {
      if (!row.prompt || row.processed === null) return `Reading the prompt, ${since}`;
      const spared = row.cached ? `, ${count(row.cached)} of them reused` : "";
      return `Reading the prompt: ${count(row.processed)} of ${plural(row.prompt, "token")}${spared}`;
    }
    default:
      return row.generated ? `Answering, ${plural(row.generated, "token")} so far` : "Answering";
  }
}

function Running({ row, now }) {
  const counted = row.state === "prefill" && row.prompt > 0 && row.processed !== null;
  return html`<li class="card running" data-request=${row.request_id}>
    <p class="card-head">
      <span>${row.slot === null ? "No slot" : `Slot ${row.slot}`}</span>
      <span class="state ${row.state}">${row.state}</span>
    </p>
    <p class="card-title">${name(row)}</p>
    ${counted && html`<${Progress} row=${row} />`}
    <p class="card-more"><span>${doing(row, now)}</span><span class="path">${row.path}</span></p>
  </li>`;
}

function NoSlots({ status }) {
  if (!status.backend.up) {
    return html`<${Empty} title="The backend does not answer">
      Start it at ${status.backend.url}; this page follows by itself.
    <//>`;
  }
  return html`<${Empty} title="Slots are not driven">
    ${status.advice || "This backend chooses its slots itself; requests are forwarded to it."}
  <//>`;
}

/** Slots beside running requests. */
export function Now({ state: { status, slots, running }, now }) {
  return html`<div class="now">
    <${Section} id="slots" title="Slots">
      ${slots?.length && status.mode !== "forward"
        ? html`<ul class="cards">
            ${slots.map((slot) => html`<${Card} key=${slot.index} slot=${slot} now=${now} />`)}
          </ul>`
        : slots && html`<${NoSlots} status=${status} />`}
    <//>
    <${Section} id="running" title="Running">
      ${running?.length
        ? html`<ul class="cards">
            ${running.map((row) => html`<${Running} key=${row.request_id} row=${row} now=${now} />`)}
          </ul>`
        : html`<${Empty} title="Nothing is running" />`}
    <//>
  </div>`;
}

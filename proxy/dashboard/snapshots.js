// What is on disk: states that can be restored, and the conversations they belong to.

import { html, useState } from "./vendor/htm-preact.js";
import { ago, bytes, count, name, NONE } from "./format.js";
import { Bar, Confirm, Empty, Section, Table } from "./parts.js";

const PAGE = 20;
const STATES = [
  ["Conversation"],
  ["Tokens", "number middle"],
  ["Size", "number"],
  ["Last used", "number middle"],
  ["Restored", "number wide"],
  ["Value", "number wide"],
  ["Actions", "number"],
];
const TALKS = [
  ["Conversation"],
  ["Client", "wide"],
  ["Messages", "number middle"],
  ["Last used", "number"],
  ["Actions", "number"],
];

/** The rows of a table a page at a time, with the button for more. */
function Paged({ label, head, rows, row }) {
  const [shown, setShown] = useState(PAGE);
  return html`<${Table} label=${label} head=${head}>${rows.slice(0, shown).map(row)}<//>
    ${rows.length > shown &&
    html`<button type="button" class="more" onClick=${() => setShown(shown + PAGE)}>
      Show more (${rows.length - shown})
    </button>`}`;
}

function Snapshot({ row, most, now, actions }) {
  const share = most > 0 ? Math.max(0, row.value) / most : 0;
  const titled = row.title || row.conversation ? name(row) : `Snapshot ${row.id.slice(0, 8)}`;
  return html`<tr data-snapshot=${row.id}>
    <th scope="row" class="title">
      ${titled} ${row.pinned && html`<span class="tag">pinned</span>`}
      ${row.barred && html`<span class="tag bad">not for this backend</span>`}
    </th>
    <td class="number middle">${count(row.tokens)}</td>
    <td class="number">${bytes(row.bytes)}</td>
    <td class="number middle">${ago(row.last_used, now)}</td>
    <td class="number wide">${row.restores ? `${count(row.restores)} ×` : "never"}</td>
    <td class="number wide">
      <span class="reused">${Math.round(100 * share)}<${Bar} parts=${[["snapshot", share]]} /></span>
    </td>
    <td class="actions">
      <button
        type="button"
        class="quiet"
        aria-label="${row.pinned ? "Unpin" : "Pin"} ${titled}"
        onClick=${() => actions.pin(row.id, !row.pinned)}
      >
        ${row.pinned ? "Unpin" : "Pin"}
      </button>
      <${Confirm}
        verb="Delete"
        label=${titled}
        question="Delete ${bytes(row.bytes)}?"
        onYes=${() => actions.remove(row.id)}
      />
    </td>
  </tr>`;
}

function NothingSaved({ status }) {
  if (!status.store) {
    return html`<${Empty} title="Nothing is saved to disk">
      ${status.advice || "A backend with a folder for slot states is needed: see slotkeeper doctor."}
    <//>`;
  }
  return html`<${Empty} title="Nothing saved yet">
    A conversation is saved when it has been idle for a few seconds and reading it again would cost
    more than writing it down.
  <//>`;
}

/** States on disk: pin and delete. */
export function Snapshots({ state: { snapshots, status }, now, actions }) {
  const rows = snapshots ?? [];
  const most = Math.max(0, ...rows.map((row) => row.value ?? 0));
  return html`<${Section} id="snapshots" title="Snapshots">
    ${snapshots?.length === 0 && html`<${NothingSaved} status=${status} />`}
    ${rows.length > 0 &&
    html`<p class="explain">
        Value: prefill time a snapshot can still save, for its size and age; the best one is 100.
        The lowest goes first when room is needed, pinned ones never.
      </p>
      <${Paged}
        label="Snapshots, the last used first"
        head=${STATES}
        rows=${rows}
        row=${(row) =>
          html`<${Snapshot} key=${row.id} row=${row} most=${most} now=${now} actions=${actions} />`}
      />`}
  <//>`;
}

/** Conversations the proxy knows: forget one, for good. */
export function Conversations({ state: { conversations, status }, now, actions }) {
  const rows = conversations ?? [];
  const talk = (row) => {
    const titled = row.title || `Conversation ${row.id.slice(0, 8)}`;
    return html`<tr key=${row.id} data-conversation=${row.id}>
      <th scope="row" class="title">${titled}</th>
      <td class="wide">${row.client || NONE}</td>
      <td class="number middle">${count(row.messages)}</td>
      <td class="number">${ago(row.used, now)}</td>
      <td class="actions">
        <${Confirm}
          verb="Forget"
          label=${titled}
          question="Forget it, with its snapshots?"
          onYes=${() => actions.forget(row.id)}
        />
      </td>
    </tr>`;
  };
  return html`<${Section} id="conversations" title="Conversations">
    ${status.hide_titles &&
    html`<p class="explain">Titles are hidden by the setting <code>server.hide_titles</code>.</p>`}
    ${conversations?.length === 0 &&
    html`<${Empty} title="No conversations yet">
      They are told apart by what is said in them; clients need not send an id.
    <//>`}
    ${rows.length > 0 &&
    html`<${Paged} label="Conversations, the last used first" head=${TALKS} rows=${rows} row=${talk} />`}
  <//>`;
}

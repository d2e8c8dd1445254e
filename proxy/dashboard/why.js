// Why a request got what it got: the options that were weighed and what changed in the prompt.

import { html } from "./vendor/htm-preact.js";
import { count, date, NONE, seconds } from "./format.js";
import { Table } from "./parts.js";

const COSTS = [
  ["Option"],
  ["Reused", "number"],
  ["Wait", "number"],
  ["Prefill", "number"],
  ["Transfer", "number"],
  ["Loss", "number"],
  ["Cost", "number"],
];

/** What an option would do, in the words of the command line (`commands/decisions.py`). */
function how(row) {
  const slot = row.slot === null ? "any slot" : `slot ${row.slot}`;
  const saved = row.save_first ? `save ${slot}, then ` : "";
  const waited = row.wait ? `wait for ${slot}, then ` : "";
  if (row.snapshot) {
    return `${waited}${saved}restore snapshot ${row.snapshot.slice(0, 8)} into ${slot}`;
  }
  return `${waited}${saved}${row.reason === "cold" ? `start cold in ${slot}` : `use ${slot} as it is`}`;
}

function Costs({ rows }) {
  const least = Math.min(...rows.map((row) => row.cost));
  return html`<h3>Options weighed, in seconds</h3>
    <${Table} label="Options weighed, with their cost in seconds" head=${COSTS}>
      ${rows.map(
        (row) => html`<tr class=${row.cost === least ? "best" : ""}>
          <th scope="row">
            ${how(row)}
            ${row.cost === least && html` <span class="tag">least</span>`}
          </th>
          <td class="number">${count(row.hit)} / ${count(row.prompt)}</td>
          ${["wait", "prefill", "transfer", "loss", "cost"].map(
            (part) => html`<td class="number">${row[part] ? row[part].toFixed(2) : "0"}</td>`,
          )}
        </tr>`,
      )}
    <//>`;
}

const WORD = /[\w:-]/;

/**
 * Where two texts part and meet again, whole words: [what both begin with, the middle of each,
 * what both end with].
 */
export function parted(before, after) {
  const shorter = Math.min(before.length, after.length);
  let start = 0;
  while (start < shorter && before[start] === after[start]) start += 1;
  let end = 0;
  while (end < shorter - start && before.at(-1 - end) === after.at(-1 - end)) end += 1;
  while (start > 0 && WORD.test(before[start - 1])) start -= 1;
  while (end > 0 && WORD.test(before.at(-end))) end -= 1;
  const middle = (text) => text.slice(start, text.length - end);
  return [before.slice(0, start), middle(before), middle(after), before.slice(before.length - end)];
}

function Side({ title, head, middle, tail }) {
  return html`<div class="side">
    <dt>${title}</dt>
    <dd>
      ${head || middle || tail
        ? html`<code>${head}${middle && html`<mark>${middle}</mark>`}${tail}</code>`
        : html`<i>nothing</i>`}
    </dd>
  </div>`;
}

function Cold({ cold }) {
  const sides = cold.before || cold.after ? parted(cold.before ?? "", cold.after ?? "") : null;
  return html`<h3>Why it was cold</h3>
    <p>${cold.sentence ? sentence(cold.sentence) : `Cause: ${cold.cause}.`}</p>
    ${sides &&
    html`<dl class="sides">
      <${Side} title="Last time" head=${sides[0]} middle=${sides[1]} tail=${sides[3]} />
      <${Side} title="This time" head=${sides[0]} middle=${sides[2]} tail=${sides[3]} />
    </dl>`}
    ${cold.advice && html`<p class="advice">${cold.advice}</p>`}`;
}

/** A clause as a sentence: "cold because" is already said by the heading. */
function sentence(clause) {
  return `${clause[0].toUpperCase()}${clause.slice(1)}.`;
}

function Facts({ row }) {
  const facts = [
    ["Came in", date(row.at)],
    ["Request", row.request_id],
    ["Path", row.path],
    ["Client", row.client || NONE],
    ["Side request", row.side],
    ["Conversation", row.conversation],
    ["Slot", row.slot],
    ["Waited", seconds(row.queued)],
    ["Whole answer", seconds(row.total)],
    ["Status", row.status],
    ["Rules applied", row.rules?.length ? row.rules.join(", ") : "none"],
  ];
  const told = facts.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return html`<dl class="facts">
    ${told.map(([term, value]) => html`<div><dt>${term}</dt><dd>${value}</dd></div>`)}
  </dl>`;
}

/** Everything the decision log knows of one request. */
export function Why({ row }) {
  return html`<div class="why">
    ${row.note && html`<p>${row.note}</p>`} ${row.cold && html`<${Cold} cold=${row.cold} />`}
    ${row.costs?.length > 0 && html`<${Costs} rows=${row.costs} />`}
    <h3>Facts</h3>
    <${Facts} row=${row} />
  </div>`;
}

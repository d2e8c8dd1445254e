// Four figures: what caching saved, how fast the first token is, what runs, what the disk holds.

import { html } from "./vendor/htm-preact.js";
import { bytes, compact, count, NONE, percent, plural, seconds } from "./format.js";
import { Bar } from "./parts.js";

function Figure({ id, title, value, children }) {
  return html`<div class="figure" id=${id}>
    <dt>${title}</dt>
    <dd class="figure-value">${value}</dd>
    <dd class="figure-more">${children}</dd>
  </div>`;
}

function Reused({ prompt }) {
  const total = prompt.slot + prompt.snapshot + prompt.computed;
  const share = (part) => (total ? part / total : 0);
  const parts = ["slot", "snapshot", "computed"].map((kind) => [kind, share(prompt[kind])]);
  return html`<${Figure}
    id="figure-reused"
    title="Prompt tokens not recomputed"
    value=${percent(prompt.slot + prompt.snapshot, total)}
  >
    <${Bar} parts=${parts} />
    ${total
      ? html`<span class="key slot">${compact(prompt.slot)} from slots</span>
          <span class="key snapshot">${compact(prompt.snapshot)} from disk</span>
          <span class="key computed">${compact(prompt.computed)} computed</span>`
      : "No prompt yet."}
  <//>`;
}

function Disk({ store }) {
  if (!store) {
    return html`<${Figure} id="figure-disk" title="Disk used" value=${NONE}>
      Nothing is saved to disk.
    <//>`;
  }
  const share = store.limit > 0 ? Math.min(1, store.used / store.limit) : 0;
  return html`<${Figure} id="figure-disk" title="Disk used" value=${bytes(store.used)}>
    <${Bar} parts=${[["snapshot", share]]} />
    of ${bytes(store.limit)} · ${plural(store.snapshots, "snapshot")} · ${bytes(store.free)} free
  <//>`;
}

/** The four figures, as a list of terms. */
export function Headline({ status }) {
  const { totals, first_token: first, queue } = status;
  return html`<dl class="figures">
    <${Reused} prompt=${totals.prompt_tokens} />
    <${Figure} id="figure-saved" title="Prefill time saved, estimated" value=${seconds(totals.seconds_saved)}>
      ${plural(totals.requests, "request")} since the start · ${count(queue.running)} running,
      ${" "}${count(queue.waiting)} waiting
    <//>
    <${Figure} id="figure-first" title="Time to first token" value=${seconds(first.p50)}>
      ${first.count
        ? html`half of ${plural(first.count, "request")} are faster; 95 % within${" "}
            <b>${seconds(first.p95)}</b> (last hour)`
        : "No streamed request in the last hour."}
    <//>
    <${Disk} store=${status.store} />
  </dl>`;
}

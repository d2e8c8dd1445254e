// One sentence on what is done to this backend, and what to do about it if that is not all.

import { html } from "./vendor/htm-preact.js";

const MODES = {
  exclusive: ["good", "Caching in full: each conversation keeps its slot, and its state is saved to disk."],
  routed: ["good", "Placing requests: conversations go where they are warm; this backend saves no states."],
  forward: ["warn", "Forwarding only: slots are not pinned and nothing is saved."],
};

/** What is said, most urgent first: [class, what, why, advice]. */
function said({ status, link, trouble }) {
  const { backend } = status;
  if (link === "lost") {
    return ["bad", "Disconnected: these figures are old. Trying again by itself.", trouble, ""];
  }
  if (status.draining) {
    return ["warn", "Shutting down: running answers end, states are saved.", "", ""];
  }
  if (!backend.up) {
    const advice = status.advice || "Start it; Slotkeeper notices by itself.";
    return ["bad", `The backend at ${backend.url} does not answer.`, status.why, advice];
  }
  if (status.paused) {
    return ["warn", "Caching is paused: requests are forwarded plainly.", "", "Resume it when you are done."];
  }
  if (status.restores === "retired") {
    const what = "States are not restored any more: restoring had no effect on this model.";
    return ["warn", what, "Slots are still used; saved states wait for another build or model.", ""];
  }
  // The mode's own advice goes first: where it saves nothing, the store is not why.
  const full = status.mode === "exclusive" && status.store?.advice;
  if (full && status.advice === full) return ["warn", "New states are not saved.", "", full];
  const [kind, what] = MODES[status.mode] ?? ["warn", `Mode ${status.mode}.`];
  return [kind, what, status.why, status.advice];
}

/** The mode in words. */
export function Banner({ state, onRetry }) {
  const [kind, what, why, advice] = said(state);
  return html`<div class="banner ${kind}" id="banner">
    <p class="banner-what">
      ${what}
      ${state.link === "lost" &&
      html` <button type="button" class="quiet" onClick=${onRetry}>Try now</button>`}
    </p>
    ${why && kind !== "good" && html`<p>${why}</p>`}
    ${advice && html`<p class="banner-advice">${advice}</p>`}
  </div>`;
}

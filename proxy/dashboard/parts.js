// Small pieces that several sections use.

import { html, useLayoutEffect, useRef, useState } from "./vendor/htm-preact.js";

/** A landmark with a heading; `aside` stands at the heading's right. */
export function Section({ id, title, aside, children }) {
  return html`<section id=${id} aria-labelledby="${id}-title" class="section">
    <div class="section-head">
      <h2 id="${id}-title" tabindex="-1">${title}</h2>
      ${aside && html`<div class="section-aside">${aside}</div>`}
    </div>
    ${children}
  </section>`;
}

/** What to do when there is nothing to show yet. */
export function Empty({ title, children }) {
  return html`<div class="nothing">
    <p class="nothing-title">${title}</p>
    ${children && html`<p>${children}</p>`}
  </div>`;
}

/** A bar of coloured parts; `parts`: rows of [class, share of 1]. Decoration: say it in words too. */
export function Bar({ parts }) {
  return html`<span class="bar" aria-hidden="true">
    ${parts.map(
      ([kind, share]) =>
        html`<span class="bar-part ${kind}" style=${{ width: `${100 * share}%` }}></span>`,
    )}
  </span>`;
}

/** A table that scrolls by itself when it is too wide; `label` is its caption. */
export function Table({ label, head, children }) {
  return html`<div class="table-frame" role="region" aria-label=${label} tabindex="0">
    <table>
      <caption class="unseen">
        ${label}
      </caption>
      <thead>
        <tr>
          ${head.map(([text, kind]) => html`<th scope="col" class=${kind}>${text}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${children}
      </tbody>
    </table>
  </div>`;
}

/** A button that asks once more. `question`: what will happen; `verb`: the word on the button. */
export function Confirm({ verb, question, label, onYes }) {
  const [asking, ask] = useState(false);
  const keep = useRef(null);
  const first = useRef(null);
  const asked = useRef(false);
  useLayoutEffect(() => {
    if (asking) keep.current?.focus();
    else if (asked.current) first.current?.focus();
    asked.current = asking;
  }, [asking]);
  if (!asking) {
    return html`<button
      type="button"
      class="quiet"
      ref=${first}
      aria-label="${verb} ${label}"
      onClick=${() => ask(true)}
    >
      ${verb}
    </button>`;
  }
  const yes = () => {
    ask(false);
    onYes();
  };
  return html`<span
    class="confirm"
    role="group"
    aria-label=${question}
    onKeyDown=${(event) => event.key === "Escape" && ask(false)}
  >
    <span class="confirm-question">${question}</span>
    <button type="button" class="danger" onClick=${yes}>${verb}</button>
    <button type="button" class="quiet" ref=${keep} onClick=${() => ask(false)}>Keep</button>
  </span>`;
}

// The top of the page: whose page it is, whether it is live, and the three controls.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { model, plural, seconds } from "./format.js";

const PLACES = [
  ["overview", "Overview"],
  ["requests", "Requests"],
  ["charts", "Charts"],
  ["snapshots", "Snapshots"],
  ["conversations", "Conversations"],
  ["log", "Log"],
];
const LINK = { connecting: "Connecting", live: "Live", lost: "Disconnected" };
const THEMES = { auto: "light", light: "dark", dark: "auto" };

function Theme() {
  const [theme, setTheme] = useState(window.slotkeeperTheme.current());
  useEffect(() => {
    const changed = () => setTheme(window.slotkeeperTheme.current());
    addEventListener("themechange", changed);
    return () => removeEventListener("themechange", changed);
  }, []);
  return html`<button
    type="button"
    class="quiet"
    id="theme"
    onClick=${() => window.slotkeeperTheme.keep(THEMES[theme])}
  >
    Theme: ${theme}
  </button>`;
}

function Pause({ status, link, actions }) {
  const verb = status.paused ? "resume" : "pause";
  return html`<button
    type="button"
    id="pause"
    class=${status.paused ? "primary" : ""}
    disabled=${link !== "live" || status.draining}
    onClick=${() => actions[verb]()}
  >
    ${status.paused ? "Resume caching" : "Pause caching"}
  </button>`;
}

/** Name, backend, connection and controls. */
export function Header({ state, now, actions }) {
  const { status, link } = state;
  const backend = status?.backend;
  return html`<header class="top">
    <div class="top-name">
      <h1>Slotkeeper <span class="version">${status?.version}</span></h1>
      ${backend &&
      html`<p class="top-backend">
        ${backend.kind ?? backend.url}${backend.model && html` · <b>${model(backend.model)}</b>`}
        ${backend.total_slots > 0 && ` · ${plural(backend.total_slots, "slot")}`}
        ${" · "}<span>up ${seconds(Math.max(0, now - status.started))}</span>
      </p>`}
    </div>
    <div class="top-controls">
      <span class="link ${link}" id="link"><span class="dot" aria-hidden="true"></span>${LINK[link]}</span>
      <${Theme} />
      ${status && html`<${Pause} status=${status} link=${link} actions=${actions} />`}
    </div>
  </header>`;
}

/** The way to each section. */
export function Places() {
  return html`<nav class="places" aria-label="Sections">
    <ul>
      ${PLACES.map(([id, title]) => html`<li><a href="#${id}">${title}</a></li>`)}
    </ul>
  </nav>`;
}

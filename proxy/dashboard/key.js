// The one form of the page: the admin key, when the proxy asks for it.

import { html, useLayoutEffect, useRef } from "./vendor/htm-preact.js";
import { key } from "./api.js";

/** Asks for the key; `error` is what the proxy said. */
export function KeyForm({ error, onKey }) {
  const field = useRef(null);
  useLayoutEffect(() => field.current.focus(), []);
  const tried = key() !== "" && error.status === 401;
  const submit = (event) => {
    event.preventDefault();
    if (field.current.value) onKey(field.current.value);
  };
  return html`<main class="key-page">
    <form id="key-form" onSubmit=${submit}>
      <h1>Slotkeeper</h1>
      <p role="alert">${tried ? "This key was not accepted." : error.message}</p>
      ${error.hint && html`<p class="faint">${error.hint}</p>`}
      <label for="key">Admin key</label>
      <input
        id="key"
        type="password"
        autocomplete="current-password"
        spellcheck="false"
        ref=${field}
        aria-describedby="key-note"
      />
      <p id="key-note" class="faint">
        The value of <code>server.admin_key</code>. It stays in this tab and is forgotten when the
        tab is closed.
      </p>
      <button type="submit" class="primary">Open</button>
    </form>
  </main>`;
}

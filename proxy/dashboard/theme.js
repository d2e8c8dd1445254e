// Loaded before the first paint, so that a chosen theme does not flash. A classic script: it must
// run before the page is parsed. The rest of the page uses what it puts on `slotkeeperTheme`.
"use strict";

(() => {
  const NAME = "slotkeeper.theme";
  const root = document.documentElement;

  /** "light", "dark", or "auto" where the browser's setting decides. */
  function current() {
    return root.dataset.theme ?? "auto";
  }

  function choose(theme) {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
  }

  function keep(theme) {
    choose(theme);
    try {
      localStorage.setItem(NAME, theme);
    } catch {
      // A browser that keeps nothing: the choice lasts as long as the page.
    }
    dispatchEvent(new Event("themechange"));
  }

  try {
    const kept = localStorage.getItem(NAME);
    if (kept === "light" || kept === "dark") choose(kept);
  } catch {
    // As above.
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    dispatchEvent(new Event("themechange"));
  });
  window.slotkeeperTheme = { current, keep };
})();

// What can be done from the page. Each tells how it went in one sentence.

import { get, send } from "./api.js";

/** The actions by name. `dispatch`: to the page's state; `refresh(name)`: ask for a list anew. */
export function actions(dispatch, refresh) {
  const tell = (text, kind = "good") => dispatch({ kind: "notice", data: { text, kind } });

  /** Do it, say so; a refusal is said too, with its hint. */
  async function attempt(work, said) {
    try {
      tell(said(await work()));
    } catch (error) {
      if (error.locked) dispatch({ kind: "refused", data: error });
      else tell([error.message, error.hint].filter(Boolean).join(" "), "bad");
    }
  }

  async function caching(verb, said) {
    await send("POST", `api/${verb}`);
    dispatch({ kind: "status", data: await get("api/status") });
    return said;
  }

  /** The row with the focus is gone: its section has it now, not the page's beginning. */
  const settle = (section) => document.getElementById(`${section}-title`)?.focus();

  const path = (kind, id) => `api/${kind}/${encodeURIComponent(id)}`;
  return {
    pause: () => attempt(() => caching("pause", "Caching is paused."), String),
    resume: () => attempt(() => caching("resume", "Caching is resumed."), String),
    pin: (id, pinned) =>
      attempt(
        async () => {
          await send("POST", `${path("snapshots", id)}/pin`, { pinned });
          await refresh("snapshots");
        },
        () => (pinned ? "Pinned: it stays on disk." : "Unpinned."),
      ),
    remove: (id) =>
      attempt(
        async () => {
          await send("DELETE", path("snapshots", id));
          await refresh("snapshots");
          settle("snapshots");
        },
        () => "Snapshot deleted.",
      ),
    forget: (id) =>
      attempt(
        async () => {
          await send("POST", `${path("conversations", id)}/forget`);
          await Promise.all(["conversations", "snapshots", "requests", "slots"].map(refresh));
          settle("conversations");
        },
        () => "Conversation forgotten.",
      ),
  };
}

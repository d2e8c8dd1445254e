// What the page knows, and how each piece of news changes it. Pure.

const MOST_REQUESTS = 512;
const MOST_LOGS = 500;

/** `link`: connecting, live or lost, `trouble` why; `skew`: seconds the proxy's clock is ahead of this one. */
export const NOTHING = Object.freeze({
  status: null,
  slots: null,
  running: null,
  requests: null,
  snapshots: null,
  conversations: null,
  logs: null,
  link: "connecting",
  trouble: "",
  skew: 0,
  refused: null,
  notice: null,
});

const by = {
  newest: (one, other) => other.at - one.at,
  sequence: (one, other) => one.seq - other.seq,
};

/** `rows` with `news` in it: rows of the same id are replaced. */
function merged(rows, news, id) {
  const all = new Map((rows ?? []).map((row) => [row[id], row]));
  for (const row of news) all.set(row[id], row);
  return [...all.values()];
}

function withRequests(state, news) {
  const rows = merged(state.requests, news, "seq").sort(by.newest);
  return { ...state, requests: rows.slice(0, MOST_REQUESTS) };
}

function withLogs(state, news) {
  const rows = merged(state.logs, news, "seq").sort(by.sequence);
  return { ...state, logs: rows.slice(-MOST_LOGS) };
}

function withStatus(state, status) {
  const skew = status.now - Date.now() / 1000;
  // Its decision log and its log are kept in memory: a proxy started anew begins with none.
  const another = state.status && state.status.started !== status.started;
  return { ...state, status, skew, ...(another ? { requests: null, logs: null } : {}) };
}

/** The next state. `kind`: an event of the stream, or a name of this page's own. */
export function reduce(state, { kind, data }) {
  switch (kind) {
    case "status":
      return withStatus(state, data);
    case "slots":
    case "running":
    case "snapshots":
    case "conversations":
      return { ...state, [kind]: data[kind] };
    case "request":
      return withRequests(state, [data]);
    case "requests":
      return withRequests(state, data.requests);
    case "log":
      return withLogs(state, [data]);
    case "logs":
      return withLogs(state, data.logs);
    case "link":
    case "trouble":
    case "refused":
    case "notice":
      return { ...state, [kind]: data };
    case "key":
      return { ...NOTHING };
    default:
      return state; // a newer proxy may tell more
  }
}

// The proxy's own API: requests with the admin key, errors with their hint.

const KEY = "slotkeeper.key";

let inMemory = "";

/** The admin key of this browser tab, "" for none. */
export function key() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return inMemory;
  }
}

/** Keep the key until the tab is closed; never in the address, never on disk. */
export function keepKey(value) {
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    inMemory = value;
  }
}

/** What the proxy refused: `status` is HTTP's, 0 where nobody answered; `hint` says what to do. */
export class ApiError extends Error {
  constructor(status, message, hint = "") {
    super(message);
    this.status = status;
    this.hint = hint;
  }

  /** Whether another key would help. */
  get locked() {
    return this.status === 401 || this.status === 403;
  }
}

/** Headers of every request; only what is there. */
function headers(more = {}) {
  return key() ? { Authorization: `Bearer ${key()}`, ...more } : more;
}

async function refusal(answer) {
  let told = {};
  try {
    told = (await answer.json()).error ?? {};
  } catch {
    // Not from the proxy: a gateway before it, perhaps.
  }
  const message = told.message ?? `The proxy answered ${answer.status}.`;
  return new ApiError(answer.status, message, told.hint);
}

/** Open `path` below /_slotkeeper/; raises `ApiError`. */
export async function open(path, options = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      cache: "no-store",
      credentials: "omit",
      ...options,
      headers: headers(options.headers),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The proxy does not answer.", "Is it still running?");
  }
  if (!answer.ok) throw await refusal(answer);
  return answer;
}

/** What is at `path`, parsed. */
export async function get(path) {
  return (await open(path)).json();
}

/** Change something. A JSON body is what a form of another site cannot send. */
export async function send(method, path, body = {}) {
  const options = {
    method,
    body: JSON.stringify(body),
    headers: { "Content-Type": "application/json" },
  };
  return (await open(path, options)).json();
}

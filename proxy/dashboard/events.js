// Server-sent events by fetch: EventSource cannot send the admin key. Never gives up.

import { open } from "./api.js";

const FIRST_WAIT = 1000; // ms before the first new try; doubled at each further one
const LONGEST_WAIT = 15000;
const SILENCE = 40000; // the proxy says something every 15 s; longer silence is a dead connection

/** One event of the stream as `{kind, data}`; null for a comment. */
export function parse(block) {
  let kind = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) kind = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
  }
  return data.length ? { kind, data: JSON.parse(data.join("\n")) } : null;
}

/** Read one connection to its end; `alive` is called at every sign of life. */
async function read(answer, alive, onEvent) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    const blocks = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = parse(block);
      if (event) onEvent(event);
    }
  }
}

/**
 * Follow `path` until `stop` is called. `onEvent({kind, data})`; `onOpen()` at each connection, the
 * moment to ask for everything anew: if that fails, so does the connection. `onLost(error)` when it
 * broke, the error null where it just ended; `onRefused(error)` when the key is not enough, after
 * which nothing is tried again.
 */
export function follow(path, { onEvent, onOpen, onLost, onRefused }) {
  let stopped = false;
  let wait = FIRST_WAIT;
  let wake = () => {};
  let connection = new AbortController();

  async function once() {
    connection = new AbortController();
    let timer = 0;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => connection.abort(), SILENCE);
    };
    alive();
    try {
      const answer = await open(path, { signal: connection.signal });
      wait = FIRST_WAIT;
      await Promise.all([read(answer, alive, onEvent), onOpen()]);
    } finally {
      clearTimeout(timer);
      connection.abort();
    }
  }

  async function run() {
    while (!stopped) {
      let trouble = null;
      try {
        await once();
      } catch (error) {
        trouble = error;
      }
      if (stopped) return;
      if (trouble?.locked) {
        onRefused(trouble);
        return;
      }
      onLost(trouble);
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, wait);
      });
      wait = Math.min(2 * wait, LONGEST_WAIT);
    }
  }

  run();
  return {
    stop() {
      stopped = true;
      connection.abort();
      wake();
    },
    /** Try at once, not after the wait. */
    retry() {
      wake();
    },
  };
}

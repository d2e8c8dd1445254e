// The page: follows the proxy's events and shows what they tell.

import { actions } from "./actions.js";
import { get, keepKey } from "./api.js";
import { Banner } from "./banner.js";
import { Charts } from "./charts.js";
import { follow } from "./events.js";
import { Header, Places } from "./header.js";
import { Headline } from "./headline.js";
import { KeyForm } from "./key.js";
import { Log } from "./log.js";
import { Requests } from "./requests.js";
import { Now } from "./slots.js";
import { Conversations, Snapshots } from "./snapshots.js";
import { NOTHING, reduce } from "./state.js";
import { html, render, useEffect, useMemo, useReducer, useRef, useState } from "./vendor/htm-preact.js";

const LISTS = {
  slots: "api/slots",
  running: "api/running",
  requests: "api/requests?limit=200",
  snapshots: "api/snapshots",
  conversations: "api/conversations",
  logs: "api/logs?limit=500",
};
const SETTLE = 1500; // ms after the last finished request before conversations are asked for
const NOTICE = 8000; // ms a notice stays

const LINK = {
  live: "Connected.",
  lost: "Disconnected from the proxy.",
};

/** The connection: `dispatch` hears of everything, `tries` starts it anew. */
function useLive(dispatch, tries) {
  const live = useRef(null);
  const refresh = async (name) => dispatch({ kind: name, data: await get(LISTS[name]) });
  useEffect(() => {
    let timer = 0;
    const everything = async () => {
      dispatch({ kind: "status", data: await get("api/status") });
      await Promise.all(Object.keys(LISTS).map(refresh));
      dispatch({ kind: "link", data: "live" });
    };
    live.current = follow("api/events", {
      onOpen: everything,
      onEvent: (event) => {
        dispatch(event);
        if (event.kind !== "request") return;
        clearTimeout(timer);
        timer = setTimeout(() => refresh("conversations").catch(() => {}), SETTLE);
      },
      onLost: (error) => {
        dispatch({ kind: "trouble", data: error?.status ? error.message : "" });
        dispatch({ kind: "link", data: "lost" });
      },
      onRefused: (error) => dispatch({ kind: "refused", data: error }),
    });
    return () => {
      clearTimeout(timer);
      live.current.stop();
    };
  }, [tries]);
  return { refresh, retry: () => live.current.retry() };
}

/** The proxy's clock in unix seconds, ticking. */
function useNow(skew) {
  const [here, setHere] = useState(Date.now());
  useEffect(() => {
    const timer = setInterval(() => setHere(Date.now()), 1000);
    return () => clearInterval(timer);
  }, []);
  return here / 1000 + skew;
}

/** What changed, in words: shown for a while, and read out by a screen reader. */
function Notice({ notice, link, onGone }) {
  useEffect(() => {
    if (!notice) return undefined;
    const timer = setTimeout(onGone, NOTICE);
    return () => clearTimeout(timer);
  }, [notice]);
  return html`<div class="notices">
    <p class="unseen" role="status">${LINK[link]}</p>
    <p class="notice ${notice?.kind}" id="notice" role="status">${notice?.text}</p>
  </div>`;
}

function Page({ state, act, retry }) {
  const now = useNow(state.skew);
  const { status } = state;
  return html`<a class="skip" href="#overview">Skip to the figures</a>
    <div class=${state.link === "lost" ? "page stale" : "page"}>
      <${Header} state=${state} now=${now} actions=${act} />
      <${Places} />
      <main>
        ${!status &&
        html`<p class="loading">
          ${state.link === "lost"
            ? `${state.trouble || "The proxy does not answer."} Trying again …`
            : "Connecting …"}
        </p>`}
        ${status &&
        html`<section id="overview" aria-label="Overview" class="section">
            <${Banner} state=${state} onRetry=${retry} />
            <${Headline} status=${status} />
          </section>
          <${Now} state=${state} now=${now} />
          <${Requests} requests=${state.requests} />
          <${Charts} link=${state.link} />
          <${Snapshots} state=${state} now=${now} actions=${act} />
          <${Conversations} state=${state} now=${now} actions=${act} />
          <${Log} logs=${state.logs} />`}
      </main>
    </div>`;
}

function App() {
  const [state, dispatch] = useReducer(reduce, NOTHING);
  const [tries, setTries] = useState(0);
  const { refresh, retry } = useLive(dispatch, tries);
  const act = useMemo(() => actions(dispatch, refresh), []);
  const gone = () => dispatch({ kind: "notice", data: null });
  if (state.refused) {
    const enter = (key) => {
      keepKey(key);
      dispatch({ kind: "key" });
      setTries(tries + 1);
    };
    return html`<${KeyForm} error=${state.refused} onKey=${enter} />`;
  }
  return html`<${Page} state=${state} act=${act} retry=${retry} />
    <${Notice} notice=${state.notice} link=${state.link} onGone=${gone} />`;
}

const root = document.getElementById("app");
root.replaceChildren();
render(html`<${App} />`, root);

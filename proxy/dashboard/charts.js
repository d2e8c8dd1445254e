// Six small charts over the same hours (uPlot draws, this says what).

import { get } from "./api.js";
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { bytes, compact, count, percent, seconds } from "./format.js";
import { Empty, Section } from "./parts.js";
import { columns, highest, newest, stacked, total } from "./series.js";

const SPANS = { "1h": 3600, "6h": 6 * 3600, "24h": 24 * 3600 };
const REFRESH = 60000; // the proxy keeps minutes
const HEIGHT = 168;
const FEW = 12; // points of a line that are drawn one by one
/** Steps of an axis that read well. */
const TENS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap((unit) => [unit, 2 * unit, 5 * unit]);
const TIMES = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1800, 3600];
const TWOS = Array.from({ length: 30 }, (_, power) => 2 ** (power + 16));

const tokens = (data) => {
  const all = stacked(data.slot, data.snapshot, data.computed);
  return { lines: all.reverse(), shown: [data.computed, data.snapshot, data.slot] };
};
const plain = (...names) => (data) => {
  const lines = names.map((name) => data[name]);
  return { lines, shown: lines };
};

/** Title, what is drawn ([name, colour] per line), how its figures are spelled, its sum in words. */
const CHARTS = [
  {
    title: "Prompt tokens",
    lines: [["computed", "computed"], ["from disk", "snapshot"], ["from slots", "slot"]],
    data: tokens,
    filled: true,
    spell: compact,
    steps: TENS,
    sum: ({ slot, snapshot, computed }) => {
      const spared = total(slot) + total(snapshot);
      const all = spared + total(computed);
      return all ? `${compact(all)}, ${percent(spared, all)} not recomputed` : "none";
    },
  },
  {
    title: "Time to first token",
    lines: [["95 % within", "computed"], ["half within", "slot"]],
    data: plain("first_token_p95", "first_token_p50"),
    spell: seconds,
    steps: TIMES,
    sum: (data) => {
      const slowest = highest(data.first_token_p95);
      return slowest === null ? "none" : `at most ${seconds(slowest)} for 95 %`;
    },
  },
  {
    title: "Prefill time saved",
    lines: [["saved", "slot"]],
    data: plain("seconds_saved"),
    filled: true,
    spell: seconds,
    steps: TIMES,
    sum: (data) => `${seconds(total(data.seconds_saved))} in all`,
  },
  {
    title: "Requests",
    lines: [["requests", "snapshot"]],
    data: plain("requests"),
    filled: true,
    spell: count,
    steps: TENS,
    sum: (data) => `${count(total(data.requests))} in all`,
  },
  {
    title: "Waiting requests",
    lines: [["waiting", "computed"]],
    data: plain("queue"),
    filled: true,
    spell: count,
    steps: TENS,
    sum: (data) => `at most ${count(highest(data.queue) ?? 0)}`,
  },
  {
    title: "Disk used",
    lines: [["used", "snapshot"]],
    data: plain("disk"),
    spell: bytes,
    steps: TWOS,
    sum: (data) => bytes(newest(data.disk)),
  },
];

const hour = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

/** A colour of the style sheet as the canvas needs it. */
function colour(element, name) {
  const probe = document.createElement("span");
  probe.className = `colour-${name}`;
  element.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Few values, far apart: a line would hardly show. */
export function lonely(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length > 0 && known.length <= FEW;
}

function options(frame, chart, onCursor) {
  const [ink, rule] = ["faint", "rule"].map((name) => colour(frame, name));
  const font = `11px ${getComputedStyle(frame).fontFamily}`;
  const axis = { stroke: ink, font, ticks: { show: false }, grid: { stroke: rule, width: 1 } };
  const spelled = (_, splits) => splits.map((value) => chart.spell(value));
  const stepped = window.uPlot.paths.stepped({ align: 1 });
  return {
    width: frame.clientWidth,
    height: HEIGHT,
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { y: false, drag: { setScale: false }, points: { show: false } },
    scales: { y: { range: (_, _low, high) => [0, high > 0 ? 1.08 * high : 1] } },
    axes: [
      { ...axis, grid: { show: false }, size: 26, values: (_, all) => all.map((t) => hour.format(1000 * t)) },
      { ...axis, size: 62, values: spelled, incrs: chart.steps },
    ],
    series: [
      {},
      ...chart.lines.map(([label, name]) => ({
        label,
        stroke: colour(frame, name),
        fill: chart.filled ? colour(frame, `${name}-fill`) : undefined,
        width: 1.5,
        paths: stepped,
        // A minute alone has no line: its value is a dot.
        points: { show: (plot, line) => lonely(plot.data[line]), size: 5, fill: colour(frame, name) },
      })),
    ],
    hooks: { setCursor: [({ cursor }) => onCursor(cursor.idx ?? null)] },
  };
}

function Chart({ chart, data, theme }) {
  const frame = useRef(null);
  const drawn = useRef(null);
  const [at, setAt] = useState(null);
  const { lines, shown } = chart.data(data);
  useEffect(() => {
    const made = options(frame.current, chart, setAt);
    const plot = new window.uPlot(made, [data.t, ...lines], frame.current);
    const watch = new ResizeObserver(() => {
      plot.setSize({ width: frame.current.clientWidth, height: HEIGHT });
    });
    watch.observe(frame.current);
    drawn.current = plot;
    return () => {
      watch.disconnect();
      plot.destroy();
    };
  }, [theme]);
  useEffect(() => drawn.current.setData([data.t, ...lines]), [data]);
  const said = chart.sum(data);
  const point = (place) =>
    [
      hour.format(1000 * data.t[place]),
      ...chart.lines.map(([label], line) => `${label} ${chart.spell(shown[line][place])}`),
    ].join(" · ");
  return html`<figure class="chart">
    <figcaption>
      <b>${chart.title}</b>
      <span class="faint">${at !== null && data.t[at] !== undefined ? point(at) : said}</span>
    </figcaption>
    <div ref=${frame} class="chart-frame" role="img" aria-label="${chart.title}: ${said}"></div>
    ${chart.lines.length > 1 &&
    html`<p class="keys">
      ${chart.lines.map(([label, name]) => html`<span class="key ${name}">${label}</span>`)}
    </p>`}
  </figure>`;
}

/** Redraws when the theme changes: a canvas does not follow the style sheet. */
function useTheme() {
  const [theme, setTheme] = useState(0);
  useEffect(() => {
    const changed = () => setTheme((count) => count + 1);
    addEventListener("themechange", changed);
    return () => removeEventListener("themechange", changed);
  }, []);
  return theme;
}

function useHistory(span, link) {
  const [history, setHistory] = useState(null);
  useEffect(() => {
    if (link !== "live") return undefined;
    let gone = false;
    const ask = async () => {
      try {
        const answer = await get(`api/history?span=${span}`);
        if (!gone) setHistory({ span, data: columns(answer, SPANS[span], Date.now() / 1000) });
      } catch {
        // The stream notices a lost proxy, and says so; the old chart stays.
      }
    };
    ask();
    const timer = setInterval(ask, REFRESH);
    return () => {
      gone = true;
      clearInterval(timer);
    };
  }, [span, link]);
  return history;
}

function Spans({ span, setSpan }) {
  return html`<div class="choice" role="group" aria-label="Time shown">
    ${Object.keys(SPANS).map(
      (name) => html`<button
        type="button"
        aria-pressed=${span === name}
        onClick=${() => setSpan(name)}
      >
        ${name.replace("h", " h")}
      </button>`,
    )}
  </div>`;
}

/** The charts and the choice of their span. */
export function Charts({ link }) {
  const [span, setSpan] = useState("1h");
  const history = useHistory(span, link);
  const theme = useTheme();
  const nothing = history && total(history.data.requests) === 0 && highest(history.data.disk) === null;
  const choice = html`<${Spans} span=${span} setSpan=${setSpan} />`;
  return html`<${Section} id="charts" title="Charts" aside=${choice}>
    ${nothing && html`<${Empty} title="Nothing happened in this time" />`}
    ${history &&
    !nothing &&
    html`<div class="charts" data-span=${history.span}>
      ${CHARTS.map(
        (chart) =>
          html`<${Chart} key=${chart.title} chart=${chart} data=${history.data} theme=${theme} />`,
      )}
    </div>`}
  <//>`;
}

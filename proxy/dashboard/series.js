// The history in even steps: from the minutes the proxy kept to what a chart can show. Pure.

const POINTS = 120; // more cannot be told apart in a chart of this width

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);
const known = (values) => values.filter((value) => value !== null && value !== undefined);
const mean = (values) => (known(values).length ? sum(values) / known(values).length : null);
const most = (values) => (known(values).length ? Math.max(...known(values)) : null);
const last = (values) => known(values).at(-1) ?? null;

/** How several minutes become one point, by column. */
const JOINED = {
  requests: sum,
  slot: sum,
  snapshot: sum,
  computed: sum,
  seconds_saved: sum,
  first_token_p50: mean,
  first_token_p95: most,
  queue: most,
  disk: last,
};

/**
 * Columns by name, `t` among them, over `span` seconds up to `now`. Minutes without a row count
 * as nothing where amounts are added up, else as unknown.
 */
export function columns({ step, columns: names, rows }, span, now) {
  const width = step * Math.max(1, Math.ceil(span / step / POINTS));
  const end = Math.floor(now / width);
  const start = end - Math.floor(span / width) + 1;
  const buckets = Array.from({ length: end - start + 1 }, () => []);
  for (const row of rows) buckets[Math.floor(row[0] / width) - start]?.push(row);
  const made = { t: buckets.map((_, place) => (start + place) * width) };
  for (const [place, name] of names.entries()) {
    const join = JOINED[name];
    if (join) made[name] = buckets.map((bucket) => join(bucket.map((row) => row[place])));
  }
  return made;
}

/** Columns added up from left to right: what a stacked chart draws. */
export function stacked(...parts) {
  let below = parts[0].map(() => 0);
  return parts.map((part) => {
    below = part.map((value, place) => value + below[place]);
    return below;
  });
}

/** All of a column in one number. */
export const total = sum;

/** The highest of a column, null for none. */
export const highest = most;

/** The newest of a column that is known, null for none. */
export const newest = last;

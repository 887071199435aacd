// From the text of /metrics to the points of the charts.

export const SECONDS = 120; // of history
const WINDOW = 10; // seconds that a latency is taken over
const GAP = 5; // seconds without a sample, after which a rate would be a guess

const SAMPLE = /^kvern:(\w+)(?:\{(.*)\})?\s+(\S+)/;
const LIMIT = /(?:^|,)le="([^"]+)"/;
const STORE = /(?:^|,)store="([^"]+)"/;
const STORED = /^tier_(?:(\w+)_total|(\w+))$/;

/**
 * One reading: `values` by name, summed over labels, `counts` of how many there were, and the cumulative `buckets` of
 * histograms as Maps from limit to count. `stores` has the figures of each store of the KV tier by its name: counters
 * summed over engines, and the last engine's values of now. The time is in seconds.
 */
export function parse(text, time) {
  const reading = { time, values: {}, counts: {}, buckets: {}, stores: {} };
  for (const line of text.split("\n")) {
    const found = SAMPLE.exec(line);
    if (!found) continue;
    const [, name, labels, value] = found;
    const store = STORE.exec(labels ?? "")?.[1];
    if (store) {
      const [, counter, gauge] = STORED.exec(name) ?? [];
      const figures = (reading.stores[store] ??= {});
      figures[counter ?? gauge] = (counter ? (figures[counter] ?? 0) : 0) + Number(value);
    }
    const limit = name.endsWith("_bucket") && LIMIT.exec(labels)?.[1];
    if (limit) {
      const buckets = (reading.buckets[name.slice(0, -"_bucket".length)] ??= new Map());
      const key = limit === "+Inf" ? Infinity : Number(limit);
      buckets.set(key, (buckets.get(key) ?? 0) + Number(value));
    } else {
      reading.values[name] = (reading.values[name] ?? 0) + Number(value);
      reading.counts[name] = (reading.counts[name] ?? 0) + 1;
    }
  }
  return reading;
}

/** Whether the server that gave `later` has started anew since `earlier`: its counters have. */
export const restarted = (earlier, later) =>
  Object.keys(earlier.values).some((name) => name.endsWith("_total") && later.values[name] < earlier.values[name]);

/** What the charts show at the last of `readings`. A figure is null where nothing happened that it could tell. */
export function point(readings) {
  const now = readings.at(-1);
  const before = readings.at(-2);
  const start = readings.find((reading) => reading.time >= now.time - WINDOW - 0.5);
  const near = before && now.time - before.time < GAP ? before : null;
  const grown = (from, name) => now.values[name] - from.values[name];
  const rate = (name) => (near ? grown(near, name) / (now.time - near.time) : null);
  const ratio = (above, below) => (below > 0 ? above / below : null);
  const accepted = grown(start, "spec_decode_num_accepted_tokens_total");
  const verified = grown(start, "spec_decode_num_drafts_total"); // times that drafts of a request were
  const latency = (name) => ({
    mean: ratio(grown(start, `${name}_sum`), grown(start, `${name}_count`)),
    p95: quantile(0.95, start.buckets[name], now.buckets[name]),
  });
  return {
    time: now.time,
    generated: rate("generation_tokens_total"),
    prompt: rate("prompt_tokens_total"),
    running: now.values.num_requests_running,
    waiting: now.values.num_requests_waiting,
    first: latency("time_to_first_token_seconds"),
    next: latency("inter_token_latency_seconds"),
    whole: latency("e2e_request_latency_seconds"),
    cache: now.values.kv_cache_usage_perc / now.counts.kv_cache_usage_perc,
    hits: ratio(grown(start, "prefix_cache_hits_total"), grown(start, "prefix_cache_queries_total")),
    right: ratio(accepted, grown(start, "spec_decode_num_draft_tokens_total")),
    kept: ratio(verified + accepted, verified),
  };
}

/** The quantile of what a histogram has counted between two readings, interpolated inside its bucket. */
export function quantile(share, earlier, later) {
  if (!earlier || !later) return null;
  const limits = [...later.keys()].sort((a, b) => a - b);
  const counted = (limit) => later.get(limit) - (earlier.get(limit) ?? 0);
  const wanted = share * counted(limits.at(-1));
  if (!(wanted > 0)) return null;
  let [low, below] = [0, 0];
  for (const limit of limits) {
    const count = counted(limit);
    if (count >= wanted) return limit === Infinity ? low : low + ((limit - low) * (wanted - below)) / (count - below);
    [low, below] = [limit, count];
  }
  return null;
}

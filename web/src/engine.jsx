// The engine's figures of the last two minutes, read every second while somebody looks.
import { useEffect, useState } from "preact/hooks";
import { Facts, PrefillServers, Stores, Version } from "./facts.jsx";
import { NONE, number, percent, seconds } from "./format.js";
import { SECONDS, parse, point, restarted } from "./metrics.js";
import { engines, metrics } from "./server.js";

const EVERY = 1000; // milliseconds

const latency = (name) => [
  { label: "mean", of: (point) => point[name].mean },
  { label: "p95", of: (point) => point[name].p95 },
];

const CHARTS = [
  { title: "Generated tokens/s", format: number, lines: [{ of: (point) => point.generated }] },
  { title: "Prompt tokens/s", format: number, lines: [{ of: (point) => point.prompt }] },
  {
    title: "Requests",
    format: number,
    lines: [
      { label: "running", of: (point) => point.running },
      { label: "waiting", of: (point) => point.waiting },
    ],
  },
  { title: "Time to first token", format: seconds, lines: latency("first") },
  { title: "Between tokens", format: seconds, lines: latency("next") },
  { title: "Whole requests", format: seconds, lines: latency("whole") },
  { title: "KV cache in use", format: percent, most: 1, lines: [{ of: (point) => point.cache }] },
  { title: "Prefix cache hits", format: percent, most: 1, lines: [{ of: (point) => point.hits }] },
  { title: "Drafts that were right", format: percent, most: 1, lines: [{ of: (point) => point.right }] },
  { title: "Tokens of a step with drafts", format: number, lines: [{ of: (point) => point.kept }] },
];

const TOTALS = {
  "requests answered": "request_success_total",
  "tokens generated": "generation_tokens_total",
  "prompt tokens": "prompt_tokens_total",
  preemptions: "num_preemptions_total",
  "engine restarts": "engine_restarts_total",
};

export function Engine({ shown }) {
  const [{ readings, points, failure, told, servers }, setState] = useState({ readings: [], points: [] });
  const [pointed, setPointed] = useState(null);
  usePolling(shown, async (signal) => {
    try {
      const [text, { data, prefill_servers: servers = [] }] = await Promise.all([metrics(signal), engines(signal)]);
      setState((state) => ({ ...grown(state, parse(text, performance.now() / 1000)), told: data, servers }));
    } catch (error) {
      const failure = [403, 404].includes(error.status) ? "This server has no metrics, or they are not for this key: those with admin=1 or metrics=1 may read them." : error.message;
      if (!signal.aborted) setState((state) => ({ ...state, failure }));
    }
  });
  const at = points[pointed] ?? points.at(-1);
  if (!at)
    return (
      <div class="engine">
        <Facts />
        <p class={failure ? "failure" : "hint"} role={failure ? "alert" : undefined}>
          {failure ?? "Reading the metrics…"}
        </p>
      </div>
    );
  const now = points.at(-1).time;
  const ago = Math.round(now - at.time);
  return (
    <div class="engine">
      <Facts />
      <Stores stores={readings.at(-1).stores} />
      <PrefillServers servers={servers} />
      <Verdicts verdicts={told.filter(({ verdict }) => verdict)} />
      <Parts engines={told.filter(({ step_parts }) => step_parts?.length)} />
      <h2>Figures</h2>
      <p class={failure ? "failure" : "hint"} role={failure ? "alert" : undefined}>
        {failure ?? (ago ? `${ago} s ago` : "The last two minutes, every second. Latencies and hits are over ten seconds.")}
      </p>
      <div class="charts">
        {CHARTS.map((chart) => (
          <Chart key={chart.title} {...chart} points={points} at={at} now={now} setPointed={setPointed} />
        ))}
      </div>
      <dl class="totals">
        {Object.entries(TOTALS).map(([label, name]) => (
          <div key={name}>
            <dt>{label}</dt>
            <dd>{readings.at(-1).values[name]?.toLocaleString("en") ?? NONE}</dd>
          </div>
        ))}
      </dl>
      <Version />
    </div>
  );
}

/** What most of the last seconds of each engine went to, and what helps. */
function Verdicts({ verdicts }) {
  if (!verdicts.length) return null;
  return (
    <section class="verdict">
      <h2>Where the time goes</h2>
      {verdicts.map(({ model, engine, verdict: { share, evidence, action } }) => (
        <p key={`${model} ${engine}`}>
          {verdicts.length > 1 && `${model}, engine ${engine}: `}
          {evidence} ({percent(share)} of the time): {action}.
        </p>
      ))}
    </section>
  );
}

/** Where the time of a step of each engine goes, if its layers are measured. */
function Parts({ engines }) {
  return engines.flatMap(({ model, engine, step_parts }) =>
    step_parts.map((step) => (
      <section key={`${model} ${engine} ${step.step}`} class="parts">
        <h2>
          {step.step === "decode" ? "Decode steps" : "Steps with prompts"}: {seconds(step.seconds)}, {number(step.tokens)} tokens
          {engines.length > 1 && ` (${model}, engine ${engine})`}
        </h2>
        <table>
          <thead>
            <tr>
              {["part", "time", "share", "bound"].map((name) => (
                <th key={name}>{name}</th>
              ))}
            </tr>
          </thead>
          <tbody>
            {step.parts.map((part) => (
              <tr key={part.part}>
                <th>{part.part}</th>
                <td>{seconds(part.seconds)}</td>
                <td>{percent(part.share)}</td>
                <td>{seconds(part.bound_seconds)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </section>
    )),
  );
}

/** The state with one more reading, without what is too old. */
function grown({ readings, points }, reading) {
  if (readings.length && restarted(readings.at(-1), reading)) [readings, points] = [[], []];
  const young = ({ time }) => time > reading.time - SECONDS;
  readings = [...readings.filter(young), reading];
  return { readings, points: [...points.filter(young), point(readings)] };
}

/** Calls `poll` again and again, each time after the last has ended, while `shown` and the page is visible. */
function usePolling(shown, poll) {
  useEffect(() => {
    if (!shown) return undefined;
    const leaving = new AbortController();
    let timer;
    const turn = async () => {
      clearTimeout(timer);
      if (document.hidden) return;
      const begun = performance.now();
      await poll(leaving.signal);
      if (!leaving.signal.aborted) timer = setTimeout(turn, Math.max(0, begun + EVERY - performance.now()));
    };
    document.addEventListener("visibilitychange", turn, { signal: leaving.signal });
    turn();
    return () => {
      clearTimeout(timer);
      leaving.abort();
    };
  }, [shown]);
}

const [WIDTH, HEIGHT] = [240, 60]; // of the drawing, which is stretched to its card

function Chart({ title, format, lines, most, points, at, now, setPointed }) {
  const values = lines.flatMap(({ of }) => points.map(of)).filter(Number.isFinite);
  const top = most ?? ceiling(Math.max(0, ...values));
  const x = (time) => WIDTH * (1 - (now - time) / SECONDS);
  const y = (value) => HEIGHT * (1 - value / top);
  const said = lines.map(({ label = "", of }) => `${label} ${format(of(at))}`.trim());
  const onPointerMove = ({ currentTarget, clientX }) => {
    const { left, width } = currentTarget.getBoundingClientRect();
    const time = now - SECONDS * (1 - (clientX - left) / width);
    const distances = points.map((point) => Math.abs(point.time - time));
    setPointed(distances.indexOf(Math.min(...distances)));
  };
  return (
    <figure class="chart">
      <figcaption>{title}</figcaption>
      <p class="values">
        {lines.map(({ label, of }, index) => (
          <span key={label} class={`line-${index}`}>
            <strong>{format(of(at))}</strong>
            {label}
          </span>
        ))}
      </p>
      <div class="plot">
        <svg
          viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
          preserveAspectRatio="none"
          role="img"
          aria-label={`${title}: ${said.join(", ")}`}
          onPointerMove={onPointerMove}
          onPointerLeave={() => setPointed(null)}
        >
          <path class="grid" d={`M0 0H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT}H${WIDTH}`} />
          {lines.map(({ label, of }, index) => (
            <path key={label} class={`line line-${index}`} d={path(points, of, x, y)} />
          ))}
          {at !== points.at(-1) && <path class="cursor" d={`M${x(at.time)} 0V${HEIGHT}`} />}
        </svg>
        <span class="top">{format(top)}</span>
      </div>
    </figure>
  );
}

/** Lines through the points that have a value; a point between two without one is a dot. */
function path(points, of, x, y) {
  let pen = "";
  return points
    .map((point) => {
      const value = of(point);
      if (!Number.isFinite(value)) {
        pen = "";
        return "";
      }
      const place = `${x(point.time).toFixed(1)} ${y(value).toFixed(1)}`;
      const step = pen ? `L${place}` : `M${place}h0`;
      pen = place;
      return step;
    })
    .join("");
}

/** The least of 1, 2, 5, 10, 20 ... times a power of ten that is not below `value`; 1 for nothing. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((limit) => limit >= value);
}

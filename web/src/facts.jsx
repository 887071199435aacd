// What the server tells of its models and their adapters.
import { modelName, number, seconds } from "./format.js";
import { server } from "./server.js";

const count = (value) => value?.toLocaleString("en");

/** Pairs of a label and a value, of what is known of a model. */
function factsOf({ id, root, max_model_len: context, vocab_size: vocabulary }, shown) {
  const { details = {}, capabilities = [], model_info: info = {} } = shown ?? {};
  const of = (name) => info[`${info["general.architecture"]}.${name}`];
  const parameters = info["general.parameter_count"];
  return [
    ["weights", (root !== id || modelName(id) !== id) && root],
    ["family", details.family],
    ["parameters", parameters ? scaled(parameters) : details.parameter_size],
    ["precision", details.quantization_level],
    ["format", details.format],
    ["context", context && `${count(context)} tokens`],
    ["vocabulary", vocabulary && `${count(vocabulary)} tokens`],
    ["layers", of("block_count")],
    ["hidden size", count(of("embedding_length"))],
    ["attention heads", of("attention.head_count")],
    ["KV heads", of("attention.head_count_kv")],
    ["can", capabilities.join(", ")],
  ].filter(([, value]) => value);
}

const SCALES = [
  [1e9, "billion"],
  [1e6, "million"],
];

function scaled(value) {
  const [size, word] = SCALES.find(([least]) => value >= least) ?? [1, ""];
  return `${number(value / size)} ${word}`.trim();
}

export function Facts() {
  const { models, facts } = server.use();
  return models
    .filter(({ parent }) => !parent)
    .map((model) => (
      <section key={model.id} class="facts">
        <h2>{modelName(model.id)}</h2>
        <dl>
          {factsOf(model, facts[model.id]).map(([label, value]) => (
            <div key={label}>
              <dt>{label}</dt>
              <dd>{value}</dd>
            </div>
          ))}
        </dl>
        <Adapters adapters={models.filter(({ parent }) => parent === model.id || parent === model.root)} />
      </section>
    ));
}

/** Of the stores of a KV tier: what they gave and got, and what a load from them takes. */
export function Stores({ stores }) {
  return Object.entries(stores).map(([name, figures]) => (
    <section key={name} class="facts store">
      <h2>KV tier: {name}</h2>
      <dl>
        {storeFacts(figures).map(([label, value]) => (
          <div key={label}>
            <dt>{label}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </section>
  ));
}

/** Of the servers that compute prompts for this one: whether they take some, and what became of them. */
export function PrefillServers({ servers }) {
  return servers.map((one) => (
    <section key={`${one.model} ${one.prefill_server}`} class="facts server">
      <h2>Prefill server {one.prefill_server}</h2>
      <dl>
        {[
          ["state", one.ready ? "takes prompts" : `takes no prompts: ${one.reason}`],
          ["prompts running", count(one.running)],
          ["prompts computed", count(one.computed_prompts)],
          ["tokens of these", count(one.computed_tokens)],
          ["prompts failed", count(one.failed_prompts)],
        ].map(([label, value]) => (
          <div key={label}>
            <dt>{label}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </section>
  ));
}

const storeFacts = (figures) =>
  [
    ["state", figures.is_on ? "on" : "off, since it failed"],
    ["tokens loaded", count(figures.hit_tokens)],
    ["tokens stored", count(figures.stored_tokens)],
    ["tokens not found", count(figures.missed_tokens)],
    ["computed instead", count(figures.refused_tokens + figures.late_tokens)],
    ["not stored", figures.skipped_tokens && count(figures.skipped_tokens)],
    ["corrupt pages", figures.corrupt_pages && count(figures.corrupt_pages)],
    ["a load takes", `${seconds(figures.latency_seconds)} + ${number(figures.bandwidth / 1e9)} GB/s`],
  ].filter(([, value]) => value);

export function Version() {
  const { version } = server.use();
  return version && <p class="hint">kvern {version}</p>;
}

function Adapters({ adapters }) {
  if (!adapters.length) return null;
  return (
    <div class="adapters">
      <h3>Adapters</h3>
      <ul>
        {adapters.map(({ id, root }) => (
          <li key={id}>
            {id} {root && root !== id && <small>{root}</small>}
          </li>
        ))}
      </ul>
    </div>
  );
}

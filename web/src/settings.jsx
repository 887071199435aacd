// What requests are sent with: the model, and everything under Settings.
import { Settings } from "./icons.jsx";

export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, step: "any" },
  { name: "top_p", label: "Top p", min: 0, step: "any" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];
const TEXTS = [
  { name: "system", label: "System prompt", placeholder: "none" },
  { name: "schema", label: "Answer as JSON of this schema", placeholder: '{"type": "object", "properties": {…}}', code: true },
  { name: "tools", label: "Tools, a JSON list", placeholder: '[{"name": "…", "parameters": {…}}]', code: true },
];

/** What the settings add to a request. Raises an Error that says which of them is no JSON. */
export function parameters(settings) {
  const given = NUMBERS.filter(({ name }) => settings[name]).map(({ name }) => [name, Number(settings[name])]);
  const found = Object.fromEntries(given);
  const schema = json(settings, "schema");
  if (schema !== undefined) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = json(settings, "tools");
  if (tools !== undefined) found.tools = [tools].flat().map((tool) => (tool?.function ? tool : { type: "function", function: tool }));
  return found;
}

function json(settings, name) {
  if (!settings[name]?.trim()) return undefined;
  try {
    return JSON.parse(settings[name]);
  } catch (error) {
    const { label } = TEXTS.find((text) => text.name === name);
    throw new Error(`Settings, ${label}: this is no JSON (${error.message}).`);
  }
}

/** Models, and below each its adapters. */
export function ModelChoice({ offered, model, choose }) {
  return (
    <select aria-label="Model" value={model} onChange={(event) => choose(event.currentTarget.value)}>
      {offered
        .filter(({ parent }) => !parent)
        .map(({ id }) => (
          <option key={id}>{id}</option>
        ))}
      {offered.some(({ parent }) => parent) && (
        <optgroup label="Adapters">
          {offered
            .filter(({ parent }) => parent)
            .map(({ id }) => (
              <option key={id}>{id}</option>
            ))}
        </optgroup>
      )}
    </select>
  );
}

export function OptionsButton({ settings, setSettings }) {
  const count = [...TEXTS, ...NUMBERS].filter(({ name }) => settings[name]?.trim()).length;
  return (
    <button
      type="button"
      class="quiet"
      aria-label="Settings"
      aria-expanded={Boolean(settings.open)}
      aria-controls="options"
      onClick={() => setSettings({ ...settings, open: !settings.open })}
    >
      <Settings />
      <span>Settings</span>
      {count > 0 && <b>{count}</b>}
    </button>
  );
}

export function Options({ settings, setSettings }) {
  const change = (name) => (event) => setSettings({ ...settings, [name]: event.currentTarget.value });
  return (
    <div id="options" class="options" hidden={!settings.open}>
      {TEXTS.map(({ name, label, placeholder, code }) => (
        <label key={name} class={`text ${code ? "code-field" : ""}`}>
          {label}
          <textarea rows={2} spellcheck={!code} placeholder={placeholder} value={settings[name] ?? ""} onInput={change(name)} />
        </label>
      ))}
      {NUMBERS.map(({ name, label, ...limits }) => (
        <label key={name}>
          {label}
          <input type="number" placeholder="default" value={settings[name] ?? ""} onInput={change(name)} {...limits} />
        </label>
      ))}
    </div>
  );
}

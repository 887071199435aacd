// What requests are sent with: the model, and everything under Settings. Tabs share it.
import { server } from "./server.js";
import { kept } from "./state.js";

export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, step: "any" },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: "any" },
  { name: "top_k", label: "Top k", min: 0, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: "any" },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
];
export const TEXTS = [
  { name: "system", label: "System prompt", placeholder: "none" },
  { name: "stop", label: "Stop strings, one a line", placeholder: "none; \\n is a line's end", code: true },
  { name: "schema", label: "Answer as JSON of this schema", placeholder: '{"type": "object", "properties": {…}}', code: true },
  { name: "tools", label: "Tools, a JSON list", placeholder: '[{"name": "…", "parameters": {…}}]', code: true },
];
export const CHOICES = [
  { name: "thinking", label: "Thinking", options: { "": "the model's default", on: "on", off: "off" } },
  { name: "effort", label: "Effort", options: { "": "the model's default", low: "low", medium: "medium", high: "high" } },
];
const ALL = [...TEXTS, ...CHOICES, ...NUMBERS];
const EMPTY = Object.fromEntries(ALL.map(({ name }) => [name, ""]));

export const settings = kept("settings", { ...EMPTY, model: "" });
export const reset = () => settings.change(EMPTY);
export const countSet = (values) => ALL.filter(({ name }) => values[name].trim() && isOffered(name)).length;

/** The model that is asked: the chosen one, if the server still has it. */
export const modelInUse = () => {
  const { models } = server.value;
  return models.find(({ id }) => id === settings.value.model) ?? models[0];
};

/** Whether the model thinks before it answers, as the server says. */
export function thinks() {
  const model = modelInUse();
  return server.value.facts[model?.parent ?? model?.id]?.capabilities?.includes("thinking") ?? false;
}

/** Whether the model reads pictures, as the server says. */
export const sees = () => modelInUse()?.architecture?.input_modalities?.includes("image") ?? false;

const isOffered = (name) => thinks() || !CHOICES.some((choice) => choice.name === name);

/** What the settings add to a request. Raises an Error that says which of them is no JSON. */
export function parameters(values) {
  const given = NUMBERS.filter(({ name }) => values[name]).map(({ name }) => [name, Number(values[name])]);
  const found = Object.fromEntries(given);
  const stops = values.stop.split("\n").filter(Boolean);
  if (stops.length) found.stop = stops.map((text) => text.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
  if (thinks() && values.thinking) found.enable_thinking = values.thinking === "on";
  if (thinks() && values.effort && values.thinking !== "off") found.reasoning_effort = values.effort;
  const schema = json(values, "schema");
  if (schema !== undefined) found.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  const tools = json(values, "tools");
  if (tools !== undefined) found.tools = [tools].flat().map((tool) => (tool?.function ? tool : { type: "function", function: tool }));
  return found;
}

function json(values, name) {
  if (!values[name].trim()) return undefined;
  try {
    return JSON.parse(values[name]);
  } catch (error) {
    const { label } = TEXTS.find((text) => text.name === name);
    throw new Error(`Settings, ${label}: this is no JSON (${error.message}).`);
  }
}

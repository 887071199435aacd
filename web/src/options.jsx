// The model, and the panel of settings.
import { modelName } from "./format.js";
import { readStates, server } from "./server.js";
import { CHOICES, NUMBERS, TEXTS, countSet, modelInUse, reset, settings, thinks } from "./settings.js";

/** Models, each with its state if there are several, and below them their adapters. */
export function ModelChoice() {
  const { models } = server.use();
  settings.use();
  const option = ({ id, parent, state }) => (
    <option key={id} value={id} title={id}>
      {state && !parent ? `${modelName(id)} (${state})` : modelName(id)}
    </option>
  );
  const adapters = models.filter(({ parent }) => parent);
  return (
    <select
      aria-label="Model"
      value={modelInUse()?.id}
      onChange={(event) => settings.change({ model: event.currentTarget.value })}
      onFocus={readStates}
      onPointerEnter={readStates}
    >
      {models.filter(({ parent }) => !parent).map(option)}
      {adapters.length > 0 && <optgroup label="Adapters">{adapters.map(option)}</optgroup>}
    </select>
  );
}

export function Options() {
  const values = settings.use();
  server.use();
  const change = (name) => (event) => settings.change({ [name]: event.currentTarget.value });
  return (
    <div id="options" class="options" hidden={!values.open}>
      {TEXTS.map(({ name, label, placeholder, code }) => (
        <label key={name} class={`text ${code ? "code-field" : ""} of-${name}`}>
          {label}
          <textarea rows={2} spellcheck={!code} placeholder={placeholder} value={values[name]} onInput={change(name)} />
        </label>
      ))}
      {thinks() &&
        CHOICES.map(({ name, label, options }) => (
          <label key={name} class="choice">
            {label}
            <select value={values[name]} onChange={change(name)} disabled={name === "effort" && values.thinking === "off"}>
              {Object.entries(options).map(([value, words]) => (
                <option key={value} value={value}>
                  {words}
                </option>
              ))}
            </select>
          </label>
        ))}
      {NUMBERS.map(({ name, label, ...limits }) => (
        <label key={name}>
          {label}
          <input type="number" placeholder="default" value={values[name]} onInput={change(name)} {...limits} />
        </label>
      ))}
      <button type="button" class="plain reset" disabled={countSet(values) === 0} onClick={reset}>
        Reset all
      </button>
    </div>
  );
}

// Small parts that several views have.
import { useState } from "preact/hooks";
import { copy } from "./browser.js";
import { Copy, Done } from "./icons.jsx";

export function IconButton({ label, icon, ...others }) {
  return (
    <button type="button" class="quiet" aria-label={label} title={label} {...others}>
      {icon}
    </button>
  );
}

export function CopyButton({ text, label }) {
  const [done, setDone] = useState(false);
  const onClick = async () => {
    setDone(await copy(text));
    setTimeout(() => setDone(false), 1500);
  };
  return <IconButton label={label} icon={done ? <Done /> : <Copy />} onClick={onClick} />;
}

/** Sends at Enter, begins a line at Shift+Enter, and lets an input method's own Enter be. */
export const onEnter = (send) => (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
};

/** Makes a text field as high as its text. */
export function fit(field) {
  field.style.height = "auto";
  field.style.height = `${field.scrollHeight}px`;
}

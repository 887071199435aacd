// The browser's storage and clipboard, which may both be refused.
import { useEffect, useState } from "preact/hooks";

export function load(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`kvern.${name}`)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function store(name, value) {
  try {
    localStorage.setItem(`kvern.${name}`, JSON.stringify(value));
  } catch {
    // full or forbidden: the page works, and forgets
  }
}

/** State that outlives the page. */
export function useStored(name, initial) {
  const [value, setValue] = useState(() => load(name, initial));
  useEffect(() => store(name, value), [value]);
  return [value, setValue];
}

/** Copies `text`, on plain HTTP too, where browsers offer no clipboard. Whether it worked. */
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    const focused = document.activeElement;
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    focused?.focus();
    return done;
  }
}

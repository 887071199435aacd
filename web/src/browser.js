// The browser's small storage, clipboard and files, all of which may be refused.

/** `area`: "sessionStorage" for what belongs to a tab. */
export function load(name, area = "localStorage") {
  try {
    return JSON.parse(globalThis[area].getItem(`kvern.${name}`));
  } catch {
    return null;
  }
}

export function store(name, value, area = "localStorage") {
  try {
    globalThis[area].setItem(`kvern.${name}`, JSON.stringify(value));
  } catch {
    // full or forbidden: the page works, and forgets its settings
  }
}

/** What was stored under names that begin so, which is then no longer stored. */
export function takeAll(beginning) {
  try {
    const names = Object.keys(localStorage).filter((name) => name.startsWith(`kvern.${beginning}`));
    return names.map((name) => {
      const value = JSON.parse(localStorage.getItem(name));
      localStorage.removeItem(name);
      return value;
    });
  } catch {
    return [];
  }
}

/** A name that no other tab gives, on plain HTTP too. */
export const newId = () =>
  Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");

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

/** Hands a file to the browser's downloads. */
export function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

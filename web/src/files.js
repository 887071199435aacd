// Text files that go with a question.

const MOST_BYTES = 1024 * 1024; // of a question's files together
const MOST_FILES = 20;

/** The chosen files as `{ name, text }`, after those that are there. Raises an Error that says which cannot go along. */
export async function readFiles(chosen, there) {
  const found = [...there];
  for (const file of chosen) {
    if (found.length === MOST_FILES) throw new Error(`A question takes at most ${MOST_FILES} files: ${file.name} was left out.`);
    const used = found.reduce((sum, { text }) => sum + text.length, 0);
    if (used + file.size > MOST_BYTES)
      throw new Error(`${file.name} was left out: with its ${kilobytes(file.size)} the files have more than ${kilobytes(MOST_BYTES)}.`);
    found.push({ name: file.name, text: await textOf(file) });
  }
  return found;
}

const kilobytes = (bytes) => `${Math.ceil(bytes / 1024).toLocaleString("en")} kB`;

async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // another encoding, or no text at all
  }
  throw new Error(`${file.name} was left out: it is no text in UTF-8. Only text files can be attached.`);
}

// Files that go with a question: texts, and pictures where the model reads them.
import { modelName } from "./format.js";
import { isPicture, readPicture } from "./pictures.js";
import { modelInUse, sees } from "./settings.js";

const MOST_BYTES = 1024 * 1024; // of a question's texts together
const MOST_FILES = 32;

/**
 * `files` are those that are there and the chosen ones, texts as `{ name, text }`, and `refused` says which cannot go along.
 * `earlier` are the files of the turns before.
 */
export async function readFiles(chosen, there, earlier) {
  const [files, refused] = [[...there], []];
  for (const file of chosen) {
    try {
      files.push(await readFile(file, files, earlier));
    } catch (error) {
      refused.push(error.message);
    }
  }
  return { files, refused: refused.join(" ") };
}

async function readFile(file, found, earlier) {
  if (found.length === MOST_FILES) throw new Error(`A question takes at most ${MOST_FILES} files: ${file.name} was left out.`);
  if (isPicture(file)) {
    if (!sees()) throw new Error(`${file.name} was left out: ${modelName(modelInUse()?.id) ?? "the model"} reads no pictures.`);
    return readPicture(file, [...earlier, ...found]);
  }
  const used = found.reduce((sum, { text = "" }) => sum + text.length, 0);
  if (used + file.size > MOST_BYTES)
    throw new Error(`${file.name} was left out: with its ${kilobytes(file.size)} the files have more than ${kilobytes(MOST_BYTES)}.`);
  return { name: file.name, text: await textOf(file) };
}

const kilobytes = (bytes) => `${Math.ceil(bytes / 1024).toLocaleString("en")} kB`;

async function textOf(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // another encoding, or no text at all
  }
  throw new Error(`${file.name} was left out: it is no text in UTF-8${sees() ? ", and no picture" : ""}.`);
}

// Pictures that go with a question. A file of a turn names its picture by id; the picture itself, a data URL, is a record of
// its own in the database, so that a growing answer is stored without it.
import { newId } from "./browser.js";
import * as database from "./database.js";

export const FORMATS = ["image/jpeg", "image/png", "image/webp", "image/gif"];
const MOST_PICTURES = 32; // in a conversation, as the server has it
const MOST_CHARACTERS = 15 * 1024 * 1024; // of all pictures of a conversation, since a request's body has at most 16 MiB
const MOST_RATIO = 200; // of the longer side to the shorter one, as the server has it
const [MOST_BYTES, MOST_PIXELS, LONGEST] = [4 * 1024 * 1024, 50_000_000, 16_384]; // what is beyond one of these is reduced
const REDUCED = 2048; // pixels on the longer side

const attached = new Map(); // data URLs of what was attached to this page, since the browser may refuse to store them

/** Whether a file is a picture by its type; those that are texts, too, go along as texts. */
export const isPicture = ({ type }) => type.startsWith("image/") && !type.includes("xml");

/** The data URL of a file's picture. Raises an Error that says that it is gone. */
export async function dataOf({ name, picture }) {
  const data = attached.get(picture) ?? (await database.picture(picture))?.data;
  if (!data) throw new Error(`${name} is not in this browser any more: edit the question, and attach it again or take it away.`);
  return data;
}

/** What the database keeps of a turn's pictures. */
export const recordsOf = ({ files, conversation }) =>
  (files ?? []).filter(({ picture }) => attached.has(picture)).map(({ picture: id }) => ({ id, conversation, data: attached.get(id) }));

const decimal = (number) => number.toLocaleString("en");
export const pixels = ({ width, height }) => `${decimal(width)} × ${decimal(height)}`;

/**
 * A picture as a file of a question: `{ name, picture, width, height, characters }`, and `from` where it was reduced. `there`
 * are the other files of the conversation. Raises an Error that says why it cannot go along.
 */
export async function readPicture(file, there) {
  const left = (why) => new Error(`${file.name} was left out: ${why}`);
  const others = there.filter(({ picture }) => picture);
  if (others.length >= MOST_PICTURES) throw left(`a conversation has at most ${MOST_PICTURES} pictures.`);
  if (!FORMATS.includes(file.type)) throw left(`${file.type} is not read. Pictures are JPEG, PNG, WebP or GIF.`);
  const bitmap = await createImageBitmap(file).catch(() => null);
  if (!bitmap) throw left("the browser cannot read it as a picture. It may be damaged, or too large.");
  const [longer, shorter] = [Math.max(bitmap.width, bitmap.height), Math.min(bitmap.width, bitmap.height)];
  if (longer > MOST_RATIO * shorter)
    throw left(`it has ${pixels(bitmap)} pixels, and the longer side may have ${MOST_RATIO} times the shorter one. Cut it into parts.`);
  const isLarge = file.size > MOST_BYTES || bitmap.width * bitmap.height > MOST_PIXELS || longer > LONGEST;
  const { blob, width, height } = isLarge ? await reduced(bitmap) : { blob: file, width: bitmap.width, height: bitmap.height };
  const from = isLarge ? pixels(bitmap) : undefined;
  bitmap.close();
  const data = await dataUrl(blob);
  const used = others.reduce((sum, { characters }) => sum + characters, 0);
  if (used + data.length > MOST_CHARACTERS) {
    const [mine, most] = [data.length, MOST_CHARACTERS].map((size) => `${(size / 1024 / 1024).toFixed(1)} MiB`);
    throw left(`a request holds ${most} of pictures, and the conversation's others leave no space for its ${mine}.`);
  }
  const picture = newId();
  attached.set(picture, data);
  return { name: file.name, picture, width, height, characters: data.length, from };
}

/** A picture of at most `REDUCED` pixels on a side, as a JPEG, on white. */
async function reduced(bitmap) {
  const less = Math.min(1, REDUCED / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * less)));
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const brush = Object.assign(canvas.getContext("2d"), { fillStyle: "white", imageSmoothingQuality: "high" });
  brush.fillRect(0, 0, width, height);
  brush.drawImage(bitmap, 0, 0, width, height);
  return { blob: await new Promise((resolve) => canvas.toBlob(resolve, "image/jpeg", 0.92)), width, height };
}

const dataUrl = (blob) =>
  new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(blob);
  });

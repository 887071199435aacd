// The conversations of this browser, the open one, and what has to be said about them. Tabs tell one another of changes.
import { download, newId, store, takeAll } from "./browser.js";
import * as database from "./database.js";
import { FORMATS, recordsOf } from "./pictures.js";
import { observable } from "./state.js";
import { branch, newestLeaf } from "./tree.js";

/**
 * `turns` is a Map of the open conversation's turns, `leaf` the last one of the branch that is shown, `shown` how often a
 * conversation was opened or a turn added, at which the view goes to the end, `switched` how often another version was
 * chosen, at which it stays where it is.
 */
export const library = observable({
  ...{ list: [], open: null, turns: new Map(), leaf: null },
  ...{ shown: 0, switched: 0, notice: null, ready: false },
});
/** Turns whose answers come in this tab, until they are stored. */
export const live = new Map();

const [BEFORE, AFTER] = [24, 60]; // characters around what a search has found
const SAVED = 5000; // milliseconds: a running turn that was not saved for three times as long runs no more
const FORMAT = "kvern conversations";
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("kvern") : null;
const tell = (message) => channel?.postMessage(message);

export function notify(text, action = null) {
  library.change({ notice: text && { text, action, id: newId() } });
}

/** Runs what writes, and says in words why it failed. */
async function written(work) {
  try {
    return await work;
  } catch (error) {
    const full = error?.name === "QuotaExceededError";
    notify(
      full
        ? "The browser's storage is full: what comes now is lost when this page closes. Export your conversations and delete some."
        : `The browser did not store this (${error?.message ?? error}): export the conversation before you close the page.`,
    );
    return undefined;
  }
}

const newestFirst = (list) => list.sort((one, other) => other.changed - one.changed);

async function reload() {
  library.change({ list: newestFirst(await database.conversations()), ready: true });
}

const named = () => /^#chat\/(\w+)$/.exec(location.hash)?.[1] ?? null;
export const address = (id) => (id ? `#chat/${id}` : "#chat");

/** Opens the conversation of the address, once at the start and whenever it changes. */
export async function start() {
  addEventListener("databaseblocked", () => notify("Close this page's other tabs: they hold the conversations in an older form."));
  channel?.addEventListener("message", ({ data }) => hear(data));
  addEventListener("hashchange", () => location.hash.startsWith("#chat") && named() !== library.value.open && open(named()));
  addEventListener("pagehide", () => [...live.values()].forEach(leave));
  await takeUp();
  await reload();
  if (library.value.open === null) await open(named()); // or somebody has asked already
  if (!(await database.isKept())) notify("This browser keeps no data of this page: export what you want to keep before you close it.");
}

// A page that goes has no time for the database: what its answers have become waits in the browser's small storage.

const leave = (turn) => store(`left.${turn.id}`, broken(turn));
const broken = (turn) => ({ ...turn, state: turn.state === "running" ? "stopped" : turn.state });

async function takeUp() {
  for (const turn of takeAll("left.")) await written(database.begin(turn, null));
}

export async function open(id) {
  const found = library.value.list.find((one) => one.id === id);
  if (id && !found) notify("This conversation is not in this browser.");
  const turns = found ? await turnsOf(id) : new Map();
  const leaf = turns.has(found?.leaf) ? found.leaf : newestLeaf(turns, null);
  library.change({ open: found ? id : null, turns, leaf, shown: library.value.shown + 1 });
  if (location.hash.startsWith("#engine")) return;
  history.replaceState(null, "", address(found?.id));
}

/** Goes to a conversation, or to a new one for null, so that the browser's button leads back. */
export function go(id) {
  if (id === library.value.open) return;
  history.pushState(null, "", address(id));
  open(id);
}

async function turnsOf(id) {
  const stored = await database.turnsOf(id);
  return new Map(stored.map((turn) => [turn.id, live.get(turn.id) ?? settled(turn)]));
}

/** A turn that runs in no tab any more has stopped. */
function settled(turn) {
  if (turn.state !== "running") return turn;
  return Date.now() - turn.saved > 3 * SAVED ? { ...turn, state: "stopped" } : { ...turn, elsewhere: true };
}

setInterval(() => {
  const { turns } = library.value;
  const waiting = [...turns.values()].filter((turn) => turn.elsewhere && turn.state === "running");
  if (waiting.some((turn) => settled(turn).state !== "running"))
    library.change({ turns: new Map([...turns].map(([id, turn]) => [id, turn.elsewhere ? settled(turn) : turn])) });
}, SAVED);

/** What another tab has done. */
async function hear({ conversation, turn, removed }) {
  await reload();
  const { open: id, list, turns } = library.value;
  if (id === null || (conversation && conversation !== id)) return;
  if (removed && !list.some((one) => one.id === id)) {
    open(null);
    notify("This conversation was deleted in another tab, which can bring it back.");
  } else if (turn) {
    const found = await database.turn(turn);
    if (!found || library.value.open !== id || live.has(turn)) return;
    const grown = new Map(library.value.turns).set(turn, settled(found));
    const leaf = list.find((one) => one.id === id)?.leaf;
    const goesOn = !library.value.leaf || branch(grown, leaf).some((one) => one.id === library.value.leaf);
    library.change({ turns: grown, leaf: goesOn && grown.has(leaf) ? leaf : library.value.leaf });
  } else if (turns.size === 0) {
    open(id);
  }
}

const title = (text) => {
  const line = text.trim().split("\n")[0].replace(/\s+/g, " ");
  return line.length <= 70 ? line : `${line.slice(0, 70).replace(/\s\S*$/, "")}…`;
};

/** Adds a turn after another one, or as the first of a new conversation, and shows its branch. */
export function addTurn(turn) {
  const now = Date.now();
  let { open: id, turns, list } = library.value;
  const begun = id === null;
  if (begun) {
    const name = title(turn.question || turn.files?.[0]?.name || "") || "Conversation";
    const conversation = { id: newId(), title: name, created: now, changed: now, leaf: turn.id };
    id = conversation.id;
    list = [conversation, ...list];
    history.replaceState(null, "", address(id));
    turns = new Map();
  }
  const added = { ...turn, conversation: id, saved: now };
  live.set(added.id, added);
  const shown = library.value.shown + 1;
  library.change({ open: id, list, turns: new Map(turns).set(added.id, added), leaf: added.id, shown });
  storeAdded(added, begun ? list[0] : null);
  return added;
}

async function storeAdded(turn, begun) {
  await written(database.begin(turn, begun, recordsOf(turn)));
  await reload();
  tell({ conversation: turn.conversation, turn: turn.id });
}

/** Stores a turn as it grows. */
export async function keepTurn(turn) {
  await written(database.save({ ...turn, saved: Date.now() }));
  tell({ conversation: turn.conversation, turn: turn.id });
}

/** Shows what has become of a turn, if its conversation is open. */
export function showTurn(turn) {
  const { open: id, turns } = library.value;
  if (id === turn.conversation) library.change({ turns: new Map(turns).set(turn.id, turn) });
}

async function changeConversation(id, fields) {
  await written(database.change(id, fields));
  await reload();
  tell({ conversation: id });
}

export const rename = (id, text) => text.trim() && changeConversation(id, { title: text.trim().slice(0, 200) });

export function showBranch(turn) {
  const leaf = newestLeaf(library.value.turns, turn.id);
  library.change({ leaf, switched: library.value.switched + 1 });
  changeConversation(library.value.open, { leaf });
}

export async function remove(id) {
  const name = library.value.list.find((one) => one.id === id)?.title;
  const growing = [...live.values()];
  const removed = await written(database.remove(id));
  if (removed) await gone(removed, growing, `“${name}” was deleted.`);
}

export async function removeAll() {
  const growing = [...live.values()];
  const removed = await written(database.removeAll());
  if (removed) await gone(removed, growing, `${count(removed.conversations.length)} deleted.`);
}

/** Says what was deleted, and can bring it back: turns that were `growing` as far as they had come. */
async function gone(found, growing, text) {
  const ended = new Map(growing.map((turn) => [turn.id, broken(turn)]));
  const removed = { ...found, turns: found.turns.map((turn) => ended.get(turn.id) ?? turn) };
  const isOpen = removed.conversations.some((one) => one.id === library.value.open);
  const was = library.value.open;
  await reload();
  if (isOpen) await open(null);
  tell({ removed: true });
  const undo = async () => {
    notify(null);
    await written(database.add(removed));
    await reload();
    tell({});
    if (isOpen && library.value.open === null) await open(was);
  };
  notify(text, { label: "Undo", run: undo });
}

const count = (number) => (number === 1 ? "1 conversation" : `${number} conversations`);

/** The ids of the conversations that hold all of the words, each with the text around the first, or "" for a title. */
export async function search(words) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const all = await database.everything();
  const texts = new Map(all.conversations.map(({ id, title: name }) => [id, [name]]));
  for (const turn of all.turns.sort((one, other) => one.created - other.created)) {
    const files = (turn.files ?? []).flatMap((file) => [file.name, file.text]);
    texts.get(turn.conversation)?.push(turn.question ?? "", turn.answer ?? "", ...files);
  }
  const found = new Map();
  for (const [id, [name, ...rest]] of texts) {
    const text = rest.join("\n").replace(/\s+/g, " ");
    const whole = `${name}\n${text}`.toLowerCase();
    if (!wanted.every((word) => whole.includes(word))) continue;
    const at = text.toLowerCase().indexOf(wanted.find((word) => !name.toLowerCase().includes(word)) ?? "\n");
    found.set(id, at < 0 ? "" : extract(text, at));
  }
  return found;
}

/** What stands around a place of a text, from the beginning of a word. */
function extract(text, at) {
  if (at <= BEFORE) return text.slice(0, at + AFTER);
  return `…${text.slice(at - BEFORE, at).replace(/^\S*\s/, "")}${text.slice(at, at + AFTER)}`;
}

/** Hands over all conversations as a JSON file. */
export async function exportAll() {
  const all = await database.everything();
  const pictures = await database.pictures();
  const of = (list, { id }) => list.filter(({ conversation }) => conversation === id);
  const whole = newestFirst(all.conversations).map((one) => ({ ...one, turns: of(all.turns, one), pictures: of(pictures, one) }));
  const content = { format: FORMAT, version: 1, conversations: whole };
  download(`kvern-${new Date().toISOString().slice(0, 10)}.json`, JSON.stringify(content, null, 1), "application/json");
}

/** Adds the conversations of an exported file. What is here already stays as it is. */
export async function importFrom(file) {
  let content;
  try {
    content = read(JSON.parse(await file.text()));
  } catch (error) {
    notify(`${file.name} was not imported: ${error.message}.`);
    return;
  }
  const added = await written(database.add(content));
  if (added === undefined) return;
  await reload();
  tell({});
  if (library.value.open) open(library.value.open);
  const there = content.conversations.length - added;
  notify(`${count(added)} imported${there ? `; ${there} ${there === 1 ? "was" : "were"} here already` : ""}.`);
}

/** The records of an exported file. Raises an Error that says why it is none. */
function read(content) {
  if (content?.format !== FORMAT || !Array.isArray(content.conversations)) throw new Error("it is no export of this page");
  const found = { conversations: [], turns: [], pictures: [] };
  for (const { turns, pictures = [], ...one } of content.conversations) {
    const name = String(one.title ?? "Conversation");
    if (!ID.test(one.id) || !Array.isArray(turns)) throw new Error(`“${name}” in it has no id or no turns`);
    const [created, changed] = [Number(one.created) || 0, Number(one.changed) || 0];
    found.conversations.push({ id: one.id, title: name, created, changed, leaf: one.leaf ?? null });
    for (const turn of turns) {
      if (!ID.test(turn?.id)) throw new Error(`a turn of “${name}” has no id`);
      found.turns.push({ ...readTurn(turn), conversation: one.id });
    }
    for (const { id, data } of pictures) {
      if (!ID.test(id) || !DATA.test(data)) throw new Error(`a picture of “${name}” has no id or no data`);
      found.pictures.push({ id, conversation: one.id, data });
    }
    if (goesRound(turns)) throw new Error(`turns of “${name}” follow one another in a circle`);
  }
  return found;
}

function goesRound(turns) {
  const parents = new Map(turns.map(({ id, parent }) => [id, parent]));
  return turns.some(({ id }) => {
    let steps = 0;
    for (let at = id; at != null && steps <= turns.length; at = parents.get(at)) steps += 1;
    return steps > turns.length;
  });
}

const ID = /^\w{1,64}$/;
const DATA = new RegExp(`^data:(${FORMATS.join("|")});base64,[A-Za-z0-9+/]+=*$`);
const text = (value) => (typeof value === "string" ? value : "");
const texts = (list, ...names) =>
  Array.isArray(list) ? list.map((one) => Object.fromEntries(names.map((name) => [name, text(one?.[name])]))) : [];

function readFile(file) {
  const { picture, width, height, characters, from } = file ?? {};
  if (!ID.test(picture)) return { name: text(file?.name), text: text(file?.text) };
  const sizes = { width: Number(width) || 0, height: Number(height) || 0, characters: Number(characters) || 0 };
  return { name: text(file.name), picture, ...sizes, ...(from && { from: text(from) }) };
}

/** What the page knows of a turn, each field of its type. */
function readTurn(turn) {
  const { id, parent, asked, model, finish, figures, structured } = turn;
  return {
    ...{ id, parent: parent ?? null, asked: asked ?? id, created: Number(turn.created) || 0, model: text(model) },
    question: typeof turn.question === "string" ? turn.question : null,
    files: Array.isArray(turn.files) ? turn.files.map(readFile) : [],
    results: texts(turn.results, "id", "name", "result"),
    answer: text(turn.answer),
    thinking: text(turn.thinking),
    calls: texts(turn.calls, "id", "name", "arguments"),
    error: text(turn.error),
    state: ["done", "failed"].includes(turn.state) ? turn.state : "stopped",
    ...{ finish: text(finish), figures: typeof figures === "object" ? figures : null, structured: structured === true },
  };
}

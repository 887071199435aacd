// Conversations in IndexedDB. Each turn is a record of its own and is written by the tab that asked it, so that two tabs
// add to a conversation without overwriting anything. Where the browser refuses IndexedDB, a Map keeps them for a while.
//
// conversation: id, title, created, changed, leaf (the last turn of the branch that was seen last)
// turn:         id, conversation, parent (null for a first one), and what was asked and answered
// picture:      id, conversation, data (a data URL)

const [CONVERSATIONS, TURNS, PICTURES] = ["conversations", "turns", "pictures"];
const STORES = [CONVERSATIONS, TURNS, PICTURES];
let opened = null;

/** What there is to read and write with: IndexedDB's database, or null where the browser has none. */
function database() {
  opened ??= new Promise((resolve) => {
    try {
      const request = indexedDB.open("kvern", 2);
      request.onupgradeneeded = ({ oldVersion }) => {
        const make = (name) => request.result.createObjectStore(name, { keyPath: "id" });
        if (oldVersion < 1) make(CONVERSATIONS);
        if (oldVersion < 1) make(TURNS).createIndex("conversation", "conversation");
        make(PICTURES).createIndex("conversation", "conversation");
      };
      request.onsuccess = () => {
        request.result.onversionchange = () => request.result.close(); // a newer page's tab waits for that
        resolve(request.result);
      };
      request.onblocked = () => dispatchEvent(new Event("databaseblocked"));
      request.onerror = () => resolve(null);
    } catch {
      resolve(null);
    }
  });
  return opened;
}

export const isKept = async () => (await database()) !== null;

const memory = Object.fromEntries(STORES.map((name) => [name, new Map()]));
const inMemory = (name) => ({
  get: async (id) => structuredClone(memory[name].get(id)),
  all: async () => structuredClone([...memory[name].values()]),
  of: async (id) => structuredClone([...memory[name].values()].filter((one) => one.conversation === id)),
  put: (value) => memory[name].set(value.id, structuredClone(value)),
  remove: (id) => memory[name].delete(id),
});

const answer = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

const inDatabase = (store) => ({
  get: (id) => answer(store.get(id)),
  all: () => answer(store.getAll()),
  of: (id) => answer(store.index("conversation").getAll(id)),
  put: (value) => store.put(value),
  remove: (id) => store.delete(id),
});

/** Runs `work` on all stores in one transaction, which is as a whole or not at all, and returns what it returns. */
async function transaction(mode, work) {
  const open = await database();
  if (!open) return work(...STORES.map(inMemory));
  const running = open.transaction(STORES, mode);
  const ended = new Promise((resolve, reject) => {
    running.oncomplete = resolve;
    running.onabort = () => reject(running.error);
  });
  try {
    const found = await work(...STORES.map((name) => inDatabase(running.objectStore(name))));
    await ended;
    return found;
  } catch (error) {
    ended.catch(() => {}); // it says the same
    if (!running.error) running.abort();
    throw error;
  }
}

const reading = (work) => transaction("readonly", work);
const writing = (work) => transaction("readwrite", work);

export const conversations = () => reading((all) => all.all());
export const turn = (id) => reading((_, turns) => turns.get(id));
export const picture = (id) => reading((_, __, pictures) => pictures.get(id));
export const pictures = () => reading((_, __, all) => all.all());
export const turnsOf = (id) => reading((_, turns) => turns.of(id));
export const everything = () => reading(async (all, turns) => ({ conversations: await all.all(), turns: await turns.all() }));

/** Adds conversations, turns and pictures, and leaves those alone that are there. Returns how many conversations were new. */
export const add = (added) =>
  writing(async (all, turns, pictures) => {
    let count = 0;
    for (const one of added.conversations) {
      if (await all.get(one.id)) continue;
      all.put(one);
      count += 1;
    }
    for (const one of added.turns) if (!(await turns.get(one.id))) turns.put(one);
    for (const one of added.pictures) if (!(await pictures.get(one.id))) pictures.put(one);
    return count;
  });

/** Changes fields of a conversation. One that another tab has deleted stays so. */
export const change = (id, fields) =>
  writing(async (all) => {
    const found = await all.get(id);
    if (found) all.put({ ...found, ...fields });
  });

/** Writes a turn that begins as the leaf of its conversation, which is new or, for null, there, and its new pictures. */
export const begin = (one, conversation, added = []) =>
  writing(async (all, turns, pictures) => {
    const found = conversation ?? (await all.get(one.conversation));
    if (!found) return;
    all.put({ ...found, changed: one.saved, leaf: one.id });
    turns.put(one);
    for (const picture of added) pictures.put(picture);
  });

/** Writes a turn as far as it has come. That of a deleted conversation is left out. */
export const save = (one) =>
  writing(async (all, turns) => {
    if (await all.get(one.conversation)) turns.put(one);
  });

/** Removes a conversation and returns what `add` brings back. */
export const remove = (id) =>
  writing(async (all, ...parts) => {
    const [turns, pictures] = await removeOf(parts, (store) => store.of(id));
    const removed = { conversations: [await all.get(id)].filter(Boolean), turns, pictures };
    all.remove(id);
    return removed;
  });

export const removeAll = () =>
  writing(async (...stores) => {
    const [conversations, turns, pictures] = await removeOf(stores, (store) => store.all());
    return { conversations, turns, pictures };
  });

/** Removes of each store what `find` finds there, and returns it. */
async function removeOf(stores, find) {
  const found = [];
  for (const store of stores) {
    found.push(await find(store));
    for (const one of found.at(-1)) store.remove(one.id);
  }
  return found;
}

// Asking: a new question, one that was edited, an answer anew, results of calls, and going on. Answers come into their turns
// whatever conversation is open, are stored as they grow, and end when they are stopped.
import { useEffect, useState } from "preact/hooks";
import { body, stream } from "./answer.js";
import { newId } from "./browser.js";
import { addTurn, keepTurn, library, live, showTurn } from "./library.js";
import { modelInUse, settings } from "./settings.js";
import { branch } from "./tree.js";

const SAVED = 1000; // milliseconds between two times that a growing answer is stored

const requests = new Map(); // what stops each running turn
const growth = new EventTarget();

/** A turn with what has come of its answer. It alone is drawn again when more comes. */
export function useGrowing(turn) {
  const [, setCount] = useState(0);
  useEffect(() => {
    const grow = () => setCount((count) => count + 1);
    growth.addEventListener(turn.id, grow);
    return () => growth.removeEventListener(turn.id, grow);
  }, [turn.id]);
  return live.get(turn.id) ?? turn;
}

const EMPTY = { answer: "", thinking: "", calls: [], error: "", state: "running" };

function answer(fields) {
  const model = modelInUse()?.id;
  const structured = Boolean(settings.value.schema.trim());
  return run(addTurn({ id: newId(), created: Date.now(), model, structured, ...fields, ...EMPTY }), false);
}

async function run(begun, goOn) {
  let turn = begun;
  const abort = new AbortController();
  const earlier = branch(library.value.turns, turn.parent);
  live.set(turn.id, turn);
  requests.set(turn.id, abort);
  const change = (fields) => {
    turn = { ...turn, ...fields };
    live.set(turn.id, turn);
    growth.dispatchEvent(new Event(turn.id));
  };
  const saving = setInterval(() => keepTurn(turn), SAVED);
  let ended;
  try {
    ended = await stream(await body(earlier, turn, goOn), abort.signal, turn, change);
  } catch (error) {
    ended = { state: "failed", error: error.message }; // the settings or a picture cannot be sent
  }
  clearInterval(saving);
  requests.delete(turn.id);
  change(ended);
  showTurn(turn);
  await keepTurn(turn);
  live.delete(turn.id);
}

/** Asks after the last turn of the branch that is shown. */
export const ask = (question, files = []) => answer({ parent: library.value.leaf, asked: newId(), question, files, results: [] });

/** Asks at a turn's place with another question; the former one stays as a version. */
export const askInstead = ({ parent }, question, files) => answer({ parent, asked: newId(), question, files, results: [] });

export const answerAgain = ({ parent, asked, question, files, results }) => answer({ parent, asked, question, files, results });

/** The answer goes on after the results of its calls. */
export const tellResults = (turn, results) => answer({ parent: turn.id, asked: newId(), question: null, files: [], results });

/** Goes on with an answer that broke off, was stopped, or came to the limit of tokens, in a version of its own. */
export function goOn({ parent, asked, question, files, results, model, structured, answer: begun }) {
  const fields = { parent, asked, question, files, results, model, structured };
  return run(addTurn({ id: newId(), created: Date.now(), ...fields, ...EMPTY, answer: begun }), true);
}

export const canGoOn = (turn) =>
  Boolean(turn.answer) && !turn.calls?.length && !turn.thinking && (["stopped", "failed"].includes(turn.state) || turn.finish === "length");

export const isRunning = (turn) => requests.has(turn?.id);
export const stop = (turn) => requests.get(turn?.id)?.abort();

/** Stops what runs in a conversation, or everywhere for null. */
export function stopAll(conversation = null) {
  for (const turn of live.values()) if (conversation === null || turn.conversation === conversation) stop(turn);
}

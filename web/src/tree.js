// A conversation is a tree of turns: a turn that is asked or answered anew stands beside the former one.

const earlierFirst = (one, other) => one.created - other.created || (one.id < other.id ? -1 : 1);

/** The turns of each turn's place, in the order of their making: a Map from parent to turns. */
export function places(turns) {
  const found = new Map();
  for (const turn of [...turns.values()].sort(earlierFirst)) found.set(turn.parent, [...(found.get(turn.parent) ?? []), turn]);
  return found;
}

/** From the first turn to `leaf`. */
export function branch(turns, leaf) {
  const found = [];
  for (let turn = turns.get(leaf); turn; turn = turns.get(turn.parent)) found.unshift(turn);
  return found;
}

/** The last turn of the newest branch that goes on from a turn, or from the beginning for null. */
export function newestLeaf(turns, id) {
  const all = places(turns);
  while (all.get(id)?.length) id = all.get(id).at(-1).id;
  return id;
}

/**
 * The other versions of a turn, itself among them: `questions`, one turn of each question that was asked at its place,
 * the newest, and `answers`, the turns with the same question.
 */
export function versions(all, turn) {
  const here = all.get(turn.parent) ?? [turn];
  const questions = new Map(here.map((one) => [one.asked, one.asked === turn.asked ? turn : one]));
  return { questions: [...questions.values()], answers: here.filter((one) => one.asked === turn.asked) };
}

// Whether the list of conversations is open: as it was left on a wide screen, closed at first on a narrow one, where it
// covers the rest.
import { load, store } from "./browser.js";
import { observable } from "./state.js";

const NARROW = matchMedia("(max-width: 52rem)");
const read = () => ({ narrow: NARROW.matches, list: !NARROW.matches && load("list") !== false });

export const layout = observable(read());
NARROW.addEventListener("change", () => layout.change(read()));

export function showList(list) {
  if (!layout.value.narrow) store("list", list);
  layout.change({ list });
}

/** After something was chosen in the list: it goes where it covers what was chosen. */
export const leaveList = () => layout.value.narrow && showList(false);

// The list of keys.
import { useLayoutEffect, useRef } from "preact/hooks";
import { Close } from "./icons.jsx";
import { IconButton } from "./parts.jsx";

const KEYS = [
  ["Enter", "sends the question"],
  ["Shift+Enter", "begins a line"],
  ["Escape", "stops the answer, leaves an edit"],
  ["Shift+Escape", "goes to the question"],
  ["Ctrl+Shift+O", "begins a conversation"],
  ["Ctrl+K", "searches in conversations"],
  ["Ctrl+/", "shows this list"],
];

export function Shortcuts({ close }) {
  const dialog = useRef(null);
  useLayoutEffect(() => dialog.current.showModal(), []);
  return (
    <dialog ref={dialog} aria-labelledby="shortcuts" onClose={close} onClick={({ target }) => target === dialog.current && close()}>
      <div>
        <header>
          <h2 id="shortcuts">Keys</h2>
          <IconButton label="Close" icon={<Close />} onClick={() => dialog.current.close()} />
        </header>
        <dl>
          {KEYS.map(([keys, what]) => (
            <div key={keys}>
              <dt>
                {keys.split("+").map((key) => (
                  <kbd key={key}>{key}</kbd>
                ))}
              </dt>
              <dd>{what}</dd>
            </div>
          ))}
        </dl>
        <p class="hint">On a Mac the command key does for Ctrl.</p>
      </div>
    </dialog>
  );
}

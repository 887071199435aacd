// The page: two tabs, of which the arrow keys choose one.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Chat } from "./chat.jsx";
import { Engine } from "./engine.jsx";
import { Dark, Help, Light, List, Stone, System } from "./icons.jsx";
import { layout, showList } from "./layout.js";
import { address, library, start } from "./library.js";
import { IconButton } from "./parts.jsx";
import { readModels } from "./server.js";
import { Shortcuts } from "./shortcuts.jsx";
import { THEMES, theme } from "./theme.js";
import "./css/page.css";

const TABS = { chat: "Chat", engine: "Engine" };
const NAMES = Object.keys(TABS);
const named = () => NAMES.find((name) => location.hash.slice(1).split("/")[0] === name) ?? NAMES[0];

function Page() {
  const [tab, setTab] = useState(named);
  const [shortcuts, setShortcuts] = useState(false);
  const list = useRef(null);
  useEffect(() => {
    const follow = () => setTab(named());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  const choose = (name) => {
    history.replaceState(null, "", name === "chat" ? address(library.value.open) : `#${name}`);
    setTab(name);
  };
  const onKeyDown = (event) => {
    const here = NAMES.indexOf(tab);
    const there = { ArrowLeft: here - 1, ArrowRight: here + 1, Home: 0, End: NAMES.length - 1 }[event.key];
    if (there === undefined) return;
    event.preventDefault();
    const name = NAMES.at(there % NAMES.length);
    choose(name);
    list.current.querySelector(`#tab-${name}`).focus();
  };
  return (
    <>
      <header>
        <ListButton away={tab !== "chat"} />
        <h1>
          <Stone />
          kvern
        </h1>
        <div role="tablist" aria-label="Views" ref={list} onKeyDown={onKeyDown}>
          {NAMES.map((name) => (
            <button
              key={name}
              type="button"
              role="tab"
              id={`tab-${name}`}
              aria-selected={name === tab}
              aria-controls={name}
              tabIndex={name === tab ? 0 : -1}
              onClick={() => choose(name)}
            >
              {TABS[name]}
            </button>
          ))}
        </div>
        <div class="actions">
          <ThemeButton />
          <IconButton label="Keys" title="Keys (Ctrl+/)" icon={<Help />} onClick={() => setShortcuts(true)} />
        </div>
      </header>
      <main>
        <section id="chat" role="tabpanel" aria-labelledby="tab-chat" hidden={tab !== "chat"}>
          <Chat shown={tab === "chat"} setShortcuts={setShortcuts} />
        </section>
        <section id="engine" role="tabpanel" aria-labelledby="tab-engine" tabIndex={0} hidden={tab !== "engine"}>
          <Engine shown={tab === "engine"} />
        </section>
      </main>
      {shortcuts && <Shortcuts close={() => setShortcuts(false)} />}
    </>
  );
}

/** `away`: its place stays empty, so that nothing moves. */
function ListButton({ away }) {
  const { list } = layout.use();
  const state = { "aria-expanded": list, "aria-controls": "conversations", class: `quiet ${away ? "away" : ""}` };
  return <IconButton label="Conversations" icon={<List />} {...state} onClick={() => showList(!list)} />;
}

const ICONS = { system: <System />, light: <Light />, dark: <Dark /> };

/** Goes round: as the system has it, light, dark. */
function ThemeButton() {
  const { chosen } = theme.use();
  const next = THEMES[(THEMES.indexOf(chosen) + 1) % THEMES.length];
  return <IconButton label={`Colours: ${chosen}`} icon={ICONS[chosen]} onClick={() => theme.change({ chosen: next })} />;
}

start();
readModels();
render(<Page />, document.body);

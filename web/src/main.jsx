// The page: two tabs, of which the arrow keys choose one.
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Chat } from "./chat.jsx";
import { Engine } from "./engine.jsx";
import { Stone } from "./icons.jsx";
import "./page.css";

const TABS = { chat: "Chat", engine: "Engine" };
const NAMES = Object.keys(TABS);
const named = () => (location.hash.slice(1) in TABS ? location.hash.slice(1) : NAMES[0]);

function Page() {
  const [tab, setTab] = useState(named);
  const list = useRef(null);
  useEffect(() => {
    const follow = () => setTab(named());
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  const choose = (name) => {
    history.replaceState(null, "", `#${name}`);
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
      </header>
      <main>
        <section id="chat" role="tabpanel" aria-labelledby="tab-chat" hidden={tab !== "chat"}>
          <Chat shown={tab === "chat"} />
        </section>
        <section id="engine" role="tabpanel" aria-labelledby="tab-engine" hidden={tab !== "engine"}>
          <Engine shown={tab === "engine"} />
        </section>
      </main>
    </>
  );
}

render(<Page />, document.body);

// State that components follow, and components that are drawn again only when their properties change.
import { Component, h } from "preact";
import { useEffect, useState } from "preact/hooks";
import { load, store } from "./browser.js";

/** A value outside of components: `value`, `change(fields)`, and `use()` inside a component. */
export function observable(value) {
  const followers = new Set();
  const self = {
    value,
    change(fields) {
      self.value = { ...self.value, ...fields };
      for (const follower of followers) follower(self.value);
    },
    follow(follower) {
      followers.add(follower);
      return () => followers.delete(follower);
    },
    use() {
      const [seen, setSeen] = useState(self.value);
      useEffect(() => {
        setSeen(self.value); // it may have changed since it was drawn
        return self.follow(setSeen);
      }, []);
      return seen;
    },
  };
  return self;
}

/** An observable that outlives the page, and that the other tabs share. */
export function kept(name, initial) {
  const self = observable({ ...initial, ...load(name) });
  self.follow((value) => store(name, value));
  addEventListener("storage", ({ key }) => {
    if (key === `kvern.${name}` && JSON.stringify(load(name)) !== JSON.stringify(self.value)) self.change(load(name));
  });
  return self;
}

const differ = (some, others) =>
  Object.keys(some).length !== Object.keys(others).length || Object.keys(some).some((name) => some[name] !== others[name]);

export function memo(inner) {
  return class extends Component {
    shouldComponentUpdate(next) {
      return differ(this.props, next);
    }

    render() {
      return h(inner, this.props);
    }
  };
}

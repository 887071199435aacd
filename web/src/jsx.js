// What JSX becomes; the bundler puts it where it is needed.
export { Fragment, h } from "preact";

// Light or dark: as the system has it, or as it was chosen here.
import { kept } from "./state.js";

export const theme = kept("theme", { chosen: "system" });
export const THEMES = ["system", "light", "dark"];

const apply = ({ chosen }) => {
  if (chosen === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
};
apply(theme.value);
theme.follow(apply);

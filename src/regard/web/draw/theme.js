// A signal that changes with the theme's colours, for canvases that must be painted again.

import { signal } from "../html.js";

export const theme = signal(0);
const changed = () => (theme.value += 1);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
new MutationObserver(changed).observe(document.documentElement, { attributeFilter: ["data-theme"] });

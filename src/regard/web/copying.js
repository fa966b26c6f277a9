// A button that copies a text and says whether it could.

import { html, useEffect, useState } from "./html.js";

const SHOWN = 1500; // milliseconds for which the result is shown

export function CopyButton({ text }) {
  const [result, setResult] = useState("");
  useEffect(() => {
    if (!result) return undefined;
    const timer = setTimeout(() => setResult(""), SHOWN);
    return () => clearTimeout(timer);
  }, [result]);
  const copy = async () => setResult((await copyText(text)) ? "Copied" : "Not copied");
  return html`<button type="button" class="quiet" aria-live="polite" onClick=${copy}>${result || "Copy"}</button>`;
}

// Browsers have navigator.clipboard only on https and localhost; the older command works everywhere.
async function copyText(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => false,
    );
  }
  const opened = document.activeElement;
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "visually-hidden";
  document.body.append(field);
  field.select();
  const copied = document.execCommand("copy");
  field.remove();
  opened?.focus();
  return copied;
}

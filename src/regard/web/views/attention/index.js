import { html } from "../../html.js";

export default function View() {
  return html`<p class="notice">…</p>`;
}

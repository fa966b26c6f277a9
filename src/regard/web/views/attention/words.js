// The passage as words, tinted by the weights of the selected row. Pointing at a word selects its row of the map.

import { classes, html, useEffect, useMemo, useRef, useSignal } from "../../html.js";
import { rgb } from "../../draw/colours.js";
import { tintShares } from "../../draw/tint_shares.js";
import { model, passage, select, selection } from "../../state.js";
import { hasSource } from "./axes.js";
import { rowWeights } from "./weights.js";

export function Words() {
  const shown = useSignal(passage);
  const list = useRef();
  const output = hasSource(model.value) ? shown.generated : -1; // the first word after the source
  // the words are rendered once for a passage; pointing at them changes a few styles
  const words = useMemo(
    () =>
      shown.tokens.map(
        (token, i) => html`<span key=${i} data-index=${i} class=${i === output ? "output" : null}>${token}</span>`,
      ),
    [shown],
  );
  useEffect(() => tintWords(list.current), [shown]);
  const indexOf = (event) => (event.target.dataset.index === undefined ? null : Number(event.target.dataset.index));
  const point = (event) => {
    if (event.pointerType !== "touch" && !selection.value.pinned) select({ row: indexOf(event), column: null });
  };
  const leave = () => !selection.value.pinned && select({ row: null, column: null });
  const pin = (event) => {
    const row = indexOf(event);
    const same = selection.value.pinned && selection.value.row === row;
    select({ row, column: null, pinned: row !== null && !same });
  };
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") return select({ row: null, column: null, pinned: false });
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      return selection.value.row !== null && select({ column: null, pinned: !selection.value.pinned });
    }
    if (!step) return;
    event.preventDefault();
    const row = Math.min(Math.max((selection.value.row ?? -1) + step, 0), shown.tokens.length - 1);
    select({ row, column: null });
    list.current.children[row]?.scrollIntoView({ block: "nearest" });
  };
  return html`<div
    class=${classes("attention-words", !shown.tokens.some((token) => /\s/.test(token)) && "spaced")}
    ref=${list}
    tabindex="0"
    role="group"
    aria-label="Words of the passage. Left and right arrow keys select a query, Enter pins it."
    onPointerOver=${point}
    onPointerLeave=${leave}
    onClick=${pin}
    onKeyDown=${move}
  >
    ${words}
  </div>`;
}

// Follows the selected row with tints on the words; returns a function that ends it.
function tintWords(list) {
  let tinted = [];
  let marked = null;
  const clear = () => tinted.forEach((word) => word.style.removeProperty("background-color"));
  const tint = (weights) => {
    clear();
    tinted = [];
    if (!weights) return;
    const [red, green, blue] = rgb("--highlight");
    tintShares(weights).forEach((share, i) => {
      if (share === 0 || !list.children[i]) return;
      list.children[i].style.backgroundColor = `rgb(${red} ${green} ${blue} / ${(0.85 * share).toFixed(3)})`;
      tinted.push(list.children[i]);
    });
  };
  const mark = ({ row }) => {
    const word = row === null ? null : (list.children[row] ?? null);
    if (word === marked) return;
    marked?.classList.remove("query");
    word?.classList.add("query");
    marked = word;
  };
  const ends = [rowWeights.subscribe(tint), selection.subscribe(mark)];
  return () => ends.forEach((end) => end());
}

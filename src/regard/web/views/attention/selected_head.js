// The selected layer and head, {layer, head}. Pointing at tokens changes the selection often; a component that calls
// this is rendered again only for another head.

import { useEffect, useState } from "../../html.js";
import { selection } from "../../state.js";

export function useSelectedHead() {
  const [chosen, setChosen] = useState(selection.value);
  const update = (now) => setChosen((then) => (then.layer === now.layer && then.head === now.head ? then : now));
  useEffect(() => selection.subscribe(update), []);
  return chosen;
}

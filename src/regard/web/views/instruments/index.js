// Instruments: the course at the left, the chosen instrument beside it.

import * as api from "../../api.js";
import { classes, html, useEffect, useSignal, useState } from "../../html.js";
import { Choice } from "../../controls.js";
import { goTo, stored } from "../../state.js";
import { Instrument } from "./instrument.js";

export const done = stored("instruments-done", {});
let loaded = null; // the course, once for all visits of the view

export default function View({ path }) {
  const [course, setCourse] = useState(loaded);
  const [failure, setFailure] = useState("");
  useEffect(() => {
    if (!loaded)
      api.instruments().then(
        (chapters) => setCourse((loaded = chapters)),
        (error) => setFailure(error.message),
      );
  }, []);
  if (failure) return html`<p class="problem" role="alert">${failure}</p>`;
  if (!course) return html`<p class="notice">loading …</p>`;
  const all = course.flatMap(({ instruments }) => instruments);
  const index = path[0] ? all.findIndex(({ id }) => id === path[0]) : 0;
  if (index < 0)
    return html`<p class="notice">
      There is no instrument “${path[0]}”. <a href="#/instruments">Open the first one</a>
    </p>`;
  const current = all[index];
  return html`<div class="instruments">
    <${Course} course=${course} current=${current} />
    <div class="instruments-picker">
      <${Choice}
        label="Instrument"
        value=${current.id}
        choices=${all.map(({ id, title }, i) => [id, `${i + 1}. ${title}`])}
        onChange=${(id) => goTo("instruments", id)}
      />
    </div>
    <${Instrument}
      key=${current.id}
      instrument=${current}
      number=${index + 1}
      count=${all.length}
      previous=${all[index - 1]}
      next=${all[index + 1]}
      onDone=${() => (done.value = { ...done.value, [current.id]: true })}
    />
  </div>`;
}

function Course({ course, current }) {
  const finished = useSignal(done);
  const count = course.flatMap(({ instruments }) => instruments).filter(({ id }) => finished[id]).length;
  const total = course.reduce((sum, { instruments }) => sum + instruments.length, 0);
  let number = 0;
  return html`<nav class="instruments-course" aria-label="Course">
    <p class="instruments-progress muted">${count} of ${total} answers shown</p>
    ${course.map(
      ({ title, instruments }) =>
        html`<section key=${title}>
          <h2 class="label">${title}</h2>
          <ol start=${number + 1}>
            ${instruments.map(({ id, title }) => {
              number += 1;
              return html`<li key=${id}>
                <a href=${`#/instruments/${id}`} aria-current=${id === current.id ? "page" : null}>
                  <span class="instruments-number">${number}</span>
                  <span>${title}</span>
                  <span class=${classes("instruments-tick", finished[id] && "ticked")}>
                    ${finished[id] ? "✓" : ""}${finished[id] && html`<span class="visually-hidden"> answered</span>`}
                  </span>
                </a>
              </li>`;
            })}
          </ol>
        </section>`,
    )}
  </nav>`;
}

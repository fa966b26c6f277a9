// Sampling settings: what each does in one line, their defaults, and the fields that are sent to the server.

import { stored } from "../../state.js";

export const SETTINGS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 2,
    step: 0.05,
    digits: 2,
    help: "0 always takes the most likely token. Higher values make unlikely tokens more frequent.",
  },
  {
    name: "top_p",
    label: "Top-p",
    min: 0.05,
    max: 1,
    step: 0.05,
    digits: 2,
    neutral: 1,
    help: "Draw only from the most likely tokens that together have this probability. 1: all of them.",
  },
  {
    name: "top_k",
    label: "Top-k",
    min: 0,
    max: 200,
    step: 1,
    digits: 0,
    neutral: 0,
    help: "Draw only from this many of the most likely tokens. 0: all of them.",
  },
  {
    name: "min_p",
    label: "Min-p",
    min: 0,
    max: 0.5,
    step: 0.01,
    digits: 2,
    neutral: 0,
    help: "Leave out tokens less likely than this share of the most likely one. 0: none.",
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    min: 1,
    max: 2,
    step: 0.05,
    digits: 2,
    neutral: 1,
    help: "Above 1, tokens that have already occurred become less likely.",
  },
];

// What the user has changed, per column; everything else has its default.
export const changed = [stored("sampling-0", {}), stored("sampling-1", {})];

const SMALL_VOCABULARY = 5000; // of a model that knows few words: any draw but the best soon leaves what it knows

export function defaults(model) {
  const temperature = model.vocabulary < SMALL_VOCABULARY ? 0 : model.chat ? 0.7 : 0.3;
  const max_tokens = Math.min(model.chat && model.vocabulary >= SMALL_VOCABULARY ? 512 : 96, model.context);
  return { temperature, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, max_tokens, seed: null };
}

export function settingsOf(model, column) {
  const empty = ["max_tokens", "seed"]; // fields that can be empty
  const usable = ([name, value]) => Number.isFinite(value) || (value === null && empty.includes(name));
  return { ...defaults(model), ...Object.fromEntries(Object.entries(changed[column].value).filter(usable)) };
}

// The fields of a request: without those that change nothing.
export function requestFields(settings) {
  const { max_tokens, seed, temperature } = settings;
  const fields = { temperature, max_tokens: max_tokens || 96, ...(seed === null ? {} : { seed }) };
  for (const { name, neutral } of SETTINGS) {
    if (neutral !== undefined && settings[name] !== neutral) fields[name] = settings[name];
  }
  return fields;
}

export function summary(settings) {
  const parts = [settings.temperature === 0 ? "greedy" : `T ${settings.temperature.toFixed(2)}`];
  if (settings.top_p < 1) parts.push(`p ${settings.top_p}`);
  if (settings.top_k) parts.push(`k ${settings.top_k}`);
  if (settings.min_p) parts.push(`min-p ${settings.min_p}`);
  if (settings.repetition_penalty !== 1) parts.push(`repetition ${settings.repetition_penalty}`);
  return parts.join(" · ");
}
